"""zoo.hf: outputs of transformers from golden files, round trips, refusals, memory, the hub.

The golden files are made by `golden/make_hf_golden.py`; nothing here needs PyTorch.
"""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo

GOLDEN = Path(__file__).parent / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir())
DECODERS = [name for name in CASES if name != "bert"]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


def outputs(model: Any, golden: Any) -> dict[str, Any]:
    if "logits" in golden:
        return {"logits": eqx.filter_jit(model)(jnp.asarray(golden["tokens"]))}
    inputs = {name: jnp.asarray(golden[name]) for name in ("token_types", "mask")}
    hidden = eqx.filter_jit(model)(jnp.asarray(golden["tokens"]), **inputs)
    return {"hidden": hidden, "pooled": model.pooled(hidden)}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_transformers(name: str):
    golden = np.load(GOLDEN / name / "golden.npz")
    seen = golden["mask"] if "mask" in golden else np.ones_like(golden["tokens"], bool)
    for output, got in outputs(zoo.load(GOLDEN / name), golden).items():
        want = golden[output]
        difference = np.abs(np.asarray(got) - want)
        difference = difference[seen] if want.ndim == 3 else difference
        assert difference.max() < 1e-4, output
        assert np.abs(want).max() > (0.9 if output == "pooled" else 3)


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit(name: str, tmp_path: Path):
    model = zoo.load(GOLDEN / name)
    zoo.save(tmp_path / name, model, format="hf")
    want, got = tensors(GOLDEN / name), tensors(tmp_path / name)
    assert want.keys() == got.keys()
    for path, x in want.items():
        assert (x.dtype, x.shape) == (got[path].dtype, got[path].shape), path
        assert x.tobytes() == got[path].tobytes(), path
    again = zoo.load(tmp_path / name)
    assert again.config == model.config
