"""Writes preferences.json: losses of pairs of answers, by TRL 1.16.0's own code.

Needs PyTorch, transformers and trl, which the tests do not:
`python tests/golden/make_preferences_golden.py`. Of three pairs there are the log-probability of
each token of the answers under the model, and of whole answers under the reference; of each loss
its mean over the pairs, and the gradient by those of tokens. KTO takes the first answer of a pair
for an example, which is desirable or not, and the second for the mismatched one. Of a reward model
there are the scores of four pairs.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer

LENGTHS = [(3, 5), (4, 2), (6, 6)]  # tokens of the chosen and of the rejected answers
BETA, GAMMA = 0.4, 0.7
LABELS, WEIGHTS = [True, False, True], (1.5, 0.5)

Tokens = list[list[torch.Tensor]]


def padded(tokens: Tokens, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the answers' tokens, and where there are some behind a prompt's."""
    answers = [pair[side] for pair in tokens]
    width = max(len(x) for pair in tokens for x in pair)
    rows = [torch.nn.functional.pad(x, (0, width - len(x))) for x in answers]
    mask = [(np.arange(width + 1) < 1 + len(x)) & (np.arange(width + 1) > 0) for x in answers]
    return torch.stack(rows), torch.tensor(np.stack(mask)).long()


def stand_in(**fields: object) -> MagicMock:
    """A trainer with some fields."""
    trainer = MagicMock(beta=BETA, precompute_ref_logps=True, aux_loss_enabled=False, **fields)
    trainer.accelerator.device = torch.device("cpu")
    trainer.accelerator.gather_for_metrics = lambda x: x
    return trainer


def outputs(log_probs: torch.Tensor) -> SimpleNamespace:
    """What a model returns."""
    zeros = torch.zeros_like(log_probs)  # of metrics
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def of_reference(kind: str, tokens: Tokens, reference: torch.Tensor) -> torch.Tensor:
    """A loss of `DPOTrainer`, whose model gives the log-probabilities of tokens."""
    trainer = stand_in(loss_types=[kind], loss_weights=[1.0], label_smoothing=0.0)
    trainer.f_divergence_type, trainer.ld_alpha = "reverse_kl", None
    trainer.use_weighting = False
    log_probs, mask = (torch.cat(x) for x in zip(*(padded(tokens, i) for i in (0, 1)), strict=True))
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[:, 0],
        "ref_rejected_logps": reference[:, 1],
    }
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs(log_probs), inputs, False)


def of_kto(tokens: Tokens, reference: torch.Tensor) -> torch.Tensor:
    """KTO's loss, of `KTOTrainer`, whose model is asked for the mismatched answers first."""
    trainer = stand_in(loss_type="kto", calculate_KL=True, _tp_size=1, _total_train_tokens=0)
    trainer.desirable_weight, trainer.undesirable_weight = WEIGHTS
    trainer._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(trainer, *given)
    (log_probs, mask), (mismatched, other_mask) = padded(tokens, 0), padded(tokens, 1)
    asked = iter([mismatched, log_probs])
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "KL_input_ids": torch.zeros_like(mask),
        "KL_attention_mask": torch.ones_like(mask),
        "KL_completion_mask": other_mask,
        "label": torch.tensor(LABELS),
        "ref_logps": reference[:, 0],
        "ref_KL_logps": reference[:, 1],
    }
    model = lambda **_: outputs(next(asked))
    return KTOTrainer._compute_loss(trainer, model, inputs, False)


def of_simpo(tokens: Tokens, reference: torch.Tensor) -> torch.Tensor:
    """SimPO's loss, of `CPOTrainer`, from the log-probabilities per token."""
    means = torch.stack([torch.stack([x.mean() for x in pair]) for pair in tokens])
    trainer = stand_in(alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, label_smoothing=0.0)
    return CPOTrainer.cpo_loss(trainer, means[:, 0], means[:, 1])[0].mean()


def of_scores(scores: np.ndarray) -> float:
    """The loss of `RewardTrainer`, whose model gives the scores of all chosen answers, then the
    rejected ones."""
    trainer = MagicMock()
    trainer.args.center_rewards_coefficient = None
    inputs = {"attention_mask": torch.ones(1)}
    outputs = SimpleNamespace(logits=torch.tensor(scores.T.reshape(-1, 1)))
    return float(RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs))


def main() -> None:
    draw = np.random.default_rng(0)
    tokens = [[-draw.exponential(size=n) - 0.01 for n in pair] for pair in LENGTHS]
    whole = np.array([[x.sum() for x in pair] for pair in tokens])
    reference = whole + draw.normal(size=whole.shape)
    kinds = {"dpo": "sigmoid", "ipo": "ipo", "apo_zero": "apo_zero", "apo_down": "apo_down"}
    makers = {ours: functools.partial(of_reference, theirs) for ours, theirs in kinds.items()}
    losses, gradients = {}, {}
    for name, make in (makers | {"simpo": of_simpo, "kto": of_kto}).items():
        leaves = [[torch.tensor(x, requires_grad=True) for x in pair] for pair in tokens]
        loss = make(leaves, torch.tensor(reference))
        loss.backward()
        of_token = lambda x: [0.0] * len(x) if x.grad is None else x.grad.tolist()
        losses[name] = loss.item()
        gradients[name] = [[of_token(x) for x in pair] for pair in leaves]
    scores = np.array([[0.3, -0.9], [-1.2, 0.4], [2.5, 2.4], [-0.1, 3.0]])
    content = {
        "beta": BETA,
        "gamma": GAMMA,
        "labels": LABELS,
        "weights": WEIGHTS,
        "tokens": [[x.tolist() for x in pair] for pair in tokens],
        "reference": reference.tolist(),
        "scores": scores.tolist(),
        "losses": losses | {"reward": of_scores(scores)},
        "gradients": gradients,
    }
    path = Path(__file__).with_name("preferences.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
