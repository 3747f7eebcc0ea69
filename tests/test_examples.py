"""The example project does what it claims: each claim is a command in its README."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROTEINS = Path(__file__).parents[1] / "docs" / "examples" / "proteins"
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "digits_and_dates"
SMALL = {"digits": ("--width=8",), "dates": ("--size=16", "--num-layers=1")}
README = (EXAMPLE / "README.md").read_text()
CLAIMS = re.findall(r"^python -m claims (\w+) (\w+)(?: --precision (\w+))?$", README, re.M)
# Of what both networks and both precisions show in the same way, one of each.
ALIKE = {("meshes", "digits", ""), ("meshes", "dates", "bf16"), ("meshes", "dates", "")}
ALIKE |= {("resume", "dates", ""), ("average", "digits", "")}


def run(folder: Path, *command: str, project: Path = EXAMPLE) -> subprocess.CompletedProcess:
    """A command of a project, which finds the zoo and no other folder of this checkout."""
    (folder / "packages").mkdir(exist_ok=True)
    if not (folder / "packages" / "zoo").exists():
        (folder / "packages" / "zoo").symlink_to(EXAMPLE.parents[2] / "zoo")
    return subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(folder / "packages"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_that_must_be_shown_is_documented():
    meshes = {(network, precision) for claim, network, precision in CLAIMS if claim == "meshes"}
    assert meshes == {(x, y) for x in SMALL for y in ("", "bf16")}
    assert {claim for claim, *_ in CLAIMS} == {"meshes", "resume", "tracked", "average"}
    assert {*CLAIMS} > ALIKE
    programs = set(re.findall(r"^python -m (\w+)", README, re.M))
    assert programs == {"train", "claims", "evaluate"}
    assert all((EXAMPLE / f"{name}.py").is_file() for name in programs)


@pytest.mark.slow
@pytest.mark.parametrize("claim", sorted({*CLAIMS} - ALIKE), ids="-".join)
def test_claim_holds(claim: tuple[str, str, str], tmp_path: Path):
    name, network, precision = claim
    if name == "tracked":
        pytest.importorskip("tensorboardX")
        pytest.importorskip("wandb")
    flags = shlex.split(f"--folder {tmp_path} --steps 12 --precision {precision or 'fp32'}")
    done = run(tmp_path, "-m", "claims", name, network, *flags, "--", *SMALL[network])
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {
        "meshes": r"12 losses on fsdp=2,tensor=2 and on one device differ by at most \S+, the",
        "resume": r"killed after step \d+ of 12 and resumed: the same metrics, model and average",
        "tracked": r"TensorBoard has the loss of each of 12 steps, wandb an offline run",
        "average": r"the published average, loaded: {'eval_",
    }
    assert re.match(shown[name], done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ("resume", r"killed after step \d+ of 16 on data=2,fsdp=4 and resumed: the same bits"),
        ("peft", r"PEFT's vectors are the zoo's to \de-0[5-7], and \d\.\d\d from those"),
    ],
)
def test_adapters_on_an_encoder_of_proteins(claim: str, shown: str, tmp_path: Path):
    if claim == "peft":
        pytest.importorskip("peft")
    assert f"python -m claims {claim}\n" in (PROTEINS / "README.md").read_text()
    flags = ("--folder", str(tmp_path), "--steps=16")
    done = run(tmp_path, "-m", "claims", claim, *flags, project=PROTEINS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(shown, done.stdout), done.stdout
