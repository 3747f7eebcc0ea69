"""The train step of the PyTorch peers: fused AdamW and autocast; eager, or compiled."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.common import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Batch, Built, Precision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(model: nn.Module, batch: Batch, precision: Precision, *, compiled: bool) -> Built:
    """A step of a model that returns logits, [..., classes]."""
    model = model.to(DEVICE)
    torch.backends.cudnn.allow_tf32 = precision != "fp32"  # as in JAX, where fp32 is exact
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE) for x in batch)

    def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    forward = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss

    def step(state: Any, batch: Any) -> tuple[Any, Tensor]:
        optimizer.zero_grad()
        loss = forward(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        return state, loss.detach()

    return Built(step, None, (inputs, targets.long()), compile_seconds=None if compiled else 0.0)


def linear(weight: np.ndarray, bias: np.ndarray | None = None) -> nn.Linear:
    """A linear layer of weights [in, out], which PyTorch keeps as [out, in]."""
    layer = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None)
    layer.weight.data = torch.from_numpy(np.ascontiguousarray(weight.T))
    if bias is not None:
        layer.bias.data = torch.from_numpy(bias)
    return layer
