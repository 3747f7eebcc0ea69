import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import zoo
from zoo import __main__ as main
from zoo import mlp
from zoo.publishing import PublishError
from zoo.publishing import shelf as the_shelf
from zoo.publishing.formats import WEIGHTS
from zoo.runs.command_line import _ELSEWHERE, parse


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    config = mlp.Config(in_size=4, out_size=2, hidden_size=8)
    card = "Tells irises from roses.\n\nMore of it."
    zoo.save(tmp_path / "flowers", mlp.MLP(config, key=jax.random.key(0)), card=card)
    monkeypatch.setattr(the_shelf, "_shelf", lambda: tmp_path)
    return tmp_path


def test_list_shows_each_model(shelf, capsys):
    main.list_models()
    lines = capsys.readouterr().out.splitlines()
    assert "description" in lines[0]
    assert any("gemma3_text" in line for line in lines)
    [line] = [line for line in lines if line.strip().startswith("flowers")]
    assert " mlp " in line
    assert "130" in line  # 4·8 + 8 + 8·8 + 8 + 8·2 + 2
    assert "Tells irises from roses." in line


def test_description_shows_card_and_parameters(shelf, capsys):
    for name in ("flowers", str(shelf / "flowers")):
        main.describe(name, mesh="fsdp=2")
        output = capsys.readouterr().out
        for text in ("Tells irises", "hidden_size=8", "head.weight", "8×2", "fsdp", "all"):
            assert text in output


def test_verify_names_damaged_models(shelf, capsys):
    main.verify()
    assert "flowers: 2 files are as they were written" in capsys.readouterr().out
    weights = shelf / "flowers" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(PublishError, match="damaged: flowers"):
        main.verify(("flowers",))
    assert "model.safetensors is damaged" in capsys.readouterr().out


def test_command_line_lists_and_helps(shelf, capsys):
    main.main([])
    assert "flowers" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert not ended.value.code
    assert "describe" in capsys.readouterr().out


def test_a_reader_that_leaves_ends_a_command_quietly():
    command = ["zoo", "plan", "--help"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()  # as `| head` does
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("platform", ["nothing", "rocm"])  # JAX has an error of its own for each
def test_a_platform_without_devices_is_named(platform):
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "describe", "lm-python", "--mesh", "data=-1"],
        env=os.environ | {"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith(f"error: JAX_PLATFORMS='{platform}': JAX finds")
    assert "Traceback" not in done.stderr


def test_flags_of_other_programs_are_translated(capsys):
    from recipes import lm

    meant = {
        "--lr": "--optimizer.learning-rate",
        "--batch": "--data.batch-size",
        "--max_steps": "--steps",
        "--num-train-epochs": "--epochs",
        "--output-dir": "--run-dir",
        "--n-layer": "--model.num-layers",
        "--block-size": "--data.seq-len",
        "--model.hidden-dim": "--model.d-model",
    }
    with pytest.raises(SystemExit):
        parse(lm.Config, "python -m recipes.lm", [f"{given}=3" for given in meant])
    said = capsys.readouterr().err.splitlines()
    for given, flag in meant.items():
        assert f"{given.replace('_', '-')}: did you mean {flag}?" in said


def test_flags_are_translated_to_those_of_the_command(capsys):
    from recipes import generate

    with pytest.raises(SystemExit):
        parse(generate.Config, "python -m recipes.generate", ["m", "--lr=3", "--max-tokens", "3"])
    errors = capsys.readouterr().err
    assert "--max-tokens: did you mean --max-new-tokens?" in errors.splitlines()
    assert "learning-rate" not in errors


def test_flags_are_translated_to_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main.main(["plan", "--help"])
    lines = (Path(__file__).parent / "recipe_flags.txt").read_text().split()
    known = {line for line in lines if line.startswith("--")}
    known |= {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert {"--lora.rank", "--seq-len"} <= known  # adapters have a prefix
    for given, meant in _ELSEWHERE.items():
        assert f"--{meant}" in known
        assert f"--{given}" not in known


@pytest.mark.parametrize("flag", ["--run-dir", "--compilation-cache", "--work-dir"])
def test_empty_paths_are_refused(flag, capsys):
    """As of a variable that is not set: a run would be scattered over the working directory."""
    from recipes import lm

    with pytest.raises(SystemExit):
        parse(lm.Config, "python -m recipes.lm", [flag, ""])
    assert flag.strip("-") in capsys.readouterr().err.replace("_", "-")


@pytest.mark.parametrize("command", ["plan", "describe"])
def test_wrong_flags_name_the_command_at_hand(capsys, command):
    with pytest.raises(SystemExit):
        main.main([command, "llama3-8b", "--target", "cpu:1", "--mash", "fsdp=1"])
    said = capsys.readouterr()
    hints = [line for line in (said.out + said.err).splitlines() if "--help" in line]
    assert len(hints) == 1
    assert f"python -m zoo {command} --help" in hints[0]


def test_report_names_versions_devices_and_settings(monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    main.report()
    output = capsys.readouterr().out
    lines = [line.strip() for line in output.splitlines()]
    assert lines[0].startswith(f"zoo {zoo.__version__} in ")
    for name in ("jax", "jaxlib", "equinox", "optax", "tensorstore", "grain", "numpy"):
        assert f"{name} {importlib.metadata.version(name)}" in lines
    assert "backend cpu, process 0 of 1" in lines
    assert "7: cpu" in lines
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in lines
    assert "a secret" not in output


def test_report_names_packages_that_are_missing(monkeypatch, capsys):
    found = [x for x in importlib.metadata.distributions() if x.name not in ("optax", "s3fs")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    main.report()
    lines = capsys.readouterr().out.splitlines()
    assert {"  optax is missing", "  s3fs is missing"} <= {*lines}


def test_report_says_that_devices_are_missing(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(jax, "devices", broken)
    main.report()
    assert "none: no driver" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["zoo", "report"], ["recipes.mlp", "--help"]])
def test_ctrl_c_within_an_import_ends_a_command(command, tmp_path):
    """As where an import swallows a KeyboardInterrupt, which extensions of C++ do."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "equinox":
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Finder())
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")


def test_ctrl_c_within_a_callback_of_the_garbage_collector_comes_again():
    code = """
import gc, signal, time
from zoo.common import startup

def callback(phase, info):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)

startup.as_usual()
gc.callbacks.append(callback)
try:
    gc.collect()
    print("dropped")
    time.sleep(60)
except KeyboardInterrupt:
    print("came again")
"""
    command = [sys.executable, "-c", code, "-m", "zoo"]  # taken for a program of the zoo's
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("dropped\ncame again\n", "")


def test_ctrl_c_within_an_import_is_left_to_other_programs():
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import zoo; "
    code += "print(signal.getsignal(signal.SIGINT))"  # a shell's background jobs ignore it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "default_int_handler" in done.stdout
