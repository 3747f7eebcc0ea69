"""Do learning rates transfer over widths? muP beside the standard parametrization.

python -m benchmarks.mup

trains transformers of several widths on the standard library's source: a few steps each for the
scale of their activations (the coordinate check of Yang, Hu et al. 2022, figure 5), and over a
grid of learning rates for the best of them. Each run's numbers are appended to a file, from which a
sweep that was cut off continues.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

import zoo
from benchmarks.harness import Table, main
from benchmarks.peers.given import Precision
from zoo import losses, optimizers, text, transformer
from zoo.training.compiled import CompiledStep

PARAMETRIZATIONS = ("standard", "mup")
Coordinates = dict[str, float]


@dataclass(frozen=True)
class Config:
    """Train transformers of several widths, by either parametrization, and compare them."""

    base_width: int = 64
    """Width at which both parametrizations are the same."""
    coordinate_widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Widths of the coordinate check."""
    coordinate_steps: int = 8
    """Its steps, at a constant rate."""
    coordinate_rate: float = 2**-9
    """Its learning rate."""
    coordinate_seeds: int = 3
    """Models per width, at least: narrow ones, which scatter more, are more in proportion."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Widths of the sweep over learning rates."""
    steps: int = 100
    """Its steps, with warm-up and cosine decay."""
    first: int = -12
    """Where the search begins: rates are powers of √2, and this is the first one's exponent."""
    margin: int = 2
    """Rates to try on each side of the best one."""
    seeds: int = 1
    """Runs per rate, whose held-out losses are averaged."""
    eval_batches: int = 12
    """Batches that the held-out loss is over."""
    num_layers: int = 2
    head_dim: int = 32
    """Size of a head; their number grows with the width."""
    data: text.Config = text.Config(tokenizer="bpe", vocab_size=512, seq_len=128, batch_size=8)
    log: Path = Path("runs/mup.jsonl")
    """File of the numbers of each run, which are not measured again."""


def mup(config: Annotated[Config, tyro.conf.arg(name="")] = Config()) -> list[Table]:
    """Measure what the log lacks, and tell all of it: learning rates and scales over widths."""
    log, data = Log(config.log), read_data(config.data, config.log.with_name("mup-tokenizer"))
    curves = search(config, data, log)
    coordinates = check_coordinates(config, data, log)
    return [coordinate_table(config, coordinates), rate_table(config, curves)]


class Log:
    """Numbers by the run that gave them, one JSON line each."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = path.read_text() if path.exists() else ""
        whole = found[: found.rfind("\n") + 1]
        if whole != found:  # a kill cut the last line off
            path.write_text(whole)
        self.path = path
        self.found: dict[str, Any] = {}
        for line in map(json.loads, whole.splitlines()):
            self.found[json.dumps(line["run"], sort_keys=True)] = line["result"]

    def get(self, label: str, run: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """The result of a run, measured if it is not in the file."""
        key = json.dumps(run, sort_keys=True)
        if key not in self.found:
            start = time.perf_counter()
            self.found[key] = measure()
            print(f"{label}: {time.perf_counter() - start:.0f} s", flush=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"run": run, "result": self.found[key]}) + "\n")
        return self.found[key]


def read_data(config: text.Config, tokenizer: Path) -> text.Text:
    """The default corpus of `recipes.lm`, with byte pairs trained on it, kept in that folder."""

    def once(make: Callable[[Path], object]) -> Path:
        if not tokenizer.exists():
            make(partial := tokenizer.with_name(f"{tokenizer.name}.tmp"))
            partial.rename(tokenizer)
        return tokenizer

    return text.read_text(config, seed=0, tokenizer_folder=once)


def model_config(config: Config, width: int, vocab_size: int) -> transformer.Config:
    """A transformer all of whose widths are in proportion."""
    return transformer.Config(
        vocab_size=vocab_size,
        d_model=width,
        num_layers=config.num_layers,
        num_heads=width // config.head_dim,
        mlp="gelu",
        scan_layers=False,
        attention=transformer.AttentionConfig(head_dim=config.head_dim),
    )


def rule(config: Config, width: int, parametrization: str, **options: Any) -> optimizers.Config:
    """AdamW in a parametrization; both are the same at the base width."""
    if parametrization == "mup" and width != config.base_width:
        options |= {"parametrization": "mup", "base_width": config.base_width}
    return optimizers.Config(**options)


def state_and_step(
    make_model: Callable[[Any], Any], rule: optimizers.Config, steps: int, precision: Precision
) -> tuple[Callable[[int], Any], CompiledStep]:
    """A function from a seed to the state of a training, and its step."""
    optimizer = optimizers.make_optimizer(rule, steps)
    step = zoo.make_train_step(losses.next_token, optimizer, precision=precision)
    initialised = optimizers.initialise(rule, make_model)
    make_state = lambda seed: zoo.init_state(initialised, optimizer, key=jax.random.key(seed))  # noqa: E731
    return make_state, step


def trainer(
    model: transformer.Config, rule: optimizers.Config, steps: int
) -> Callable[[Sequence[Any], int], Iterator[transformer.Transformer]]:
    """A function from batches and a seed to the model at the start and after each step."""
    make_model = lambda key: transformer.Transformer(model, key=key)  # noqa: E731
    make_state, step = state_and_step(make_model, rule, steps, "fp32")

    def train(batches: Sequence[Any], seed: int) -> Iterator[transformer.Transformer]:
        state = make_state(seed)
        yield state.model
        for batch in batches:
            state, _ = step(state, batch)
            yield state.model

    return train


# --- The coordinate check ---------------------------------------------------------------------


@eqx.filter_jit
def activations(model: transformer.Transformer, tokens: Array) -> dict[str, Array]:
    """The output of the embedding, of each layer, of the last norm, and the logits."""
    found = {}
    x_BTE, rotaries = model.embed(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
    found["embedding"] = x_BTE
    for index, kind in enumerate(model.config.all_layer_kinds):
        block = jax.tree.map(lambda x, i=index: x[i] if eqx.is_array(x) else x, model.blocks)
        x_BTE, _ = block(x_BTE, None, rotaries[kind], model.config.window_of(kind), None)
        found[f"layer {index + 1}"] = x_BTE
    found["logits"] = model(tokens)
    return found


def coordinates(
    model: transformer.Config, rule: optimizers.Config, batches: Sequence[Any], seeds: int
) -> dict[str, list[Coordinates]]:
    """The mean |x| of each layer's output at each step ("scale"), and of its change so far.

    They are of the first batch, and averaged over models.
    """
    train = trainer(model, rule, len(batches))
    found: dict[str, list[list[Coordinates]]] = {"scale": [], "change": []}
    for seed in range(seeds):
        outputs = [activations(x, jnp.asarray(batches[0]["tokens"])) for x in train(batches, seed)]
        zeros = {name: 0.0 for name in outputs[0]}
        for what, start in (("scale", zeros), ("change", outputs[0])):
            means = [{n: jnp.abs(x - start[n]).mean() for n, x in each.items()} for each in outputs]
            found[what].append(means)
    return {
        what: [
            {name: float(np.mean([float(run[name]) for run in step])) for name in step[0]}
            for step in zip(*runs, strict=True)
        ]
        for what, runs in found.items()
    }


def check_coordinates(config: Config, data: text.Text, log: Log) -> dict[tuple[str, int], Any]:
    """The coordinates by parametrization and width."""
    found = {}
    batches = [data.train.batch(k) for k in range(config.coordinate_steps)]
    for name in PARAMETRIZATIONS:
        for width in config.coordinate_widths:
            options = {"schedule": "constant", "warmup_steps": 0}
            chosen = rule(config, width, name, learning_rate=config.coordinate_rate, **options)
            model = model_config(config, width, data.vocab_size())
            seeds = max(config.coordinate_seeds, max(config.coordinate_widths) // width)
            run = {"coordinates": name, "rule": dataclasses.asdict(chosen)}
            run |= {"model": dataclasses.asdict(model), "data": data.fingerprint}
            run |= {"steps": config.coordinate_steps, "seeds": seeds}
            measure = functools.partial(coordinates, model, chosen, batches, seeds)
            found[name, width] = log.get(f"coordinates, {name}, width {width}", run, measure)
    return found


def spread(values: Sequence[float]) -> float:
    """The largest of some values over the smallest."""
    return max(values) / min(values)


def coordinate_table(config: Config, found: Any) -> Table:
    """The largest spread over the widths at any step."""
    widths = config.coordinate_widths
    table = Table(
        f"coordinate check: largest over smallest mean, over widths {min(widths)} to {max(widths)}"
    )

    def spreads(name: str, what: str, part: str) -> list[float]:
        """At each step, of a part's scale or change."""
        steps = zip(*(found[name, width][what] for width in widths), strict=True)
        values = [[at_width[part] for at_width in step] for step in steps]
        return [spread(each) for each in values if min(each) > 0]

    for part in found["mup", config.base_width]["scale"][0]:
        cells = [(name, what) for name in PARAMETRIZATIONS for what in ("scale", "change")]
        worst = {f"{name}: {what}": max(spreads(name, what, part)) for name, what in cells}
        table.rows.append({"part": part, **worst})
    last = {name: spreads(name, "scale", "logits")[-1] for name in PARAMETRIZATIONS}
    table.notes += [
        f"Of the mean |x| at each of {config.coordinate_steps} steps at a rate of "
        f"{config.coordinate_rate:g}, and of its change since the start: the worst step's spread.",
        "In muP, logits begin smaller in a wider model, by the root of its width, as its output "
        f"matrix does; after the last step the spread of their scale is {last['mup']:.2f} "
        f"(standard: {last['standard']:.2f}).",
    ]
    return table


# --- The best learning rate -------------------------------------------------------------------


def held_out_loss(
    config: Config, model: transformer.Config, chosen: optimizers.Config, data: text.Text, seed: int
) -> float:
    """The held-out loss in nats per token at the end of a training; infinite if it diverged."""
    batches = [data.train.batch(k) for k in range(config.steps)]
    *_, trained = trainer(model, chosen, config.steps)(batches, seed)
    return mean_loss(trained, data.held_out, config.eval_batches, "fp32")


def mean_loss(model: Any, data: Any, num_batches: int, precision: Precision) -> float:
    """The loss of a model in nats per token, over the first batches; 1e9 if it diverged."""
    step = zoo.make_eval_step(losses.next_token, precision=precision)
    sums = [step(model, data.batch(k))[1] for k in range(num_batches)]
    loss = float(sum(s["loss"] for s in sums) / sum(s["tokens"] for s in sums))
    return loss if math.isfinite(loss) else 1e9


Curve = dict[int, float]


def search(config: Config, data: text.Text, log: Log) -> dict[tuple[str, int], Curve]:
    """The held-out loss by the exponent of the rate, by parametrization and width.

    A width begins where the one before was best, and tries rates until the best has `margin`
    others on either side.
    """
    curves: dict[tuple[str, int], Curve] = {}
    for name in PARAMETRIZATIONS:
        exponent: int | None = config.first
        for width in config.widths:
            model, curve = model_config(config, width, data.vocab_size()), {}
            while exponent is not None:
                chosen = rule(config, width, name, learning_rate=2 ** (exponent / 2))
                found = []
                for seed in range(config.seeds):
                    run = {"rule": dataclasses.asdict(chosen), "model": dataclasses.asdict(model)}
                    run |= {"steps": config.steps, "eval_batches": config.eval_batches}
                    run |= {"data": data.fingerprint, "seed": seed}
                    measure = functools.partial(held_out_loss, config, model, chosen, data, seed)
                    label = f"{name}, width {width}, rate 2^{exponent / 2:g}, seed {seed}"
                    found.append(log.get(label, run, measure))
                curve[exponent] = float(np.mean(found))
                exponent = next_rate(curve, config.margin)
            curves[name, width] = dict(sorted(curve.items()))
            exponent = best(curve)
    return curves


def best(curve: Curve) -> int:
    """The exponent of the rate with the lowest loss."""
    return min(curve, key=lambda exponent: curve[exponent])


def next_rate(curve: Curve, margin: int) -> int | None:
    """The nearest rate to the best one that is still to be tried."""
    middle = best(curve)
    offsets = sorted((sign * i for i in range(1, margin + 1) for sign in (1, -1)), key=abs)
    return next((middle + i for i in offsets if middle + i not in curve), None)


def rate_table(config: Config, curves: dict[tuple[str, int], Curve]) -> Table:
    """The best rate of each width, and how far it is from the base width's."""
    table = Table(f"best learning rate after {config.steps} steps, on powers of √2")
    for width in config.widths:
        row: dict[str, Any] = {"width": width}
        for name in PARAMETRIZATIONS:
            curve, base = curves[name, width], curves[name, config.base_width]
            row |= {
                f"{name}: best": f"2^{best(curve) / 2:g}",
                f"{name}: steps of √2": best(curve) - best(base),
                f"{name}: loss": f"{min(curve.values()):.4f}",
                f"{name}: at the base's rate": _loss_at(curve, best(base)),
            }
        table.rows.append(row)
    table.notes.append(f"Held-out loss in nats per token, {config.seeds} run(s) per rate.")
    for name in PARAMETRIZATIONS:
        moves = [best(curves[name, width]) for width in config.widths]
        table.notes.append(
            f"{name}: the best rates lie {max(moves) - min(moves)} step(s) of √2 apart."
        )
    return table


def _loss_at(curve: Curve, exponent: int) -> str:
    return f"{curve[exponent]:.4f}" if exponent in curve else "–"


if __name__ == "__main__":
    main(mup)
