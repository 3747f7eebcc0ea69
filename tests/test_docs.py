"""Every block of code in the documentation runs, or is parsed by the program that it calls."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import jax
import pytest
import tyro
import yaml
from jax.experimental.compilation_cache import compilation_cache

import zoo
from zoo.__main__ import commands as commands_of_zoo
from zoo.runs import processes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if "examples" not in path.parts),
]
LAUNCH = sorted((DOCS / "launch").iterdir())

# Pages whose blocks take long, and the blocks that nothing here can run: ```python run="…".
SLOW = {
    *(f"docs/concepts/{name}.md" for name in ("derivatives", "models", "precision", "recurrences")),
    *(f"docs/guides/{name}.md" for name in ("distillation", "evaluation", "finetuning")),
    *(f"docs/guides/{name}.md" for name in ("generate", "preferences", "rewards")),
    *(f"docs/how-to/{name}.md" for name in ("attention", "freeze", "precision", "recurrence")),
    *(f"docs/how-to/{name}.md" for name in ("resume", "shard")),
    "docs/reference/wrappers.md",
    "docs/tour.md",
    *(f"docs/tutorials/{name}.md" for name in ("eight-devices", "equinox", "finetune", "loop")),
}
NOT_RUN = {
    "docs/guides/rewards.md": ["a finished run"],
    "docs/how-to/pretrained.md": ["network"],
    "docs/guides/hugging-face.md": [
        "network",
        "network",
        "a finished run",
        "transformers",
        "ctranslate2",
    ],
}

FENCE = re.compile(r"^( *)```+ *([\w-]*)(?: +run=\"([^\"]+)\")? *(.*)$")
OTHER_PROGRAMS = {"bash", "cd", "gcloud", "kubectl", "mkdocs", "mypy", "ruff", "sbatch", "tail"}
OTHER_PROGRAMS |= {"ct2-transformers-converter", "llama-cli", "llama-server"}


class Block(NamedTuple):
    page: str
    line: int  # of its first line of code, from 1
    language: str
    mark: str  # why it cannot run here, or "printed" for output
    lines: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    opened: Block | None = None
    indent = ""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                indent, language, mark, rest = fence.groups(default="")
                assert not rest, f"{name}:{number}: the block is opened by {line!r}"
                opened = Block(name, number + 1, language, mark, [])
        elif fence:
            yield opened
            opened = None
        else:
            opened.lines.append(line.removeprefix(indent))
    assert opened is None, f"{name}:{opened and opened.line}: the block is not closed"


# --- Python -----------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, no_curves):
    """An empty working folder, JAX as a user has it, and nothing of it left behind."""
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def run_python(page: Path, folder: Path) -> None:
    """Run a page's Python as one program, and compare what it prints with blocks that say so."""
    found = list(blocks(page))
    lines = [""] * len(page.read_text().splitlines())
    for block in found:
        if block.language == "python" and not block.mark:
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
    # A module in a file, for what reads the source of a class, as tyro does for docstrings. Its
    # lines have the numbers of the page's.
    path = folder / page.name
    path.write_text("\n".join(lines))
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)
    except BaseException as error:
        frames = [f for f in inspect.getinnerframes(error.__traceback__) if f.filename == str(path)]
        line = frames[-1].lineno if frames else getattr(error, "lineno", 0)
        message = f"{type(error).__name__}: {error}"[:500]
        raise AssertionError(f"{found[0].page}:{line}: {message}") from error
    finally:
        del sys.modules[module.__name__]
    for block in found:
        if block.mark == "printed" and "\n".join(block.lines) not in printed.getvalue():
            text = printed.getvalue()
            raise AssertionError(f"{block.page}:{block.line}: this was not printed, but:\n{text}")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.slow] if str(page.relative_to(ROOT)) in SLOW else [],
        )
        for page in PAGES
        if any(block.language == "python" and not block.mark for block in blocks(page))
    ],
)
def test_python_blocks_run(page, elsewhere):
    run_python(page, elsewhere)


def test_blocks_that_cannot_run_are_few_and_known():
    marked: dict[str, list[str]] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.mark not in ("", "printed"):
                marked.setdefault(block.page, []).append(block.mark)
            known = {"", "python", "sh", "text", "yaml", "json", "toml"}
            assert block.language in known - {""}, f"{block.page}:{block.line}: no language"
    assert marked == NOT_RUN


# --- Commands ---------------------------------------------------------------------------------


def commands(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """(index of its first line, the words of each command) in some lines of a shell."""
    text, start = "", 0
    for index, line in enumerate(lines):
        if not text:
            start = index
        if line.endswith("\\"):
            text += f"{line[:-1]} "
            continue
        lexer = shlex.shlex(text + line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words, text = list(lexer), ""
        while words:
            end = next((i for i, w in enumerate(words) if w in ("&&", "||", "|", ";")), len(words))
            yield start, words[:end]
            words = words[end + 1 :]


def check_command(words: list[str]) -> None:
    """Raise a ValueError for a command that there is not, or flags that it does not take."""
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/") if words else ""
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"(?:zoo|\.)\[([^\]]+)\]", " ".join(words)):
            if unknown := set(extra.split(",")) - extras["optional-dependencies"].keys():
                raise ValueError(f"no extra {unknown}")
    elif program in ("python", "python3") and words[1] == "-m":
        check_module(words[2], words[3:])
    elif program == "python":
        if not (ROOT / words[1]).is_file():
            raise ValueError(f"no file {words[1]}")
    elif program and program not in OTHER_PROGRAMS:
        raise ValueError(f"{program!r} is no program that the documentation uses")
    for path in re.findall(r"docs/[\w./-]+", " ".join(words)):
        if not (ROOT / path).exists():
            raise ValueError(f"no file {path}")


def check_module(module: str, arguments: list[str]) -> None:
    """Raise a ValueError where `python -m module` does not take the arguments."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            if module == "zoo":
                parsers = {
                    name: functools.wraps(function)(lambda *_, **__: None)
                    for name, function in commands_of_zoo().items()
                }
                tyro.extras.subcommand_cli_from_dict(parsers, args=arguments or ["list"])
            elif module.removeprefix("zoo.").startswith("recipes."):  # a wheel has them in zoo
                tyro.cli(
                    importlib.import_module(module.removeprefix("zoo.")).Config, args=arguments
                )
            elif importlib.util.find_spec(module) is None:
                raise ValueError(f"no module {module}")
    except (SystemExit, ImportError) as error:
        if not isinstance(error, SystemExit) or error.code:
            raise ValueError(f"{module} {arguments}: {error} {errors.getvalue()}") from error


def check_commands(where: str, first: int, lines: list[str]) -> int:
    count = 0
    for index, words in commands(lines):
        try:
            check_command(words)
        except ValueError as error:
            raise AssertionError(f"{where}:{first + index}: {error}") from error
        count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_take_their_flags(page):
    for block in blocks(page):
        if block.language == "sh" and not block.mark:
            assert check_commands(block.page, block.line, block.lines)


# --- Files for launching ----------------------------------------------------------------------


def launched(path: Path) -> list[list[str]]:
    """The words of each command in a file for launching that starts a recipe."""
    if path.suffix == ".yaml":
        documents = yaml.safe_load_all(path.read_text())
        jobs = [job for document in documents for job in document["spec"]["replicatedJobs"]]
        pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
        return [container["command"] for pod in pods for container in pod["containers"]]
    text = re.sub(r"\\\n *", "", path.read_text())
    found = re.findall(r"python (-m recipes\.[^\n\"]+)", text)
    return [["python", *shlex.split(re.sub(r"\$\w+", "/mnt", line))] for line in found]


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.name)
def test_launch_files_are_right(path):
    if path.suffix == ".yaml":
        documents = list(yaml.safe_load_all(path.read_text()))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= x.keys() for x in documents)
    else:
        subprocess.run(["bash", "-n", path], check=True)
        assert path.read_text().startswith("#!/bin/bash\n")
        assert path.stat().st_mode & 0o111 or path.suffix == ".sbatch"
    [words] = launched(path)
    check_command(words)
    assert "--distributed" in words


def test_kubernetes_sets_the_variables_that_a_run_reads():
    read = set(re.findall(r"JAX_\w+", inspect.getsource(processes.join_processes)))
    [document] = yaml.safe_load_all((DOCS / "launch" / "kubernetes.yaml").read_text())
    job = document["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert read == {name for name in variables if name.startswith("JAX_")} != set()
    assert spec["completions"] == spec["parallelism"]
    assert variables["JAX_NUM_PROCESSES"]["value"] == str(spec["completions"])
    name = document["metadata"]["name"]
    host = f"{name}-{job['name']}-0-0.{name}"
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"].split(":")[0] == host
    index = variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


# --- The site ---------------------------------------------------------------------------------


def test_the_reference_has_each_public_name_once():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: zoo\.(\w+)$", text, re.M)) == sorted(dir(zoo))


def test_the_table_of_what_is_stable_has_each_public_name_once():
    names = (DOCS / "stability.md").read_text().partition("## Names")[2].partition("\nWhat is")[0]
    rows = [line.split("|")[1] for line in names.splitlines() if line.startswith("|")]
    found = [name for row in rows for name in re.findall(r"`zoo\.(\w+)`", row)]
    assert sorted(found) == sorted(dir(zoo))


@functools.cache
def own_names(module: ModuleType) -> set[str]:
    """The names that a module of the zoo defines, or takes from another one."""
    found = set()
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zoo"):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign | ast.ClassDef):
            targets = node.targets if isinstance(node, ast.Assign) else [ast.Name(node.name)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def annotations(node: ast.AST) -> Iterator[ast.expr]:
    """The annotations of a function, or of a class's fields and public methods."""
    if isinstance(node, ast.FunctionDef):
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg) and each.annotation is not None:
                yield each.annotation
        if node.returns is not None:
            yield node.returns
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            yield each.annotation
        elif isinstance(each, ast.FunctionDef) and (each.name == "__init__" or each.name[0] != "_"):
            yield from annotations(each)


def types_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """The zoo's types that a signature names: (name, type)."""
    module = sys.modules[thing.__module__]
    [node] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    for annotation in annotations(node):
        for each in ast.walk(annotation):
            name = getattr(each, "id", getattr(each, "value", None))
            if isinstance(name, str) and name in own_names(module):
                value = getattr(module, name)
                if not isinstance(value, TypeVar | ModuleType):
                    yield name, value


def test_types_of_public_signatures_are_public():
    homes = {"zoo": zoo, **{f"zoo.{name}": getattr(zoo, name) for name in ("sharding", "types")}}
    homes["zoo.callbacks"] = zoo.callbacks
    public = {
        f"{home}.{name}": getattr(module, name)
        for home, module in homes.items()
        for name in dir(module)
        if name[0] != "_"
    }
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    things = [x for x in public.values() if inspect.isfunction(x) or inspect.isclass(x)]
    things = [x for x in things if x.__module__.startswith("zoo.")]
    named = {(thing.__name__, name): value for thing in things for name, value in types_of(thing)}
    assert {"LossFunction", "Rules", "Axes", "Trainable", "Precision"} <= {n for _, n in named}
    lacking = [key for key, value in named.items() if value not in public.values()]
    assert lacking == []
    names = [n for n, x in vars(zoo.types).items() if n[0] != "_" and not isinstance(x, ModuleType)]
    assert len(names) > 20
    assert [name for name in names if f"`zoo.types.{name}`" not in text] == []


LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")


def test_links_lead_somewhere():
    """Of all pages those outside by their form; of the two that MkDocs does not see, files too."""
    outside, inside = [], []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in LINK.findall(text):
            (outside if "://" in target else inside).append((page, target))
    assert len(outside) > 40
    for page, target in outside:
        parts = urlsplit(target)
        assert parts.scheme == "https", f"{page.name}: {target}"
        assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), f"{page.name}: {target}"
    of_root = [(page, target) for page, target in inside if page.parent == ROOT]
    assert len(of_root) > 30
    for page, target in of_root:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: no {target}"
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", x).strip().lower().replace(" ", "-") for x in headings]
        assert anchor in ("", *slugs), f"{page.name}: no {target}"


def test_the_first_block_is_as_wide_as_its_page():
    """At 1,280 pixels, which have 83 characters of it between the two sidebars."""
    first = next(blocks(DOCS / "index.md"))
    assert len(first.lines) > 10
    assert max(map(len, first.lines)) <= 83
