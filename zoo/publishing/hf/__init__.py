"""Hugging Face's format, read and written: folders and hub ids, `config.json`, safetensors."""

from zoo.publishing.hf.folder import MODEL_TYPES as MODEL_TYPES
from zoo.publishing.hf.folder import announced_skeleton as announced_skeleton
from zoo.publishing.hf.folder import describe as describe
from zoo.publishing.hf.folder import read_model as read_model
from zoo.publishing.hf.folder import read_skeleton as read_skeleton
from zoo.publishing.hf.folder import write_model as write_model
from zoo.publishing.hf.hub import cached as cached
from zoo.publishing.hf.hub import is_hub_id as is_hub_id
from zoo.publishing.hf.hub import snapshot as snapshot
from zoo.publishing.hf.weights import are_present as are_present
from zoo.publishing.hf.weights import weight_files as weight_files
