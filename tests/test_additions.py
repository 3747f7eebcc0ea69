"""What CONTRIBUTING says of adding things is true: each addition is made in a copy, and used.

A folder of `additions` has `change.diff`, a newcomer's change of the zoo, and `check.py`, a program
that uses it. `python tests/test_additions.py` prints how large the changes are.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import xla

TESTS = Path(__file__).parent
ADDITIONS = TESTS / "additions"
# What a check ends with where its addition was not made.
WITHOUT = {
    "cell": "mgu",
    "norm_and_mlp": "'scale'",
    "hf_family": "model_type 'vaultgemma' is unknown",
    "recipe": "cannot import name 'cnn'",
    "logical_axis": "the logical axis 'states' is not in the sharding rules",
    "optimizer": "ademamix",
}
# Shapes and types are checked in them as pytest does here, and numbers are as strict.
RUN = """
import runpy, sys, jaxtyping
jaxtyping.install_import_hook(["zoo", "recipes"], "beartype.beartype")
for path in sys.argv[1:]:
    print(path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""
STRICT = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}


def apply(name: str, folder: Path, *options: str) -> str:
    """Apply an addition to a copy of the zoo, or with --numstat only count its lines."""
    command = ["git", "apply", *options, str(ADDITIONS / name / "change.diff")]
    # The copy is no part of a repository that may be around it.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.absolute().parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sizes(name: str, folder: Path) -> list[tuple[str, int, int]]:
    """Each file of an addition, with the lines added and removed."""
    rows = [line.split("\t") for line in apply(name, folder, "--numstat").splitlines()]
    return [(path, int(added), int(removed)) for added, removed, path in rows]


def test_every_addition_is_tested():
    assert {path.name for path in ADDITIONS.iterdir()} == WITHOUT.keys()


@pytest.mark.parametrize("name", WITHOUT)
def test_an_addition_takes_two_files(name: str):
    apply(name, TESTS.parent, "--check")
    assert 1 <= len(sizes(name, TESTS.parent)) <= 2


@pytest.mark.slow
def test_additions_work_together(tmp_path: Path):
    """All are made in one copy: none has a line of another's."""
    for package in ("zoo", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TESTS.parent / package, tmp_path / package, ignore=ignored)
    for name in WITHOUT:
        apply(name, tmp_path)
    cache = jax.config.jax_compilation_cache_dir
    done = subprocess.run(
        [sys.executable, "-c", RUN, *(ADDITIONS / name / "check.py" for name in WITHOUT)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
            **STRICT,
            "XLA_FLAGS": xla.flags(devices=8),
            **({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines().count("done") == len(WITHOUT), done.stdout


@pytest.mark.parametrize("name", WITHOUT)
def test_a_check_fails_without_its_addition(name: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, SystemExit)) as error:
        runpy.run_path(str(ADDITIONS / name / "check.py"), run_name="__main__")
    assert WITHOUT[name] in f"{error.value}{capsys.readouterr().err}"


if __name__ == "__main__":
    for name in WITHOUT:
        for path, added, removed in sizes(name, TESTS.parent):
            print(f"{name:14} {path:40} +{added:<3} -{removed}")
