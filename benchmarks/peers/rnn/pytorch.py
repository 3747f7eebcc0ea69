"""The same model by PyTorch's own `nn.LSTM`."""

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import torch_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        weights = given.weights(shape)
        self.embedding = nn.Embedding.from_pretrained(
            torch.from_numpy(weights["embedding"]), freeze=False
        )
        self.head = torch_step.linear(weights["head"], weights["head_bias"])
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


def build(shape: Shape, precision: Precision, *, compiled: bool) -> Built:
    return torch_step.build(LanguageModel(shape), given.batch(shape), precision, compiled=compiled)
