"""Object stores on loopback for tests, in processes of their own, and a proxy that makes faults.

`s3` and `gs` are fixtures: a `Store` with a bucket that no other test has. Its `environment` is set
in this process, and is what subprocesses need. `store.proxied(fault)` puts a proxy before it, which
asks `fault(number, method, path)` at each request: None lets it pass, a number is answered as that
status, "drop" cuts the connection before the request is passed on, "half" in the midst of the
answer to it, and a float is a delay in seconds before it passes. `fault` may also kill a process.
"""

import contextlib
import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Fault = Callable[[int, str, str], "int | float | str | None"]
S3 = "from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
# Its parser takes a file's last byte, if that is a carriage return, for one of the boundary's.
GS = """
from gcp_storage_emulator import server as emulator
class Parser(emulator.BytesParser):
    def parsebytes(self, text):
        return super().parsebytes(text.replace(b"\\r\\n--==", b"\\r\\r\\n--=="))
emulator.BytesParser = Parser
server = emulator.create_server("127.0.0.1", {port}, in_memory=True)
server.run()
"""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Store:
    """A bucket of a running store."""

    scheme: str
    port: int
    bucket: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    @contextlib.contextmanager
    def proxied(self, fault: Fault) -> Iterator[dict[str, str]]:
        """Within, the store that the environment names is a proxy before this one."""
        with (
            proxy(self.port, fault) as port,
            environment(_endpoint(self.scheme, port)) as variables,
        ):
            yield variables


def _endpoint(scheme: str, port: int) -> dict[str, str]:
    if scheme == "s3":
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """Within, these variables are set, and file systems are made anew."""
    import fsspec

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _forget(fsspec)
    try:
        yield variables
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _forget(fsspec)


def _forget(fsspec) -> None:
    for protocol in ("s3", "gs"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()


@contextlib.contextmanager
def server(program: str) -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", program.format(port=port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, "the store did not start"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    pytest.importorskip("moto")
    with server(S3) as port:
        yield port


@pytest.fixture(scope="session")
def gs_port() -> Iterator[int]:
    pytest.importorskip("gcp_storage_emulator")
    with server(GS) as port:
        yield port


@pytest.fixture
def s3(s3_port: int) -> Iterator[Store]:
    with environment(_endpoint("s3", s3_port)) as variables:
        import fsspec

        store = Store("s3", s3_port, f"bucket-{uuid.uuid4().hex[:12]}", variables)
        fsspec.filesystem("s3").mkdir(store.bucket)
        yield store


@pytest.fixture
def gs(gs_port: int) -> Iterator[Store]:
    with environment(_endpoint("gs", gs_port)) as variables:
        import fsspec

        store = Store("gs", gs_port, f"bucket-{uuid.uuid4().hex[:12]}", variables)
        fsspec.filesystem("gs", token="anon").mkdir(store.bucket)
        yield store


@contextlib.contextmanager
def proxy(target: int, fault: Fault) -> Iterator[int]:
    """A proxy before the server at a port; see the file's first lines."""
    lock, count = threading.Lock(), [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self._chunks()
            with lock:
                count[0] += 1
                number = count[0]
            answer = fault(number, self.command, self.path)
            if answer == "drop":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if isinstance(answer, int) and answer:
                self.send_response(answer)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if isinstance(answer, float):
                time.sleep(answer)
            self._pass(body, half=answer == "half")

        def _chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return b""
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _pass(self, body: bytes, *, half: bool) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
            headers = {
                name: value
                for name, value in self.headers.items()
                if name.lower()
                not in ("transfer-encoding", "content-length", "connection", "expect")
            }
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = response.getheader("Content-Length")
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(content))
            )
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if half else content)
            connection.close()
            if half:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # a client that went away
            pass

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        try:
            yield running.server_address[1]
        finally:
            running.shutdown()


def tree(folder: Path) -> dict[str, bytes]:
    """The files below a folder, or a location, by their names."""
    return {
        str(path)[len(str(folder)) + 1 :]: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
