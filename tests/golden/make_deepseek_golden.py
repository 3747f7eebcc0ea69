"""Writes deepseek.npz: a DeepseekV3MoE of transformers, its choice of experts, and its gradients.

Needs PyTorch and transformers, which the tests do not:
`python tests/golden/make_deepseek_golden.py`. Weights keep their names and layout.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

CONFIG = DeepseekV3Config(
    hidden_size=16,
    moe_intermediate_size=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)


def golden() -> dict[str, np.ndarray]:
    module = DeepseekV3MoE(CONFIG)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    module.gate.e_score_correction_bias.copy_(torch.linspace(0.3, -0.3, 8))
    x = torch.randn(2, 7, 16, requires_grad=True)
    y = module(x)
    weight = torch.randn_like(y)  # a loss in which each output has a weight of its own
    (y * weight).sum().backward()
    chosen = module.gate(x)[-1]
    arrays = {"x": x, "y": y, "d_x": x.grad, "d_y": weight, "chosen": chosen}
    arrays["bias"] = module.gate.e_score_correction_bias
    for name, parameter in module.named_parameters():
        arrays |= {name: parameter, f"d_{name}": parameter.grad}
    return {name: array.detach().numpy() for name, array in arrays.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    np.savez_compressed(Path(__file__).with_name("deepseek.npz"), **golden())
