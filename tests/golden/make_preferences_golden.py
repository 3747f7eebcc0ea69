"""Writes preferences.json: losses of pairs of answers, by TRL 1.16.0's own code.

Needs PyTorch, transformers and trl, which the tests do not:
`python tests/golden/make_preferences_golden.py`. Of three pairs there are the log-probability of
each token of the answers under the model, and of whole answers under the reference; of each loss
its mean over the pairs. Of a reward model there are the scores of four pairs.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from trl import DPOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer

LENGTHS = [(3, 5), (4, 2), (6, 6)]  # tokens of the chosen and of the rejected answers
BETA, GAMMA = 0.4, 0.7


def of_reference(kind: str, tokens: list[list[np.ndarray]], reference: np.ndarray) -> float:
    """A loss of `DPOTrainer`, whose model gives the log-probabilities of tokens."""
    width = max(len(x) for pair in tokens for x in pair)
    rows = [pair[side] for side in (0, 1) for pair in tokens]
    log_probs = torch.tensor(np.stack([np.pad(x, (1, width - len(x))) for x in rows]))
    mask = torch.tensor(np.stack([np.arange(width + 1) < 1 + len(x) for x in rows])).long()
    mask[:, 0] = 0  # one token of a prompt
    trainer = MagicMock()
    trainer.loss_types, trainer.loss_weights, trainer.beta = [kind], [1.0], BETA
    trainer.f_divergence_type, trainer.ld_alpha, trainer.label_smoothing = "reverse_kl", None, 0.0
    trainer.precompute_ref_logps, trainer.aux_loss_enabled, trainer.use_weighting = (
        True,
        False,
        False,
    )
    trainer.accelerator.device = torch.device("cpu")
    trainer.accelerator.gather_for_metrics = lambda x: x
    zeros = torch.zeros_like(log_probs[:, 1:])  # of metrics
    zeros = torch.zeros_like(log_probs[:, 1:])  # of metrics
    outputs = SimpleNamespace(
        log_probs=log_probs[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros > 0
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": torch.tensor(reference[:, 0]),
        "ref_rejected_logps": torch.tensor(reference[:, 1]),
    }
    return float(DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False))


def of_simpo(tokens: list[list[np.ndarray]]) -> float:
    """SimPO's loss, of `CPOTrainer`, from the log-probabilities per token."""
    means = torch.tensor([[x.mean() for x in pair] for pair in tokens])
    trainer = SimpleNamespace(alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, beta=BETA)
    trainer.label_smoothing = 0.0
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
    return float(CPOTrainer.cpo_loss(trainer, means[:, 0], means[:, 1])[0].mean())


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
    found = {ours: of_reference(theirs, tokens, reference) for ours, theirs in kinds.items()}
    scores = np.array([[0.3, -0.9], [-1.2, 0.4], [2.5, 2.4], [-0.1, 3.0]])
    content = {
        "beta": BETA,
        "gamma": GAMMA,
        "tokens": [[x.tolist() for x in pair] for pair in tokens],
        "reference": reference.tolist(),
        "scores": scores.tolist(),
        "losses": found | {"simpo": of_simpo(tokens), "reward": of_scores(scores)},
    }
    path = Path(__file__).with_name("preferences.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
