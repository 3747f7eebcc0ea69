"""The house keeps its order: who imports whom, and nothing of the user's is imported by mistake."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(importlib.util.find_spec("zoo").origin).parent
MODULES = {path.relative_to(ZOO).with_suffix("").as_posix(): path for path in ZOO.rglob("*.py")}
FAMILIES = {"bert", "blocks", "mlp", "moe", "rnn", "rnn_config"}
FAMILIES |= {"transformer", "transformer_config"}
# What works for every family, and so knows none.
SHARED = {"attention", "checkpoint", "data", "evaluation", "layers", "loop", "losses", "optimizers"}
SHARED |= {
    "beam_search",
    "cache",
    "compiled",
    "decoder",
    "generate",
    "precision",
    "publish",
    "remat",
    "run",
    "sharding",
    "tensors",
    "train",
}
# What layers and families stand on.
GROUND = {"axes", "precision", "remat", "sharding"}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, in functions too; `from a import b` may mean a or a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def zoo_imports(path: Path) -> set[str]:
    """The modules of zoo that a file imports."""
    names = {name.removeprefix("zoo.").replace(".", "/") for name in imports(path)}
    return names & set(MODULES)


def test_the_imports_are_seen(tmp_path: Path):
    file = tmp_path / "file.py"
    file.write_text("import models.x\ndef f():\n  from zoo import rnn\n  from zoo.mlp import MLP")
    assert imports(file) == {"models.x", "zoo", "zoo.rnn", "zoo.mlp", "zoo.mlp.MLP"}
    assert zoo_imports(MODULES["transformer"]) >= {"blocks", "layers", "remat", "sharding"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_zoo_imports_none_of_its_users(name: str):
    roots = {module.partition(".")[0] for module in imports(MODULES[name])}
    assert not roots & {"benchmarks", "helpers", "models", "recipes", "tests"}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_serves_every_family_knows_none(name: str):
    assert not zoo_imports(MODULES[name]) & FAMILIES


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_stands_on_nothing_but_itself(name: str):
    assert zoo_imports(MODULES[name]) <= GROUND


def test_only_sharding_names_mesh_axes():
    axes = {"data", "fsdp", "tensor"}
    for name in FAMILIES | {"attention", "layers", "losses", "remat", "train"}:
        tree = ast.parse(MODULES[name].read_text())
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not texts & axes, name


def test_folders_of_the_same_name_as_ours_are_not_imported(tmp_path: Path):
    for decoy in ("models", "recipes"):
        (tmp_path / f"{decoy}.py").write_text(f"raise SystemExit('the decoy {decoy} was imported')")
    names = ["zoo." + name.replace("/", ".") for name in MODULES]
    names = [name.removesuffix(".__init__") for name in names]
    program = (
        f"import importlib, sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ZOO.parent)!r}]\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print(*sorted({'models', 'recipes'} & set(sys.modules)), 'done')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.stdout.split() == ["done"], result.stderr + result.stdout
