"""zoo.export.stablehlo: programs that run without zoo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zoo
from zoo import rnn, transformer
from zoo.__main__ import main
from zoo.export import stablehlo
from zoo.publishing import PublishError

KEY = jax.random.key(0)
# As a program of its own: neither zoo nor Equinox can be imported.
ALONE = """
import runpy, sys
for name in ("zoo", "equinox"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SIZES = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 2}
MODELS = {
    "transformer": lambda: transformer.Transformer(transformer.Config(**SIZES), key=KEY),
    "rnn": lambda: rnn.RNN(rnn.Config(vocab_size=64, hidden_size=32, num_layers=1), key=KEY),
}


def run(folder: Path, count: int, ids: list[int]) -> Any:
    command = [sys.executable, "-c", ALONE, f"{folder}/run.py", str(count), *map(str, ids)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wider(model: Any) -> Any:
    """The model with larger weights, whose tokens are far apart."""
    return jax.tree.map(lambda x: 3 * x, model)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_tokens_without_zoo(tmp_path: Path, kind: str):
    """The transformer's text has an end, at which the program stops."""
    model = wider(MODELS[kind]())
    prompt = np.random.default_rng(0).integers(1, 64, 17).tolist()
    [ours] = zoo.generate(model, [prompt], max_new_tokens=24, temperature=0.0)
    wanted = ours[17:]
    if kind == "transformer":
        end = max(wanted[:20], key=wanted.index)  # the last one of these that is new
        wanted = wanted[: wanted.index(end) + 1]
        config = transformer.Config(**SIZES, eos_ids=(end,))
        like = transformer.Transformer(config, key=KEY)
        model = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(model))
    stablehlo.write(tmp_path / "out", model, name="tiny", length=64, tokenizer=None)
    found = run(tmp_path / "out", 24, prompt)
    assert found.stdout.split() == [str(id) for id in wanted], found.stderr
    assert len({*wanted}) > 2
    if kind == "transformer":
        assert "too many" in run(tmp_path / "out", 34, prompt).stderr  # 32, 34 and no more


def test_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture):
    zoo.save(tmp_path / "tiny", MODELS["transformer"]())
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "tiny"), "--to", "stablehlo", "--no-tokenizer"]
    main([*command, "--length", "32", "--out", str(out), "--type", "bf16"])
    assert "run.py" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["prompts"] == [16, 32]
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"]
    assert "model.embedding.weight" in manifest["weights"]
    program = jax.export.deserialize(bytearray((out / "prefill-16.bin").read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert {str(x.dtype) for x in program.in_avals} == {"bfloat16", "int32", "bool"}
    # No weights are in a program.
    largest = max(path.stat().st_size for path in out.glob("*.bin"))
    assert largest < (out / "model.safetensors").stat().st_size
    assert len(stablehlo.RUN.read_text().splitlines()) <= 50


def test_what_is_refused(tmp_path: Path):
    model = MODELS["transformer"]()
    with pytest.raises(PublishError, match="length=48"):
        stablehlo.write(tmp_path / "x", model, name="x", length=48, tokenizer=None)
    encoder = transformer.Transformer(transformer.Config(**SIZES, causal=False), key=KEY)
    with pytest.raises(PublishError, match="causal=False"):
        stablehlo.write(tmp_path / "x", encoder, name="x", length=16, tokenizer=None)
    with pytest.raises(ValueError, match="type='q8_0'"):
        main(["export", "lm-python", "--to", "stablehlo", "--type", "q8_0"])
    with pytest.raises(ValueError, match="length=64"):
        main(["export", "lm-python", "--length", "64"])
    assert not [*tmp_path.iterdir()]
