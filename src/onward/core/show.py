"""The text view: one line per Variable that is given, one line per op, the pass in the margin.

>>> import jax.numpy as jnp, onward as ow
>>> print(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3), name="dot"))
Program dot: 1 feed, 1 parameter (3 numbers), 2 ops
<BLANKLINE>
feed      │ f32[3]  x
parameter │ f32[3]  w
──────────┼──────────────────────────────────────────────────────────────────────
forward   │ f32[3]  mul = mul(w, x)
          │ f32[]   reduce_sum = reduce_sum(mul, axes=(0,))
──────────┼──────────────────────────────────────────────────────────────────────
return    │ f32[]   reduce_sum  (the loss)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from onward.core.graph import Op, Program
from onward.core.meshes import specs_of
from onward.core.variable import Variable
from onward.core.words import Kind, Pass, Placement

_TYPE_WIDTH = 24
_RULE_WIDTH = 70
_LARGE = 200
_MANY = 16
_QUIET = {
    "accuracy",
    "context_mesh",
    "dtype",
    "index_dtype",
    "new_sizes",
    "num_consts",
    "out_sharding",
    "precision",
    "preferred_element_type",
    "shape",
    "sharding",
    "unconstrained_dims",
    "weak_type",
}
_ONE_IS_PLAIN = {
    "base_dilation",
    "batch_group_count",
    "feature_group_count",
    "lhs_dilation",
    "rhs_dilation",
    "window_dilation",
    "window_strides",
}
_SHORT_VALUE = 16
_PLACES = {
    Placement.REPLICATED: "",
    Placement.PER_REPLICA: "  (each device its own)",
    Placement.SHARDED: "  (each device a part)",
}
_SHORT = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
}


@dataclass(frozen=True)
class _ListingLine:
    margin: str
    type: str
    text: str
    source: str = ""


def listing(
    program: Program, depth: int | None = None, source: bool = False, initializers: bool = False
) -> str:
    """The text that ``print(program)`` shows; a Program of over 200 ops is folded to scopes of depth 1."""
    if depth is None and sum(map(_count_within, program.ops)) > _LARGE:
        depth = 1
    if depth is None:
        blocks = [[*_given(program)], [*_ops(program)], [*_returned(program)]]
    else:
        blocks = [[*_given_folded(program, depth)], [*_ops_folded(program, depth)], [*_returned(program)]]
    if initializers:
        blocks.insert(1, [replace(_op_line(op), margin="initialize") for op in program.initializers])
    return f"{headline(program)}\n\n" + "\n".join(_table(blocks, source))


def headline(program: Program) -> str:
    """A Program in one line: its name and devices, and how many feeds, parameters and ops it has."""
    parts = [_count(len(program.inputs), "feed")]
    if program.parameters:
        numbers = _count(_numbers(program.parameters), "number")
        parts.append(f"{_count(len(program.parameters), 'parameter')} ({numbers})")
    frozen = [v for v in program.state if v.kind is Kind.FROZEN]
    if frozen:
        parts.append(f"{len(frozen)} frozen ({_count(_numbers(frozen), 'number')})")
    others = len(program.state) - len(program.parameters) - len(frozen)
    if others:
        parts.append(_count(others, "other state Variable"))
    parts.append(_count(len(program.ops), "op"))
    devices = f" on {_count(program.replicas.count, 'device')}" if program.replicas is not None else ""
    if program.partition is not None:
        devices = f" over a mesh of {program.partition}"
    return f"Program {program.name}{devices}: {', '.join(parts)}"


def short_type(v: Variable) -> str:
    """Dtype and shape as the listing shows them: ``f32[8,10]``."""
    dtype = str(v.dtype)
    stem = dtype.rstrip("0123456789")
    return f"{_SHORT.get(stem, stem)}{dtype[len(stem) :]}[{','.join(map(str, v.shape))}]"


def _given(program: Program) -> Iterator[_ListingLine]:
    places = _places(program)
    for margin, variables in _groups(program):
        yield from (_ListingLine(margin, short_type(v), f"{v.name}{places[v.name]}") for v in variables)


def _places(program: Program) -> dict[str, str]:
    """Where what is given lies on many devices, in words."""
    found = {v.name: _PLACES[v.placement] for _, variables in _groups(program) for v in variables}
    return found | {name: f"  {spec}" for name, spec in specs_of(program).items()}


def _given_folded(program: Program, depth: int) -> Iterator[_ListingLine]:
    places = _places(program)
    for margin, variables in _groups(program):
        for name, group in groupby(variables, lambda v: "/".join(v.name.split("/")[: max(depth, 1)])):
            members = list(group)
            if len(members) == 1:
                only = members[0]
                yield _ListingLine(margin, short_type(only), f"{only.name}{places[only.name]}")
            else:
                yield _ListingLine(
                    margin, f"{len(members)} arrays", f"{name}/... ({_numbers(members):,} numbers)"
                )


def _groups(program: Program) -> Iterator[tuple[str, list[Variable]]]:
    yield "feed", list(program.inputs)
    yield "parameter", list(program.parameters)
    yield "frozen", [v for v in program.state if v.kind is Kind.FROZEN]
    yield "state", [v for v in program.state if v.kind not in (Kind.PARAMETER, Kind.FROZEN)]
    yield "constant", list(program.constants)


def _returned(program: Program) -> Iterator[_ListingLine]:
    losses = _losses(program)
    for v in program.outputs:
        yield _ListingLine("return", short_type(v), f"{v.name}{losses.get(v, '')}")
    for v in losses:
        if v not in program.outputs:
            yield _ListingLine("loss", short_type(v), f"{v.name}{losses[v]}, not returned")
    replaced = program.next_state.items()
    if plain := [old for old, new in replaced if new.name == f"next({old.name})"]:
        yield _ListingLine(
            "next step", _count(len(plain), "array"), "each state Variable x takes the value of next(x)"
        )
    for old, new in replaced:
        if old not in plain:
            yield _ListingLine("next step", short_type(old), f"{old.name} <- {new.name}")


def _ops(program: Program) -> Iterator[_ListingLine]:
    for op in program.ops:
        yield _op_line(op)
        for part in turns_within(op):
            yield from map(_indented, _ops(part))


def turns_within(op: Op) -> list[Program]:
    """The Programs within a loop over steps or micro-batches, which are shown below it."""
    parts = op.subprograms.values()
    return [part for part in parts if part.gradients or any(map(turns_within, part.ops))]


def _count_within(op: Op) -> int:
    return 1 + sum(_count_within(inner) for part in turns_within(op) for inner in part.ops)


def _indented(line: _ListingLine) -> _ListingLine:
    return replace(line, margin=f"  {line.margin}", text=f"  {line.text}")


def _losses(program: Program) -> dict[Variable, str]:
    """A remark for each loss: of several, with the parameters that it trains; a loss is one number."""
    told = {v: f"  (a loss, of {_first_names(trained)})" for v, trained in program.losses.items()}
    alone = program.loss is not None and program.loss.is_float and not program.loss.shape
    return {program.loss: "  (the loss)"} if program.loss is not None and alone else told


def _first_names(variables: Sequence[Variable]) -> str:
    more = f" and {len(variables) - 2} more" * (len(variables) > 2)
    return ", ".join(v.name for v in variables[:2]) + more


def _op_line(op: Op) -> _ListingLine:
    source = str(op.source) if op.source is not None else ""
    return _ListingLine(str(op.made_by), _types(op.outputs), sentence(op), source)


def sentence(op: Op) -> str:
    """An op as an assignment: ``y = dot_general(x, w)``."""
    names = ", ".join(_few([v.name for v in op.outputs]))
    return f"{names} = {_call(op)}" if names else _call(op)


def _few(texts: list[str], many: int = _MANY) -> list[str]:
    """The first of many texts, and how many more there are."""
    if len(texts) <= many:
        return texts
    return [*texts[: many - 2], f"... ({len(texts) - many + 2} more)"]


def _types(variables: Iterable[Variable]) -> str:
    """The types of several Variables, the first of many; ``f32[8] x3`` where the same one repeats."""
    runs = [(name, len(list(run))) for name, run in groupby(map(short_type, variables))]
    return " ".join(_few([name if n == 1 else f"{name} x{n}" for name, n in runs], _MANY // 2))


def _call(op: Op) -> str:
    """The op as a call: its operands, literal numbers among them, and its short attributes."""
    body = op.primal or op.body
    operands = [op.inputs[o].name if isinstance(o, int) else o for o in body.operands]
    attributes = [f"{key}={value}" for key, value in body.attributes.items() if _is_telling(key, value)]
    return f"{op.type}({', '.join([*_few(operands), *attributes])})"


def _is_telling(key: str, value: str) -> bool:
    """Whether an attribute says something that a reader could not guess."""
    if key in _QUIET or (len(value) > _SHORT_VALUE and key != "spec") or value in ("False", "()"):
        return False
    return key not in _ONE_IS_PLAIN or not set(value) <= set("(1, )")


def _ops_folded(program: Program, depth: int) -> Iterator[_ListingLine]:
    def key(op: Op) -> tuple[Pass, str]:
        return op.made_by, "/".join(op.scope.split("/")[:depth]) if op.scope else ""

    for (made_by, scope), group in groupby(program.ops, key):
        ops = list(group)
        if len(ops) == 1 or (depth and not scope and made_by is Pass.FORWARD):
            yield from map(_op_line, ops)
            for part in (part for op in ops for part in turns_within(op)):
                yield from map(_indented, _ops_folded(part, depth))
        else:
            yield _ListingLine(
                str(made_by),
                _count(len(ops), "op"),
                f"{scope or '(no scope)'}: {_census(ops)}" if depth else _census(ops),
            )


def _census(ops: Iterable[Op]) -> str:
    common = Counter(op.type for op in ops).most_common()
    shown = ", ".join(f"{kind} {n}" for kind, n in common[:5])
    return shown + (", ..." if len(common) > 5 else "")


def _table(blocks: list[list[_ListingLine]], source: bool) -> Iterator[str]:
    lines = [line for block in blocks for line in block]
    margin = max((len(line.margin) for line in lines), default=0)
    width = min(_TYPE_WIDTH, max((len(line.type) for line in lines), default=0))
    for i, block in enumerate(block for block in blocks if block):
        if i:
            yield f"{'─' * (margin + 1)}┼{'─' * _RULE_WIDTH}"
        before = ""
        for line in block:
            row = f"{line.type:<{width}}  {line.text}"
            row = f"{row}  # {line.source}" if source and line.source else row
            yield f"{line.margin if line.margin != before else '':<{margin}} │ {row}".rstrip()
            before = line.margin


def nbytes(v: Variable) -> int:
    """The size of a value in bytes."""
    return v.size * int(v.dtype.itemsize)


def human_bytes(count: int, up: bool = False) -> str:
    """A size in the unit a person would use; rounded up where the text is to be enough for it.

    >>> human_bytes(12), human_bytes(2048), human_bytes(5 * 2**20)
    ('12 B', '2.0 KiB', '5.0 MiB')
    >>> human_bytes(2049), human_bytes(2049, up=True)
    ('2.0 KiB', '2.1 KiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            size = ceil(10 * size) / 10 if up else size
            return f"{int(size)} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def human_number(count: float) -> str:
    """A count in three digits, in the unit a person would use.

    >>> human_number(12), human_number(2500), human_number(1_234_567), human_number(3e9)
    ('12', '2.5 k', '1.23 M', '3 G')
    """
    size, units = float(count), ["", " k", " M", " G", " T"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g}{units[0]}"


def _numbers(variables: Iterable[Variable]) -> int:
    return sum(v.size for v in variables)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
