"""Addresses: files and folders on object stores and web servers, beside local ones.

`location` gives a `Path` for a local path, and a `upath.UPath`, which is used like one, for an
address `scheme://…`. Endpoints and credentials are read by the stores' own libraries (s3fs, gcsfs,
huggingface_hub), and so are their environment variables: AWS_ENDPOINT_URL, AWS_PROFILE,
GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN.
"""

import contextlib
import errno
import functools
import glob
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.common.files import AddressError, Location, is_remote, scheme_of

# Scheme -> (the module that reads it, the extra with that), and what else the file system is told.
SCHEMES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "hf": ("huggingface_hub", "hf"),
    "http": ("aiohttp", "s3"),
    "https": ("aiohttp", "s3"),
    "memory": ("fsspec", "s3"),
}
# Other processes write to the same folders, so that no listing may be remembered.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"use_listings_cache": False},
    "gs": {"use_listings_cache": False, "cache_timeout": 0},
}
_WEB = ("http", "https")


def location(path: str | os.PathLike[str], name: str) -> Location:
    """The path with `~` as the home folder, or the file or folder at an address.

    Raises:
        ValueError: a scheme that is not known, or a bucket that is missing from the address; the
            message names the field `name`.
        ImportError: the scheme needs an extra that is not installed.
    """
    text = os.fspath(path) if isinstance(path, Path) else str(path)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(os.path.expanduser(text))
    if scheme == "file":
        return Path("/" + _rest(text).lstrip("/"))
    # `Path` makes one slash of the two.
    address = f"{scheme}://{_rest(text)}"
    if scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES if known != "memory")
        raise ValueError(f"{name}='{address}': unknown scheme {scheme}://; known are {known}")
    module, extra = SCHEMES[scheme]
    if any(importlib.util.find_spec(needed) is None for needed in (module, "upath")):
        raise ImportError(f"{name}='{address}' needs an extra: pip install 'zoo[{extra}]'")
    if not _rest(text).strip("/"):
        raise ValueError(f"{name}='{address}': there is no bucket or host in this address")
    _silence()
    from upath import UPath

    return UPath(address.rstrip("/"), **_OPTIONS.get(scheme, {}))


def _rest(address: str) -> str:
    return re.sub(r"^[A-Za-z][\w+.-]+:/+", "", address)


def files_matching(pattern: str, name: str) -> dict[Location, str]:
    """The files that a glob matches, sorted, with their names.

    `**` works, and so does the path or address of a single file. A name is the path relative to
    the pattern's fixed folder, with forward slashes.

    Raises:
        FileNotFoundError: no such file.
        AddressError: the store cannot be read.
    """
    where = location(pattern, name)
    text = str(where)
    parts = text.split("/")  # of an address, the empty one between its slashes too
    magic = [i for i, part in enumerate(parts) if glob.has_magic(part)]
    root = "/".join(parts[: magic[0] if magic else len(parts) - 1])
    with explained(where):
        if is_remote(where):
            scheme, fs = scheme_of(where), where.fs
            names = sorted(fs.glob(text if scheme in _WEB else where.path)) if magic else [text]
            # A name is an address without its scheme, except on the web.
            addresses = [n if is_remote(n) else f"{scheme}://{n.lstrip('/')}" for n in names]
            paths = [location(address, name) for address in addresses]
        else:
            paths = sorted(map(Path, glob.glob(text, recursive=True)))
        files = [path for path in paths if path.is_file()]
        is_folder = bool(paths) and not files and paths[0].is_dir()
    if not files:
        here = "" if is_remote(where) else f" in {Path.cwd()}"
        folder = f"; {pattern!r} is a folder: add '/**/*.txt' or the like" if is_folder else ""
        raise FileNotFoundError(f"no file matches {pattern!r}{here}{folder}")
    return {path: str(path)[len(root) :].lstrip("/") for path in files}


@contextlib.contextmanager
def explained(where: object) -> Iterator[None]:
    """A context in which the errors of a store's library become an `AddressError`: one sentence.

    Local paths keep their own errors.
    """
    try:
        yield
    except AddressError:
        raise
    except Exception as error:
        if not is_remote(where) or (reason := reason_of(error)) is None:
            raise
        raise AddressError(f"{where}: {reason}") from error


def reason_of(error: BaseException) -> str | None:
    """Why a store failed, and what to do about it; None for other errors."""
    chain = list(_causes(error))
    if str(getattr(error, "filename", None)).startswith("/"):
        return None  # a file of this machine, which its own error names
    names = {type(e).__name__ for e in chain}
    text = " ".join(f"{type(e).__name__}: {e}" for e in chain)
    codes = {_status(e) for e in chain}
    if names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"} or (
        "credentials" in text and "not found" in text
    ):
        return (
            "there are no credentials for this store: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or a profile, for s3://; run `gcloud auth "
            "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS, for gs://; set "
            "HF_TOKEN for hf://"
        )
    if (
        codes & {401, 403}
        or "PermissionError" in names
        or re.search(r"AccessDenied|Forbidden|InvalidAccessKeyId|SignatureDoesNotMatch", text)
    ):
        return (
            "the store refuses permission to these credentials: give them the right to read, and "
            "to write where you save, or use others"
        )
    if re.search(r"NoSuchBucket|bucket does not exist|BucketNotFound", text, re.I) or any(
        _GS_BUCKET.search(str(e)) for e in chain if isinstance(e, FileNotFoundError)
    ):
        return NO_BUCKET
    if re.search(r"quota ?exceeded|InsufficientStorage", text, re.I) or 507 in codes:
        return "the store is full, or its quota is used up: free some space"
    if any(getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for e in chain):
        return None  # of this machine's disk: said where it is written
    kinds = {kind.__name__ for e in chain for kind in type(e).__mro__}
    if any("SSL" in kind or "Certificate" in kind for kind in kinds):
        return None  # a certificate, which its own error explains
    if any(_UNREACHED.match(kind) for kind in kinds) or re.search(
        r"Could not connect|Connect(ion)? ?(call )?(failed|refused)", text
    ):
        return (
            "the store cannot be reached (connection refused or cut, or no answer): check the "
            "network, and AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST if they are set"
        )
    if "upload_id=" not in text and (names & {"FileNotFoundError", "NoSuchKey"} or 404 in codes):
        return "there is no such file or folder"
    if any(code is not None and (code == 429 or code >= 500) for code in codes) or re.search(
        r"upload_id=|InternalError|SlowDown|ServiceUnavailable|internal server error", text, re.I
    ):
        return f"the store failed, more often than its library tries again ({chain[0]})"
    return None


NO_BUCKET = "there is no such bucket: make it, or correct the address"
# What gcsfs did not find: the objects of a bucket, or a bucket to write to.
_GS_BUCKET = re.compile(r"^b/[^/]+/o$|/upload/storage/(?!.*upload_id=)")
# Of Python, aiohttp, botocore, httpx and fsspec: a class, or one above it.
_UNREACHED = re.compile(
    r"(Client|Server)?Connect|(FS)?Timeout|Client(OS|Payload)Error|ResponseStreaming|Network|"
    r"RemoteProtocol"
)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _status(error: BaseException) -> int | None:
    """The status of HTTP that an error of a store tells."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return int(str(status)) if str(status).isdecimal() else None


@functools.cache
def _silence() -> None:
    """Keep what these libraries log of errors, which they also raise, from the terminal."""
    # gcsfs asks for the kind of each bucket, by other credentials, and warns where it cannot.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    for name in ("gcsfs", "fsspec", "s3fs", "aiobotocore", "botocore", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
