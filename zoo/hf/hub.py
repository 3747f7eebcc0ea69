"""Folders from the Hugging Face Hub, by its own client with its cache, endpoint and tokens."""

import re
from pathlib import Path

from zoo.data import tokenizer
from zoo.publishing import PublishError

# No pickled weights, and none in the formats of other libraries.
FILES = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    tokenizer.FILE_NAME,
    tokenizer.CONFIG_NAME,
    *tokenizer.BESIDE,
]


def is_hub_id(name: str) -> bool:
    """Whether a text has the form of a hub id, "organisation/model"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith((".", "/"))


def snapshot(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model on the Hub; only files that the local cache lacks are downloaded.

    `revision` is a commit, a branch or a tag; None is the newest commit. Without `weights` all but
    those are downloaded, which is all that a plan takes.

    The cache is in `HF_HOME`, the server is `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` uses the cache alone.

    Raises:
        PublishError: the client is missing, no server answers, or there is no such model.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise PublishError(
            f"{name!r} is no folder here, and looking for it on the Hugging Face Hub needs "
            "huggingface_hub: pip install 'zoo[hf]'"
        ) from None
    files = FILES if weights else [name for name in FILES if "safetensors" not in name]
    try:
        # In FILES "*" would match slashes too: other subfolders are left out.
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=files, ignore_patterns="model-*/*"
        )
    except Exception as error:  # of the client, of its HTTP library, or of the system
        constants = huggingface_hub.constants
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} gave"
        raise PublishError(
            f"{name!r} is no folder here, and could not be downloaded from the Hugging Face Hub; "
            f"it is not in the local cache {constants.HF_HUB_CACHE}, and {reason}: "
            f"{type(error).__name__}: {str(error).strip()}"
        ) from error
    return Path(folder)


def cached(name: str) -> Path | None:
    """The folder of a model of the Hub in the local cache, if it is there."""
    try:
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(name, local_files_only=True)
    except (ImportError, OSError, ValueError):  # its errors for what the cache lacks are of both
        return None
    return Path(folder)
