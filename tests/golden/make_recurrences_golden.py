"""Writes recurrences.npz: what the layers of Qwen3-Next, Mamba-2 and xLSTM give, and gradients.

Needs PyTorch and transformers (5.24), which the tests do not:
`python tests/golden/make_recurrences_golden.py`. Every array is named `layer/name`; weights and
their gradients (`d_…`) keep the names and layout of transformers.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextConfig,
    Qwen3NextGatedDeltaNet,
)
from transformers.models.xlstm.modeling_xlstm import xLSTMConfig, xLSTMLayer

WIDTH, BATCH, SEQ = 12, 2, 19

LAYERS = {
    "gated_deltanet": lambda: Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=WIDTH,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=5,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=3,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    ),
    "mamba2": lambda: Mamba2Mixer(
        Mamba2Config(
            hidden_size=WIDTH,
            num_heads=4,
            head_dim=6,
            expand=2,
            state_size=5,
            n_groups=2,
            conv_kernel=3,
            chunk_size=8,
            num_hidden_layers=1,
        ),
        0,
    ),
    "mlstm": lambda: xLSTMLayer(
        xLSTMConfig(
            hidden_size=WIDTH,
            num_heads=2,
            qk_dim_factor=0.5,
            v_dim_factor=1.0,
            num_hidden_layers=1,
            chunk_size=SEQ,
            mode="train",
            return_last_states=True,
        )
    ),
}


def golden(name: str) -> dict[str, np.ndarray]:
    layer = LAYERS[name]().train()
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=True)
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    dy = torch.randn_like(y)
    (y * dy).sum().backward()
    arrays = {"x": x, "y": y, "dy": dy, "dx": x.grad}
    for key, weight in layer.named_parameters():
        arrays |= {key: weight, f"d_{key}": weight.grad}
    return {f"{name}/{key}": array.detach().numpy() for key, array in arrays.items()}


torch.manual_seed(0)
np.savez_compressed(
    Path(__file__).parent / "recurrences.npz",
    **{key: array for name in LAYERS for key, array in golden(name).items()},
)
