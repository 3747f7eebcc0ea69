"""The peers of a benchmark compute the same thing, and a run says so where one does not."""

import importlib.util
import math

import jax
import pytest

import benchmarks.run
from benchmarks import ensemble, mlp, rnn, transformer
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
        "pytorch" not in name or importlib.util.find_spec("torch") is not None
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


def test_what_differs_is_named():
    losses = {"a": [1.0, 2.0], "b": [1.0, 2.00001], "c": [1.0, 2.1], "d": [1.0, math.nan]}
    assert [line.split()[0] for line in disagreements(losses, 1e-4)] == ["c", "d"]
    assert disagreements({}, 1e-4) == []


@pytest.mark.slow
def test_a_run_fails_where_a_peer_computes_something_else(tmp_path, monkeypatch):
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
    monkeypatch.setitem(mlp.PEERS, "zoo", Peer("ensemble.zoo_model", {"as_one": True}))
    assert exit_code() == 1
    assert "zoo computes something else" in results.read_text()
