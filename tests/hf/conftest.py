"""Copies of golden folders."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_hf import GOLDEN


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy
