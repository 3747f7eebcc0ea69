"""Softmax attention: one function before several kernels, and decoding's over a cache's slots."""

from zoo.nn.attention.kernels import Implementation as Implementation
from zoo.nn.attention.kernels import attend_to_slots as attend_to_slots
from zoo.nn.attention.kernels import attention as attention
