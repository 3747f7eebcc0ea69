"""The train step with adapters beside that of all parameters: its operations, and its time."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zoo
from benchmarks.peers.common import Precision
from benchmarks.report import Table
from benchmarks.timing import PAUSE_SECONDS, Timing, median_ratio
from zoo import lora, losses, transformer
from zoo.nn.parameters import cast
from zoo.nn.precision import native_precision
from zoo.planning import flops

METHODS: dict[str, lora.Config | None] = {
    "full": None,
    "LoRA": lora.Config(rank=8),
    "DoRA": lora.Config(rank=8, dora=True),
}


@dataclass(frozen=True)
class Options:
    """Fine-tuning in full, and by adapters on all matrices but the embedding and the head."""

    precision: Precision = native_precision()
    """Precision of the compute."""
    num_layers: int = 2
    """Layers of the transformer."""
    d_model: int = 2048
    """Its width; the rank is small beside it, as beside that of published models."""
    batch_size: int = 8
    """Rows per step."""
    seq_len: int = 128
    """Tokens per row."""


def measure(options: Options, timing: Timing) -> list[Table]:
    """One row per method, in turn."""
    config = transformer.Config(
        vocab_size=512, d_model=options.d_model, num_layers=options.num_layers, num_heads=8
    )
    # In bf16, as published models are stored.
    model = cast(transformer.Transformer(config, key=jax.random.key(0)), jnp.bfloat16)
    tokens = jnp.zeros((options.batch_size, options.seq_len), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones(tokens.shape)}
    made = {name: _build(adapters, model, options) for name, adapters in METHODS.items()}
    states = {name: state for name, (_, state) in made.items()}
    counted = {
        name: flops.count(step.trace(state, batch).jaxpr) for name, (step, state) in made.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(timing.rounds + 1):  # the first one is the warm-up
        for name, (step, _) in made.items():
            time.sleep(PAUSE_SECONDS)
            start, num_steps = time.perf_counter(), 3
            for _ in range(num_steps):
                states[name], metrics = step(states[name], batch)
            float(metrics["loss"])
            if turn:
                seconds[name].append((time.perf_counter() - start) / num_steps)
    table = Table(
        f"fine-tuning steps: {options.num_layers} layers of {options.d_model}, batches of "
        f"{options.batch_size} × {options.seq_len} tokens, rank 8, {options.precision}"
    )
    table.rows = [
        {
            "method": name,
            "GFLOP per step": counted[name] / 1e9,
            "FLOPs / full": counted[name] / counted["full"],
            "steps/s": 1 / statistics.median(seconds[name]),
            "time / full": median_ratio(seconds[name], seconds["full"]),
        }
        for name in made
    ]
    table.print()
    return [table]


def _build(adapters: lora.Config | None, model: Any, options: Options) -> tuple[Any, Any]:
    """The step, and the state that it begins with."""
    optimizer = optax.adamw(1e-3)
    trainable = None if adapters is None else lora.trainable
    state = zoo.init_state(
        lambda key, model: model if adapters is None else lora.adapt(model, adapters, key=key),
        optimizer,
        key=jax.random.key(1),
        pretrained=model,
        trainable=trainable,
    )
    step = zoo.make_train_step(
        losses.next_token, optimizer, trainable=trainable, precision=options.precision
    )
    return step, state
