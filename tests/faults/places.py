"""Where a fault can be planted: one small change of the syntax tree, with the text before and after."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

__all__ = ["Fault", "faults_in", "sample"]

FLIPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
CHECKS = ("check", "refuse", "require", "validate", "assert", "known", "only")
AXES = ("axis", "axes", "dimension", "dim")


@dataclass(frozen=True)
class Fault:
    """One change: in this file the bytes from ``start`` to ``stop`` become ``text``.

    ``function`` is the first line of the innermost function around it, by which recorded tests are found.
    """

    file: str
    function: int
    line: int
    kind: str
    start: int
    stop: int
    text: str

    def planted_in(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}"


def sample(root: Path, count: int, seed: int) -> list[Fault]:
    """So many faults below a folder, each of its folders by its share of lines, kinds in turn."""
    by_folder: dict[str, list[Fault]] = {}
    lines: dict[str, int] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if len(relative.parts) == 1:
            continue
        source = path.read_bytes()
        by_folder.setdefault(relative.parts[0], []).extend(faults_in(source, relative.as_posix()))
        lines[relative.parts[0]] = lines.get(relative.parts[0], 0) + source.count(b"\n")
    total = sum(lines.values())
    chosen = []
    for folder, faults in by_folder.items():
        quota = max(1, round(count * lines[folder] / total))
        chosen += _in_turn(faults, quota, Random(f"{seed}/{folder}"))
    return chosen


def _in_turn(faults: list[Fault], quota: int, random: Random) -> list[Fault]:
    kinds: dict[str, list[Fault]] = {}
    for fault in random.sample(faults, len(faults)):
        kinds.setdefault(fault.kind, []).append(fault)
    chosen: list[Fault] = []
    while len(chosen) < min(quota, len(faults)):
        for left in kinds.values():
            if left and len(chosen) < quota:
                chosen.append(left.pop())
    return chosen


def faults_in(source: bytes, file: str) -> Iterator[Fault]:
    """Every fault that can be planted in the functions of one file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST, function: int) -> Iterator[Fault]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            below: list[ast.AST] = list(node.body)
        else:
            below = [n for n in ast.iter_child_nodes(node) if not _is_text(n)]
        if function:
            for kind, old, text in _changes(node):
                start = starts[old.lineno - 1] + old.col_offset
                stop = starts[old.end_lineno - 1] + old.end_col_offset
                yield Fault(file, function, old.lineno, kind, start, stop, text)
        for child in below:
            if isinstance(node, ast.AnnAssign) and child is node.annotation:
                continue
            yield from walk(child, function)

    yield from walk(ast.parse(source), 0)


def _is_text(node: ast.AST) -> bool:
    """Docstrings and what an error says are no place for a fault."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The kind of a fault, the node it replaces, and the text in its place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            flipped = ast.Compare(left, [FLIPPED[type(op)]()], [right])
            yield "comparison", node, f"({ast.unparse(flipped)})"
        case ast.BinOp(left=left, op=op) if isinstance(op, ARITHMETIC):
            yield "term", node, f"({ast.unparse(left)})"
        case ast.BoolOp(op=op, values=[*first, _]):
            kept = first[0] if len(first) == 1 else ast.BoolOp(op, first)
            yield "term", node, f"({ast.unparse(kept)})"
        case ast.keyword(arg=name, value=ast.Constant(value=int(n)) as value) if name in AXES:
            yield "axis", value, str(n + 1)
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=int(n)) as value):
            yield "axis", value, str(n + 1)
        case ast.Constant(value=int(n)) if type(n) is int and 0 <= n < 1000:
            yield "off by one", node, str(n + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branch", node, f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.If(test=test, body=[ast.Raise()]):
            yield "check", test, "False"
        case ast.If(test=test):
            yield "branch", test, f"not ({ast.unparse(test)})"
        case ast.With(items=[ast.withitem(context_expr=held)]) if _is_lock(held):
            yield "lock", held, "__import__('contextlib').nullcontext()"
        case ast.Expr(value=ast.Call(func=called)) if any(c in ast.unparse(called) for c in CHECKS):
            yield "check", node, "pass"


def _is_lock(held: ast.expr) -> bool:
    text = ast.unparse(held).lower()
    return any(word in text for word in ("lock", "interning", "mutex", "condition"))
