"""The same models in PyTorch, with its own attention and LSTM, fused AdamW and autocast."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import given
from benchmarks.peers.given import MLP, RNN, Batch, Built, Precision, Remat, Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _step(model: nn.Module, batch: Batch, precision: Precision, *, compiled: bool) -> Built:
    """A step of a model that returns logits, [..., classes]."""
    model = model.to(DEVICE)
    torch.backends.cudnn.allow_tf32 = precision != "fp32"  # as in JAX, where fp32 is exact
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=given.LEARNING_RATE, weight_decay=given.WEIGHT_DECAY, fused=True
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
        nn.utils.clip_grad_norm_(parameters, given.CLIP_NORM)
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


class Block(nn.Module):
    def __init__(self, shape: Transformer, layer: dict[str, np.ndarray]):
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.mlp_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.linears = nn.ModuleDict({name: linear(weight) for name, weight in layer.items()})

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self.linears[name](x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """[batch, seq, d_model] to the same."""
        normed = self.attention_norm(x)
        q, k, v = (self._heads(name, normed) for name in ("wq", "wk", "wv"))
        q, k = (rotate(q, cos, sin), rotate(k, cos, sin))
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = flex_attention.flex_attention(q, k, v, block_mask=mask)
        x = x + self.linears["wo"](out.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.linears["w_up"](self.mlp_norm(x)), approximate="tanh")
        return x + self.linears["w_down"](hidden)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


def _mask(shape: Transformer) -> Any:
    """The blocks of packed rows, for PyTorch's flex attention."""
    if (documents := shape.documents()) is None:
        return None
    ids = torch.from_numpy(documents).to(DEVICE)
    seen = lambda b, _, q, k: (q >= k) & (ids[b, q] == ids[b, k])  # noqa: E731
    return flex_attention.create_block_mask(seen, len(ids), None, *ids.shape[1:] * 2, device=DEVICE)


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Transformer, remat: Remat):
        super().__init__()
        weights = shape.weights()
        self.embedding = nn.Embedding.from_pretrained(
            torch.from_numpy(weights.pop("embedding")), freeze=False
        )
        if shape.tied:
            self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
            self.head.weight = self.embedding.weight
        else:
            self.head = linear(weights.pop("head"))
        self.blocks = nn.ModuleList(
            Block(shape, {name: w[i] for name, w in weights.items()})
            for i in range(shape.num_layers)
        )
        self.final_norm = nn.RMSNorm(shape.d_model, eps=given.NORM_EPS)
        self.remat, self.mask = remat, _mask(shape)
        frequency = given.ROPE_THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.seq_len)[:, None] * frequency
        self.register_buffer("cos", torch.cos(angles))
        self.register_buffer("sin", torch.sin(angles))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64[batch, seq] to logits, [batch, seq, vocab]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.remat == "full":
                x = checkpoint(block, x, self.cos, self.sin, self.mask, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin, self.mask)
        return self.head(self.final_norm(x))


def transformer(shape: Transformer, precision: Precision, *, remat: Remat, compiled: bool) -> Built:
    return _step(Decoder(shape, remat), shape.batch(), precision, compiled=compiled)


class LanguageModel(nn.Module):
    def __init__(self, shape: RNN):
        super().__init__()
        weights = shape.weights()
        self.embedding = nn.Embedding.from_pretrained(
            torch.from_numpy(weights["embedding"]), freeze=False
        )
        self.head = linear(weights["head"], weights["head_bias"])
        size = shape.hidden_size
        self.lstm = nn.LSTM(size, size, shape.num_layers, batch_first=True)
        for i in range(shape.num_layers):
            for name in ("ih", "hh"):
                parameter = getattr(self.lstm, f"weight_{name}_l{i}")
                parameter.data = torch.from_numpy(np.ascontiguousarray(weights[name][i].T))
            getattr(self.lstm, f"bias_ih_l{i}").data = torch.from_numpy(weights["bias"][i])
            # PyTorch adds a second bias, which would double the learning of the first.
            getattr(self.lstm, f"bias_hh_l{i}").data.zero_()
            getattr(self.lstm, f"bias_hh_l{i}").requires_grad_(False)
        self.lstm.flatten_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """int[batch, seq] to logits, [batch, seq, vocab]."""
        return self.head(self.lstm(self.embedding(tokens))[0])


def rnn(shape: RNN, precision: Precision, *, compiled: bool) -> Built:
    return _step(LanguageModel(shape), shape.batch(), precision, compiled=compiled)


def mlp(shape: MLP, precision: Precision, *, compiled: bool) -> Built:
    *hidden, head = (linear(*weights) for weights in shape.weights())
    layers = [module for layer in hidden for module in (layer, nn.ReLU())]
    model = nn.Sequential(*layers, head)
    return _step(model, shape.batch(), precision, compiled=compiled)
