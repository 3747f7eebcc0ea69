"""zoo.common.addresses: locations, globs, and what a store's errors become."""

import subprocess
import sys
from pathlib import Path

import pytest
from stores import Store, gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common.addresses import (
    AddressError,
    explained,
    files_matching,
    is_remote,
    location,
    scheme_of,
)


def test_local_paths_stay_paths(tmp_path: Path):
    assert location("~/x", "data") == Path.home() / "x"
    assert location(tmp_path, "data") == tmp_path
    assert location(f"file://{tmp_path}", "data") == tmp_path
    assert not is_remote("a:b/c.txt")
    assert not is_remote("file:///x")
    assert is_remote("s3://b/x")
    assert is_remote(Path("s3://b/x"))  # which makes one slash of the two
    assert scheme_of("S3://b") == "s3"


def test_light_until_an_address_is_given():
    program = (
        "import sys; from zoo.common.addresses import location; location('/x', 'data');"
        "assert not {'upath', 'fsspec', 's3fs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/x", "data='ftp://host/x': unknown scheme ftp://; known are s3://"),
        ("s3://", "data='s3://': there is no bucket or host"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(address: str, message: str):
    with pytest.raises(ValueError, match=message):
        location(address, "data")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"data='gs://b/x' needs an extra: pip install 'zoo\[gs\]'"
    ):
        location("gs://b/x", "data")


def test_globs_of_memory_and_of_files_agree(tmp_path: Path):
    root = location("memory://folder", "data")
    for base in (tmp_path, root):
        for name in ("b/2.txt", "b/c/3.txt", "a.txt", "x.csv"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text(name)
    for pattern in ("*.txt", "**/*.txt", "b/*.txt", "a.txt"):
        here = files_matching(f"{tmp_path}/{pattern}", "data")
        there = files_matching(f"memory://folder/{pattern}", "data")
        assert list(here.values()) == list(there.values())
        assert len(here) >= 1
        assert [path.read_text() for path in here] == [path.read_text() for path in there]
    assert list(files_matching("memory://folder/b/*/3.txt", "data").values()) == ["c/3.txt"]
    with pytest.raises(FileNotFoundError, match=r"no file matches 'memory://folder/\*.gz'"):
        files_matching("memory://folder/*.gz", "data")
    with pytest.raises(FileNotFoundError, match=r"is a folder: add"):
        files_matching("memory://folder/b", "data")
    with pytest.raises(FileNotFoundError, match=r"is a folder: add"):
        files_matching(str(tmp_path / "b"), "data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_stores_are_read_and_written(kind: str, request: pytest.FixtureRequest):
    store: Store = request.getfixturevalue(kind)
    root = location(store.address, "data")
    for name in ("b/2.txt", "b/c/3.txt", "a.txt"):
        (root / name).write_text(name)
    found = files_matching(f"{store.address}/**/*.txt", "data")
    assert sorted(found.values()) == ["a.txt", "b/2.txt", "b/c/3.txt"]
    assert [path.read_text() for path in found] == [*found.values()]
    assert location(f"{store.address}/b/2.txt", "data").read_text() == "b/2.txt"
    # Another writer's file is seen: no listing is remembered.
    (location(store.address, "data") / "b" / "4.txt").write_text("4")
    assert len(files_matching(f"{store.address}/b/*.txt", "data")) == 2


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
