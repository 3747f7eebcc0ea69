"""Checks of the claims in README.md, one command per claim; exit code 1 where one fails.

python -m claims resume
python -m claims peft

They train in processes of their own, on eight virtual devices of the CPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
MESH, DEVICES = "data=2,fsdp=4", 8
SEQUENCES = ["MKTAYIAKQR", "FWYAGFWYLL"]


def main() -> None:
    """Check one claim."""
    parser = argparse.ArgumentParser(prog="python -m claims", description=__doc__.splitlines()[0])
    parser.add_argument("claim", choices=("resume", "peft"))
    parser.add_argument("--folder", type=Path, default=Path("runs/claims"), help="of the runs")
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    folder = (given.folder / given.claim).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = [f"--steps={given.steps}", f"--mesh={MESH}", "--precision=fp32", "--log-every=1"]
    print({"resume": resume, "peft": peft}[given.claim](folder, flags))


def resume(folder: Path, flags: list[str]) -> str:
    """A run killed by SIGKILL and resumed ends in the same bits as one that was not."""
    flags = [*flags, "--checkpoint-every=2"]
    train(folder, "whole", *flags)
    killed, steps = folder / "runs" / "killed", len(losses(folder / "runs" / "whole"))
    process = start(folder, "killed", *flags)
    while process.poll() is None and max(losses(killed), default=0) < steps // 2:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    require(process.returncode == -signal.SIGKILL, "it ended before it was killed")
    behind = max(losses(killed))
    require("resumed" in train(folder, "killed", *flags), "it did not resume")
    require(losses(killed) == losses(folder / "runs" / "whole"), "other losses")
    for name in ("model/model.safetensors", "adapters/adapter_model.safetensors"):
        files = [folder / "runs" / run / name for run in ("whole", "killed")]
        require(files[0].read_bytes() == files[1].read_bytes(), f"other bits: {files}")
    return f"killed after step {behind} of {steps} on {MESH} and resumed: the same bits"


def peft(folder: Path, flags: list[str]) -> str:
    """PEFT opens the adapters over the base, and its vectors of the tokens are the zoo's."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer, EsmForMaskedLM

    import zoo

    train(folder, "run", *flags)
    run, base = folder / "runs" / "run", folder / "runs" / "base"
    adapted = PeftModel.from_pretrained(EsmForMaskedLM.from_pretrained(base), run / "adapters")
    tokenizer, encoder = AutoTokenizer.from_pretrained(base), adapted.base_model.model.esm.eval()
    plain = EsmForMaskedLM.from_pretrained(base).esm.eval()
    model, largest, moved = zoo.load(run), 0.0, 0.0
    for sequence in SEQUENCES:
        ids = tokenizer(sequence, return_tensors="pt").input_ids
        with torch.no_grad():
            theirs, before = (x(ids).last_hidden_state.numpy() for x in (encoder, plain))
        ours = np.asarray(model.body.hidden(ids.numpy().astype(np.int32)))
        largest = max(largest, float(np.abs(ours - theirs).max()))
        moved = max(moved, float(np.abs(theirs - before).max()))
    require(largest < 1e-4 < moved, f"differences: {largest} from the zoo's, {moved} from before")
    return f"PEFT's vectors are the zoo's to {largest:.0e}, and {moved:.2f} from those before"


def start(folder: Path, name: str, *flags: str) -> subprocess.Popen:
    """A training in a process of its own, in a folder that has all its files."""
    flags_of_xla = os.environ.get("XLA_FLAGS", "")
    devices = f"{flags_of_xla} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "train", f"--run-dir=runs/{name}", *flags],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(folder: Path, name: str, *flags: str) -> str:
    """The output of a training."""
    process = start(folder, name, *flags)
    output, _ = process.communicate()
    require(process.returncode == 0, output)
    return output


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step that a run has logged, in whole lines."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def require(holds: bool, otherwise: str) -> None:
    """End the program with 1 and a message, unless something holds."""
    if not holds:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
