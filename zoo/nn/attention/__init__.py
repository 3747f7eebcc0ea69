"""Softmax attention: one function before several kernels, and decoding's over a cache's slots."""

from zoo.nn.attention.attention import attention as attention
