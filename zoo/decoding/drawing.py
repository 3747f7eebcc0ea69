"""The next token: the penalty and biases of the logits, the tokens that are left, and the draw.

In the order of `transformers`: the penalty and biases, the temperature, the `top_k` likeliest
tokens, among them `top_p`, and among them `min_p`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from zoo.common import configuration
from zoo.sharding import constrain


class State(eqx.Module):
    """A continuation in progress: `count` tokens per row, the last of which is not yet read.

    With a draft there is room for one more than is asked for, a second cache, and the number of
    `steps` of the model: the others of `count` tokens come from drafts.
    """

    tokens: Int[Array, "batch room"]
    count: Int[Array, ""]
    done: Bool[Array, "batch"]
    cache: PyTree
    seen: Bool[Array, "batch vocab"] | None = None
    """The tokens of each row so far, its prompt's too, where they are penalised."""
    logprobs: Float[Array, "batch room"] | None = None
    draft_cache: PyTree = None
    steps: Int[Array, ""] | None = None

    def append(
        self,
        new: Int[Array, "batch new"],
        logits: Float[Array, "batch new vocab"],
        count: Int[Array, ""] | int,
        stops: Int[Array, "stops"],
        **caches: Any,
    ) -> "State":
        """The state with the first `count` new tokens; a row that has stopped repeats its last.

        What comes behind those is without meaning: later steps write over it.
        """
        last = jax.lax.dynamic_index_in_dim(
            self.tokens, jnp.maximum(self.count - 1, 0), 1, keepdims=False
        )
        done, seen = self.done, self.seen
        tokens, logprobs = [], []
        for place in range(new.shape[1]):
            last = jnp.where(done, last, new[:, place])
            logs = jax.nn.log_softmax(logits[:, place])
            logs = jnp.take_along_axis(logs, last[:, None], 1)[:, 0]
            tokens.append(last)
            logprobs.append(jnp.where(done, 0.0, logs))
            done |= (last[:, None] == stops[None]).any(1) & (place < count)
            if seen is not None:
                seen = seen | jax.nn.one_hot(last, seen.shape[1], dtype=bool)

        def put(x: Array, columns: list[Array]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, jnp.stack(columns, 1), self.count, 1)

        return dataclasses.replace(
            self,
            tokens=put(self.tokens, tokens),
            count=self.count + count,
            done=done,
            seen=seen,
            logprobs=None if self.logprobs is None else put(self.logprobs, logprobs),
            **caches,
        ).whole()

    def whole(self) -> "State":
        """The state with its tokens on every device, and so in every process that reads them.

        XLA chooses the placement of a loop's results, whatever it was inside the loop.
        """
        everywhere = lambda x: None if x is None else constrain(x, *(None,) * x.ndim)  # noqa: E731
        found = tuple(map(everywhere, (self.tokens, self.done, self.logprobs)))
        parts = lambda s: (s.tokens, s.done, s.logprobs)  # noqa: E731
        return eqx.tree_at(parts, self, found, is_leaf=lambda x: x is None)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and which of them end a text: the options of `zoo.generate`.

    The penalty comes first, then biases, the temperature, `top_k`, `top_p` and `min_p`.

    Raises:
        ValueError: it names the option that is out of range.
    """

    temperature: float | None = None
    """Divides the logits: 0 is greedy and needs no key, 1 samples the model's own probabilities;
    0.8 if not given."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only; 0 is all, as if not given."""
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities add up to p (Holtzman et al. 2020); 1 is
    all, as if not given."""
    min_p: float | None = None
    """Sample from the tokens that have p times the probability of the likeliest (Nguyen et al.
    2024); 0 is all, as if not given."""
    repetition_penalty: float | None = None
    """Divides the positive logits of all earlier tokens, the prompt's too, and multiplies their
    negative ones (Keskar et al. 2019): more than 1 makes them less likely; 1 if not given."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers that are added to the logits of some ids; with -1e4 an id never comes."""
    stop_tokens: Sequence[int] | None = None
    """Ids that end a text: the model's own `eos_ids` if not given, and none if empty."""

    def __post_init__(self) -> None:
        if self.stop_tokens is not None:
            ids = np.asarray(self.stop_tokens).reshape(-1).tolist()
            object.__setattr__(self, "stop_tokens", tuple(ids))
        configuration.check(self)
        _require(self, "temperature", lambda x: x >= 0, "must not be negative; 0 is greedy")
        _require(self, "top_k", lambda x: x >= 0, "must be at least 1; 0 is all")
        _require(self, "top_p", lambda x: 0 < x <= 1, "must be above 0 and at most 1, which is all")
        _require(self, "min_p", lambda x: 0 <= x <= 1, "must be from 0, which is all, to 1")
        _require(self, "repetition_penalty", lambda x: x > 0, "must be positive; 1 changes nothing")
        for token, bias in (self.logit_bias or {}).items():
            configuration.check_value(f"logit_bias[{token}]", bias, float)


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keywords of a function."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_tokens: Sequence[int] | None


def _require(sampling: Sampling, name: str, holds: Callable[[Any], bool], text: str) -> None:
    value = getattr(sampling, name)
    configuration.require(value is None or bool(holds(value)), f"{name}={value}: {text}")


class Sampler(eqx.Module):
    """A `Sampling` on the device: another temperature, `top_p` or penalty compiles nothing."""

    temperature: Float[Array, ""] | None
    """None is greedy."""
    top_p: Float[Array, ""] | None
    key: Key[Array, ""] | None
    top_k: int | None = eqx.field(static=True, default=None)
    min_p: Float[Array, ""] | None = None
    repetition: Float[Array, ""] | None = None
    bias: Float[Array, "vocab"] | None = None
    scales_logprobs: bool = eqx.field(static=True, default=False)

    @staticmethod
    def of(sampling: Sampling, vocab_size: int, key: Key[Array, ""] | None) -> "Sampler":
        """The sampler of a vocabulary; a ValueError for ids beyond it, or a missing key."""
        bias: Array | None = None
        if sampling.logit_bias:
            configuration.check_ids("logit_bias", sampling.logit_bias, vocab_size)
            ids, values = [*sampling.logit_bias], [*sampling.logit_bias.values()]
            bias = jnp.zeros(vocab_size).at[np.array(ids)].set(np.array(values, np.float32))
        repetition = None
        if sampling.repetition_penalty not in (None, 1):
            repetition = jnp.float32(sampling.repetition_penalty)
        temperature = 0.8 if sampling.temperature is None else sampling.temperature
        if temperature == 0:
            return Sampler(None, None, None, repetition=repetition, bias=bias)
        if key is None:
            raise ValueError(f"temperature={temperature} samples, and needs a key; or set it to 0")
        if isinstance(key, int):
            raise ValueError(f"key={key}: must be a key of JAX; give jax.random.key({key})")
        top_p = None if sampling.top_p in (None, 1) else jnp.float32(sampling.top_p)
        min_p = jnp.float32(sampling.min_p) if sampling.min_p else None
        top_k = sampling.top_k or None
        return Sampler(jnp.float32(temperature), top_p, key, top_k, min_p, repetition, bias)

    def begin(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], vocab_size: int
    ) -> Bool[Array, "batch vocab"] | None:
        """The tokens that are in prompts, for a penalty on them; `mask` is False at padding."""
        if self.repetition is None:
            return None
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        return jnp.zeros((tokens.shape[0], vocab_size), bool).at[rows, tokens].max(mask)

    def adjusted(
        self, logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"] | None
    ) -> Float[Array, "batch vocab"]:
        """The logits after the penalty of repetitions (Keskar et al. 2019) and biases."""
        if self.repetition is not None:
            assert seen is not None
            smaller = jnp.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = jnp.where(seen, smaller, logits)
        return logits if self.bias is None else logits + self.bias[None]

    def draw(
        self,
        logits: Float[Array, "batch vocab"],
        step: Int[Array, ""],
        seen: Bool[Array, "batch vocab"] | None = None,
    ) -> Int[Array, "batch"]:
        """One id per row, in the random stream of that step."""
        logits = self.adjusted(logits, seen)
        if self.temperature is None or self.key is None:
            return logits.argmax(-1).astype(jnp.int32)
        key = jax.random.fold_in(self.key, step)
        logits, ids = self._left(logits)
        drawn = jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
        return drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]

    def judged(
        self, logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"] | None
    ) -> Float[Array, "batch vocab"]:
        """The logits whose log-probabilities are kept: the model's own, or scaled."""
        if not self.scales_logprobs:
            return logits
        logits = self.adjusted(logits, seen)
        return logits if self.temperature is None else logits / self.temperature

    def probabilities(self, logits: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
        """The probability of each token to be drawn, without a penalty."""
        vocab = logits.shape[-1]
        flat = self.adjusted(logits.reshape(-1, vocab), None)
        if self.temperature is None:
            return jax.nn.one_hot(flat.argmax(-1), vocab).reshape(logits.shape)
        left, ids = self._left(flat)
        found = jax.nn.softmax(left, axis=-1)
        if ids is not None:
            rows = jnp.arange(len(flat), dtype=jnp.int32)[:, None]
            found = jnp.zeros_like(flat).at[rows, ids].set(found)
        return found.reshape(logits.shape)

    def _left(
        self, logits: Float[Array, "batch vocab"]
    ) -> tuple[Float[Array, "batch left"], Int[Array, "batch left"] | None]:
        """The logits of the tokens to draw from, and their ids if these are not in order."""
        assert self.temperature is not None
        logits, ids = logits / self.temperature, None
        if self.top_k is not None or self.top_p is not None:
            # Only those candidates are drawn from; ties fall to the lower id.
            vocab = logits.shape[-1]
            logits, ids = jax.lax.top_k(logits, min(self.top_k or vocab, vocab))
        if self.top_p is not None:
            probabilities = jax.nn.softmax(logits, axis=-1)
            # A token stays if those before it have not reached p, so at least one does.
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            logits = jnp.where(before < self.top_p, logits, -jnp.inf)
        if self.min_p is not None:
            least = logits.max(-1, keepdims=True) + jnp.log(self.min_p)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits, ids
