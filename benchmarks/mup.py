"""Do learning rates transfer over widths? muP beside the standard parametrization, in two plots.

    python -m benchmarks.mup

trains transformers of several widths on the standard library's source: a few steps each for the
scale of their activations (the coordinate check of Yang, Hu et al. 2022, figure 5), and over a
grid of learning rates for the best of them. Each run's numbers are appended to a file, from which a
sweep that was cut off continues. Writes a table, two plots and the numbers.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array

import zoo
from benchmarks.report import Table, provenance, save
from zoo import losses, optimizers, text, transformer

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
    results: Path = Path(__file__).parent / "results"
    """Folder for the results."""


def main(config: Config) -> None:
    """Measure what the log lacks, and write the tables and the plots of all of it."""
    log = Log(config.log)
    data = read_data(config)
    curves = search(config, data, log)
    coordinates = check_coordinates(config, data, log)
    tables = [coordinate_table(config, coordinates), rate_table(config, curves)]
    for table in tables:
        table.print()
    source = {"command": "python -m benchmarks.mup", "date": date.today().isoformat()}
    stem = save("mup", tables, source | provenance(), config.results)
    plot_coordinates(config, coordinates, stem.with_name(f"{stem.name}-coordinates.png"))
    plot_rates(config, curves, stem.with_name(f"{stem.name}-rates.png"))


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


def read_data(config: Config) -> text.Text:
    """The default corpus of `recipes.lm`, with byte pairs trained on it."""
    folder = config.log.parent / "mup-tokenizer"

    def once(make: Callable[[Path], object]) -> Path:
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.tmp")
            make(partial)
            partial.rename(folder)
        return folder

    return text.read_text(config.data, seed=0, tokenizer_folder=once)


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


def trainer(
    model: transformer.Config, rule: optimizers.Config, steps: int
) -> Callable[[Sequence[Any], int], Iterator[transformer.Transformer]]:
    """A function from batches and a seed to the model at the start and after each step."""
    make_model = optimizers.initialise(rule, lambda key: transformer.Transformer(model, key=key))
    optimizer = optimizers.make_optimizer(rule, steps)
    step = zoo.make_train_step(losses.next_token, optimizer, precision="fp32")

    def train(batches: Sequence[Any], seed: int) -> Iterator[transformer.Transformer]:
        state = zoo.init_state(make_model, optimizer, key=jax.random.key(seed))
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
    runs: list[list[tuple[Coordinates, Coordinates]]] = []
    train = trainer(model, rule, len(batches))
    for seed in range(seeds):
        found: list[tuple[Coordinates, Coordinates]] = []
        first: dict[str, Array] = {}
        for each in train(batches, seed):
            outputs = activations(each, jnp.asarray(batches[0]["tokens"]))
            first = first or outputs
            scale = {name: float(jnp.abs(x).mean()) for name, x in outputs.items()}
            change = {n: float(jnp.abs(x - first[n]).mean()) for n, x in outputs.items()}
            found.append((scale, change))
        runs.append(found)

    def mean(which: int) -> list[Coordinates]:
        by_step = zip(*runs, strict=True)
        return [
            {name: float(np.mean([run[which][name] for run in step])) for name in step[0][which]}
            for step in by_step
        ]

    return {"scale": mean(0), "change": mean(1)}


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


def spreads(config: Config, found: Any, name: str, what: str, part: str) -> list[float]:
    """The spread over the widths at each step of a part's scale or change."""
    steps = range(config.coordinate_steps + 1)
    widths = config.coordinate_widths
    values = [[found[name, width][what][step][part] for width in widths] for step in steps]
    return [spread(each) for each in values if min(each) > 0]


def coordinate_table(config: Config, found: Any) -> Table:
    """The largest spread over the widths at any step."""
    widths = f"{min(config.coordinate_widths)} to {max(config.coordinate_widths)}"
    table = Table(f"coordinate check: largest over smallest mean, over widths {widths}")
    for part in found["mup", config.base_width]["scale"][0]:
        row: dict[str, Any] = {"part": part}
        for name in PARAMETRIZATIONS:
            for what in ("scale", "change"):
                row[f"{name}: {what}"] = max(spreads(config, found, name, what, part))
        table.rows.append(row)
    last = {name: spreads(config, found, name, "scale", "logits")[-1] for name in PARAMETRIZATIONS}
    table.notes += [
        f"Of the mean |x| at each of {config.coordinate_steps} steps at a rate of "
        f"{config.coordinate_rate:g}, and of its change since the start: the spread of the worst "
        "step.",
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
    step = zoo.make_eval_step(losses.next_token, precision="fp32")
    sums = [step(trained, data.held_out.batch(k))[1] for k in range(config.eval_batches)]
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
                exponent = _next(curve, config.margin)
            curves[name, width] = dict(sorted(curve.items()))
            exponent = best(curve)
    return curves


def best(curve: Curve) -> int:
    """The exponent of the rate with the lowest loss."""
    return min(curve, key=lambda exponent: curve[exponent])


def _next(curve: Curve, margin: int) -> int | None:
    """The nearest rate to the best one that is still to be tried."""
    middle = best(curve)
    offsets = sorted((sign * i for i in range(1, margin + 1) for sign in (1, -1)), key=abs)
    return next((middle + i for i in offsets if middle + i not in curve), None)


def vertex(curve: Curve) -> float:
    """The exponent at the lowest point of the parabola through the best rate and two neighbours.

    The neighbours on each side make it less a matter of noise than the lowest loss is.
    """
    middle = best(curve)
    near = [exponent for exponent in curve if abs(exponent - middle) <= 2]
    a, b, _ = np.polyfit(near, [curve[exponent] for exponent in near], 2)
    return float(-b / (2 * a))


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
                f"{name}: by parabola": round(vertex(curve) - vertex(base), 2),
                f"{name}: loss": f"{min(curve.values()):.4f}",
                f"{name}: at the base's rate": _loss_at(curve, best(base)),
            }
        table.rows.append(row)
    table.notes.append(
        f"Held-out loss in nats per token, {config.seeds} run(s) per rate. By parabola: the lowest "
        "point of one through the best rate and its neighbours, in steps of √2 from the base's."
    )
    for name in PARAMETRIZATIONS:
        moves = [best(curves[name, width]) for width in config.widths]
        table.notes.append(
            f"{name}: the best rates lie {max(moves) - min(moves)} step(s) of √2 apart."
        )
    return table


def _loss_at(curve: Curve, exponent: int) -> str:
    return f"{curve[exponent]:.4f}" if exponent in curve else "–"


# --- Plots ------------------------------------------------------------------------------------


def plot_coordinates(config: Config, found: Any, path: Path) -> None:
    """Draw mean |x| against the width, a line per step: scales of layers, change of the logits."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers = [name for name in found["mup", config.base_width]["scale"][0] if name != "logits"]
    columns = [*(("scale", layer) for layer in layers), ("change", "logits")]
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="col")
    for row, name in zip(grid, PARAMETRIZATIONS, strict=True):
        for axes, (what, part) in zip(row, columns, strict=True):
            for step in range(what == "change", config.coordinate_steps + 1):
                y = [found[name, w][what][step][part] for w in config.coordinate_widths]
                color = colormaps["viridis"](step / (config.coordinate_steps + 1))
                axes.plot(config.coordinate_widths, y, "o-", ms=3, color=color, label=f"{step}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(config.coordinate_widths, [str(w) for w in config.coordinate_widths])
            axes.set_title(f"{name}: {part}", fontsize=10)
            axes.set_ylabel("mean |x|" if what == "scale" else "mean |x − x at the start|")
            _tidy(axes)
    for axes in grid[-1]:
        axes.set_xlabel("width")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, title="step", loc="outside right", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def plot_rates(config: Config, curves: dict[tuple[str, int], Curve], path: Path) -> None:
    """Draw the held-out loss against the learning rate, a line per width, the best rate marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    pair = figure.subplots(1, 2, sharey=True, sharex=True)
    lowest = min(min(curve.values()) for curve in curves.values())
    highest = max(sorted(curve.values())[len(curve) - 2] for curve in curves.values())
    for axes, name in zip(pair, PARAMETRIZATIONS, strict=True):
        for index, width in enumerate(config.widths):
            curve, color = curves[name, width], f"C{index}"
            x = [2 ** (exponent / 2) for exponent in curve]
            axes.plot(x, list(curve.values()), "o-", ms=3, color=color, label=f"width {width}")
            axes.plot(2 ** (best(curve) / 2), min(curve.values()), "*", ms=12, color=color)
        axes.set_xscale("log", base=2)
        axes.set_title("muP" if name == "mup" else "standard")
        axes.set_xlabel("learning rate")
        axes.set_ylim(lowest - 0.03, highest + 0.03)
        axes.legend(frameon=False, fontsize=8)
        _tidy(axes)
    pair[0].set_ylabel(f"held-out loss after {config.steps} steps, nats per token")
    figure.savefig(path, dpi=130)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.mup"))
