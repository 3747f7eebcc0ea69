"""The peers of a benchmark compute the same thing, and a run says so where one does not."""

import dataclasses
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

import benchmarks.run
from benchmarks import ensemble, memory, mlp, mup, programs, rnn, transformer
from benchmarks.compare import TOLERANCE, disagreements
from benchmarks.peers.common import Precision
from benchmarks.peers.ensemble.given import Shape as EnsembleShape
from benchmarks.peers.mlp.given import Shape as MLPShape
from benchmarks.peers.rnn.given import Shape as RNNShape
from benchmarks.peers.transformer.given import Shape as TransformerShape
from benchmarks.timing import Peer, Timing

MLP = MLPShape(in_size=16, hidden_size=32, out_size=4, batch_size=8)
RNN = RNNShape(hidden_size=16, vocab_size=16, seq_len=8, batch_size=4)
TRANSFORMER = TransformerShape(
    num_layers=2, d_model=32, num_heads=2, d_ff=64, vocab_size=16, seq_len=8, batch_size=2
)
ENSEMBLE = EnsembleShape(in_size=16, hidden_size=32, out_size=4, batch_size=8, num_members=3)
CASES = {
    "mlp": (mlp.PEERS, MLP),
    "rnn": (rnn.PEERS, RNN),
    "ensemble": (ensemble.PEERS, ENSEMBLE),
    "transformer": (
        {name: peer.given(remat="full") for name, peer in transformer.PEERS.items()},
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
        ("ensemble", "fp32"),
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
    """Peers in processes of their own, one of which is made to train eight models instead."""
    config = benchmarks.run.Config(
        names=("mlp",),
        results=tmp_path,
        timing=Timing(rounds=1, turn_seconds=0.01),
        mlp=mlp.Options(peers=("handwritten", "zoo"), precision=("fp32",), shape=MLP),
    )

    def exit_code() -> int:
        with pytest.raises(SystemExit) as exit_info:
            benchmarks.run.main(config)
        return int(exit_info.value.code)

    assert exit_code() == 0
    [results] = tmp_path.glob("*-mlp-*.md")
    assert "| zoo |" in results.read_text()
    record = json.loads(results.with_suffix(".json").read_text())
    assert {"hardware", "jax", "flax", "torch", "command"} <= set(record)
    [table] = record["tables"]
    for row in table["rows"]:
        assert {"steps/s", "examples/s", "time / handwritten", "compile s", "peak MiB"} <= set(row)
        assert row["MFU %"] > 0
    assert any("measured here" in note for note in table["notes"])  # a CPU has no data sheet
    monkeypatch.setitem(mlp.PEERS, "zoo", Peer("ensemble.zoo_model", {"as_one": True}))
    assert exit_code() == 1
    assert "zoo has other losses" in results.read_text()


def test_largest_batch_search_needs_few_plans():
    """Against a search one by one, where memory is nearly a line of the batch."""
    for base, slope, budget in [(100, 7, 1000), (0, 3, 100), (990, 5, 1000), (2000, 5, 1000)]:
        asked = []

        def planned(batch: int, base: int = base, slope: int = slope, asked: list = asked) -> int:
            asked.append(batch)
            return base + slope * batch + batch % 2

        one_by_one = max((n for n in range(1, 400) if planned(n) <= budget), default=0)
        asked.clear()
        found = memory.largest_batch(planned, budget)
        assert one_by_one - found <= found // 32
        assert found == 0 or planned(found) <= budget
        assert len(asked) <= 8


def test_gpu_program_uses_bf16_and_flash_attention(monkeypatch):
    shape = dataclasses.replace(programs.GPT_124M, num_layers=2)
    [table] = programs.measure(programs.Options(shape))
    assert table.failures == []
    # And where it is otherwise, the program says so.
    monkeypatch.setattr("zoo.training.losses.LOGITS_BYTES", 2**62)
    monkeypatch.setattr("zoo.nn.attention.kernels._refusal", lambda *_: "is not for this test")
    text = programs.lowered(shape)
    assert not any("fmha" in name for name in programs.custom_calls(text))
    assert programs.largest_logits(text, shape) == shape.num_tokens * shape.vocab_size
    product = "%2 = stablehlo.dot_general %0, %1 : (tensor<2x3xf32>, tensor<3x4xbf16>)"
    assert programs.dot_generals(product) == {"f32, bf16": 1}


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
    decoder, parity, attention, lstm, profile = json.loads(record.read_text())["tables"]
    peers = ["zoo", "pytorch"] if importlib.util.find_spec("torch") else ["zoo"]
    assert [row["peer"] for row in decoder["rows"]] == peers
    assert [row["quantity"] for row in parity["rows"]] == ["loss", "gradient"]
    assert [row["implementation"] for row in attention["rows"]] == ["chunked"]
    assert len(lstm["rows"]) == len(peers)
    assert sum(row["%"] for row in profile["rows"]) > 90


def test_failed_and_overdue_parts_are_reported(tmp_path):
    from benchmarks.gpu.process import Clock, PartError

    clock = Clock(minutes=10)
    # Python imports this module first.
    (tmp_path / "sitecustomize.py").write_text("import time\n\ntime.sleep(60)\n")
    slow = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(PartError, match="stopped after 1 s"):
        clock.run("parity", "gradients", {}, seconds=1, environment=slow)
    with pytest.raises(PartError, match="no time was left"):
        Clock(minutes=0).run("parity", "gradients", {}, seconds=60)
    with pytest.raises(PartError, match=r"TypeError.*unexpected keyword"):
        clock.run("text", "write", {"wrong": 1}, seconds=60)


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
    assert mup.vertex(curves["standard", 512]) == pytest.approx(-12)
    before = len(measured)
    # What a kill cut off in the middle of a line is measured again.
    config.log.write_text(config.log.read_text()[:-9])
    assert mup.search(config, data, mup.Log(config.log)) == curves
    assert len(measured) == before + 1
    table = mup.rate_table(config, curves)
    assert [row["standard: steps of √2"] for row in table.rows] == [0, -2, -4, -6]
    mup.plot_rates(config, curves, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 10_000
