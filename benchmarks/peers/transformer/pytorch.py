"""The same model in PyTorch, with its own attention."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import torch_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.transformer import given
from benchmarks.peers.transformer.given import Remat, Shape


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: dict[str, np.ndarray]):
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.mlp_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.linears = nn.ModuleDict(
            {name: torch_step.linear(weight) for name, weight in layer.items()}
        )

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self.linears[name](x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, d_model] to the same."""
        normed = self.attention_norm(x)
        q, k, v = (self._heads(name, normed) for name in ("wq", "wk", "wv"))
        q, k = (rotate(q, cos, sin), rotate(k, cos, sin))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linears["wo"](out.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.linears["w_up"](self.mlp_norm(x)), approximate="tanh")
        return x + self.linears["w_down"](hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, remat: Remat):
        super().__init__()
        weights = given.weights(shape)
        self.embedding = nn.Embedding.from_pretrained(
            torch.from_numpy(weights.pop("embedding")), freeze=False
        )
        if shape.tied:
            self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
            self.head.weight = self.embedding.weight
        else:
            self.head = torch_step.linear(weights.pop("head"))
        self.blocks = nn.ModuleList(
            Block(shape, {name: w[i] for name, w in weights.items()})
            for i in range(shape.num_layers)
        )
        self.final_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.remat = remat
        frequency = given.ROPE_THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.seq_len)[:, None] * frequency
        self.register_buffer("cos", torch.cos(angles))
        self.register_buffer("sin", torch.sin(angles))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[batch, seq] to logits, [batch, seq, vocab]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.remat == "full":
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.head(self.final_norm(x))


def build(shape: Shape, precision: Precision, *, remat: Remat, compiled: bool) -> Built:
    return torch_step.build(Decoder(shape, remat), given.batch(shape), precision, compiled=compiled)
