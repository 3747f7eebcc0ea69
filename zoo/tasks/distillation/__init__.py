"""Distillation: a student language model of any family beside a published teacher's distribution.

The student alone is the same training without the teacher, for comparison: it begins with the same
parameters, and has the same batches.
"""

from zoo.tasks.distillation.comparison import student_row as student_row
from zoo.tasks.distillation.comparison import table as table
from zoo.tasks.distillation.comparison import teacher_row as teacher_row
from zoo.tasks.distillation.config import Config as Config
from zoo.tasks.distillation.config import Data as Data
from zoo.tasks.distillation.teacher import Teacher as Teacher
from zoo.tasks.distillation.teacher import read_text as read_text
from zoo.tasks.distillation.training import Student as Student
from zoo.tasks.distillation.training import train as train
from zoo.tasks.distillation.training import training as training
