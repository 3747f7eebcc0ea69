"""The peers of a benchmark compute the same thing, and a run says so where one does not."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import comparison, harness, mup, run
from benchmarks.peers import given
from benchmarks.peers.given import Precision
from benchmarks.steps import TOLERANCE, Peer, disagreements, timed_steps

MLP = given.MLP(in_size=16, hidden_size=32, out_size=4, batch_size=8)
RNN = given.RNN(hidden_size=16, vocab_size=16, seq_len=8, batch_size=4)
TRANSFORMER = given.Transformer(
    num_layers=2, d_model=32, num_heads=2, d_ff=64, vocab_size=16, seq_len=8, batch_size=2
)
CASES = {
    "mlp": (run.PEERS["mlp"], MLP),
    "rnn": (run.PEERS["rnn"], RNN),
    "transformer": (
        {name: peer.given(remat="full") for name, peer in run.PEERS["transformer"].items()},
        TRANSFORMER,
    ),
}


@pytest.fixture(autouse=True)
def _promotion_as_in_a_benchmark():
    """The peers are not ours alone, and run without the tests' strictness."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def first_losses(peer: Peer, shape, precision: Precision, num_steps: int = 4) -> list[float]:
    built = peer.build(shape, precision)
    state, losses = built.state, []
    for _ in range(num_steps):
        state, loss = built.step(state, built.batch)
        losses.append(float(loss))
    return losses


def runs_here(name: str, peer: Peer) -> bool:
    # torch.compile takes longer than all others together, of the same model as eager PyTorch's.
    return not peer.options.get("compiled") and (
        (("pytorch" not in name) or importlib.util.find_spec("torch") is not None)
        and (("flax" not in name) or importlib.util.find_spec("flax") is not None)
    )


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "fp32"),
        ("mlp", "bf16"),
        pytest.param("rnn", "fp32", marks=pytest.mark.slow),
        pytest.param("transformer", "fp32", marks=pytest.mark.slow),
    ],
)
def test_all_peers_compute_the_same(name: str, precision: Precision):
    peers, shape = CASES[name]
    losses = {
        name: first_losses(peer, shape, precision)
        for name, peer in peers.items()
        if runs_here(name, peer)
    }
    assert len(losses) > 1
    assert disagreements(losses, TOLERANCE[precision]) == []
    assert all(values[-1] < values[0] for values in losses.values())


def test_disagreeing_peers_are_named():
    losses = {"a": [1.0, 2.0], "b": [1.0, 2.00001], "c": [1.0, 2.1], "d": [1.0, math.nan]}
    assert [line.split()[0] for line in disagreements(losses, 1e-4)] == ["c", "d"]
    assert disagreements({}, 1e-4) == []


@pytest.mark.slow
def test_disagreeing_peers_fail_the_benchmark(tmp_path, monkeypatch):
    """Peers in processes of their own, at a tolerance that nothing meets."""
    flags = "mlp --peers handwritten zoo --precision fp32 --timing.rounds 1 --mlp.in-size 16"
    flags += " --timing.turn-seconds 0.01 --mlp.hidden-size 32 --mlp.out-size 4 --mlp.batch-size 8"

    def none() -> list[harness.Table]:
        return [harness.Table("none")]

    def exit_code(function, *flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run.py", *flags, f"--results={tmp_path}"])
        with pytest.raises(SystemExit) as exit_info:
            harness.main(function)
        return int(exit_info.value.code)

    assert exit_code(none) == 0
    monkeypatch.setitem(TOLERANCE, "fp32", -1.0)  # no two numbers are near
    assert exit_code(run.train_steps, *flags.split()) == 1
    [results] = tmp_path.glob("*-train-steps-*.md")
    assert "| zoo |" in results.read_text()
    assert "zoo has other losses" in results.read_text()
    record = json.loads(results.with_suffix(".json").read_text())
    assert {"hardware", "jax", "flax", "torch"} <= set(record)
    assert record["command"].startswith("python -m benchmarks.run mlp --peers")
    [table] = record["tables"]
    for row in table["rows"]:
        assert {"steps/s", "examples/s", "time / handwritten", "compile s", "peak MiB"} <= set(row)
        assert row["MFU %"] > 0
    assert any("measured here" in note for note in table["notes"])  # a CPU has no data sheet


@pytest.mark.slow
def test_gpu_suite_runs_without_data_packages(tmp_path):
    for name in ("grain", "tyro", "rich"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--results", str(tmp_path)]
    process = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    [record] = tmp_path.glob("*-gpu-*.json")
    decoder, attention, parity, lstm = json.loads(record.read_text())["tables"]
    peers = ["zoo", "pytorch"] if importlib.util.find_spec("torch") else ["zoo"]
    assert [row["peer"] for row in decoder["rows"]] == peers
    assert len(attention["rows"]) == 4
    [row] = parity["rows"]
    assert row["same tokens"] == "132 of 132"
    assert len(lstm["rows"]) == len(peers)


def test_failed_and_overdue_processes_are_reported():
    with pytest.raises(harness.SkippedError, match=r"AttributeError.*nothing"):
        harness.Process(timed_steps, Peer("handwritten.nothing"), MLP, "fp32")
    with pytest.raises(harness.SkippedError, match="not finished in 0 s"):
        harness.Process(timed_steps, Peer("handwritten.mlp"), MLP, "fp32", limit=0.1)
    with pytest.raises(harness.SkippedError, match="exit code 3"):
        harness.Process(os._exit, 3)
    with pytest.raises(harness.SkippedError, match=r"TypeError.*unsupported operand"):
        harness.in_process(disagreements, {"a": [1.0], "b": ["x"]}, 0.1)


# Rates over widths


def test_rates_are_searched_around_the_best_and_measured_once(tmp_path, monkeypatch):
    """Planted: the best exponent falls by two from each width to the next one, or stays in muP."""
    config = mup.Config(first=-3, margin=2, seeds=2, log=tmp_path / "runs" / "mup.jsonl")
    measured = []

    def held_out_loss(config, model, rule, data, seed):
        exponent = 2 * math.log2(rule.learning_rate)
        widening = 0 if rule.base_width else math.log2(model.d_model / config.base_width)
        measured.append(exponent)
        return (exponent + 6 + 2 * widening) ** 2 + 0.1 * seed

    monkeypatch.setattr(mup, "held_out_loss", held_out_loss)
    data = SimpleNamespace(vocab_size=lambda: 64, fingerprint="")
    curves = mup.search(config, data, mup.Log(config.log))
    found = {key: mup.best(curve) for key, curve in curves.items()}
    widths = config.widths
    assert [found["mup", width] for width in widths] == [-6] * 4
    assert [found["standard", width] for width in widths] == [-6, -8, -10, -12]
    assert all(
        curve.keys() >= {found[key] + i for i in range(-2, 3)} for key, curve in curves.items()
    )
    assert curves["mup", 64][-6] == pytest.approx(0.05)
    before = len(measured)
    # What a kill cut off in the middle of a line is measured again.
    config.log.write_text(config.log.read_text()[:-9])
    assert mup.search(config, data, mup.Log(config.log)) == curves
    assert len(measured) == before + 1
    table = mup.rate_table(config, curves)
    assert [row["standard: steps of √2"] for row in table.rows] == [0, -2, -4, -6]


def test_compared_models_have_one_size_and_are_drawn(tmp_path):
    names = [*comparison.PATTERNS, *comparison.CELLS]
    sizes = [comparison.num_parameters(comparison.maker(name, 512)) for name in names]
    assert len(names) == 7
    assert max(sizes) < 1.03 * min(sizes)
    row = {"bits_per_byte": 1.5, "in longer rows": 1.4, "tokens per second": 100.0}
    table = harness.Table("models", [{"peer": name, **row} for name in names])
    comparison.draw(table, 256, 4, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
