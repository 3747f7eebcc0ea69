"""The installed package is `zoo` alone, beside a project whose modules have the names of ours."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))
# Without hatchling (it is in the extra `test`), pip and build fetch it.
FETCHED = importlib.util.find_spec("hatchling") is None
OURS = ("models", "recipes", "tests", "benchmarks", "docs")

PROJECT = {
    "models/__init__.py": "",
    "models/net.py": "SIZE = 4\n",
    "recipes.py": "STEPS = 3\n",
    "data.py": "import numpy as np\nROWS = np.eye(4, dtype=np.float32)\n",
    "main.py": """
from pathlib import Path

import data, recipes
import jax, optax
from models import net

import zoo
from zoo import losses, mlp

here = Path(__file__).parent
assert {Path(x.__file__).parents[i] for x, i in ((data, 0), (recipes, 0), (net, 1))} == {here}
config = mlp.Config(in_size=net.SIZE, out_size=4, hidden_size=8)
optimizer = optax.adam(1e-1)
state = zoo.init_state(lambda key: mlp.MLP(config, key=key), optimizer, key=jax.random.key(0))
step = zoo.make_train_step(losses.classification, optimizer, precision="fp32")
batch = {"inputs": data.ROWS, "labels": data.ROWS.argmax(1), "weights": data.ROWS.sum(1)}
found = []
for _ in range(recipes.STEPS):
    state, metrics = step(state, batch)
    found.append(float(metrics["loss"]))
assert found[-1] < found[0], found
assert len(zoo.published()) >= 3
zoo.load("lm-python")
print(zoo.__version__, Path(zoo.__file__).parent)
""",
}


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """The output of a command that sees nothing of this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of the sdist, and of the wheel that was built from it, as a release has them."""
    folder = tmp_path_factory.mktemp("dist")
    isolation = [] if FETCHED else ["--no-isolation"]
    run(sys.executable, "-m", "build", *isolation, "--outdir", folder, ROOT, cwd=folder)
    return folder


def make_venv(folder: Path, *install: str | Path) -> Path:
    """The Python of a new venv: the packages of this one without the zoo, and `install`."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    for entry in SITE.iterdir():
        if not entry.name.startswith(("zoo", "_editable_impl_zoo", "_zoo", "__pycache__")):
            (Path(site.strip()) / entry.name).symlink_to(entry)
    isolation = [] if FETCHED else ["--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "-q", *isolation, *install, cwd=folder)
    return python


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request, built, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "wheel":
        return request.param, make_venv(folder, *built.glob("*.whl"))
    return request.param, make_venv(folder, "-e", ROOT)


def files(folder: str) -> set[str]:
    """The files of a folder of the checkout, without what running it leaves."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {x.relative_to(ROOT).as_posix() for x in found if "__pycache__" not in x.parts}


@pytest.mark.slow
def test_wheel_has_zoo_alone(built):
    [wheel] = built.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    within = {f"zoo/{name}" for name in files("models") | files("recipes")}
    assert len(within) > 10
    assert sorted(names) == sorted(files("zoo") | within)


@pytest.mark.slow
def test_sdist_has_what_builds_and_tests(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = set().union(*map(files, ("zoo", "recipes", "models", "tests")))
    assert expected | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {".venv", ".git", "runs", "build", "dist", "site"}
    assert sdist.stat().st_size < 30e6


@pytest.mark.slow
def test_project_keeps_its_own_modules(installed, tmp_path):
    kind, python = installed
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    version, where = run(python, "main.py", cwd=tmp_path).split()[-2:]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert (Path(where).resolve() == ROOT / "zoo") == (kind == "editable")
    where = str(Path(where).resolve())
    assert f"zoo {version} in {where}" in run(python, "-m", "zoo", "report", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["editable"], indirect=True)  # no package as any other
def test_folders_named_zoo_hide_nothing(installed, tmp_path):
    """Python's path finder takes such a folder for an empty package, if it finds no other."""
    _, python = installed
    for name in ("parent", "empty", "other/zoo"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "parent" / "zoo").symlink_to(ROOT, target_is_directory=True)  # a checkout
    code = "import zoo; print(len(zoo.published()), zoo.fit.__module__)"
    for folder in (tmp_path / "parent", tmp_path / "empty", tmp_path / "other", ROOT, Path("/")):
        count, module = run(python, "-c", code, cwd=folder).split()
        assert int(count) >= 3, folder
        assert module == "zoo.runs.loop", folder


@pytest.mark.slow
def test_other_packages_are_not_exposed(installed, tmp_path):
    _, python = installed
    for name in OURS:
        assert "ModuleNotFoundError" in run(python, "-c", f"import {name}", cwd=tmp_path, code=1)


@pytest.mark.slow
def test_recipes_run(installed, tmp_path):
    kind, python = installed
    module, folder = ("zoo.recipes.", tmp_path) if kind == "wheel" else ("recipes.", ROOT)
    printed = run(python, "-m", f"{module}lm", "--help", cwd=folder)
    assert f"usage: python -m {module}lm " in printed
    text = run(python, "-m", f"{module}generate", "--max-new-tokens=3", cwd=folder)
    assert "error" not in text
