"""The next token: penalties and biases of the logits, the tokens that are left, and the draw.

Penalties come before the temperature, and what is cut off after it, in the order of `transformers`:
the `top_k` likeliest, of these `top_p`, of these `min_p`.
"""

import math
from collections.abc import Mapping, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key


class Seen(eqx.Module):
    """The tokens of each row so far: whether they are in its prompt, how often they came after."""

    prompt: Bool[Array, "batch vocab"]
    counts: Int[Array, "batch vocab"]

    @staticmethod
    def of(
        tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], vocab_size: int
    ) -> "Seen":
        """Those of prompts alone; `mask` is False at padding."""
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        none = jnp.zeros((tokens.shape[0], vocab_size), jnp.int32)
        return Seen(none.at[rows, tokens].max(mask.astype(jnp.int32)) > 0, none)

    def add(self, tokens: Int[Array, "batch"]) -> "Seen":
        """Those with one more token per row."""
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return Seen(self.prompt, self.counts.at[rows, tokens].add(1))


class Sampling(eqx.Module):
    """How the next token is drawn; without a temperature it is the likeliest."""

    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    key: Key[Array, ""] | None
    top_k: int | None = eqx.field(static=True)
    min_p: Float[Array, ""] | None = None
    penalties: tuple[Float[Array, ""], ...] | None = None
    """Of repetition, presence and frequency."""
    bias: Float[Array, "vocab"] | None = None

    @staticmethod
    def checked(
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        key: Key[Array, ""] | None,
        *,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        banned_tokens: Sequence[int] = (),
        vocab_size: int = 0,
    ) -> "Sampling":
        """The sampling of these parameters; a ValueError names the one out of range."""
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature} must not be negative; 0 is greedy")
        if (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise ValueError(f"top_k={top_k} must be at least 1, and top_p={top_p} in (0, 1]")
        if min_p is not None and not 0 <= min_p <= 1:
            raise ValueError(f"min_p={min_p} must be in [0, 1]: a share of the likeliest's")
        if not 0 < repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty={repetition_penalty} must be positive; 1 is none, and more "
                "makes repetitions less likely"
            )
        added = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
        for name, penalty in added.items():
            if not -100 <= penalty <= 100:
                raise ValueError(f"{name}={penalty} must be from -100 to 100; 0 is none")
        given = (repetition_penalty, presence_penalty, frequency_penalty)
        penalties = None if given == (1, 0, 0) else tuple(map(jnp.float32, given))
        bias = _bias(logit_bias or {}, banned_tokens, vocab_size)
        if temperature == 0:
            return Sampling(None, None, None, None, None, penalties, bias)
        if key is None:
            raise ValueError(f"temperature={temperature} samples, and needs a key; or set it to 0")
        whole = top_p is None or top_p == 1
        top_p_array = None if whole else jnp.float32(top_p)
        min_p_array = jnp.float32(min_p) if min_p else None
        return Sampling(
            jnp.float32(temperature), top_p_array, key, top_k, min_p_array, penalties, bias
        )

    def begin(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], vocab_size: int
    ) -> Seen | None:
        """The record of prompts, where there is a penalty that asks for it."""
        return None if self.penalties is None else Seen.of(tokens, mask, vocab_size)

    def adjusted(
        self, logits: Float[Array, "batch vocab"], seen: Seen | None
    ) -> Float[Array, "batch vocab"]:
        """The logits after penalties and biases.

        Repetition (Keskar et al. 2019) is of the prompt and of new tokens, presence and frequency,
        which are subtracted, of new ones alone.
        """
        if self.penalties is not None:
            assert seen is not None
            repetition, presence, frequency = self.penalties
            smaller = jnp.where(logits > 0, logits / repetition, logits * repetition)
            logits = jnp.where(seen.prompt | (seen.counts > 0), smaller, logits)
            counts = seen.counts.astype(jnp.float32)
            logits = logits - presence * jnp.minimum(counts, 1) - frequency * counts
        return logits if self.bias is None else logits + self.bias[None]

    def draw(
        self, logits: Float[Array, "batch vocab"], step: Int[Array, ""], seen: Seen | None = None
    ) -> Int[Array, "batch"]:
        """One id per row, in the random stream of that step."""
        logits = self.adjusted(logits, seen)
        if self.temperature is None or self.key is None:
            return logits.argmax(-1).astype(jnp.int32)
        key = jax.random.fold_in(self.key, step)
        logits, ids = _left(logits, self.temperature, self.top_k, self.top_p, self.min_p)
        return _drawn(logits, ids, key)

    def probabilities(self, logits: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
        """The probability of each token to be drawn, without penalties."""
        vocab = logits.shape[-1]
        flat = self.adjusted(logits.reshape(-1, vocab), None)
        if self.temperature is None:
            return jax.nn.one_hot(flat.argmax(-1), vocab).reshape(logits.shape)
        left, ids = _left(flat, self.temperature, self.top_k, self.top_p, self.min_p)
        found = jax.nn.softmax(left, axis=-1)
        if ids is not None:
            rows = jnp.arange(len(flat), dtype=jnp.int32)[:, None]
            found = jnp.zeros_like(flat).at[rows, ids].set(found)
        return found.reshape(logits.shape)


def _bias(
    logit_bias: Mapping[int, float], banned_tokens: Sequence[int], vocab_size: int
) -> Float[Array, "vocab"] | None:
    """The biases of the logits: minus infinity for banned tokens."""
    named = {"logit_bias": [*logit_bias], "banned_tokens": [*banned_tokens]}
    for name, ids in named.items():
        if wrong := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} has the id {wrong[0]}: the model's are 0 to {vocab_size - 1}")
    if wrong_bias := [(i, x) for i, x in logit_bias.items() if not math.isfinite(x)]:
        token, x = wrong_bias[0]
        raise ValueError(f"logit_bias={{{token}: {x}}} must be a number; name it in banned_tokens")
    if len(set(banned_tokens)) == vocab_size > 0:
        raise ValueError(f"banned_tokens are all {vocab_size} that there are: leave one")
    if not (logit_bias or banned_tokens):
        return None
    bias = np.zeros(vocab_size, np.float32)
    bias[[*logit_bias]] = [*logit_bias.values()]
    bias[[*banned_tokens]] = -np.inf
    return jnp.asarray(bias)


def sample(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    *,
    temperature: float | Float[Array, ""],
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    min_p: float | Float[Array, ""] | None = None,
) -> Int[Array, "batch"]:
    """One token id per row, int32[batch], from logits float32[batch, vocab]."""
    left, ids = _left(logits, temperature, top_k, top_p, min_p)
    return _drawn(left, ids, key)


def _left(
    logits: Float[Array, "batch vocab"],
    temperature: float | Float[Array, ""],
    top_k: int | None,
    top_p: float | Float[Array, ""] | None,
    min_p: float | Float[Array, ""] | None,
) -> tuple[Float[Array, "batch left"], Int[Array, "batch left"] | None]:
    """The logits of the tokens to draw from, and their ids if these are not in order."""
    logits, ids = logits / temperature, None
    if top_k is not None or top_p is not None:
        # Only those candidates are drawn from; ties fall to the lower id.
        logits, ids = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    if top_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        # A token stays if those before it have not reached p, so at least one does.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(before < top_p, logits, -jnp.inf)
    if min_p is not None:
        least = logits.max(-1, keepdims=True) + jnp.log(jnp.float32(min_p))
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits, ids


def _drawn(
    logits: Float[Array, "batch left"],
    ids: Int[Array, "batch left"] | None,
    key: Key[Array, ""],
) -> Int[Array, "batch"]:
    drawn = jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
    return drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
