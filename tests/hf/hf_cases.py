"""Golden folders of Hugging Face's models, and changed copies of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_hf import CASES, GOLDEN

import zoo
from zoo.publishing import PublishError

TYPES = {x: json.loads((GOLDEN / x / "config.json").read_text())["model_type"] for x in CASES}


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; a field that becomes ... is left out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in values.items() if x is not ...}))


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(PublishError) as error:
        zoo.load(folder, **options)
    return str(error.value)


class Ends:
    """A tokenizer that knows its ids, and writes no settings of its own."""

    bos_id, eos_ids, pad_id, separator_id = 1, (2, 3), 0, 1

    def save(self, folder: Path) -> None:
        pass


def contents(folder: Path) -> tuple[dict, dict | None]:
    generation = folder / "generation_config.json"
    values = json.loads((folder / "config.json").read_text())
    return values, json.loads(generation.read_text()) if generation.exists() else None


IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
