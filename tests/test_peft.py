"""Adapters in PEFT's format: both ways, against golden files that PEFT wrote."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays

import zoo
from zoo import lora
from zoo.publishing.errors import PublishError

GOLDEN = Path(__file__).parent / "golden" / "peft"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


def opened(name: str, folder: Path) -> Path:
    """A copy of the golden adapters, which name their base by its path."""
    shutil.copytree(GOLDEN / name, folder)
    edit(folder, lambda config: {**config, "base_model_name_or_path": str(base_of(name))})
    return folder


def base_of(name: str) -> Path:
    return GOLDEN / json.loads((GOLDEN / name / CONFIG).read_text())["base_model_name_or_path"]


def edit(folder: Path, change) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


CONFIG = "adapter_config.json"


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_give_its_logits(name: str, tmp_path: Path):
    golden = np.load(GOLDEN / name / "golden.npz")
    folder = opened(name, tmp_path / "adapters")
    model = zoo.load(folder)
    assert lora.has_adapters(model)
    tokens = jnp.asarray(golden["tokens"])
    np.testing.assert_allclose(model(tokens), golden["logits"], atol=1e-5)
    assert np.abs(zoo.load(base_of(name))(tokens) - golden["logits"]).max() > 0.1
    # And once more, as the zoo writes them.
    zoo.save_adapters(tmp_path / "again", model, base=base_of(name), format="peft")
    np.testing.assert_allclose(zoo.load(tmp_path / "again")(tokens), golden["logits"], atol=1e-5)
    zoo.save_adapters(tmp_path / "own", model, base=base_of(name))
    again = arrays(zoo.load(tmp_path / "own"))
    for path, array in arrays(model).items():
        np.testing.assert_array_equal(again[path], array)
