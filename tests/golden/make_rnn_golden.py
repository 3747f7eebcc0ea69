"""Writes rnn.npz: what torch.nn.RNN, GRU and LSTM give, and their gradients, on padded rows.

Needs PyTorch, which the tests do not: `python tests/golden/make_rnn_golden.py`. Every array is
named `kind/name`; weights keep PyTorch's names and layout.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

IN_SIZE, HIDDEN, LAYERS, BATCH, SEQ = 3, 5, 2, 4, 7
LENGTHS = torch.tensor([7, 3, 5, 1])


def golden(module: torch.nn.RNNBase) -> dict[str, np.ndarray]:
    directions = 2 if module.bidirectional else 1
    x = torch.randn(BATCH, SEQ, IN_SIZE, requires_grad=True)
    num_states = 2 if isinstance(module, torch.nn.LSTM) else 1
    states = [
        torch.randn(LAYERS * directions, BATCH, HIDDEN, requires_grad=True)
        for _ in range(num_states)
    ]
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    outputs, finals = module(packed, tuple(states) if num_states == 2 else states[0])
    outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=SEQ)
    finals = finals if num_states == 2 else (finals,)
    # A loss in which each output and each final state has a weight of its own.
    targets = [torch.randn_like(y) for y in (outputs, *finals)]
    sum((y * t).sum() for y, t in zip((outputs, *finals), targets, strict=True)).backward()
    arrays = {"x": x, "outputs": outputs, "dx": x.grad, "d_outputs": targets[0]}
    for i, (state, final) in enumerate(zip(states, finals, strict=True)):
        arrays |= {f"state{i}": state, f"final{i}": final}
        arrays |= {f"d_state{i}": state.grad, f"d_final{i}": targets[1 + i]}
    for name, weight in module.named_parameters():
        arrays |= {name: weight, f"d_{name}": weight.grad}
    return {name: array.detach().numpy() for name, array in arrays.items()}


def main() -> None:
    torch.manual_seed(0)
    arrays = {"lengths": LENGTHS.numpy()}
    for cell, cls in (("elman", torch.nn.RNN), ("gru", torch.nn.GRU), ("lstm", torch.nn.LSTM)):
        for bidirectional in (False, True):
            module = cls(
                IN_SIZE, HIDDEN, LAYERS, batch_first=True, bidirectional=bidirectional
            ).float()
            kind = f"{cell}_{'both' if bidirectional else 'one'}"
            arrays |= {f"{kind}/{name}": array for name, array in golden(module).items()}
    np.savez_compressed(Path(__file__).parent / "rnn.npz", **arrays)


if __name__ == "__main__":
    main()
