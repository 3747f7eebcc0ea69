"""Every test sees eight devices and strict numerics, so that no sharding test ever skips."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xla

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla.flags(devices=8)}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jaxtyping
import pytest
import typechecker
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jaxtyping.jaxtyped = typechecker.jaxtyped  # before a module of the zoo is imported
gc.set_threshold(50_000)  # of what JAX keeps little is garbage: a fourteenth of the tests' time


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is compiled, most of a test's time, for the other workers and for the next run."""
    if hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


# Whole runs, in processes of their own: begun last, they would keep one worker busy at the end.
FIRST = (
    "test_faults.py",
    "test_soak.py",
    "test_multiprocess.py",
    "test_remote_servers.py",
    "test_remote_data.py",
    "test_recipes.py",
    "test_additions.py",
    "test_examples.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, or are the largest, so that workers end together."""
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.path.name not in FIRST, -sizes[item.path]))


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Compiles are compiles, whatever an earlier run of the tests has left."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or JAX goes on as its first compile of this process found it
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def cache_put_back() -> Iterator[None]:
    """A run in this process may keep its programs elsewhere; then the tests' own cache is back."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Without the checks of types that pytest alone has."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def golden_model(tmp_path) -> Path:
    """A golden model with the tokenizer of its task."""
    golden = Path(__file__).parent / "golden"
    folder = tmp_path / "llama3"
    shutil.copytree(golden / "hf" / "llama3", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden / "scores" / name, folder)
    return folder


@pytest.fixture
def no_curves(monkeypatch) -> None:
    """Runs that do not draw their curves, which would take a third of the time of small ones."""
    monkeypatch.setattr("zoo.runs.recorder.plot_curves", lambda *paths: None)
