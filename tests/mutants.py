"""Small changes of a module's source, one at a time, for `tests/mutate.py`.

The syntax tree says what to change and where; the rest of the file keeps its bytes. Left alone are
annotations, decorators, imports, docstrings, what an error says, and aliases of types.
"""

import ast
import difflib
import random
from typing import Any, NamedTuple

BINARY: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
COMPARISONS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
NAMES = {"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "zeros": "ones"}
NAMES |= {new: old for old, new in NAMES.items()}
SYMMETRIC = {"max", "maximum", "min", "minimum", "swapaxes"}
WRAPPERS = {"constrain", "stop_gradient", "unshard", "abs", "sorted"}


class Mutant(NamedTuple):
    """A module's source with its bytes start…stop replaced."""

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


def mutants(path: str, source: bytes, seed: int) -> list[Mutant]:
    """All that a file can give, in an order of the seed's."""
    found = [mutant for mutant in set(_Finder(path, source).found) if mutant.counts()]
    found.sort(key=lambda mutant: mutant[2:])
    random.Random(f"{seed} {path}").shuffle(found)
    return found


class _Finder:
    """Walks over a file's syntax tree and notes what can be changed."""

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

    def note(self, start: int, stop: int, new: str) -> None:
        self.found.append(Mutant(self.path, self.source, start, stop, new.encode()))

    def replace(self, node: Any, new: str) -> None:
        self.note(*self.span(node), new)

    def between(self, left: Any, right: Any, old: str, new: str) -> None:
        start = self.source.index(old.encode(), self.span(left)[1], self.span(right)[0])
        self.note(start, start + len(old), new)

    def visit(self, node: Any, bound: set[str]) -> None:
        """Look at a node and all below it; `bound` are the names that have a value there."""
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef):
            bound = bound | {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
        if isinstance(node, ast.expr):
            self.expression(node)
        if isinstance(node, ast.stmt):
            self.statement(node, bound)
        if isinstance(node, ast.Raise):
            return  # what it says
        tests = getattr(node, "ifs", [getattr(node, "test", None)])
        for test in tests:
            if isinstance(test, ast.expr) and not isinstance(test, ast.Compare | ast.UnaryOp):
                self.replace(test, f"(not ({self.text(test)}))")
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not _is_alias(node, child):
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
            case ast.BinOp() if type(node.op) in BINARY:
                self.between(node.left, node.right, *BINARY[type(node.op)])
            case ast.BoolOp():
                swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                self.between(*node.values[:2], *swap)
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right, op in zip(sides, sides[1:], node.ops, strict=False):
                    self.between(left, right, *COMPARISONS[type(op)])
            case ast.Constant(value=bool()):
                self.replace(node, str(not node.value))
            case ast.Constant(value=int()):
                self.replace(node, str(node.value + 1))
            case ast.Constant(value=float()):
                self.replace(node, str(2 * node.value or 1.0))
            case ast.UnaryOp():
                self.replace(node, f"({self.text(node.operand)})")
            case ast.Call():
                self.call(node)

    def call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in NAMES:
            self.replace(function, self.text(function)[: -len(name)] + NAMES[name])
        if name in WRAPPERS and arguments:
            self.replace(node, f"({self.text(arguments[0])})")
        if name == "astype" and isinstance(function, ast.Attribute):
            self.replace(node, self.text(function.value))
        if name in SYMMETRIC or any(isinstance(x, ast.Starred) for x in arguments[:2]):
            return
        if len(arguments) > 1:
            (start, end), (begin, stop) = self.span(arguments[0]), self.span(arguments[1])
            middle = self.source[end:begin].decode()
            self.note(start, stop, self.text(arguments[1]) + middle + self.text(arguments[0]))


def _is_alias(parent: ast.AST, node: ast.AST) -> bool:
    """Whether a module assigns a subscript: then it is a type by another name."""
    is_subscript = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    return isinstance(parent, ast.Module) and is_subscript
