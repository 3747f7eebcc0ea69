"""A model zoo of sharded reference models in Equinox and JAX."""

from zoo import ensemble as ensemble
from zoo import losses as losses
from zoo import mlp as mlp
from zoo import optimizers as optimizers
from zoo import rnn as rnn
from zoo import sharding as sharding
from zoo import text as text
from zoo import transformer as transformer
from zoo.generate import generate as generate
from zoo.loop import evaluator as evaluator
from zoo.loop import fit as fit
from zoo.plans import ArrayPlan as ArrayPlan
from zoo.plans import BucketPlan as BucketPlan
from zoo.plans import PackedPlan as PackedPlan
from zoo.publish import load as load
from zoo.publish import published as published
from zoo.publish import save as save
from zoo.run import Run as Run
from zoo.sharding import make_mesh as make_mesh
from zoo.tokenizer import Tokenizer as Tokenizer
from zoo.train import RecompilationError as RecompilationError
from zoo.train import TrainState as TrainState
from zoo.train import init_state as init_state
from zoo.train import make_eval_step as make_eval_step
from zoo.train import make_train_step as make_train_step
