"""Running the parts, each in its own process with a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A process has the GPU to itself; the rest of the memory is for CUDA's own libraries.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


class PartError(Exception):
    """A part failed; the message gives the reason."""


class Clock:
    """The time that is left for all parts."""

    def __init__(self, minutes: float):
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(0.0, self._end - time.monotonic())

    def run(
        self,
        module: str,
        function: str,
        options: dict[str, Any],
        *,
        seconds: float,
        environment: dict[str, str] | None = None,
    ) -> Any:
        """The result of a function of this package, called in a process with a time limit.

        Raises:
            PartError: it failed (the message is its error's last line), or its time was over.
        """
        limit = min(seconds, self.left())
        if limit < 1:
            raise PartError("no time was left")
        with tempfile.TemporaryDirectory() as folder:
            result, log = Path(folder, "result.json"), Path(folder, "log")
            command = [sys.executable, "-m", "benchmarks.gpu.part", module, function]
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*command, json.dumps(options), str(result)],
                    cwd=ROOT,
                    env=os.environ | ENVIRONMENT | (environment or {}),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise PartError(f"stopped after {limit:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):  # the process and its children
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code != 0:
                lines = log.read_text(errors="replace").strip().splitlines()
                errors = [line for line in lines if "Error" in line] or lines or [f"exit {code}"]
                print("\n".join(lines[-30:]), file=sys.stderr)
                raise PartError(errors[-1][:500])
            return json.loads(result.read_text())
