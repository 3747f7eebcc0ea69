"""Language models of one size that differ in how they mix the steps of a row, trained alike.

python -m benchmarks.comparison

All have the transformer's number of parameters, by the width of their MLPs or of their state, and
see the same batches of `recipes.lm`'s default corpus, with its optimizer, each at the best of a few
learning rates. Each training's numbers are appended to a file, from which a comparison that was cut
off continues; speeds are measured each time.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro
from jaxtyping import PyTree

import zoo
from benchmarks.harness import Table, Timing, in_turn, main
from benchmarks.mup import Log, best, mean_loss, next_rate, read_data, state_and_step
from benchmarks.peers.given import ROOT
from recipes import lm
from zoo import optimizers, rnn, text, transformer
from zoo.nn.precision import native_precision

DELTA = "gated_deltanet"
PATTERNS = {
    "attention": ("attention",),
    "3 gated_deltanet to 1 attention": (DELTA, DELTA, DELTA, "attention"),
    DELTA: (DELTA,),
    "mamba2": ("mamba2",),
    "mlstm": ("mlstm",),
}
CELLS = ("lstm", "minlstm")
BASE = lm.Config.model
RULE = lm.Config.optimizer
WIDTH_MULTIPLE = 16
NEW_TOKENS = 128


@dataclass(frozen=True)
class Config:
    """Train a model of each kind on the same batches, and compare them."""

    models: tuple[str, ...] = (*PATTERNS, *CELLS)
    """Kinds of models."""
    steps: int = 250
    """Steps of the training that is compared."""
    search_steps: int = 50
    """Steps of each training that the learning rate is chosen by."""
    longer: int = 4
    """How many times as long rows are in the second evaluation."""
    data: text.Config = lm.Config.data
    log: Path = Path("runs/comparison.jsonl")
    """File of the numbers of each training, which are not measured again."""
    picture: Path = ROOT / "docs" / "assets" / "comparison.png"
    """Picture of the table."""


def comparison(
    config: Annotated[Config, tyro.conf.arg(name="")] = Config(), timing: Timing = Timing()
) -> list[Table]:
    """Train what the log lacks, measure speeds, and tell and draw all of it."""
    log = Log(config.log)
    data = read_data(config.data, config.log.with_name("comparison-tokenizer"))
    longer = dataclasses.replace(config.data, seq_len=config.longer * config.data.seq_len)
    long_data = read_data(longer, config.log.with_name("comparison-tokenizer"))
    makers = {name: maker(name, data.vocab_size()) for name in config.models}
    found = {name: _best(config, name, makers[name], (data, long_data), log) for name in makers}
    speeds = _speeds(makers, data, timing)
    seq = config.data.seq_len
    table = Table(f"{config.steps} steps of {config.data.batch_size} rows of {seq} tokens")
    for name, row in found.items():
        table.add(peer=name, parameters=f"{num_parameters(makers[name]):,}", **row, **speeds[name])
    table.notes.append(
        f"Learning rates are 2^k times {RULE.learning_rate:g}, the best of {config.search_steps} "
        "steps with its neighbours on both sides. Bits per byte are of all held-out text; decoding "
        "is of one row."
    )
    draw(table, seq, config.longer, config.picture)
    return [table]


# --- Models of one size ------------------------------------------------------------------------

Maker = Callable[[Any], PyTree]  # from a key to a model


def maker(name: str, vocab_size: int) -> Maker:
    """Makes models of a kind with as many parameters as the transformer, or as near as may be."""

    def of_width(width: int) -> Maker:
        if name in CELLS:
            cell: Any = name
            network = rnn.Config(
                vocab_size=vocab_size, hidden_size=width, embed_size=BASE.d_model, cell=cell
            )
            return lambda key: rnn.RNN(network, key=key)
        pattern: Any = PATTERNS[name]
        mixer = transformer.MixerConfig(pattern=pattern)
        model = dataclasses.replace(BASE, vocab_size=vocab_size, mixer=mixer, d_ff=width)
        return lambda key: transformer.Transformer(model, key=key)

    base = dataclasses.replace(BASE, vocab_size=vocab_size)
    wanted = num_parameters(lambda key: transformer.Transformer(base, key=key))
    widths = range(WIDTH_MULTIPLE, 8 * BASE.d_model, WIDTH_MULTIPLE)
    size = lambda width: num_parameters(of_width(width))  # noqa: E731
    place = bisect.bisect_left(widths, wanted, key=size)
    return of_width(min(widths[place - 1 : place + 1], key=lambda w: abs(size(w) - wanted)))


def num_parameters(make_model: Maker) -> int:
    """The number of parameters of a model, which is not made."""
    skeleton = eqx.filter_eval_shape(make_model, jax.random.key(0))
    leaves = jax.tree.leaves(skeleton)
    return sum(x.size for x in leaves if isinstance(x, jax.ShapeDtypeStruct))


# --- Training ----------------------------------------------------------------------------------


def _best(
    config: Config, name: str, make_model: Maker, data: tuple[text.Text, text.Text], log: Log
) -> dict[str, Any]:
    """The held-out numbers of a kind of model, at its best learning rate."""

    def trained(exponent: int, steps: int, whole: bool) -> dict[str, float]:
        run = {"model": name, "parameters": num_parameters(make_model), "exponent": exponent}
        run |= {"steps": steps, "whole": whole, "data": [x.fingerprint for x in data]}
        rule = dataclasses.replace(RULE, learning_rate=RULE.learning_rate * 2.0**exponent)
        measure = functools.partial(_train, make_model, rule, steps, data, whole)
        return log.get(f"{name}, {steps} steps at {rule.learning_rate:g}", run, measure)

    curve: dict[int, float] = {}
    exponent: int | None = 0
    while exponent is not None:
        curve[exponent] = trained(exponent, config.search_steps, False)["bits_per_byte"]
        exponent = next_rate(curve, margin=1)
    result = trained(best(curve), config.steps, True)
    rounded = {name: f"{bits:.3f}" for name, bits in result.items()}
    return {"learning rate": f"{RULE.learning_rate * 2.0 ** best(curve):g}", **rounded}


def _train(
    make_model: Maker,
    rule: optimizers.Config,
    steps: int,
    data: tuple[text.Text, text.Text],
    whole: bool,
) -> dict[str, float]:
    """Held-out bits per byte after a training; `whole` is of all held-out text, and longer rows."""
    make_state, step = state_and_step(make_model, rule, steps, native_precision())
    state = make_state(0)
    for k in range(steps):
        state, _ = step(state, data[0].train.batch(k))
    found = {}
    names = ("bits_per_byte", "in longer rows")[: 2 if whole else 1]
    for name, each in zip(names, data, strict=False):
        num_batches = each.held_out.batches_per_epoch if whole else 16
        loss = mean_loss(state.model, each.held_out, num_batches, native_precision())
        found[name] = each.bits_per_byte(loss)
    return found


# --- Speed and memory --------------------------------------------------------------------------


def _speeds(makers: dict[str, Maker], data: text.Text, timing: Timing) -> dict[str, dict[str, Any]]:
    """Tokens per second of training, temporaries of a step, and milliseconds of a token."""
    batch = data.train.batch(0)
    steps, decoders, memory = {}, {}, {}
    for name, make_model in makers.items():
        steps[name], memory[name] = _stepper(make_model, batch)
        decoders[name] = _decoder(make_model)
    seconds, decoding = (in_turn(calls, timing.rounds) for calls in (steps, decoders))
    tokens = int(jnp.size(batch["tokens"]))
    return {
        name: {
            "tokens per second": tokens / min(seconds[name]),
            "temporaries, MB": memory[name] / 1e6,
            "decoding, ms per token": 1e3 * min(decoding[name]) / NEW_TOKENS,
        }
        for name in makers
    }


def _stepper(make_model: Maker, batch: Any) -> tuple[Callable[[], None], int]:
    make_state, step = state_and_step(make_model, RULE, lm.Config.steps, native_precision())
    held = [make_state(0)]
    program = step.lower(held[0], batch).compiled

    def call() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready(metrics)

    call()
    return call, program.memory_analysis().temp_size_in_bytes


def _decoder(make_model: Maker) -> Callable[[], None]:
    model = make_model(jax.random.key(0))

    def call() -> None:
        zoo.generate(model, [[1]], max_new_tokens=NEW_TOKENS, temperature=0.0, stop_tokens=())

    call()
    return call


# --- The picture -------------------------------------------------------------------------------


def draw(table: Table, seq: int, longer: int, path: Path) -> None:
    """Draw bits per byte in rows of both lengths, and the speed of training, as a PNG."""
    from matplotlib.figure import Figure

    rows = table.rows[::-1]
    names, places = [row["peer"] for row in rows], range(len(rows))
    figure = Figure(figsize=(10, 0.55 * len(rows) + 1.2), layout="constrained")
    quality, speed = figure.subplots(1, 2, sharey=True)
    quality.scatter(
        [float(r["bits_per_byte"]) for r in rows], places, label=f"rows of {seq} tokens"
    )
    quality.scatter(
        [float(r["in longer rows"]) for r in rows],
        places,
        marker="D",
        label=f"rows of {longer * seq}, longer than in training",
    )
    quality.set(xlabel="held-out bits per byte (less is better)", yticks=places, yticklabels=names)
    quality.legend(loc="best", fontsize="small")
    speed.barh(places, [r["tokens per second"] for r in rows], height=0.5, color="C2")
    speed.set_xlabel("tokens per second of training")
    for axes in (quality, speed):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(comparison)
