"""The RNN family: stacked recurrent layers over tokens or real-valued steps, one way or both."""

from zoo.nn.recurrences.chunks import RecurrenceConfig as RecurrenceConfig
from zoo.rnn.config import Config as Config
from zoo.rnn.config import num_flops_per_token as num_flops_per_token
from zoo.rnn.model import RNN as RNN
from zoo.rnn.model import State as State
