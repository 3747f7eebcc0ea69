"""Runs resume on text as they were begun on it: in memory, or prepared on disk."""

import functools
import random

import pytest
from recipe_cases import Recipe, losses, shared

from zoo.data.prepared import choice
from zoo.data.prepared.choice import Wanted, prepared_by_itself
from zoo.data.prepared.prepare import prepare
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.tasks import begun, language

__all__ = ["shared"]


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "IN_MEMORY", 100)
    monkeypatch.setattr(choice, "prepare", functools.partial(prepare, workers=1))
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"a text of number {i}")
    return Wanted(f"{tmp_path}/texts/*.txt", "text", 0.05, "bytes")


@pytest.fixture
def decide(tmp_path, monkeypatch):
    """`decide(fingerprint, …)`: at a start of the run, whose checkpoint has that fingerprint."""
    run = Run(language.Config(run_dir=tmp_path / "run", steps=2))
    run.folder.mkdir()

    def once(name, make):
        if not (run.folder / name).exists():
            make(run.folder / name)
        return run.folder / name

    monkeypatch.setattr(run, "once", once)

    def start(fingerprint, *given):
        meta = fingerprint and {"fingerprint": fingerprint}
        monkeypatch.setattr(begun, "read_meta", lambda folder: meta)
        return begun.for_memory(run)(*given), (run.folder / begun.RECORD).exists()

    return start


def test_small_text_is_in_memory_without_a_record(decide, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "IN_MEMORY", 10_000)
    assert decide(None, wanted, tmp_path) == (True, False)
    assert decide("some", wanted, tmp_path) == (True, False)


def test_prepared_text_stays_prepared(decide, wanted, tmp_path):
    assert decide(None, wanted, tmp_path) == (False, True)
    assert decide("some", wanted, tmp_path) == (False, True)
    with pytest.raises(RunError, match=r"was begun on text that was prepared in data\.cache, and"):
        decide("some", wanted, None)


def test_text_in_memory_stays_there_however_large(decide, wanted, tmp_path, monkeypatch):
    assert decide(None, wanted, None) == (True, False)
    monkeypatch.setattr(choice, "BY_ITSELF", 100)
    assert decide("some", wanted, tmp_path) == (True, True)
    assert decide("some", wanted, tmp_path) == (True, True)


def test_runs_without_a_record_on_text_that_was_prepared(decide, wanted, tmp_path):
    prepared = prepared_by_itself(wanted, tmp_path)
    assert prepared is not None
    assert decide(prepared.fingerprint, wanted, tmp_path) == (False, True)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_resumes_on_much_text(shared, tmp_path):
    """Without a cache a run begins as one did before text was prepared by itself."""
    words = [f"word{i}" for i in range(1000)]
    choose = random.Random(0)
    (tmp_path / "large").mkdir()
    for i in range(35):
        text = " ".join(choose.choices(words, k=150_000))
        (tmp_path / "large" / f"{i}.txt").write_text(text)
    recipe, run_dir = Recipe("lm", shared), tmp_path / "run"
    flags = (f"--data.files={tmp_path}/large/*.txt", "--eval-batches=1", "--eval-every=1000")
    recipe.run(run_dir, *flags, "--steps=2", "--data.cache=None")
    assert not (run_dir / begun.RECORD).exists()
    output = recipe.run(run_dir, *flags, "--steps=4")
    assert f"resumed {run_dir} at step 2" in output
    assert list(losses(run_dir)) == [1, 2, 3, 4]
