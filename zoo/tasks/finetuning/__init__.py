"""Fine-tuning: a published model, whatever its format, on other data, in full or in part."""

from zoo.tasks.finetuning.base import Base as Base
from zoo.tasks.finetuning.base import frozen as frozen
from zoo.tasks.finetuning.config import LEARNING_RATES as LEARNING_RATES
from zoo.tasks.finetuning.config import Config as Config
from zoo.tasks.finetuning.config import Data as Data
from zoo.tasks.finetuning.config import Optimizer as Optimizer
from zoo.tasks.finetuning.training import read_text as read_text
from zoo.tasks.finetuning.training import saver as saver
from zoo.tasks.finetuning.training import train as train
from zoo.tasks.finetuning.training import train_classifier as train_classifier
