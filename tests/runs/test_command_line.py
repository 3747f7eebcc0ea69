"""The command line of a recipe: a configuration of its flags, and errors as messages."""

import signal
import sys
from dataclasses import dataclass

import pytest
from test_run import Model, RecipeConfig

from zoo.runs.checkpoint import CheckpointError
from zoo.runs.command_line import cli
from zoo.runs.processes import RunError


def call(main, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["recipe", *flags])
    cli(RecipeConfig, main, "recipes.some")


def test_command_line_builds_the_configuration(monkeypatch):
    made = []
    call(made.append, monkeypatch, "--steps", "7", "--model.width", "4", "--mesh", "data=-1")
    assert made == [RecipeConfig(steps=7, mesh="data=-1", model=Model(width=4))]


@pytest.mark.parametrize("error", [RunError, CheckpointError, FileNotFoundError, ImportError])
def test_user_errors_print_a_message(error, monkeypatch, capsys):
    def main(config):
        raise error("this is how")

    with pytest.raises(SystemExit) as exit:
        call(main, monkeypatch)
    assert exit.value.code == 1
    assert capsys.readouterr().err.startswith("error: this is how\n")
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    with pytest.raises(error):
        call(main, monkeypatch)


def test_notes_of_an_error_are_printed(monkeypatch, capsys):
    def main(config):
        error = ValueError("this is how")
        error.add_note("and where")
        error.add_note(
            "---\nJAX has removed frames. Set JAX_TRACEBACK_FILTERING=off to include these."
        )
        raise error

    with pytest.raises(SystemExit):
        call(main, monkeypatch)
    assert capsys.readouterr().err == (
        "error: this is how\nand where\n(ZOO_TRACEBACK=1 shows where)\n"
    )


def test_internal_errors_keep_their_traceback(monkeypatch):
    def main(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(main, monkeypatch)


def test_interrupts_exit_without_traceback(monkeypatch, capsys):
    def main(config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        call(main, monkeypatch)
    assert exit.value.code == 128 + signal.SIGINT
    assert "the same command resumes" in capsys.readouterr().err


@dataclass(frozen=True)
class Wide:
    width: int = 1


@dataclass(frozen=True)
class Deep:
    depth: int = 1


def test_a_command_line_chooses_among_configurations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train", "deep", "--depth", "3"])
    found: list = []
    cli(Wide | Deep, found.append, "train")
    assert found == [Deep(3)]
