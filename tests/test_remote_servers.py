"""Run folders on servers of S3 and of GCS, with kills and faults between any two requests."""

import http.client
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from recipe_cases import (
    STEPS,
    Recipe,
    assert_same_result,
    finish,
    shared,
)

__all__ = ["shared"]
pytestmark = pytest.mark.slow
LEASE = 4.0
# The recipe, with a lease of a few seconds.
DRIVER = f"""
import runpy, sys
from zoo.runs.remote.lease import Lease
Lease.__init__.__kwdefaults__["seconds"] = {LEASE}
sys.argv = ["lm", *sys.argv[1:]]
runpy.run_module("recipes.lm", run_name="__main__")
"""


class Proxy:
    """A server in front of a store; `before` is called with each request's number and line.

    It returns None to pass the request on, or a status to answer with.
    """

    def __init__(self, port: int):
        self.before: Callable[[int, str], int | None] = lambda number, line: None
        self.number = 0
        proxy, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                with lock:
                    proxy.number += 1
                    status = proxy.before(proxy.number, f"{self.command} {self.path}")
                if status is not None:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                connection = http.client.HTTPConnection("127.0.0.1", port)
                passed = {k: v for k, v in self.headers.items() if k != "Transfer-Encoding"}
                passed["Content-Length"] = str(len(body))
                connection.request(self.command, self.path, body, passed)
                answer = connection.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                if answer.status != 204:
                    self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                connection.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = pass_on

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, BrokenPipeError):
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture(params=["s3", "gs"])
def store(request, monkeypatch) -> Iterator[tuple[str, Proxy, dict[str, str]]]:
    """The address of an empty bucket on a server, the proxy before it, and the environment."""
    bucket = f"bucket{random.randrange(10**9)}"
    if request.param == "s3":
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        server.start()
        proxy = Proxy(server.get_host_and_port()[1])
        env = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "t",
            "AWS_SECRET_ACCESS_KEY": "t",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket=bucket)
    else:
        from gcp_storage_emulator.server import create_server

        server = create_server("localhost", 0, in_memory=True, default_bucket=bucket)
        server.start()
        proxy = Proxy(server._api._httpd.server_address[1])
        env = {"STORAGE_EMULATOR_HOST": proxy.url}
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    yield f"{request.param}://{bucket}/run", proxy, env
    proxy.close()
    server.stop()


def start(address: str, work: Path, shared: Path, env: dict, *more: str) -> subprocess.Popen:
    flags = Recipe("lm", shared).flags(address, f"--work-dir={work}", *more)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *flags],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="session")
def straight(shared) -> Path:
    """A run that nothing disturbs, in a local folder."""
    folder = shared / "straight"
    Recipe("lm", shared).run(folder, XLA_FLAGS="")
    return folder


def test_kills_lose_nothing(store, shared, straight, tmp_path):
    address, proxy, env = store
    work, choose, lines = tmp_path / "work", random.Random(0), []
    process = start(address, work, shared, env)
    output = finish(process)
    assert_same_result(work, straight)
    assert "the model is in " + address + "/model" in output
    total = proxy.number
    address = address.replace("/run", "/again")
    outputs = []
    for index in range(8):
        number = choose.randrange(5, total)

        def kill(n, line, process_of=lambda: process, number=number):
            lines.append(line)
            if n >= number:
                process_of().kill()
            return None

        proxy.number, proxy.before = 0, kill
        if index % 3 == 2:
            shutil.rmtree(work, ignore_errors=True)
        elif index == 0:
            work = tmp_path / "again"
        process = start(address, work, shared, env)
        output, _ = process.communicate(timeout=300)
        outputs.append(output)
        assert process.returncode in (-signal.SIGKILL, 0), output
    proxy.before = lambda number, line: None
    output = finish(start(address, work, shared, env))
    assert_same_result(work, straight)
    shutil.rmtree(work)
    output = finish(start(address, work, shared, env))
    assert f"fetched step {STEPS} from {address}" in output
    assert f"{address} has finished {STEPS} steps" in output
    assert_same_result(work, straight)


def test_faults_are_survived(store, shared, straight, tmp_path):
    address, proxy, env = store
    choose = random.Random(0)

    def fault(number, line):
        if choose.random() < 0.1:
            return choose.choice((500, 503))
        if choose.random() < 0.05:
            time.sleep(1.0)
        return None

    proxy.before = fault
    finish(start(address, tmp_path / "work", shared, env))
    proxy.before = lambda number, line: None
    shutil.rmtree(tmp_path / "work")
    finish(start(address, tmp_path / "work", shared, env))
    assert_same_result(tmp_path / "work", straight)


def test_bad_addresses_are_said_before_any_compute(store, shared, tmp_path):
    address, proxy, env = store
    missing = address.replace("bucket", "nobucket")
    output = finish(start(missing, tmp_path / "a", shared, env), 1)
    assert f"error: {missing}" in output
    assert "there is no such bucket: make it, or correct the address" in output
    proxy.before = lambda number, line: 403
    output = finish(start(address, tmp_path / "b", shared, env), 1)
    assert "the store refuses permission to these credentials" in output
    assert "Traceback" not in output


def test_a_signal_waits_for_the_copy(store, shared, straight, tmp_path):
    address, _, env = store
    process = start(address, tmp_path / "work", shared, env, "--checkpoint-every=1000")
    path = tmp_path / "work" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (path.exists() and path.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    output = finish(process, 128 + signal.SIGTERM)
    assert f"in {address}; the same command resumes the run" in output
    shutil.rmtree(tmp_path / "work")
    output = finish(start(address, tmp_path / "work", shared, env, "--checkpoint-every=1000"))
    assert f"resumed {address} at step" in output
    assert_same_result(tmp_path / "work", straight)
