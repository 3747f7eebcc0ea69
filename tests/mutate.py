"""How well the tests bite: change one small thing in a module of zoo, and see whether they fail.

    python tests/mutate.py attention axes --count 30 --seed 0
    python tests/mutate.py attention --seed 0 --only 7       # one mutant again

Mutants are made in a copy of the checkout. The same seed gives the same ones, as long as the module
stays as it is, and a larger `--count` adds to those of a smaller. Each runs in a fork of a process
that has imported JAX and not zoo; tests that were quick and have killed before come first, and one
compilation cache (`JAX_COMPILATION_CACHE_DIR`, else a folder that goes at the end) serves all.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import importlib
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

# Each module's tests; those behind a bar run only for what has survived the ones before it.
TESTS = {
    "attention": "tests/test_attention.py",
    "axes": "tests/test_sharding.py | tests/test_optimizers.py",
    "beam_search": "tests/test_beam_search.py",
    "cache": "tests/test_generate.py | tests/test_beam_search.py",
    "checkpoint": "tests/test_checkpoint.py",
    "chunked_loss": "tests/test_losses.py",
    "generate": "tests/test_generate.py",
    "lora": "tests/test_lora.py",
    "losses": "tests/test_losses.py",
    "moe": "tests/test_moe.py",
    "optimizers": "tests/test_optimizers.py",
    "precision": "tests/test_precision.py | tests/test_train.py -k 'fp16 or bf16'",
    "recurrence": "tests/test_rnn.py",
    "remat": "tests/test_remat.py",
    "sharding": "tests/test_sharding.py",
    "token_plans": "tests/test_data.py",
    "train": "tests/test_train.py",
}

# What takes long to import, and starts none of JAX's devices.
LIBRARIES = ["equinox", "grain", "jaxtyping", "optax", "orbax.checkpoint", "pytest", "tokenizers"]

BINARY = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "*",
    "%": "*",
    "**": "*",
    "&": "|",
    "|": "&",
}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in"}
COMPARISONS |= {"not in": "in", "is": "is not", "is not": "is"}
NAMES = {"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "zeros": "ones"}
NAMES |= {new: old for old, new in NAMES.items()}
WRAPPERS = {"constrain", "stop_gradient", "gather", "abs", "sorted"}
TOKENS: dict[type, str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">"},
    **{ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in"},
    **{ast.Is: "is", ast.IsNot: "is not", ast.And: "and", ast.Or: "or"},
}


class Mutant(NamedTuple):
    """A module's source with bytes start…stop replaced."""

    path: str
    source: bytes
    start: int
    stop: int
    replacement: bytes

    def mutated(self) -> bytes:
        return self.source[: self.start] + self.replacement + self.source[self.stop :]

    def counts(self) -> bool:
        """Whether it compiles, and to something else."""
        try:
            return ast.dump(ast.parse(self.mutated())) != ast.dump(ast.parse(self.source))
        except SyntaxError:
            return False

    def diff(self) -> str:
        old, new = (x.decode().splitlines() for x in (self.source, self.mutated()))
        line = self.source[: self.start].count(b"\n") + 1
        changes = [x for x in difflib.unified_diff(old, new, n=0, lineterm="") if x[:2] != "@@"][2:]
        return "\n".join([f"{self.path}:{line}", *changes])


class Finder:
    """All small changes of one module."""

    def __init__(self, path: str, source: bytes):
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.visit(ast.parse(source), set())

    def span(self, node: Any) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        start, stop = self.span(node)
        return self.source[start:stop].decode()

    def replace(self, node: Any, new: str) -> None:
        self.found.append(Mutant(self.path, self.source, *self.span(node), new.encode()))

    def between(self, left: Any, right: Any, old: str, new: str) -> None:
        start = self.source.index(old.encode(), self.span(left)[1], self.span(right)[0])
        stop = start + len(old)
        self.found.append(Mutant(self.path, self.source, start, stop, new.encode()))

    def visit(self, node: Any, bound: set[str]) -> None:
        """Look at a node and all below it; `bound` are the names that have a value there."""
        match node:
            case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.FunctionDef(args=a):
                named = (
                    a.posonlyargs + a.args + a.kwonlyargs + [x for x in (a.vararg, a.kwarg) if x]
                )
                bound = bound | {argument.arg for argument in named}
            case ast.Module():
                # An assigned subscript in a module's body is an alias of a type.
                body = [x for x in node.body if not _is_alias(x)]
                node = ast.Module(body, [])
            case ast.expr():
                self.expression(node)
            case ast.stmt():
                self.statement(node, bound)
        if isinstance(node, ast.Raise):
            return  # its message
        tests = getattr(node, "ifs", [getattr(node, "test", None)])
        for test in tests:
            if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.UnaryOp):
                self.replace(test, f"(not ({self.text(test)}))")
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child, bound)

    def statement(self, node: ast.stmt, bound: set[str]) -> None:
        """Leave it out, where names keep a value without it."""
        match node:
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
                self.replace(node, "pass")
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in bound:
                bound.add(name)
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                bound |= {name.id for name in names if isinstance(name, ast.Name)}
            case ast.Assign() | ast.AugAssign():
                self.replace(node, "pass")

    def expression(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp() if (old := TOKENS.get(type(node.op), "")) in BINARY:
                self.between(node.left, node.right, old, BINARY[old])
            case ast.BoolOp():
                old = TOKENS[type(node.op)]
                self.between(*node.values[:2], old, "or" if old == "and" else "and")
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right, op in zip(sides, sides[1:], node.ops, strict=False):
                    token = TOKENS[type(op)]
                    self.between(left, right, token, COMPARISONS[token])
            case ast.Constant(value=bool()):
                self.replace(node, str(not node.value))
            case ast.Constant(value=int()):
                self.replace(node, str(node.value + 1))
            case ast.Constant(value=float()):
                self.replace(node, str(2 * node.value or 1.0))
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
                self.replace(node, f"({self.text(node.operand)})")
            case ast.Call():
                self.call(node)

    def call(self, node: ast.Call) -> None:
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in NAMES:
            qualifier = self.text(function)[: -len(name)]
            self.replace(function, qualifier + NAMES[name])
        if name in WRAPPERS and node.args:
            self.replace(node, f"({self.text(node.args[0])})")
        if name == "astype" and isinstance(function, ast.Attribute):
            self.replace(node, self.text(function.value))
        if len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args[:2]):
            first, second = node.args[:2]
            start, stop = self.span(first)[0], self.span(second)[1]
            middle = self.source[self.span(first)[1] : self.span(second)[0]]
            new = self.text(second).encode() + middle + self.text(first).encode()
            self.found.append(Mutant(self.path, self.source, start, stop, new))


def _is_alias(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)


def mutants(path: str, seed: int) -> list[Mutant]:
    """All that a file can give, in an order of the seed's."""
    found = Finder(path, (ROOT / path).read_bytes()).found
    found = sorted(set(found), key=lambda mutant: (mutant.start, mutant.stop, mutant.replacement))
    random.Random(f"{seed} {path}").shuffle(found)
    return found


class Order:
    """A pytest plugin: quick tests that have killed go first; notes how long each one takes."""

    def __init__(self, seconds: dict[str, float], kills: collections.Counter):
        self.seconds, self.kills = seconds, kills
        self.notes: dict[str, Any] = {"seconds": collections.Counter(), "failed": []}

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda x: self.seconds.get(x.nodeid, 0) / (1 + self.kills[x.nodeid]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.notes["seconds"][report.nodeid] += report.duration
        if report.failed:
            self.notes["failed"].append(report.nodeid)


class Suite:
    """Some tests in a copy of the checkout."""

    def __init__(self, folder: Path, arguments: str):
        self.folder, self.arguments = folder, shlex.split(arguments)
        self.seconds: dict[str, float] = {}
        self.kills: collections.Counter = collections.Counter()
        self.limit = 600.0

    def start(self) -> None:
        """Run them as they are, and once more with all compiled."""
        for _ in range(2):
            began = time.monotonic()
            passed, failed = self.run("--maxfail=1000")
            self.total = time.monotonic() - began
            if not passed:
                log = (self.folder / "log").read_text()[-3000:]
                raise SystemExit(f"these fail without a mutant: {failed}\n{log}")
        self.limit = 20 + 5 * self.total

    def run(self, *options: str) -> tuple[bool, list[str]]:
        """Whether all pass, and which failed first."""
        notes = self.folder / "notes"
        notes.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            self._child(options)
        deadline = time.monotonic() + self.limit
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what the tests have started
        if status[0] == 0:
            os.waitpid(child, 0)
            return False, ["timeout"]
        noted = json.loads(notes.read_text()) if notes.exists() else {"seconds": {}, "failed": []}
        self.kills.update(noted["failed"])
        if status[1] == 0:
            self.seconds |= noted["seconds"]
        return status[1] == 0, noted["failed"]

    def _child(self, options: tuple[str, ...]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.path.insert(0, str(self.folder))
            os.environ["PYTHONPATH"] = str(self.folder)
            import pytest

            order = Order(self.seconds, self.kills)
            flags = ["-n0", "-x", "-pno:cacheprovider", "--no-header", "-q", "--tb=line"]
            code = int(pytest.main([*flags, *options, *self.arguments], plugins=[order]))
            Path("notes").write_text(json.dumps(order.notes))
        finally:
            sys.stdout.flush()
            os._exit(code)


def try_all(module: str, options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The module's row of the table, and a paragraph for each survivor."""
    path = f"zoo/{module}.py"
    suites = [Suite(folder, arguments) for arguments in TESTS[module].split("|")]
    started: set[int] = set()
    counted, timeouts, survivors = 0, 0, []
    for number, mutant in enumerate(mutants(path, options.seed)):
        if counted == options.count and not options.only:
            break
        if not mutant.counts() or (options.only and number not in options.only):
            continue
        counted += 1
        for index, suite in enumerate(suites):
            if index not in started:
                (folder / path).write_bytes(mutant.source)
                suite.start()
                started.add(index)
                _say(f"{module}: {suite.total:.0f} s for {' '.join(suite.arguments)}")
            (folder / path).write_bytes(mutant.mutated())
            # Compiled code is told by its time in seconds and its size, and both could be alike.
            os.utime(folder / path, (0, 1_000_000 * (index + 1) + number))
            began = time.monotonic()
            passed, failed = suite.run()
            timeouts += failed == ["timeout"]
            how = "survived" if passed else f"killed by {failed or 'an error'}"
            _say(f"{module} {number}: {how} in {time.monotonic() - began:.0f} s")
            if not passed:
                break
        else:
            survivors.append((number, mutant))
            _say(mutant.diff())
    (folder / path).write_bytes((ROOT / path).read_bytes())
    killed = counted - len(survivors)
    yield f"| {module} | {counted} | {killed} | {len(survivors)} | {timeouts} |"
    for number, mutant in survivors:
        yield f"\n`--seed {options.seed} --only {number}`\n```diff\n{mutant.diff()}\n```"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _copy(folder: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", choices=TESTS, metavar="MODULE")
    parser.add_argument("--count", type=int, default=30, help="mutants a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="these numbers of the seed alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "zoo"
        _copy(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{name}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        runpy.run_path(str(ROOT / "tests/conftest.py"))
        for library in LIBRARIES:
            importlib.import_module(library)
        rows, found = (
            ["| module | mutants | killed | survived | timeouts |", "|---|---|---|---|---|"],
            [],
        )
        for module in options.modules:
            row, *survivors = try_all(module, options, folder)
            rows.append(row)
            found += survivors
        print("\n".join([*rows, *found]))


if __name__ == "__main__":
    main()
