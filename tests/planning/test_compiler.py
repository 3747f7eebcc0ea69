"""The TPU's compiler as a process of its own, and its version."""

import importlib.metadata
import re
import sys

import pytest

from zoo.planning import compiler, job, targets


def ended_by(code, **options):
    with pytest.raises(compiler.CompilerError) as error:
        compiler.run([sys.executable, "-c", code], "the compiler of v5e:4x4", **options)
    return str(error.value)


def test_an_abort_of_the_compiler_is_a_sentence():
    code = (
        "import os, sys\n"
        "sys.stderr.write('starting\\nF1123 x.cc:9] Check failed: a == b\\n***\\n')\n"
        "sys.stderr.flush(); os.abort()"
    )
    message = ended_by(code)
    assert "the compiler of v5e:4x4 was ended by signal 6, without a program: F1123" in message
    assert "Check failed: a == b; another --mesh, --quick, or the libtpu that this jax" in message
    message = ended_by("raise SystemExit(3)")
    assert "ended with status 3, without a program: it wrote nothing" in message


def test_a_long_compilation_says_that_it_goes_on(tmp_path, monkeypatch):
    """However slow the machine is: this one goes on until it has been said twice."""
    said, end = [], tmp_path / "end"

    def say(line, flush):
        said.append(line)
        if len(said) == 2:
            end.touch()

    code = f"""import os, time
for _ in range(3000):
    if os.path.exists({str(end)!r}):
        break
    time.sleep(0.01)
1 / 0
"""
    monkeypatch.setattr(compiler, "print", say, raising=False)
    assert "ZeroDivisionError" in ended_by(code, every=0.05)
    assert len(said) >= 2
    assert all(re.fullmatch(r"  compiling for \d+ s …", line) for line in said)


def test_steps_that_jax_keeps_in_another_way_are_compiled_here():
    class Lowered:
        def compile(self, compiler_options):
            return compiler_options

    options = {"exec_time_optimization_effort": -1.0}
    target = targets.parse("v5e:4x4")
    assert compiler.compile_apart(Lowered(), target, options) == options


@pytest.mark.parametrize(
    ("found", "pinned", "is_other"),
    [
        ("libtpu 0.0.42.1", "libtpu==0.0.42.*", False),
        ("libtpu 0.0.43", "libtpu==0.0.42.*", True),
        ("libtpu 0.0.421", "libtpu==0.0.42.*", True),
        ("libtpu 0.0.4", "libtpu==0.0.42", True),
        ("libtpu 0.0.42", "libtpu==0.0.42", False),
        (None, "libtpu==0.0.42.*", False),
        ("libtpu 0.0.42", None, False),
    ],
)
def test_another_compiler_than_jax_asks_for_is_a_warning(found, pinned, is_other, monkeypatch):
    monkeypatch.setattr(compiler, "version", lambda: found)
    monkeypatch.setattr(compiler, "pinned", lambda: pinned)
    warning = compiler.mismatch()
    assert (warning is not None) == is_other
    if is_other:
        assert f"{found} is not the compiler that jax" in warning
        assert f"({pinned})" in warning


def test_jax_names_the_compiler_that_it_asks_for(monkeypatch):
    assert compiler.pinned().startswith("libtpu==")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["libtpu>=1; extra == 'x'"])
    assert compiler.pinned() is None


def test_running_out_of_memory_in_the_compiler_is_a_plan(monkeypatch):
    def refuse(*given):
        raise compiler.OutOfMemory("RESOURCE_EXHAUSTED: Used 25.10G of 15.75G hbm.")

    class Traced:
        def lower(self):
            return self

    monkeypatch.setattr(compiler, "compile_apart", refuse)
    found, message = job._compile(Traced(), targets.parse("v5e:4x4"), quick=False)
    assert found is None
    assert job.wanted_bytes(message) == 25.1 * 2**30
