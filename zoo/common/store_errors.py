"""Why a store of objects failed, in one sentence, from the errors of the libraries that read it."""

import errno
import re
from collections.abc import Iterator


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
