"""Decoders and an LSTM compared with PyTorch, parity with the CPU, and a profile.

    python -m benchmarks.gpu            # within 25 minutes, on one GPU
    python -m benchmarks.gpu --tiny     # tests the benchmark itself, on any machine

Each part has its own process and time limit; a part that fails is reported, and the others
continue. The results are saved after each part. Neither a network nor data packages are needed.
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.compare import disagreements, mfu_note
from benchmarks.gpu import parity
from benchmarks.gpu.process import Clock, PartError
from benchmarks.gpu.sizes import Decoder, Sizes, tiny
from benchmarks.peak import find_peak
from benchmarks.peers.rnn import zoo_model as rnn_model
from benchmarks.peers.transformer import zoo_model
from benchmarks.report import Table, provenance, save
from zoo import rnn, transformer

MIB = 2**20
# Relative to an array's norm: for the order of fp32 sums, and for bf16's rounding.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 2e-2
# Of the first losses, relative: Adam's first steps are large even where a gradient is near zero.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}

Request = tuple[str, dict[str, Any]]  # a peer's name; its module and options


def main() -> None:
    """Run all parts, or the named ones; exit with 1 if one failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts to run (default: all)")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to test the benchmark itself"
    )
    parser.add_argument("--minutes", type=float, default=24, help="time limit of all parts")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance()}
    done: list[Table] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = tiny() if options.tiny else Sizes()
        bench = Bench(sizes, Clock(options.minutes), Path(folder))
        parts = bench.parts()
        if unknown := set(options.parts) - set(parts):
            parser.error(f"no such part: {sorted(unknown)}; there are {list(parts)}")
        for name in options.parts or parts:
            table = Table(name)
            try:
                parts[name](table)
            except Exception as error:  # the other parts continue
                if not isinstance(error, PartError):
                    traceback.print_exc()
                table.failures.append(f"{name}: {error!r}")
            print(table.markdown(), flush=True)
            done.append(table)
            save("-".join(["gpu", *options.parts]), done, source, options.results)
    sys.exit(any(table.failures for table in done))


class Bench:
    """The parts of the benchmark; each fills in a table."""

    def __init__(self, sizes: Sizes, clock: Clock, folder: Path):
        self._sizes, self._clock, self._folder = sizes, clock, folder
        self._has_text = False

    def parts(self) -> dict[str, Callable[[Table], None]]:
        """The parts by name, the most important first."""
        decoders = {
            f"decoder-{name}": lambda table, name=name: self.decoder(table, name)
            for name in self._sizes.decoders
        }
        first, *others = decoders.items()
        return dict(
            [
                first,
                ("parity", self.parity),
                ("attention", self.attention),
                *others,
                ("lstm", self.lstm),
                ("profile", self.profile),
            ]
        )

    def decoder(self, table: Table, name: str) -> None:
        """A decoder's train step on text, compared with PyTorch's."""
        decoder = self._sizes.decoders[name]
        shape = dataclasses.replace(decoder.shape, tokens=self._tokens(decoder.shape.seq_len))
        table.title = (
            f"decoder of {name}: {shape.num_layers} layers of {shape.d_model}, sequence "
            f"{shape.seq_len}, bf16 over fp32 weights, AdamW"
        )
        compiled = self._sizes.compiled
        flops = transformer.num_flops_per_token(zoo_model.sizes(shape, "none", True), shape.seq_len)
        self._train(
            table,
            [
                ("zoo", _peer("transformer.zoo_model", remat="none", scan=False)),
                (
                    "pytorch-compiled" if compiled else "pytorch",
                    _peer("transformer.pytorch", remat="none", compiled=compiled),
                ),
            ],
            dataclasses.replace(decoder, shape=shape),
            "bf16",
            flops,
        )
        for row in table.rows:
            row["goal %"] = decoder.goal
            if row["peer"] == "zoo":
                met = "reaches" if float(row["MFU %"] or 0) >= decoder.goal else "misses"
                table.notes.append(f"the zoo {met} its goal of {decoder.goal:.0f}% MFU")

    def lstm(self, table: Table) -> None:
        """An LSTM's train step compared with torch.nn.LSTM, both by cuDNN on a GPU."""
        shape = self._sizes.lstm
        flops = rnn.num_flops_per_token(rnn_model.sizes(shape, "none"))
        table.title = f"LSTM: {shape.num_layers} layers of {shape.hidden_size}"
        for precision in self._sizes.lstm_precisions:
            self._train(
                table,
                [
                    (f"zoo, {precision}", _peer("rnn.zoo_model", remat="none")),
                    (f"torch.nn.LSTM, {precision}", _peer("rnn.pytorch", compiled=False)),
                ],
                Decoder(shape, [shape.batch_size], 0, 120),  # type: ignore[arg-type]
                precision,
                flops,
            )

    def _train(
        self,
        table: Table,
        peers: Iterable[Request],
        decoder: Decoder,
        precision: Any,
        flops_per_token: float,
    ) -> None:
        """One row per peer that runs; later peers begin at the first one's batch size."""
        shape, batch_sizes = decoder.shape, decoder.batch_sizes
        found: dict[str, Any] = {}
        for name, peer in peers:
            progress = self._folder / "progress.json"
            try:
                result = found[name] = self._clock.run(
                    "train",
                    "measure",
                    {
                        "peer": peer,
                        "shape": dataclasses.asdict(shape),
                        "precision": precision,
                        "batch_sizes": batch_sizes,
                        "steps": self._sizes.steps,
                        "progress": str(progress),
                    },
                    seconds=decoder.seconds,
                )
            except PartError as error:
                tried = progress.read_text() if progress.exists() else ""
                absent = "No module named 'torch'" in str(error)
                lines = table.notes if absent else table.failures
                lines.append(f"{name} skipped: {error}" if absent else f"{name}: {error} {tried}")
                continue
            batch_sizes = [each for each in batch_sizes if each <= result["batch"]]
        if not found:
            return
        peak = find_peak(precision, [each["published peak"] for each in found.values()])
        first = next(iter(found))
        speeds = {
            name: each["batch"] * shape.seq_len / each["seconds"] for name, each in found.items()
        }
        for name, each in found.items():
            table.rows.append(
                {
                    "peer": name,
                    "batch": each["batch"],
                    "steps/s": 1 / each["seconds"],
                    "tokens/s": speeds[name],
                    "MFU %": 100 * speeds[name] * flops_per_token / peak.flops,
                    "time per token / the zoo's": speeds[first] / speeds[name],
                    "compile s": each["compile seconds"],
                    "peak MiB": each["peak bytes"] and each["peak bytes"] / MIB,
                    "XLA plan MiB": each["planned bytes"] and each["planned bytes"] / MIB,
                }
            )
            if each["too large"]:
                table.notes.append(f"{name}: batches of {each['too large']} are too large")
        table.notes.append(mfu_note(flops_per_token, peak, "token"))
        same = {name: x["losses"] for name, x in found.items() if x["batch"] == batch_sizes[0]}
        if len(same) > 1:
            table.notes.append(f"the same batch, so the same losses: {', '.join(same)}")
            table.failures += disagreements(same, LOSS_TOLERANCE[precision])
        else:
            table.notes.append("losses are not compared: the batch sizes differ")

    def parity(self, table: Table) -> None:
        """The loss and gradients of a transformer in fp32, on this device and on the CPU."""
        table.title = "fp32 train step of a transformer: this device compared with the CPU"
        files = {}
        for name, environment in (("here", {}), ("cpu", {"JAX_PLATFORMS": "cpu"})):
            files[name] = str(self._folder / f"{name}.npz")
            result = self._clock.run(
                "parity",
                "gradients",
                {"shape": dataclasses.asdict(self._sizes.parity), "file": files[name]},
                seconds=120,
                environment=environment,
            )
            table.notes.append(f"{name}: {result['device']}, loss {result['loss']:.7f}")
        for name, difference in parity.compare(files["here"], files["cpu"]).items():
            table.rows.append({"quantity": name, "relative difference": difference})
            if not difference <= FP32_TOLERANCE:
                table.failures.append(f"{name} differs by {difference}, over {FP32_TOLERANCE}")

    def attention(self, table: Table) -> None:
        """bf16 attention by cuDNN and in chunks, compared with fp32's."""
        batch, seq_len, heads, head_dim = self._sizes.attention
        table.title = "attention in bf16: relative difference from fp32"
        for implementation in ("chunked", "cudnn"):
            options = {"batch": batch, "seq_len": seq_len, "heads": heads, "head_dim": head_dim}
            try:
                errors = self._clock.run(
                    "parity",
                    "attention_errors",
                    options | {"implementation": implementation},
                    seconds=90,
                )
            except PartError as error:
                if "needs an NVIDIA GPU" not in str(error):
                    raise
                table.notes.append(f"{implementation} skipped: {error}")
                continue
            table.rows.append({"implementation": implementation, **errors})
            if not max(errors.values()) <= BF16_TOLERANCE:
                table.failures.append(f"{implementation} is off by more than {BF16_TOLERANCE}")

    def profile(self, table: Table) -> None:
        """The five kinds of operations that take most of the first decoder's train step."""
        name, decoder = next(iter(self._sizes.decoders.items()))
        tokens = self._tokens(decoder.shape.seq_len)
        shape = dataclasses.replace(
            decoder.shape, batch_size=self._sizes.profile_batch, tokens=tokens
        )
        result = self._clock.run(
            "trace",
            "measure",
            {
                "peer": _peer("transformer.zoo_model", remat="none", scan=False),
                "shape": dataclasses.asdict(shape),
                "precision": "bf16",
                "steps": 3,
            },
            seconds=150,
        )
        table.title = f"profile of the {name} decoder's step, batch {shape.batch_size}, bf16"
        total = sum(result["kinds"].values())
        for kind, seconds in sorted(result["kinds"].items(), key=lambda item: -item[1])[:5]:
            row = {"operations": kind, "ms per step": 1e3 * seconds, "%": 100 * seconds / total}
            table.rows.append(row)
        table.notes.append("the longest single operations, in ms per step:")
        table.notes.append(
            ", ".join(f"`{x}` {1e3 * seconds:.3g}" for x, seconds in result["operations"].items())
        )

    def _tokens(self, seq_len: int) -> str:
        """A file with rows of text of that length."""
        decoders = self._sizes.decoders.values()
        if not self._has_text:
            self._clock.run(
                "text",
                "write",
                {
                    "vocab_size": max(each.shape.vocab_size for each in decoders),
                    "rows": max(max(each.batch_sizes) for each in decoders),
                    "seq_lens": sorted({each.shape.seq_len for each in decoders}),
                    "folder": str(self._folder),
                    "share": self._sizes.text,
                },
                seconds=120,
            )
            self._has_text = True
        return str(self._folder / f"{seq_len}.npy")


def _peer(module: str, **options: Any) -> dict[str, Any]:
    return {"module": module, "options": options}
