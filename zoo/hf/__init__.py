"""Hugging Face interop: folders and hub ids with `config.json` and safetensors, both ways."""

from zoo.hf.folder import FAMILIES as FAMILIES
from zoo.hf.folder import describe as describe
from zoo.hf.folder import load as load
from zoo.hf.folder import write as write
from zoo.hf.hub import is_hub_id as is_hub_id
from zoo.hf.hub import snapshot as snapshot
