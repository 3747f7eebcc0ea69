"""The zoo as an engine that serves an exported model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import zoo


class Engine:
    """`zoo.load` and `zoo.generate`, in fp32."""

    def __init__(self, folder: Path):
        self.model = zoo.load(folder, dtype="fp32")
        self.forward = jax.jit(lambda model, tokens: model(tokens))

    def logits(self, prompts: list[list[int]]) -> list[np.ndarray]:
        """The logits behind each token, fp32[seq, vocab], per prompt."""
        rows = [jnp.asarray([ids], jnp.int32) for ids in prompts]
        return [np.asarray(self.forward(self.model, row))[0] for row in rows]

    def generate(self, prompts: list[list[int]], num_tokens: int, stop: bool) -> list[list[int]]:
        """The greedy tokens after each prompt, with its end if they `stop` there."""
        stops = None if stop else ()
        options: dict = {"max_new_tokens": num_tokens, "temperature": 0.0, "stop_tokens": stops}
        found = zoo.generate(self.model, prompts, **options)
        return [row[len(ids) :] for row, ids in zip(found, prompts, strict=True)]
