"""A model zoo of sharded reference models in Equinox and JAX.

Each name is imported at its first use: `from zoo import transformer` loads JAX and Equinox alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zoo.common import plugins, startup

startup.leave_at_once()
plugins.register(
    "zoo.formats",
    zoo="zoo.publishing.families:OWN",
    hf="zoo.hf.folder:HUGGING_FACE",
    peft="zoo.hf.peft:PEFT",
)
plugins.register(
    "zoo.row_datasets",
    preferences="zoo.alignment.pairs:PairDataset",
    unpaired="zoo.alignment.pairs:labelled_examples",
)
plugins.register("zoo.precisions", int8="zoo.quantization.int8_training:INT8")
plugins.register(
    "zoo.quantizations", **dict.fromkeys(("int8", "int4", "nf4"), "zoo.quantization.loading")
)
plugins.register("zoo.planners", zoo="zoo.planning.planner")
plugins.register(
    "zoo.commands",
    plan="zoo.planning.command:main",
    eval="zoo.evaluation.command:main",
    export="zoo.export.command:main",
)

if TYPE_CHECKING:
    from zoo import hf as hf
    from zoo import images as images
    from zoo import mlp as mlp
    from zoo import rnn as rnn
    from zoo import sharding as sharding
    from zoo import transformer as transformer
    from zoo.alignment import distillation as distillation
    from zoo.alignment import preferences as preferences
    from zoo.alignment import reinforcement as reinforcement
    from zoo.alignment.pairs import PairDataset as PairDataset
    from zoo.common.configuration import may_differ as may_differ
    from zoo.data import tabular as tabular
    from zoo.data import text as text
    from zoo.data import tokenizer as tokenizer
    from zoo.data.datasets import Dataset as Dataset
    from zoo.data.labelled import LabelledDataset as LabelledDataset
    from zoo.data.sources import ArrayDataset as ArrayDataset
    from zoo.data.sources import batches as batches
    from zoo.data.token_datasets import BucketedDataset as BucketedDataset
    from zoo.data.token_datasets import PackedDataset as PackedDataset
    from zoo.data.tokenizer import Tokenizer as Tokenizer
    from zoo.decoding.beam_search import beam_search as beam_search
    from zoo.decoding.drawing import Sampling as Sampling
    from zoo.decoding.sampling import generate as generate
    from zoo.decoding.sampling import stream as stream
    from zoo.nn.products import forward_mode as forward_mode
    from zoo.publishing.families import register as register
    from zoo.publishing.models import load as load
    from zoo.publishing.models import load_adapters as load_adapters
    from zoo.publishing.models import save as save
    from zoo.publishing.models import save_adapters as save_adapters
    from zoo.publishing.shelf import published as published
    from zoo.runs import callbacks as callbacks
    from zoo.runs import types as types
    from zoo.runs.evaluation import evaluator as evaluator
    from zoo.runs.loop import fit as fit
    from zoo.runs.run import Run as Run
    from zoo.sharding import Layout as Layout
    from zoo.sharding import make_mesh as make_mesh
    from zoo.tasks import classification as classification
    from zoo.tasks import finetuning as finetuning
    from zoo.tasks import language as language
    from zoo.tasks import masked as masked
    from zoo.training import losses as losses
    from zoo.training import optimizers as optimizers
    from zoo.training.compiled import RecompilationError as RecompilationError
    from zoo.training.description import Training as Training
    from zoo.training.loss_checks import LossWarning as LossWarning
    from zoo.training.loss_checks import PrecisionWarning as PrecisionWarning
    from zoo.training.state import TrainState as TrainState
    from zoo.training.state import init_state as init_state
    from zoo.training.step import make_eval_step as make_eval_step
    from zoo.training.step import make_train_step as make_train_step
    from zoo.wrappers import ensemble as ensemble
    from zoo.wrappers import lora as lora
    from zoo.wrappers.classifier import Classifier as Classifier
    from zoo.wrappers.classifier import TokenClassifier as TokenClassifier


# The same imports, by modules: made at the first use of a name (tests/test_layering.py compares).
_HOMES = {
    "zoo": "hf images mlp rnn sharding transformer",
    "zoo.alignment": "distillation preferences reinforcement",
    "zoo.alignment.pairs": "PairDataset",
    "zoo.common.configuration": "may_differ",
    "zoo.data": "tabular text tokenizer",
    "zoo.data.datasets": "Dataset",
    "zoo.data.sources": "ArrayDataset batches",
    "zoo.data.labelled": "LabelledDataset",
    "zoo.data.token_datasets": "BucketedDataset PackedDataset",
    "zoo.data.tokenizer": "Tokenizer",
    "zoo.decoding.beam_search": "beam_search",
    "zoo.decoding.drawing": "Sampling",
    "zoo.decoding.sampling": "generate stream",
    "zoo.nn.products": "forward_mode",
    "zoo.publishing.families": "register",
    "zoo.publishing.models": "load load_adapters save save_adapters",
    "zoo.publishing.shelf": "published",
    "zoo.runs": "callbacks types",
    "zoo.runs.evaluation": "evaluator",
    "zoo.runs.loop": "fit",
    "zoo.runs.run": "Run",
    "zoo.sharding": "Layout make_mesh",
    "zoo.tasks": "classification finetuning language masked",
    "zoo.training": "losses optimizers",
    "zoo.training.compiled": "RecompilationError",
    "zoo.training.description": "Training",
    "zoo.training.loss_checks": "LossWarning PrecisionWarning",
    "zoo.training.state": "TrainState init_state",
    "zoo.training.step": "make_eval_step make_train_step",
    "zoo.wrappers": "ensemble lora",
    "zoo.wrappers.classifier": "Classifier TokenClassifier",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

startup.quieten_libtpu()  # before any module starts JAX


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("zoo.publishing.formats").version()
    if name not in _NAMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    found = vars(importlib.import_module(_NAMES[name])).get(name)
    if found is None:  # it is a module itself
        found = importlib.import_module(f"{_NAMES[name]}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_NAMES)
