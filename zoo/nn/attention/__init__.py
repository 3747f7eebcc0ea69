"""Softmax attention: one function before several implementations, and decoding's over slots."""

from zoo.nn.attention.choice import Implementation as Implementation
from zoo.nn.attention.choice import attention as attention
from zoo.nn.attention.slots import attend_to_slots as attend_to_slots
