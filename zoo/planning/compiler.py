"""The TPU's compiler in a process of its own: it may abort, and keeps gigabytes until it ends.

    python -m zoo.planning.compiler REQUEST ANSWER

is that process.

Private names of JAX: a `Lowered` cannot be pickled, and no public function compiles a module for
the devices of a topology, so `_request` takes apart what `Lowered.compile` would compile
(`_lowering`, and `pxla` and `mlir` for its options and its bytes), and `_answer` calls what that
would call (`mlir`, `pxla`, `compiler`, `xla_client`). The stages are those of jax-ml/jax#7733,
which leaves their serialization out. Once there is one, or a compiler that does not abort its
process, `lowered.compile(compiler_options=…)` takes the place of both.
"""

import importlib.metadata
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from zoo.planning.targets import Target, parse

_STATS = (
    "generated_code_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes",
    "alias_size_in_bytes", "temp_size_in_bytes",
)  # fmt: skip


class CompilerError(ValueError):
    """The compiler gave up or died on this program; the message says with what."""


class OutOfMemory(CompilerError):
    """The program needs more of the device's memory than there is."""


def compile_apart(lowered: Any, target: Target, options: dict[str, Any]) -> Any:
    """Compile a lowered step for a slice of TPUs in a process of its own.

    Where this release of JAX keeps the parts of a lowered step in
    other places than is known here, it is compiled in this process.

    Raises:
        OutOfMemory, CompilerError: the compiler's message, or a sentence about its end.
    """
    try:
        request = _request(lowered, target, options)
    except (AttributeError, KeyError, ImportError, TypeError):
        return lowered.compile(compiler_options=options)
    with tempfile.TemporaryDirectory(prefix="zoo-plan-") as folder:
        asked, answer = Path(folder, "request"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "zoo.planning.compiler", str(asked), str(answer)]
        run(command, f"the compiler of {target.name} ({version() or 'libtpu'})")
        text, stats, failure = pickle.loads(answer.read_bytes())
    if failure:
        raise (OutOfMemory if "RESOURCE_EXHAUSTED" in failure else CompilerError)(failure)
    # Of a compiled program the two methods that a plan asks for.
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: SimpleNamespace(**stats))


def run(command: Sequence[str], what: str, every: float = 30.0) -> None:
    """Run a command to its end, and say every so many seconds for how long it has run.

    Raises:
        CompilerError: it failed or was killed, with the last lines that it wrote.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(command, stderr=errors, env={**os.environ, "PYTHONPATH": path})
        try:
            while process.poll() is None:
                try:
                    process.wait(every)
                except subprocess.TimeoutExpired:
                    print(f"  compiling for {time.monotonic() - began:.0f} s …", flush=True)
        finally:
            process.kill()
        errors.seek(0)
        written = errors.read().decode(errors="replace")
    if process.returncode:
        how = f"was ended by signal {-process.returncode}"
        if process.returncode > 0:
            how = f"ended with status {process.returncode}"
        raise CompilerError(
            f"{what} {how}, without a program: {_last(written)}; another --mesh, --quick, or the "
            f"libtpu that this jax was made with ({pinned() or 'see its extra tpu'}) may help"
        )


_ROOT = str(Path(__file__).parents[2])


def _last(written: str) -> str:
    """The line of an abort that says why; else the last one."""
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    why = [line for line in lines if re.search(r"Check failed|F\d{4} |Error|rror:", line)]
    return (why or lines or ["it wrote nothing"])[-1][:400]


def version() -> str | None:
    """The compiler and its version, such as "libtpu 0.0.42.1"; None where it is not installed."""
    try:
        return f"libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned() -> str | None:
    """The libtpu that this jax asks for, such as "libtpu==0.0.42.*"; None where it does not say."""
    for requirement in importlib.metadata.requires("jax") or []:
        if re.match(r"libtpu\b", requirement) and "tpu" in requirement.partition(";")[2]:
            return requirement.partition(";")[0].strip()
    return None


def mismatch() -> str | None:
    """A warning, where the compiler is not the one that this jax asks for."""
    found, wanted = version(), pinned()
    match = re.fullmatch(r"libtpu==([\d.]+?)(\.\*)?", wanted or "")
    if found is None or match is None:
        return None
    number = found.removeprefix("libtpu ")
    prefix = match.group(1)
    if number == prefix or (match.group(2) and number.startswith(prefix + ".")):
        return None
    return (
        f"{found} is not the compiler that jax {jax.__version__} asks for ({wanted}): it may give "
        "other figures of the memory, or abort"
    )


def _request(lowered: Any, target: Target, options: dict[str, Any]) -> dict[str, Any]:
    from jax._src.interpreters import mlir, pxla

    lowering = lowered._lowering
    kept = lowering.compile_args
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        kept["in_shardings"], kept["out_shardings"], len(kept["ordered_effects"])
    )
    return {
        "target": target.name,
        "module": mlir.module_to_bytecode(lowering.stablehlo()),
        "devices": [device.id for device in lowering._device_list],
        "arguments": {
            "tuple_args": kept["tuple_args"],
            "allow_prop_to_inputs": to_inputs,
            "allow_prop_to_outputs": to_outputs,
        },
        "options": dict(options),
        "partitioner": bool(getattr(jax.config, "jax_use_shardy_partitioner", True)),
    }


def _answer(request: dict[str, Any]) -> tuple[str, dict[str, int], str]:
    """The text of a program, the bytes of its parts, and the compiler's message if it failed."""
    from jax._src import compiler
    from jax._src.interpreters import mlir, pxla
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_use_shardy_partitioner", request["partitioner"])
    by_id = {device.id: device for device in parse(request["target"]).devices()}
    devices = np.array([by_id[id] for id in request["devices"]], dtype=object)
    client = devices[0].client
    with mlir.make_ir_context():
        module = ir.Module.parse(request["module"])
        options = pxla.create_compile_options(
            module,
            backend=client,
            np_dev=devices,
            compiler_options=request["options"],
            **request["arguments"],
        )
        try:
            compiled = compiler.backend_compile_and_load(
                client, module, xla_client.DeviceList(tuple(devices)), options, []
            )
        except jax.errors.JaxRuntimeError as error:
            return "", {}, str(error)
    stats = compiled.get_compiled_memory_stats()
    text = "\n\n".join(module.to_string() for module in compiled.hlo_modules())
    return text, {name: int(getattr(stats, name, 0)) for name in _STATS}, ""


if __name__ == "__main__":
    asked, answer = map(Path, sys.argv[1:])
    answer.write_bytes(pickle.dumps(_answer(pickle.loads(asked.read_bytes()))))
