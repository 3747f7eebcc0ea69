"""The transformer family: a decoder, or with `causal=False` an encoder."""

from zoo.nn.recurrences.chunks import RecurrenceConfig as RecurrenceConfig
from zoo.transformer.config import Config as Config
from zoo.transformer.encoder import EncoderConfig as EncoderConfig
from zoo.transformer.encoder import embed as embed
from zoo.transformer.flops import num_flops_per_image as num_flops_per_image
from zoo.transformer.flops import num_flops_per_token as num_flops_per_token
from zoo.transformer.model import Transformer as Transformer
from zoo.transformer.part_configs import AttentionConfig as AttentionConfig
from zoo.transformer.part_configs import ExpertsConfig as ExpertsConfig
from zoo.transformer.part_configs import LatentConfig as LatentConfig
from zoo.transformer.part_configs import MixerConfig as MixerConfig
from zoo.transformer.part_configs import ResidualConfig as ResidualConfig
from zoo.transformer.rotary import PositionsConfig as PositionsConfig
from zoo.transformer.vision import VisionConfig as VisionConfig
from zoo.transformer.vision import VisionTransformer as VisionTransformer
