"""Policy gradients: advantages of rewards, and the loss of a model's own answers.

A row of a batch is a prompt and one answer, whose tokens alone have a weight, and one advantage.
The log-probabilities that a ratio divides by come from the training's forward pass, at the
temperature that the answers were drawn at: of the update itself, or rescored once before several
updates. The sampler's own are only compared with them.

Legend of suffixes: B batch, T time, E embed.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PyTree

from zoo import sharding
from zoo.alignment import scoring
from zoo.alignment.scoring import Metrics
from zoo.common import configuration
from zoo.common.configuration import require
from zoo.training import losses
from zoo.training.loss_values import LossFunction

Advantage = Literal["group", "group_mean", "leave_one_out"]


def advantages(
    rewards: Float[np.ndarray, "prompts group"], kind: Advantage = "group"
) -> Float32[np.ndarray, "prompts group"]:
    """The advantage of each answer over the others to its prompt.

    Kinds: `group`, (r - mean) / (std + 1e-4) with the unbiased std (GRPO, Shao et al. 2024);
    `group_mean`, without the std (Dr. GRPO, Liu et al. 2025); `leave_one_out`, r less the mean of
    the others (RLOO, Ahmadian et al. 2024).

    Raises:
        ValueError: groups of one answer, or another kind.
    """
    size = rewards.shape[1]
    require(size > 1, f"group_size={size}: an advantage is over other answers; give at least 2")
    rewards = rewards.astype(np.float64)
    apart = rewards - rewards.mean(1, keepdims=True)
    match kind:
        case "group":
            apart /= rewards.std(1, ddof=1, keepdims=True) + 1e-4
        case "leave_one_out":
            apart *= size / (size - 1)
        case _:
            known = "group, group_mean or leave_one_out"
            require(kind == "group_mean", f"advantage={kind!r}: choose {known}")
    return apart.astype(np.float32)


@dataclass(frozen=True)
class Config:
    """The loss of answers, and its pull to the model under the adapters."""

    ratio: Literal["token", "sequence"] = "token"
    """The ratio of probabilities that weighs an advantage: of each token (PPO, Schulman et al.
    2017), or of a whole answer (RLOO)."""
    clip_low: float | None = 0.2
    """A ratio counts down to 1 - clip_low; None: to 0."""
    clip_high: float | None = 0.2
    """A ratio counts up to 1 + clip_high (0.28 in DAPO, Yu et al. 2025); None: all of it."""
    normalize: Literal["tokens", "answers"] = "tokens"
    """Mean over the tokens of a batch (DAPO), or over answers, of the means of their tokens
    (GRPO)."""
    kl: float = 0.0
    """Weight of the divergence from the model under the adapters."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The divergence is a term of the loss, by token (k3 of Schulman 2020), or is taken from the
    reward of an answer before its advantage (RLOO)."""
    truncate: float | None = None
    """Weigh each token by its probability in training over that in sampling, up to this much (Yao
    et al. 2025); None: no weight."""

    def __post_init__(self) -> None:
        configuration.check(self, "policy.")
        for name in ("clip_low", "clip_high", "truncate"):
            value = getattr(self, name)
            require(value is None or value > 0, f"policy.{name}={value}: must be positive, or None")
        low = self.clip_low
        require(low is None or low <= 1, f"policy.clip_low={low}: must be at most 1")
        require(self.kl >= 0, f"policy.kl={self.kl}: must not be negative")
        require(
            self.ratio == "token" or (self.normalize == "answers" and not self.has_term),
            "policy.ratio='sequence' is of whole answers: give policy.normalize='answers' (now "
            f"{self.normalize!r}), and policy.kl_in='reward' with a policy.kl",
        )

    @property
    def has_term(self) -> bool:
        """Whether the loss has a term of the divergence."""
        return self.kl > 0 and self.kl_in == "loss"


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of answers drawn at `temperature`; `loss` is as `make_train_step` takes it.

    A batch has `tokens`, `targets`, int32[batch, seq], `weights`, float32[batch, seq], and
    `advantages`, float32[batch]; `drawn`, float32[batch, seq], the log-probabilities that sampling
    had for the targets; and, unless `on_policy`, `rescored`, the training's, before the first of
    several updates. On policy a ratio is one, and its gradient that of the log-probability.

    Metrics: `entropy` of a token in nats, `kl` where it has a weight, `clipped`, the share of the
    tokens (or answers) whose ratio is out of its bounds on the side that counts, `ratio_max` (of
    several microbatches their mean), and `sampler_gap`, the mean difference of `drawn` from the
    training's log-probabilities.
    """

    config: Config = Config()
    temperature: float = 1.0
    on_policy: bool = True

    @property
    def loss(self) -> LossFunction:
        """A loss of (model, batch, key): the summed loss, the number of tokens or of answers, and
        the metrics."""
        rescored = () if self.on_policy else ("rescored",)
        keeps_dtype = losses.keeps_dtype("advantages", "drawn", *rescored)
        return keeps_dtype(functools.partial(self._loss))

    @losses.OF_TOKENS
    def _loss(
        self, model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, Metrics]:
        losses.check_names(batch, "tokens", "targets", "weights", "advantages", "drawn")
        config, weights_BT, targets_BT = self.config, batch["weights"], batch["targets"]
        readout, x_BTE = losses.readout_and_input(model, batch, key)
        readout, reference_BT = scoring.Tempered(readout, self.temperature), None
        if config.has_term:
            reference_BT = scoring.of_base(model, batch, "policy.kl", self.temperature)
        entropies_BT = losses.token_values(_entropies, readout, x_BTE, targets_BT)
        sums = lambda log_probs_BT: self._sums(log_probs_BT, reference_BT, batch)  # noqa: E731
        total, metrics = scoring.differentiable(sums, readout, x_BTE, targets_BT)
        metrics["entropy"] = _sum(entropies_BT, weights_BT), weights_BT.sum()
        counted = weights_BT if config.normalize == "tokens" else _is_answer(weights_BT)
        return total, counted.sum(), metrics

    def _sums(
        self, log_probs_BT: Array, reference_BT: Array | None, batch: dict[str, Array]
    ) -> tuple[Array, Metrics]:
        config, weights_BT = self.config, batch["weights"]
        is_sequence = config.ratio == "sequence"
        counted = _is_answer(weights_BT) if is_sequence else weights_BT

        def log_ratio(above_BT: Array, below_BT: Array) -> Array:
            apart_BT = jnp.where(weights_BT > 0, above_BT - below_BT, 0.0)
            return apart_BT.sum(1, keepdims=True) if is_sequence else apart_BT

        old_BT = jax.lax.stop_gradient(log_probs_BT) if self.on_policy else batch["rescored"]
        ratios, gains = jnp.exp(log_ratio(log_probs_BT, old_BT)), batch["advantages"][:, None]
        low = 0.0 if config.clip_low is None else 1 - config.clip_low
        high = jnp.inf if config.clip_high is None else 1 + config.clip_high
        is_out = ((ratios < low) & (gains < 0)) | ((ratios > high) & (gains > 0))
        terms = -jnp.minimum(ratios * gains, jnp.clip(ratios, low, high) * gains)
        if config.truncate is not None:
            of_sampler = jnp.exp(log_ratio(old_BT, batch["drawn"]))
            terms = terms * jnp.minimum(jax.lax.stop_gradient(of_sampler), config.truncate)
        metrics: Metrics = {
            "clipped": (_sum(is_out.astype(jnp.float32), counted), counted.sum()),
            "ratio_max": (jnp.where(counted > 0, ratios, 0.0).max(), jnp.float32(1)),
            "sampler_gap": (_sum(jnp.abs(old_BT - batch["drawn"]), weights_BT), weights_BT.sum()),
        }
        if reference_BT is not None:
            apart_BT = jnp.where(weights_BT > 0, reference_BT - log_probs_BT, 0.0)
            kl_BT = jnp.exp(apart_BT) - apart_BT - 1
            terms = terms + config.kl * kl_BT
            metrics["kl"] = _sum(kl_BT, weights_BT), weights_BT.sum()
        if config.normalize == "answers":
            counted = counted / jnp.maximum(counted.sum(1, keepdims=True), 1.0)
        return _sum(terms, counted), metrics

    @losses.OF_TOKENS
    def scores(
        self, model: PyTree, batch: dict[str, Array], key: Array | None
    ) -> tuple[Array, Array, Metrics]:
        """No loss, but the metrics `rescored` and `reference`, for `make_eval_step`.

        They are the log-probabilities of the targets, float32[batch, seq], on every device;
        `reference` is there where the configuration has a weight for it in rewards.
        """
        found = {"rescored": scoring.of_tokens(model, batch, self.temperature)}
        if self.config.kl > 0 and not self.config.has_term:
            found["reference"] = scoring.of_base(model, batch, "policy.kl", self.temperature)
        everywhere = {name: sharding.constrain(x, None, None) for name, x in found.items()}
        return jnp.float32(0), jnp.float32(1), everywhere


def _is_answer(weights_BT: Array) -> Float[Array, "batch 1"]:
    """1 in a row with an answer that counts, and else 0."""
    return (weights_BT > 0).any(1, keepdims=True).astype(jnp.float32)


def _entropies(logits: Array, targets: Array) -> Array:
    del targets
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0.0).sum(-1)


def _sum(x: Array, weights: Array) -> Array:
    return jnp.where(weights > 0, x * weights, 0.0).sum()
