"""Checks of the claims in README.md, one command per claim; exit code 1 where one fails.

python -m claims meshes digits --precision bf16
python -m claims resume dates
python -m claims tracked digits
python -m claims average digits

Each trains in processes of their own, on the CPU; flags after `--` go to `train`.
"""

import argparse
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
MESH, DEVICES = "fsdp=2,tensor=2", 4
# Largest relative difference of the losses of one step on a mesh and on one device. In bf16 the
# sums that a mesh cuts are rounded by 0.4% in other places, which each step carries on.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


def main() -> None:
    """Check one claim."""
    parser = argparse.ArgumentParser(prog="python -m claims", description=__doc__.splitlines()[0])
    parser.add_argument("claim", choices=sorted(CLAIMS))
    parser.add_argument("network", choices=("digits", "dates"))
    parser.add_argument("--precision", choices=TOLERANCES, default="fp32")
    parser.add_argument("--folder", type=Path, default=Path("runs/claims"), help="of the runs")
    parser.add_argument("--steps", type=int, default=20)
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given = parser.parse_args(arguments[:split])
    flags = [f"--precision={given.precision}", f"--steps={given.steps}", *arguments[split + 1 :]]
    folder = (given.folder / f"{given.claim}-{given.network}-{given.precision}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    print(CLAIMS[given.claim](given.network, folder, flags))


def meshes(network: str, folder: Path, flags: list[str]) -> str:
    """The losses on a mesh of four devices are those on one."""
    train(network, folder / "one", *flags, "--log-every=1")
    train(network, folder / "mesh", *flags, "--log-every=1", f"--mesh={MESH}")
    one, mesh = losses(folder / "one"), losses(folder / "mesh")
    require(len(one) > 1 and one.keys() == mesh.keys(), f"other steps: {[*one]}, {[*mesh]}")
    difference = max(abs(mesh[step] / one[step] - 1) for step in one)
    tolerance = TOLERANCES[flags[0].partition("=")[2]]
    require(difference <= tolerance, f"losses differ by {difference:.1e}: {one}, {mesh}")
    first = abs(mesh[1] / one[1] - 1)
    return (
        f"{len(one)} losses on {MESH} and on one device differ by at most {difference:.1e}, "
        f"the first by {first:.1e}"
    )


def resume(network: str, folder: Path, flags: list[str]) -> str:
    """A run killed by SIGKILL and resumed ends in the same bits as one that was not."""
    flags = [*flags, "--log-every=1", "--checkpoint-every=2", "--eval-every=4"]
    train(network, folder / "whole", *flags)
    killed, steps = folder / "killed", len(losses(folder / "whole"))
    process = start(network, killed, *flags)
    while process.poll() is None and max(losses(killed), default=0) < steps // 2:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    require(process.returncode == -signal.SIGKILL, "it ended before it was killed")
    behind = max(losses(killed))
    require("resumed" in train(network, killed, *flags), "it did not resume")
    lines = [lines_of(folder / "whole"), lines_of(killed)]
    unequal = next((pair for pair in zip(*lines, strict=False) if pair[0] != pair[1]), None)
    require(lines[0] == lines[1], f"other metrics: {unequal or [*map(len, lines)]}")
    for name in ("model", "average"):
        files = [folder / run / name / "model.safetensors" for run in ("whole", "killed")]
        require(files[0].read_bytes() == files[1].read_bytes(), f"other bits: {files}")
    return (
        f"killed after step {behind} of {steps} and resumed: the same metrics, model and average, "
        "bit for bit"
    )


def tracked(network: str, folder: Path, flags: list[str]) -> str:
    """TensorBoard's and Weights & Biases' files are in the run folder; no network is needed."""
    train(network, folder, *flags, "--log-every=1", "--track=tensorboard,wandb")
    [events], found = folder.glob("tensorboard/events.*"), {}
    for event in tensorboard_events(events):
        for point in event.summary.value:
            if point.tag == "loss":
                found[event.step] = point.simple_value
    require(found == losses(folder), f"{found} is not {losses(folder)}")
    run_id = json.loads((folder / "trackers.json").read_text())["wandb"]
    require(any(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")), f"no file of {run_id}")
    return f"TensorBoard has the loss of each of {len(found)} steps, wandb an offline run {run_id}"


def tensorboard_events(path: Path) -> Iterator[Any]:
    """The events in a file: each is between its length and two checksums."""
    from tensorboardX.proto.event_pb2 import Event

    content, position = path.read_bytes(), 0
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        yield Event.FromString(content[position + 12 : position + 12 + length])
        position += length + 16


def average(network: str, folder: Path, flags: list[str]) -> str:
    """The average of the weights, published and loaded, is as good as the run measured it."""
    train(network, folder, *flags)
    measured = {k: x for k, x in lines_of(folder)[-1].items() if k.startswith("average/")}
    answer = run([sys.executable, "-m", "evaluate", network, folder / "average"])
    loaded = json.loads(answer.splitlines()[-1])
    require({"eval_loss", "eval_accuracy"} <= loaded.keys(), f"found {loaded}")
    for name, value in loaded.items():
        require(np.isclose(value, measured[f"average/{name}"], rtol=1e-5), f"{loaded}, {measured}")
    return f"the published average, loaded: {loaded}"


CLAIMS = {"meshes": meshes, "resume": resume, "tracked": tracked, "average": average}


def start(network: str, run_dir: Path, *flags: str) -> subprocess.Popen:
    """A training in a process of its own, on virtual devices of the CPU."""
    flags_of_xla = os.environ.get("XLA_FLAGS", "")
    devices = f"{flags_of_xla} --xla_force_host_platform_device_count={DEVICES}"
    return subprocess.Popen(
        [sys.executable, "-m", "train", network, f"--run-dir={run_dir}", *flags],
        cwd=HERE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, "WANDB_MODE": "offline"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(network: str, run_dir: Path, *flags: str) -> str:
    """The output of a training."""
    process = start(network, run_dir, *flags)
    output, _ = process.communicate()
    require(process.returncode == 0, output)
    return output


def run(command: list[Any]) -> str:
    """The output of another command of this project."""
    return subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True).stdout


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole, without the speeds."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{k: x for k, x in line.items() if "per_second" not in k} for line in lines]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step that a run has logged."""
    return {line["step"]: line["loss"] for line in lines_of(run_dir) if "loss" in line}


def require(holds: bool, otherwise: str) -> None:
    """End the program with 1 and a message, unless something holds."""
    if not holds:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
