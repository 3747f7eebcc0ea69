"""The types that public signatures name, such as `zoo.types.LossFunction`."""

from zoo.data.corpus import Corpus as Corpus
from zoo.data.corpus import Piece as Piece
from zoo.data.corpus import Place as Place
from zoo.data.datasets import HostBatch as HostBatch
from zoo.data.datasets import Row as Row
from zoo.data.loader import Accepted as Accepted
from zoo.data.prepared.format import Manifest as Manifest
from zoo.data.prepared.format import PartRecord as PartRecord
from zoo.data.prepared.format import Shard as Shard
from zoo.data.prepared.format import ShardRecord as ShardRecord
from zoo.data.sources import RowDataset as RowDataset
from zoo.data.sources import Transform as Transform
from zoo.data.token_datasets import Ends as Ends
from zoo.data.tokenizer import Ids as Ids
from zoo.data.tokenizer import Spans as Spans
from zoo.decoding.drawing import SamplingOptions as SamplingOptions
from zoo.decoding.sampling import Prompt as Prompt
from zoo.nn import products, remat
from zoo.nn.layers import Linear as Linear
from zoo.nn.precision import LossScale as LossScale
from zoo.nn.precision import Precision as Precision
from zoo.nn.products import Operand as Operand
from zoo.nn.protocols import SequenceModel as SequenceModel
from zoo.nn.protocols import SequenceOptions as SequenceOptions
from zoo.publishing.shelf import Card as Card
from zoo.runs import config
from zoo.runs.callbacks.callback import Numbers as Numbers
from zoo.runs.callbacks.callback import Scalars as Scalars
from zoo.runs.callbacks.evaluations import Mode as Mode
from zoo.runs.callbacks.evaluations import Save as Save
from zoo.runs.callbacks.trackers import Status as Status
from zoo.runs.evaluation import Evaluator as Evaluator
from zoo.runs.loop import Trained as Trained
from zoo.sharding import rules
from zoo.sharding.rules import Axes as Axes
from zoo.sharding.rules import Rule as Rule
from zoo.sharding.rules import Rules as Rules
from zoo.sharding.specs import Name as Name
from zoo.training.compiled import CompiledStep as CompiledStep
from zoo.training.compiled import Flags as Flags
from zoo.training.compiled import Metrics as Metrics
from zoo.training.compiled import Program as Program
from zoo.training.description import Evaluate as Evaluate
from zoo.training.loss_checks import Checks as Checks
from zoo.training.loss_values import LossFunction as LossFunction
from zoo.training.state import Blueprint as Blueprint
from zoo.training.state import Trainable as Trainable
from zoo.wrappers.classifier import Pooling as Pooling

AxisKind = rules.Kind
Quantization = products.Kind
RematPolicy = remat.Policy
RunConfig = config.Config
