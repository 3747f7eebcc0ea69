"""The same model in PyTorch."""

from torch import nn

from benchmarks.peers import torch_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.mlp import given
from benchmarks.peers.mlp.given import Shape


def build(shape: Shape, precision: Precision, *, compiled: bool) -> Built:
    *hidden, head = (torch_step.linear(*weights) for weights in given.weights(shape))
    layers = [module for layer in hidden for module in (layer, nn.ReLU())]
    model = nn.Sequential(*layers, head)
    return torch_step.build(model, given.batch(shape), precision, compiled=compiled)
