"""The pictures of the pages, from the code and committed results: `python docs/pictures.py`.

Names after it choose some of them. Each is written to `docs/assets/NAME.svg`; `card`, which others
show beside a link, is also drawn as `card.png`, by the system's Chromium.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawing import TONES, Picture
from jaxtyping import Array, Float

import zoo
from zoo import losses, mlp, transformer
from zoo.data.corpus import Corpus
from zoo.data.tokenizer import ByteTokenizer
from zoo.nn.attention import attention
from zoo.planning import collectives, hlo
from zoo.runs.config import Config as RunConfig
from zoo.training.compiled import IN_FLIGHT

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"


# --- Sharding ---------------------------------------------------------------------------------


class Layer(eqx.Module):
    """The parameters whose pieces are drawn."""

    w_up: Float[Array, "embed mlp"]
    w_down: Float[Array, "mlp embed"]
    scale: Float[Array, "embed"]


def pieces(rules: zoo.sharding.Rules = zoo.sharding.RULES) -> Picture:
    """From the annotation of a parameter to the part of it on each of four devices."""
    layer = Layer(jnp.ones((8, 12)), jnp.ones((12, 8)), jnp.ones(8))
    mesh = zoo.make_mesh("fsdp=2,tensor=2")
    picture = Picture(352, "Three annotated parameters, and the pieces of them on a mesh of 2 × 2")
    picture.text(20, 30, "what you write", "strong")
    left, cell, step = 392, 6, 92
    picture.text(
        left, 30, f"what each device of {dict(mesh.shape_tuple)['fsdp']} × 2 holds", "strong"
    )
    places = {device: place for place, device in np.ndenumerate(mesh.devices)}
    for number, device in enumerate(mesh.devices.flat):
        index = dict(zip(mesh.axis_names, places[device], strict=True))
        picture.text(left + number * step, 52, f"fsdp {index['fsdp']}", "small quiet")
        picture.text(left + number * step, 67, f"tensor {index['tensor']}", "small quiet")
    shardings, tones = zoo.sharding.shardings(layer, zoo.Layout(mesh, rules)), {}
    for row, field in enumerate(dataclasses.fields(layer)):
        array, sharding, y = (
            getattr(layer, field.name),
            getattr(shardings, field.name),
            84 + 92 * row,
        )
        names = [name or "·" for name in getattr(zoo.sharding.logical_axes(layer), field.name)]
        picture.text(20, y + 18, f'{field.name}: Float[Array, "{" ".join(names)}"]', "mono")
        parts = np.floor_divide(array.shape, sharding.shard_shape(array.shape))
        for line, (name, axis, count) in enumerate(zip(names, sharding.spec, parts, strict=True)):
            says = f"{name} → {axis}, {array.shape[line]} in {count} parts"
            picture.text(36, y + 42 + 18 * line, says, "small quiet")
        for number, device in enumerate(mesh.devices.flat):
            x, (*outer, columns) = left + number * step, array.shape
            rows = outer[0] if outer else 1
            picture.box(x, y, columns * cell, rows * cell, "none")
            index = sharding.devices_indices_map(array.shape)[device]
            down, across = index if outer else (slice(None), *index)
            tone = tones.setdefault((field.name, str(index)), "abcd"[len(tones) % 4])
            top, bottom, _ = down.indices(rows)
            begin, end, _ = across.indices(columns)
            picture.box(
                x + begin * cell, y + top * cell, (end - begin) * cell, (bottom - top) * cell, tone
            )
    tone_note = "scale has no axis that tensor splits: two devices hold each half of it."
    picture.text(20, 338, "One colour is one piece. " + tone_note, "small quiet")
    return picture


def layer() -> Picture:
    """What is gathered and reduced in one layer, read from a compiled step."""
    config = transformer.Config(vocab_size=64, d_model=64, num_layers=6, num_heads=4, remat="full")
    mesh, optimizer = zoo.make_mesh("fsdp=2,tensor=2"), optax.sgd(1e-2)
    make_model = lambda key: transformer.Transformer(config, key=key)  # noqa: E731
    state = zoo.init_state(make_model, optimizer, key=jax.random.key(0), mesh=mesh)
    step = zoo.make_train_step(losses.next_token, optimizer, mesh=mesh, precision="fp32")
    ones = jnp.ones((8, 64), jnp.int32)
    step.compile(state, {"tokens": ones, "targets": ones, "weights": jnp.ones((8, 64))})
    axis_of = {((0, 2), (1, 3)): "fsdp", ((0, 1), (2, 3)): "tensor"}
    found: dict[str, dict[tuple[str, str], int]] = {"forward": {}, "backward": {}}
    for visit in hlo.visits(hlo.read(step.programs[0].as_text())):
        for instruction in visit.computation.instructions.values():
            kind = collectives.kind_of(instruction)
            if kind is None or visit.times != config.num_layers:
                continue
            axis = axis_of[tuple(map(tuple, collectives.groups(instruction, 4)))]
            way = "backward" if "transpose(" in instruction.op_name else "forward"
            number = len(hlo.arrays(instruction.type))
            found[way][kind, axis] = found[way].get((kind, axis), 0) + number
    picture = Picture(304, "The collectives of one layer on a mesh of 2 × 2, forward and backward")
    for row, (way, counts) in enumerate(found.items()):
        y = 50 + 104 * row
        picture.text(20, y + 26, way, "strong")
        gathered, summed = counts["all-gather", "fsdp"], counts["all-reduce", "tensor"]
        steps = [
            ("a", "gather", f"{gathered} parameters, over fsdp"),
            ("e", "compute", "attention and MLP"),
            ("b", "add up", f"{summed} arrays, over tensor"),
        ]
        if reduced := counts.get(("all-reduce", "fsdp"), counts.get(("reduce-scatter", "fsdp"), 0)):
            steps.append(("c", "reduce", f"{reduced} gradients, over fsdp"))
        for i, (tone, verb, what) in enumerate(steps):
            x = 112 + 162 * i
            picture.box(x, y, 148, 46, tone, verb)
            picture.text(x + 74, y + 62, what, "small quiet", "middle")
            if i:
                picture.line([(x - 14, y + 23), (x - 2, y + 23)], arrow=True)
    picture.text(
        20,
        26,
        f"One layer of {config.num_layers}; the others' parameters stay in pieces meanwhile.",
    )
    notes = [
        "Attention and the MLP each add up their parts once; backward, gradients are added up too.",
        "The backward pass gathers parameters anew, and leaves each gradient in pieces.",
    ]
    for line, note in enumerate(notes):
        picture.text(20, 270 + 20 * line, note, "small quiet")
    return picture


# --- Data -------------------------------------------------------------------------------------


def packed() -> Picture:
    """A packed row with its segments, positions, weights and mask."""
    texts, prompts = ["2+3=5", "ab>AB", "hi"], [4, 3, 0]
    tokenizer = ByteTokenizer()
    ids = [tokenizer.encode(text) for text in texts]
    counts = [np.arange(len(x)) >= prompt for x, prompt in zip(ids, prompts, strict=True)]
    corpus = Corpus.from_arrays(ids, tokenizer.vocab_size, sum(map(len, texts)), counts=counts)
    length = 18
    dataset = zoo.PackedDataset(corpus, (None, tokenizer.eos_ids[0]), length, 1, 0, shuffle=False)
    row = {name: x[0] for name, x in dataset.batch(0).items()}
    zeros, values = jnp.zeros((1, length, 1, length)), jnp.eye(length)[None, :, None]
    segments = jnp.asarray(row["segment_ids"])[None]
    seen = attention(zeros, zeros, values, causal=True, segment_ids=segments)[0, :, 0] > 0
    picture = Picture(
        476, "A row of three packed documents: tokens, targets, weights, segments, positions, mask"
    )
    left, cell = 118, 34
    names = {tokenizer.eos_ids[0]: "⏎"} | {
        int(i): tokenizer.decode([int(i)]) for x in ids for i in x
    }
    for line, name in enumerate(row):
        y = 20 + 30 * line
        picture.text(left - 12, y + 18, name, "small", "end")
        for i, value in enumerate(row[name]):
            segment = int(row["segment_ids"][i])
            tone = "abcd"[segment - 1] if segment else "none"
            if name == "weights" and not value:
                tone = "none"
            is_token = name in ("tokens", "targets")
            text = names.get(int(value), "") if is_token and segment else f"{value:g}"
            picture.box(
                left + i * cell, y, cell - 2, 26, tone, "" if is_token and not segment else text
            )
    top, small = 196, 14
    picture.text(left - 12, top + 12, "mask", "small", "end")
    for i, j in np.ndindex(length, length):
        tone = "abcd"[int(row["segment_ids"][i]) - 1] if row["segment_ids"][i] else "e"
        picture.box(
            left + j * small, top + i * small, small - 2, small - 2, tone if seen[i, j] else "none"
        )
    notes = [
        "Each colour is a document, with its end ⏎.",
        "Positions begin anew in each of them.",
        "Weights are 0 for prompts and padding,",
        "which no loss counts.",
        "A token sees the earlier ones of its own",
        "document: row i of the mask is what",
        "token i sees.",
    ]
    for line, note in enumerate(notes):
        picture.text(400, top + 40 + 24 * line, note)
    return picture


def buckets() -> Picture:
    """The rows of a bucketed dataset, with the padding of each, beside rows of one length."""
    lengths = np.clip(np.random.default_rng(3).lognormal(4, 0.6, 48), 8, 250).astype(int)
    documents = [np.zeros(n, np.int32) for n in lengths]
    corpus = Corpus.from_arrays(documents, vocab_size=2, num_bytes=int(lengths.sum()))
    picture = Picture(
        424, "The batches of an epoch in three buckets and in one, with their padding"
    )
    for column, sizes in enumerate([(64, 128, 256), (256,)]):
        dataset = zoo.BucketedDataset(corpus, 1, sizes, batch_size=8, seed=0)
        left, scale = 20 + 380 * column, 1.32
        head = (
            f"buckets {sizes[0]}, {sizes[1]}, {sizes[2]}"
            if len(sizes) > 1
            else f"one bucket, {sizes[0]}"
        )
        picture.text(left, 30, f"{head}: {dataset.padding_waste:.0%} padding", "strong")
        order = sorted(range(dataset.batches_per_epoch), key=lambda k: (dataset.bucket(k), k))
        for place, k in enumerate(order):
            batch, width = dataset.batch(k), dataset.bucket(k)
            for row, tokens in enumerate((batch["segment_ids"] > 0).sum(1)):
                y = 46 + 60 * place + 6 * row
                picture.box(left, y, width * scale, 5, "none")
                picture.box(left, y, tokens * scale, 5, "abc"[(64, 128, 256).index(width)])
    note = "48 documents, a row each, six batches of eight. Filled: tokens; outlined: padding."
    picture.text(20, 412, note, "small quiet")
    return picture


def token() -> Picture:
    """The files that a token passes, as CONTRIBUTING names them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    way = re.search(r"A token's way: (.*)", text)
    assert way, "CONTRIBUTING.md says what a token's way is"
    paths = [path.rstrip("/") for path in re.findall(r"`([\w./]+)`", way.group(1))]
    paths = [path if "/" in path or path == "nn" else f"transformer/{path}" for path in paths]
    does = {
        "data/formats.py": "a line of a file becomes text",
        "data/tokenizer.py": "text becomes ids",
        "data/prepared": "ids are stored in shards, with checksums",
        "data/corpus.py": "shards are read by memory map",
        "data/token_datasets.py": "ids fill a row of batch k",
        "data/loader.py": "batches are read ahead, and checked",
        "sharding/placement.py": "each process puts its rows onto its devices",
        "training/compiled.py": "the program of this bucket is chosen",
        "training/step.py": "microbatches, gradient, clip, update",
        "training/losses.py": "summed loss, summed weight",
        "transformer/model.py": "embedding, layers, head",
        "transformer/blocks.py": "attention and MLP of a layer",
        "nn": "norms, products, attention's kernels",
    }
    tones = {"data": "a", "sharding": "a", "training": "b", "transformer": "c", "nn": "d"}
    picture = Picture(len(paths) * 38 + 30, "The files that a token passes, from text to logits")
    for i, path in enumerate(paths):
        assert (ROOT / "zoo" / path).exists(), path
        y = 20 + 38 * i
        picture.box(20, y, 230, 28, tones[path.partition("/")[0]])
        picture.text(135, y + 19, path, "mono", "middle")
        picture.text(270, y + 19, does[path])
        if i:
            picture.line([(135, y - 10), (135, y - 1)], arrow=True)
    return picture


# --- Runs -------------------------------------------------------------------------------------


def timeline() -> Picture:
    """Who works when, by the loop's own rules: drawn, not measured."""
    save_after, num_steps, every, wide, gap = 4, 8, 74, 68, 26
    picture = Picture(316, "Steps, batches, metrics and a save side by side")
    tops = {"threads": 20, "host": 70, "device": 120, "disk": 170}
    for lane, y in tops.items():
        picture.text(20, y + 20, lane, "strong")
    start = [104 + every * k + gap * (k > save_after) for k in range(num_steps)]
    for k, x in enumerate(start):
        picture.box(x, tops["device"], wide, 30, "a", f"step {k}")
        picture.box(x - 8, tops["threads"], 54, 30, "c", f"batch {k + IN_FLIGHT}")
        dispatched = start[k - 1] + 2 if k and k != save_after + 1 else x - 8
        picture.box(dispatched, tops["host"], 8, 30, "a")
        if k > 0 and k != save_after + 1:
            picture.box(x + 14, tops["host"], 24, 30, "d", f"{k - 1}")
    saved = start[save_after] + wide
    picture.box(saved - 18, tops["host"], 22, 30, "d", f"{save_after}")
    picture.box(saved + 5, tops["host"], 14, 30, "b")
    picture.box(saved + 21, tops["disk"], 190, 30, "b", f"checkpoint {save_after + 1} is written")
    notes = [
        ("c", "Batches are read, checked and put onto the devices ahead."),
        (
            "a",
            f"A step is sent off while the one before computes: {IN_FLIGHT} under way at most.",
        ),
        (
            "d",
            "A step's metrics are read once the next one is under way: the device does not wait.",
        ),
        ("b", "A save waits for its step and copies the state; it is written while steps go on."),
    ]
    for i, (tone, note) in enumerate(notes):
        picture.box(20, 221 + 22 * i, 12, 12, tone)
        picture.text(40, 232 + 22 * i, note, "small quiet")
    return picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(RunConfig):
    """The run that is killed."""

    run_dir: Path | str = "run"
    steps: int = 40
    checkpoint_every: int = 10
    log_every: int = 1
    eval_every: int = 40
    precision: str = "fp32"  # type: ignore[assignment]


class Killed(BaseException):
    """In the place of a signal that ends the process."""


class Kill(zoo.callbacks.Callback):
    """Keeps the losses, and ends the run at a step, if one is given."""

    def __init__(self, last: int = 0):
        self.last, self.losses = last, dict[int, float]()

    def on_step(self, loop, step, state, metrics):
        """After the dispatch of a step."""
        self.losses[step] = float(metrics["loss"])
        if step == self.last:
            raise Killed


def kill() -> Picture:
    """The losses of a run, of one that was killed, and of its resumption."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 256).astype(np.int32)
    inputs = np.asarray([[0, 2], [2, 0], [-2, -1]])[labels] + 0.8 * rng.normal(size=(256, 2))
    rows = {"inputs": inputs.astype(np.float32), "labels": labels}

    def train(folder: Path, last: int = 0) -> dict[int, float]:
        callback, model = Kill(last), mlp.Config(in_size=2, out_size=3, hidden_size=16)
        data = zoo.ArrayDataset(rows, batch_size=32, seed=0)
        training = zoo.Training(
            make_model=lambda key: mlp.MLP(model, key=key),
            loss_fn=losses.classification,
            optimizer=optax.adam(3e-2),
            data=data,
            evaluate=data,
        )
        with (
            contextlib.suppress(Killed),
            zoo.Run(Run(run_dir=folder, compilation_cache=None)) as run,
        ):
            zoo.fit(run, training, callbacks=[callback])
        return callback.losses

    with tempfile.TemporaryDirectory() as folder:
        whole = train(Path(folder, "whole"))
        killed = train(Path(folder, "killed"), last=27)
        resumed = train(Path(folder, "killed"))
    last, again = max(killed), min(resumed) - 1
    equal = all(whole[k] == x for losses in (killed, resumed) for k, x in losses.items())
    title = f"A run killed at step {last} repeats the steps from {again} on, with equal losses"
    picture = Picture(268, title)
    x = lambda k: 140 + 14.8 * k  # noqa: E731
    for row, (name, values, tone) in enumerate(
        [("never stopped", whole, "e"), ("killed", killed, "b"), ("resumed", resumed, "a")]
    ):
        y = 20 + 70 * row
        picture.text(20, y + 42, name, "strong")
        line = [(x(k), y + 46 - 40 * loss / max(whole.values())) for k, loss in values.items()]
        picture.line(line, tone)
        for k in range(Run.checkpoint_every, max(values) + 1, Run.checkpoint_every):
            if k in values:
                picture.box(x(k) - 4, y + 50, 8, 8, "c")
    picture.line([(x(last) + 6, 96), (x(last) + 6, 148)], "b")
    picture.text(x(last) + 14, 116, f"killed at step {last}", "small")
    picture.line([(x(again), 150), (x(again), 186), (x(again) + 12, 194)], arrow=True)
    picture.text(x(again) - 8, 192, f"from the checkpoint at {again}", "small", "end")
    says = "are equal to the last bit" if equal else "DIFFER"
    picture.box(20, 246, 8, 8, "c")
    note = (
        f"a checkpoint. Steps {again + 1} to {last} are computed twice, no more; all losses {says}."
    )
    picture.text(34, 254, note, "small quiet")
    return picture


# --- Results ----------------------------------------------------------------------------------


def memory() -> Picture:
    """The memory of fine-tuning an 8B model, by method and base, from the committed plans."""
    page = (ROOT / "benchmarks/results/finetuning_plans.md").read_text()
    table = page.partition("## Llama 3 8B")[2].partition("##")[0]
    rows = [
        [cell.strip(" *") for cell in x.strip("|").split("|")]
        for x in table.splitlines()
        if x[:2] == "| "
    ]
    chosen = [x for x in rows if x[1] == "full" and not x[0].startswith("before")]

    def gib(cell: str) -> float:
        number, _, unit = cell.partition(" ")
        return float(number or 0) / (1024 if unit == "MiB" else 1)

    picture = Picture(104 + 46 * len(chosen), "Memory of fine-tuning Llama 3 8B by method and base")
    picture.text(
        20, 30, "Llama 3 8B, a row of 1,024 tokens, rematerialised: GiB on one device", "strong"
    )
    left, scale = 150, 3.4
    for name, x in (("24 GB card", 22.35), ("80 GB card", 74.5)):
        picture.line([(left + x * scale, 48), (left + x * scale, 60 + 46 * len(chosen))])
        picture.text(left + x * scale + 5, 58, name, "small quiet")
    for i, (method, _, _, *cells, total, _) in enumerate(chosen):
        y, x = 68 + 46 * i, left
        picture.text(left - 10, y + 18, method.replace(" (bf16)", ""), "", "end")
        for tone, cell in zip("abcd", cells, strict=True):
            picture.box(x, y, gib(cell) * scale, 26, tone)
            x += gib(cell) * scale
        picture.text(x + 8, y + 18, f"{gib(total):.1f}")
    names = ["frozen", "trained", "optimizer", "activations, gradients, gathered layers"]
    for tone, name, x in zip("abcd", names, (20, 100, 190, 300), strict=True):
        picture.box(x, 82 + 46 * len(chosen), 10, 10, tone)
        picture.text(x + 16, 91 + 46 * len(chosen), name, "small quiet")
    return picture


def bound() -> Picture:
    """What bounds a step of an 8B model, from the plan that the page on plans prints."""
    page = (ROOT / "docs/tutorials/plan.md").read_text()
    plan = page.partition("```text\n")[2].partition("```")[0]
    seconds = {
        k.strip(): float(v) for k, v in re.findall(r"^  ([a-z ]+?) {2,}(\d\.\d+) s ", plan, re.M)
    }
    low, high = map(float, re.findall(r"published runs +(\d\.\d+) s to (\d\.\d+) s", plan)[0])
    picture = Picture(318, "What bounds a step of Llama 3 8B on 16 chips of TPU v6e")
    command = re.search(r"zoo plan (\S+) --target (\S+) --mesh (\S+)", page)
    assert command, "the page has its command"
    picture.text(20, 30, "{} on {}, {}: seconds of a step".format(*command.groups()), "strong")
    left, scale = 190, 640
    picture.text(20, 62, "if all overlaps", "quiet small")
    for i, (name, tone) in enumerate([("compute", "a"), ("memory", "b"), ("interconnect", "c")]):
        picture.text(left - 10, 84 + 32 * i, name, "", "end")
        picture.box(left, 68 + 32 * i, seconds[name] * scale, 22, tone)
        picture.text(left + seconds[name] * scale + 8, 84 + 32 * i, f"{seconds[name]:.3f}")
    picture.text(20, 184, "as compiled", "quiet small")
    x = left
    parts = {
        "bound by products": "products",
        "bound by memory": "memory",
        "waiting for links": "links",
    }
    for (name, short), tone in zip(parts.items(), "abc", strict=True):
        picture.box(x, 194, seconds[name] * scale, 26, tone, short)
        picture.text(
            x + seconds[name] * scale / 2, 236, f"{seconds[name]:.3f}", "small quiet", "middle"
        )
        x += seconds[name] * scale
    picture.text(x + 8, 212, f"{sum(seconds[name] for name in parts):.3f}")
    picture.text(left - 10, 212, "one after another", "", "end")
    picture.text(20, 252, "by published runs", "quiet small")
    picture.box(left + low * scale, 260, (high - low) * scale, 22, "d")
    picture.text(left + low * scale - 8, 276, f"{low:.3f} to {high:.3f}", "", "end")
    used = re.findall(r"all +(\S+) GiB  of (\S+) GiB", plan)[0]
    picture.text(20, 306, "Each chip's memory: {} of {} GiB.".format(*used), "small quiet")
    return picture


def shelf() -> Picture:
    """Bits per byte of the published language models beside compressors, from their metrics."""
    groups: dict[tuple, list] = {}  # by the texts that they were measured on
    for path in sorted((ROOT / "models").glob("*/metrics.json")):
        metrics = json.loads(path.read_text())
        if "bits_per_byte" in metrics:
            compressors = tuple((name, bits, "e") for name, bits in metrics["compressors"].items())
            bar = (path.parent.name, metrics["bits_per_byte"], "a")
            groups.setdefault(compressors, []).append(bar)
    bars = [bar for group, models in groups.items() for bar in (*models, *group)]
    picture = Picture(
        90 + 36 * len(bars), "Bits per byte of held-out Python, by model and compressor"
    )
    picture.text(20, 30, "bits per byte of the Python source held out; less is better", "strong")
    scale = 520 / max(bits for _, bits, _ in bars)
    for i, (name, bits, tone) in enumerate(bars):
        y = 50 + 36 * i
        picture.text(140, y + 18, name, "", "end")
        picture.box(150, y, bits * scale, 24, tone)
        picture.text(158 + bits * scale, y + 18, f"{bits:.2f}")
    note = (
        "Compressors take the same texts one by one: lm-python's are files, rnn-python's functions."
    )
    picture.text(20, 76 + 36 * len(bars), note, "small quiet")
    return picture


def curves() -> Picture:
    """Losses of the models on the shelf by step, from the metrics of their commands."""
    paths = sorted((ROOT / "benchmarks" / "results" / "curves").glob("*.jsonl"))
    wide, high, shown = 350, 150, Picture(0, "The losses of the models on the shelf, by step")
    for place, path in enumerate(paths):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        trained = [(r["step"], r["loss"]) for r in records if "loss" in r]
        held_out = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
        published = json.loads((ROOT / "models" / path.stem / "metrics.json").read_text())
        left, top = 20 + 375 * (place % 2), 56 + 236 * (place // 2)
        steps, most = trained[-1][0], max(loss for _, loss in trained)
        at = lambda step, loss, x=left, y=top, n=steps, m=most: (  # noqa: E731
            x + wide * step / n,
            y + high * (1 - loss / m),
        )
        shown.text(left, top - 12, path.stem, "strong")
        shown.line([(left, top), (left, top + high), (left + wide, top + high)])
        shown.line([at(*each) for each in trained], "a")
        shown.line([at(*each) for each in held_out], "b")
        for x, y in (at(*each) for each in held_out):
            shown.box(x - 3, y - 3, 6, 6, "b")
        shown.text(left + wide, top - 12, f"0 to {most:.1f}", "small quiet", "end")
        shown.text(left + wide, top + high + 18, f"{steps:,} steps", "small quiet", "end")
        of = f" (after {published['steps']:,})" if published["steps"] != steps else ""
        ends = f"ends at {held_out[-1][1]:.2f}, published {published['eval_loss']:.2f}{of}"
        shown.text(left, top + high + 18, ends, "small")
    shown.height = 236 * -(-len(paths) // 2) + 50
    for tone, name, x in (("a", "training", 20), ("b", "held out, in nats per token", 110)):
        shown.box(x, shown.height - 28, 10, 10, tone)
        shown.text(x + 16, shown.height - 19, name, "small quiet")
    return shown


# --- The project itself -----------------------------------------------------------------------

ELEPHANT = (
    '<path d="M20 46 q0 -22 24 -22 h16 q8 -12 22 -9 q20 4 19 26 q-1 12 -3 20 q-3 14 4 17 '
    "q5 2 6 -4 l6 1 q-1 13 -13 12 q-15 -2 -13 -22 q-6 5 -10 5 v24 h-14 v-18 h-22 v18 h-14 v-26 "
    'q-8 -6 -8 -22z"/>'
)


def _elephant(picture: Picture, x: float, y: float, scale: float) -> None:
    """An elephant in four pieces, as a parameter on a mesh of 2 × 2."""
    quarters = [(0, 0), (62, 0), (0, 56), (62, 56)]
    rects = "".join(
        f'<rect x="{a}" y="{b}" width="60" height="54" fill="{TONES[tone]}"/>'
        for (a, b), tone in zip(quarters, "abcd", strict=True)
    )
    picture.parts.append(
        f'<g transform="translate({x} {y}) scale({scale})"><clipPath id="zoo">{ELEPHANT}</clipPath>'
        f'<g clip-path="url(#zoo)">{rects}</g><circle cx="88" cy="32" r="3" fill="#fff"/></g>'
    )


def logo() -> Picture:
    """The logo."""
    picture = Picture(112, "zoo", width=124)
    _elephant(picture, 0, 0, 1)
    return picture


def card() -> Picture:
    """The card that others show beside a link."""
    picture = Picture(320, "zoo: sharded reference models in Equinox and JAX", width=640)
    _elephant(picture, 50, 70, 1.6)
    picture.parts.append('<text x="280" y="150" style="font-size:64px;font-weight:bold">zoo</text>')
    for i, line in enumerate(["Sharded reference models", "in Equinox and JAX"]):
        picture.parts.append(
            f'<text x="282" y="{194 + 30 * i}" style="font-size:22px">{line}</text>'
        )
    return picture


PICTURES = {
    x.__name__: x
    for x in (
        pieces,
        layer,
        packed,
        buckets,
        token,
        timeline,
        kill,
        memory,
        bound,
        shelf,
        curves,
        logo,
        card,
    )
}


def photograph(svg: Path, png: Path) -> None:
    """Draw an SVG as a PNG of twice its size, with the system's Chromium.

    Raises:
        SystemExit: there is no Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit(f"{png.name} needs Chromium: apt install chromium")
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg.read_text())
    assert size
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--force-device-scale-factor=2"]
    flags += [f"--window-size={size[1]},{size[2]}", f"--screenshot={png}", svg.as_uri()]
    subprocess.run([browser, *flags], check=True, capture_output=True)


def main(names: list[str], folder: Path = ASSETS) -> None:
    """Draw the pictures of these names, or all of them, into a folder."""
    if unknown := set(names) - PICTURES.keys():
        sys.exit(f"no picture {', '.join(sorted(unknown))}: known are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        svg = PICTURES[name]().svg()
        if name == "logo":  # on any ground
            svg = re.sub(r"<rect [^>]*class=\"paper\"/>\n", "", svg)
        (folder / f"{name}.svg").write_text(svg)
        if name == "card" and folder == ASSETS:
            photograph(folder / "card.svg", folder / "card.png")


if __name__ == "__main__":
    main(sys.argv[1:])
