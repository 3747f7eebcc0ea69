"""Softmax attention: one function before several kernels, and decoding's over a cache's slots."""

from zoo.nn.attention.attention import Implementation as Implementation
from zoo.nn.attention.attention import attend_to_slots as attend_to_slots
from zoo.nn.attention.attention import attention as attention
