"""Hugging Face's format, read and written: folders and hub ids, `config.json`, safetensors."""

from zoo.hf.folder import is_hub_id as is_hub_id
from zoo.hf.folder import snapshot as snapshot
from zoo.hf.model_types import MODEL_TYPES as MODEL_TYPES
