"""Write policy.npz: losses of TRL's trainers on log-probabilities, and their gradients.

    python -P tests/golden/make_policy_golden.py  # needs trl 1.16 with torch; -P for peft/ here

What a trainer computes from a model's log-probabilities is called on numbers in their place.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

ROWS, STEPS = 6, 7


def drawn() -> dict[str, torch.Tensor]:
    """Answers of several lengths, with ratios on both sides of a clip."""
    rng = np.random.default_rng(0)
    log_probs = -rng.exponential(1.0, (ROWS, STEPS))
    lengths = [7, 1, 4, 7, 3, 5]
    mask = np.arange(STEPS) < np.array(lengths)[:, None]
    numbers = {
        "log_probs": log_probs,
        "rescored": log_probs + 0.3 * rng.normal(size=log_probs.shape),
        "reference": log_probs + 0.3 * rng.normal(size=log_probs.shape),
        "mask": mask.astype(np.float64),
        "advantages": rng.normal(size=ROWS),
    }
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}


class Numbers(dict):
    """Metrics of a trainer: whatever it appends to."""

    def __missing__(self, name):
        return mock.MagicMock()


def trainer(numbers: dict[str, torch.Tensor], log_probs: torch.Tensor, **fields) -> SimpleNamespace:
    """What the loss of a trainer reads of itself."""
    ones = lambda x, **_: x
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, -log_probs.detach(), None),
        _metrics=Numbers(),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=ones, reduce=lambda x, **_: x, gather_for_metrics=ones, num_processes=1
        ),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        use_liger_kernel=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=STEPS,
        **fields,
    )


def loss(kind: type, numbers: dict[str, torch.Tensor], **fields) -> tuple[np.ndarray, np.ndarray]:
    """A trainer's loss, and its gradient by the log-probabilities."""
    log_probs = numbers["log_probs"].clone().requires_grad_()
    ids = torch.zeros((ROWS, STEPS), dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": torch.ones_like(ids[:, :2]),
        "completion_ids": ids,
        "completion_mask": numbers["mask"],
        "advantages": numbers["advantages"],
        "ref_per_token_logps": numbers["reference"],
        "num_items_in_batch": numbers["mask"].sum(),
        "old_per_token_logps": numbers["rescored"],
        "old_logps": (numbers["rescored"] * numbers["mask"]).sum(1),
    }
    if fields.pop("on_policy", False):
        inputs["old_per_token_logps"] = None
    found = kind._compute_loss(trainer(numbers, log_probs, **fields), None, inputs)
    found.backward()
    return found.detach().numpy(), log_probs.grad.numpy()


def main() -> None:
    """Write the file."""
    numbers = drawn()
    written = {name: x.numpy() for name, x in numbers.items()}
    clips = {"symmetric": (0.2, 0.2), "higher": (0.2, 0.28)}
    for loss_type, (clip, (low, high)), beta, on_policy in itertools.product(
        ("grpo", "dapo"), clips.items(), (0.0, 0.1), (False, True)
    ):
        args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
        name = f"{loss_type} {clip} {beta}{' on policy' * on_policy}"
        written[f"{name} loss"], written[f"{name} gradient"] = loss(
            GRPOTrainer, numbers, loss_type=loss_type, epsilon_low=low, epsilon_high=high,
            beta=beta, importance_sampling_level="token", args=args, on_policy=on_policy,
        )  # fmt: skip
    for clip, (low, high) in clips.items():
        found = loss(RLOOTrainer, numbers, epsilon_low=low, epsilon_high=high)
        written[f"rloo {clip} loss"], written[f"rloo {clip} gradient"] = found
    np.savez(Path(__file__).with_name("policy.npz"), **written)


if __name__ == "__main__":
    main()
