"""Hugging Face interop: folders and hub ids with `config.json` and safetensors, both ways."""

from zoo.publishing.hf.folder import MODEL_TYPES as MODEL_TYPES
from zoo.publishing.hf.folder import describe as describe
from zoo.publishing.hf.folder import load as load
from zoo.publishing.hf.folder import write as write
from zoo.publishing.hf.hub import is_hub_id as is_hub_id
from zoo.publishing.hf.hub import snapshot as snapshot
