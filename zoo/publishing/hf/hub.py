"""Folders from the Hugging Face Hub, by its own client: cache, endpoint and tokens are its own."""

import re
from pathlib import Path

from zoo.publishing.tensors import PublishError

# No pickles, and no weights in the formats of others.
FILES = [
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]


def is_hub_id(name: str) -> bool:
    """Whether a text has the form of a hub id, "organisation/model"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith((".", "/"))


def snapshot(name: str) -> Path:
    """The folder of a model on the Hub, from the local cache as far as it is there.

    The cache is in `HF_HOME`, the server is `HF_ENDPOINT`, and `HF_HUB_OFFLINE=1` asks nobody.

    Raises:
        PublishError: the client is missing, no server answers, or there is no such model.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise PublishError(
            f"{name!r} is no folder here, and to look for it on the Hugging Face Hub takes "
            "huggingface_hub: pip install 'zoo[hf]'"
        ) from None
    try:
        # "*" would match a slash too: the patterns are for the top folder alone.
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=FILES, ignore_patterns="*/*"
        )
    except Exception as error:  # its own errors, those of its HTTP library, those of the system
        endpoint = huggingface_hub.constants.ENDPOINT
        offline = huggingface_hub.constants.is_offline_mode()
        reason = "HF_HUB_OFFLINE is set" if offline else f"{endpoint} gave"
        raise PublishError(
            f"{name!r} is no folder here, and did not come from the Hugging Face Hub; it is not "
            f"in the local cache {huggingface_hub.constants.HF_HUB_CACHE}, and {reason}: "
            f"{type(error).__name__}: {str(error).strip()}"
        ) from error
    return Path(folder)
