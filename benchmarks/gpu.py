"""The zoo's claims about one GPU: decoders and an LSTM beside PyTorch, and parity with the CPU.

python -m benchmarks.gpu            # within 25 minutes, on one GPU
python -m benchmarks.gpu --tiny     # tests the benchmark itself, on any machine

A part that fails is reported, and the others continue. The results are saved after each part.
Neither a network nor data packages are needed.
"""

import argparse
import dataclasses
import importlib
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

# A bare GPU machine may lack what the zoo has for command lines, input pipelines and terminals.
for names in (
    "grain",
    "tyro tyro.constructors",
    "rich rich.console rich.markdown rich.progress rich.table",
):
    package, *modules = names.split()
    try:
        importlib.import_module(package)
    except ImportError:
        sys.modules.update(dict.fromkeys((package, *modules), mock.MagicMock()))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import harness, parity, run, steps  # noqa: E402
from benchmarks.harness import Process, SkippedError, Table, Timing  # noqa: E402
from benchmarks.peak import find_peak, mfu_note  # noqa: E402
from benchmarks.peers import zoo_model  # noqa: E402
from benchmarks.peers.given import RNN, ROOT, Transformer  # noqa: E402
from zoo import rnn, transformer  # noqa: E402
from zoo.data.corpus import Corpus  # noqa: E402
from zoo.data.documents import standard_library  # noqa: E402
from zoo.data.token_datasets import PackedDataset  # noqa: E402
from zoo.data.tokenizer import BPETokenizer  # noqa: E402
from zoo.nn.attention.attention import attention  # noqa: E402

TEXT = ROOT / "runs" / "gpu-text"
# Of the first losses, relative: Adam's first steps are large even where a gradient is near zero.
LOSS_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder to train in bf16 over fp32 weights, with AdamW, at the largest batch that fits."""

    shape: Transformer
    batch_sizes: tuple[int, ...]
    """Batch sizes to try, the largest first."""
    goal: float
    """MFU to reach, in percent."""
    seconds: float
    """Time limit of each peer."""


def _gpt(layers: int, d_model: int, heads: int, seq_len: int, packed: bool = False) -> Transformer:
    sizes = {"vocab_size": 50304, "seq_len": seq_len, "tied": True, "packed": packed}
    return Transformer(layers, d_model, heads, 4 * d_model, **sizes)


DECODERS = {
    "124M": Decoder(_gpt(12, 768, 12, 1024), (128, 64, 32, 16, 8), 45, 210),
    "350M": Decoder(_gpt(24, 1024, 16, 1024), (64, 32, 16, 8, 4), 50, 240),
    "1.3B": Decoder(_gpt(24, 2048, 16, 2048), (16, 8, 4, 2, 1), 55, 300),
    "350M-packed": Decoder(_gpt(24, 1024, 16, 8192, packed=True), (8, 4, 2, 1), 50, 240),
}
TINY = Decoder(Transformer(2, 64, 2, 256, vocab_size=512, seq_len=64, tied=True), (4, 2), 45, 60)
LSTM = RNN(hidden_size=1024, vocab_size=2048, seq_len=512, batch_size=64)
TINY_LSTM = RNN(hidden_size=16, vocab_size=32, seq_len=16, batch_size=4)


def main() -> None:
    """Run all parts, or the named ones; exit with 1 if one failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts to run (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the benchmark")
    parser.add_argument("--minutes", type=float, default=24, help="time limit of all parts")
    parser.add_argument("--results", type=type(harness.RESULTS), default=harness.RESULTS)
    options = parser.parse_args()
    end, source = time.monotonic() + 60 * options.minutes, harness.provenance()
    # A process has the GPU to itself; the rest of the memory is for CUDA's own libraries.
    os.environ |= {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    parts, done = _parts(options.tiny, end), []
    if unknown := {*options.parts} - {*parts}:
        parser.error(f"no such part: {sorted(unknown)}; there are {list(parts)}")
    for name in options.parts or parts:
        table = Table(name)
        try:
            if time.monotonic() > end:
                raise RuntimeError("no time was left")
            parts[name](table)
        except Exception as error:  # the other parts continue
            traceback.print_exc()
            table.failures.append(f"{name}: {error!r}")
        print(table.markdown(), flush=True)
        done.append(table)
        harness.save("-".join(["gpu", *options.parts]), done, source, options.results)
    sys.exit(any(table.failures for table in done))


def _parts(tiny: bool, end: float) -> dict[str, Callable[[Table], None]]:
    """The parts by name, the most important first."""
    decoders = {"tiny": TINY} if tiny else DECODERS
    trained = {
        f"decoder-{name}": lambda table, one=one: decoder(table, one, tiny, end)
        for name, one in decoders.items()
    }
    first, *others = trained
    return {
        first: trained[first],
        "attention": lambda table: attentions(table, tiny),
        "parity": lambda table: parity.check(table, tiny),
        **{name: trained[name] for name in others},
        "lstm": lambda table: lstm(table, tiny),
    }


def decoder(table: Table, wanted: Decoder, tiny: bool, end: float) -> None:
    """A decoder's train step on text beside PyTorch's, each at the largest batch that fits."""
    shape = dataclasses.replace(wanted.shape, tokens=_text(wanted, tiny))
    table.title = (
        f"decoder: {shape.num_layers} layers of {shape.d_model}, sequence {shape.seq_len}, "
        f"{'packed, ' if shape.packed else ''}bf16 over fp32 weights, AdamW"
    )
    flops = transformer.num_flops_per_token(
        zoo_model.transformer_sizes(shape, "none", True), shape.seq_len
    )
    peers = {name: run.PEERS["transformer"][name] for name in ("zoo", "pytorch-compiled")}
    if tiny:
        peers = {"zoo": peers["zoo"], "pytorch": run.PEERS["transformer"]["pytorch"]}
    found: dict[str, dict[str, Any]] = {}
    batches = wanted.batch_sizes
    for name, peer in peers.items():
        limit = min(wanted.seconds, end - time.monotonic())
        try:
            found[name] = _largest(peer.given(remat="none"), shape, batches, limit, tiny)
        except SkippedError as error:
            absent = "No module named 'torch'" in str(error)
            (table.notes if absent else table.failures).append(f"{name}: {error}")
            continue
        # Later peers begin at the first one's batch size.
        batches = tuple(each for each in batches if each <= found[name]["batch"])
    if not found:
        return
    peak = find_peak("bf16", [each["published_peak"] for each in found.values()])
    speeds = {name: x["batch"] * shape.seq_len / x["seconds"] for name, x in found.items()}
    for name, each in found.items():
        table.rows.append(
            {
                "peer": name,
                "batch": each["batch"],
                "steps/s": 1 / each["seconds"],
                "tokens/s": speeds[name],
                "MFU %": (utilization := 100 * speeds[name] * flops / peak["flops"]),
                "goal %": wanted.goal,
                "time per token / the zoo's": speeds[next(iter(found))] / speeds[name],
                "compile s": each["compile_seconds"],
                "peak MiB": each["peak_bytes"] / 2**20,
                "XLA plan MiB": each["planned_bytes"] and each["planned_bytes"] / 2**20,
            }
        )
        if name == "zoo":
            met = "reaches" if utilization >= wanted.goal else "misses"
            table.notes.append(f"the zoo {met} its goal of {wanted.goal:.0f}% MFU")
    table.notes.append(mfu_note(flops, peak, "token"))
    same = {name: x["losses"] for name, x in found.items() if x["batch"] == batches[0]}
    table.notes.append(f"the same batch, so the same losses: {', '.join(same)}")
    table.failures += steps.disagreements(same, LOSS_TOLERANCE)


def _largest(
    peer: steps.Peer, shape: Transformer, batches: tuple[int, ...], limit: float, tiny: bool
) -> dict[str, Any]:
    """The measurements of a peer, alone on the device, at the first batch that fits in memory."""
    end = time.monotonic() + limit
    for batch in batches:
        arguments = (steps.timed_steps, peer, dataclasses.replace(shape, batch_size=batch), "bf16")
        left, count = end - time.monotonic(), 2 if tiny else 10
        try:
            with Process(*arguments, huge_pages=True, limit=left) as worker:
                turns = [worker.ask(count)["seconds"] / count for _ in range(3)]
                peak = worker.ask(0)["peak_bytes"] or worker.setup["peak_bytes"]
        except SkippedError as error:
            text = str(error).lower()
            if "resource_exhausted" not in text and "out of memory" not in text:
                raise
        else:
            return worker.setup | {"batch": batch, "seconds": sorted(turns)[1], "peak_bytes": peak}
    raise SkippedError(f"no batch of {batches} fits")


def attentions(table: Table, tiny: bool) -> None:
    """Attention forward and backward over packed rows, and over whole ones by cuDNN."""
    tokens, size = (64, 8) if tiny else (32_768, 128)
    kinds = ("chunked", "xla") if tiny else ("triton", "chunked", "cudnn")
    table.title = f"attention of {tokens:,} tokens, 16 heads of {size}, 4 of keys, bf16"
    table.notes.append("documents of 1,000 tokens in the mean, but for cudnn: there rows are one")
    rng = np.random.default_rng(0)
    for seq_len in (tokens // 4, tokens):
        q, k = (np.ones((tokens // seq_len, seq_len, heads, size)) for heads in (16, 4))
        q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16) for x in (q, k, k))
        lengths = rng.lognormal(math.log(1000) - 0.5, 1.0, tokens).astype(int) + 1
        ids = np.repeat(np.arange(1, tokens + 1), lengths)[:tokens].reshape(-1, seq_len)
        for kind in kinds:
            segment_ids = None if kind == "cudnn" else jnp.asarray(ids, jnp.int32)
            call = partial(attention, causal=True, segment_ids=segment_ids, implementation=kind)
            total = lambda call, *qkv: call(*qkv).astype(jnp.float32).sum()  # noqa: E731
            gradient = jax.jit(jax.grad(partial(total, call), (0, 1, 2)))
            gradient = partial(gradient, q, k, v)
            jax.block_until_ready(gradient())  # compiles
            turns = {"": lambda run=gradient: jax.block_until_ready(run()) and None}
            seconds = harness.in_turn(turns, 5)[""]
            table.add(peer=f"{kind}, rows of {seq_len:,}", milliseconds=1e3 * median(seconds))


def lstm(table: Table, tiny: bool) -> None:
    """An LSTM's train step beside torch.nn.LSTM's, both by cuDNN on a GPU."""
    shape = TINY_LSTM if tiny else LSTM
    tokens = shape.batch_size * shape.seq_len
    table.title = f"LSTM: {shape.num_layers} layers of {shape.hidden_size}"
    flops = tokens * rnn.num_flops_per_token(zoo_model.rnn_sizes(shape))
    peers = {name: run.PEERS["rnn"][name] for name in ("zoo", "pytorch")}
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # they share the GPU, and it is the last
    for precision in ("fp32",) if tiny else ("fp32", "bf16"):
        timing = Timing(rounds=3)
        found = steps.compare(
            precision, peers, shape, precision, timing, flops=flops, tokens=tokens
        )
        table.rows += [{**row, "peer": f"{row['peer']}, {precision}"} for row in found.rows]
        table.notes += found.notes
        table.failures += found.failures


def _text(wanted: Decoder, tiny: bool) -> str:
    """A file with rows of the standard library's text, tokenized and packed by the zoo."""
    shape, rows = wanted.shape, wanted.batch_sizes[0]
    file = TEXT / f"{shape.vocab_size}-{shape.seq_len}-{rows}.npy"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        documents = standard_library()
        documents = documents[: max(2, len(documents) // 50)] if tiny else documents
        tokenizer = BPETokenizer.train((document.text for document in documents), shape.vocab_size)
        ids = tokenizer.encode_batch([document.text for document in documents])
        corpus = Corpus.from_arrays(ids, tokenizer.vocab_size, num_bytes=1)
        plan = PackedDataset(corpus, tokenizer.separator_id, shape.seq_len + 1, rows, seed=0)
        batch = plan.batch(0)
        np.save(file, np.stack([batch["tokens"], batch["segment_ids"]]))
    return str(file)


if __name__ == "__main__":
    main()
