"""The transformer family: a decoder, or with `causal=False` an encoder."""

from zoo.transformer.config import Config as Config
from zoo.transformer.config import num_flops_per_token as num_flops_per_token
from zoo.transformer.model import Transformer as Transformer
