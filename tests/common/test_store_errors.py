"""zoo.common.store_errors: the sentences that the errors of the stores' libraries become."""

import pytest
from stores import Store, gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common.files import AddressError
from zoo.common.store import explained, location


def http_error(status: int) -> Exception:
    return type("HttpError", (Exception,), {"code": status})(f"an answer, {status}")


def boto_error(code: str, status: int) -> Exception:
    return type(
        "ClientError",
        (Exception,),
        {"response": {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}},
    )(f"An error occurred ({code}) when calling the PutObject operation")


def named(name: str, text: str = "") -> Exception:
    return type(name, (Exception,), {})(text)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (named("NoCredentialsError", "Unable to locate credentials"), "no credentials"),
        (named("DefaultCredentialsError"), "no credentials"),
        (http_error(401), "refuses permission"),
        (boto_error("AccessDenied", 403), "refuses permission"),
        (PermissionError("Forbidden"), "refuses permission"),
        (boto_error("NoSuchBucket", 404), "no such bucket"),
        (FileNotFoundError("The specified bucket does not exist"), "no such bucket"),
        (FileNotFoundError("b/nowhere/o"), "no such bucket"),
        (FileNotFoundError("http://h/upload/storage/v1/b/nowhere/o?name=a"), "no such bucket"),
        (FileNotFoundError("b/bucket/o/quota%2Fa.txt"), "no such file"),
        (http_error(507), "is full"),
        (boto_error("QuotaExceeded", 400), "is full"),
        (ConnectionRefusedError("refused"), "cannot be reached"),
        (named("ClientPayloadError"), "cannot be reached"),
        (named("FSTimeoutError"), "cannot be reached"),
        (http_error(429), "the store failed"),
        (http_error(503), "the store failed"),
        (OSError(28, "No space left on device", "/tmp/x"), None),
        (PermissionError(13, "Permission denied", "/tmp/x"), None),
        (FileNotFoundError(2, "No such file", "/tmp/x"), None),
        (KeyError("x"), None),
        (FileNotFoundError("http://h/upload/storage/v1/b/c/o?upload_id=1"), "the store failed"),
    ],
)
def test_errors_of_libraries_become_sentences(error: Exception, message: str | None):
    if message is None:
        with pytest.raises(type(error)), explained("s3://bucket/a"):
            raise error
    else:
        outer = FileNotFoundError("x") if message == "cannot be reached" else OSError("failed")
        outer.__cause__ = error  # as the libraries raise them
        wanted = pytest.raises(AddressError, match=f"^s3://bucket/a: .*{message}")
        with wanted, explained("s3://bucket/a"):
            raise outer
        with pytest.raises(type(error)), explained("/local"):
            raise error


@pytest.mark.parametrize(
    ("library", "names"),
    [
        (
            "aiohttp",
            "ClientConnectionError ClientConnectorError ClientConnectorDNSError ClientOSError "
            "ClientPayloadError ClientConnectionResetError ClientProxyConnectionError "
            "ConnectionTimeoutError ServerDisconnectedError ServerTimeoutError SocketTimeoutError",
        ),
        (
            "botocore.exceptions",
            "EndpointConnectionError ConnectTimeoutError ConnectionClosedError ReadTimeoutError "
            "ProxyConnectionError ResponseStreamingError",
        ),
        ("httpx", "ConnectError ConnectTimeout ReadError ReadTimeout RemoteProtocolError"),
    ],
)
def test_stores_that_cannot_be_reached_are_known_by_each_library(library: str, names: str):
    module = pytest.importorskip(library)
    for name in names.split():
        # Without their own constructors and texts, which name no class.
        silent = type(name, (getattr(module, name),), {"__str__": lambda self: ""})
        error = silent.__new__(silent)
        with pytest.raises(AddressError, match="cannot be reached"), explained("s3://bucket/a"):
            raise error


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("aiohttp", "ClientConnectorCertificateError ClientConnectorSSLError"),
        ("botocore.exceptions", "SSLError"),
    ],
)
def test_a_certificate_that_is_refused_keeps_its_error(library: str, names: str):
    module = pytest.importorskip(library)
    for name in names.split():
        refused = type(name, (getattr(module, name),), {"__str__": lambda self: "self-signed"})
        with pytest.raises(refused, match="self-signed"), explained("s3://bucket/a"):
            raise refused.__new__(refused)


def reason(address: str, variables: dict[str, str]) -> str:
    with pytest.raises((AddressError, FileNotFoundError)) as caught, explained(address):
        location(address, "data").read_text()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (403, "refuses permission"),
        (500, "the store failed, more often than its library tries again"),
    ],
)
def test_faults_become_sentences(
    kind: str,
    fault: int,
    message: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    store: Store = request.getfixturevalue(kind)
    (location(store.address, "data") / "a.txt").write_text("a")
    with store.proxied(lambda *_: fault):
        monkeypatch.setattr("gcsfs.retry.asyncio.sleep", _no_sleep)
        found = reason(f"{store.address}/a.txt", {})
    assert message in found
    assert f"{store.address}/a.txt" in found


async def _no_sleep(*_: object) -> None:
    pass


@pytest.mark.slow
def test_wrong_buckets_and_servers_that_are_not_there_are_named(s3: Store):  # noqa: F811
    assert "there is no such bucket" in reason("s3://no-such-bucket-here/a.txt", {})
    assert "no such file" in reason(f"{s3.address}/none.txt", {})
    from stores import environment, free_port

    with environment(
        {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_MAX_ATTEMPTS": "1"}
    ):
        assert "cannot be reached" in reason(f"{s3.address}/a.txt", {})
