"""Models and runs that version 0.1.0 stored open, and give the numbers that it gave."""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tyro
from stored import make

import zoo
from zoo import lora
from zoo.runs.metrics import read_metrics

STORED = Path(__file__).parent / "stored"
EXPECTED = json.loads((STORED / "expected.json").read_text())


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, as the working directory: its paths are relative."""
    folder = tmp_path / "stored"
    shutil.copytree(STORED, folder)
    monkeypatch.chdir(folder)
    return folder


def test_every_stored_artifact_is_tested():
    assert {path.name for path in (STORED / "models").iterdir()} == EXPECTED["models"].keys()
    assert {path.name for path in (STORED / "runs").iterdir()} == EXPECTED["runs"].keys()
    assert EXPECTED["runs"].keys() == make.RUNS.keys()


@pytest.mark.parametrize("name", EXPECTED["models"])
def test_a_stored_model_opens(name: str, stored: Path):
    model = zoo.load(stored / "models" / name)
    np.testing.assert_allclose(make.outputs(model), EXPECTED["models"][name], atol=1e-5)
    assert lora.has_adapters(model) == (name == "adapters")


@pytest.mark.parametrize(
    "name",
    [
        name if name == "mlp" else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPECTED["runs"]
    ],
)
def test_a_stored_run_resumes(name: str, stored: Path, capsys: pytest.CaptureFixture):
    recipe = importlib.import_module(f"recipes.{name}")
    flags = ["--run-dir", f"runs/{name}", *make.COMMON, *make.RUNS[name], "--steps", "4"]
    recipe.main(tyro.cli(recipe.Config, args=flags))
    assert f"resumed runs/{name} at step 2" in capsys.readouterr().out
    lines = read_metrics(stored / "runs" / name / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    np.testing.assert_allclose(losses, EXPECTED["runs"][name], rtol=1e-5)
