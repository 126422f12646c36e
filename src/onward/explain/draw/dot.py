"""A Program as text for Graphviz: scopes as clusters, colours by pass, one node for each op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onward.core.homes import own_scopes
from onward.core.program import Op, Program, Variable
from onward.core.show import short_type
from onward.core.walk import producers
from onward.core.words import Pass
from onward.explain.style import LIGHT

_INDENT = "  "


def dot_of(program: Program) -> str:
    r"""The Program in the language of Graphviz; ``dot -Tsvg`` draws it.

    >>> import jax.numpy as jnp, onward as ow
    >>> print(dot_of(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3), name="dot")))
    digraph "dot" {
      rankdir=TB; fontname="Helvetica"; compound=true;
      node [fontname="Helvetica", fontsize=11, shape=box, style="rounded,filled"];
      edge [color="#6b7280", arrowsize=0.7];
      v0 [label="w\nf32[3]", shape=ellipse, fillcolor="#e6e9ee", color="#475569"];
      v1 [label="x\nf32[3]", shape=ellipse, fillcolor="#e3ecfd", color="#2563eb"];
      op0 [label="mul\nf32[3]", fillcolor="#e3ecfd", color="#2563eb"];
      op1 [label="reduce_sum\nf32[]", fillcolor="#e3ecfd", color="#2563eb", penwidth=3];
      v0 -> op0 [color="#2563eb"];
      v1 -> op0 [color="#2563eb"];
      op0 -> op1 [color="#2563eb"];
    }
    """
    number = {op: f"op{i}" for i, op in enumerate(program.ops)}
    given = {v: f"v{i}" for i, v in enumerate(_given(program))}
    lines = [
        f"digraph {quoted(program.name)} {{",
        f'{_INDENT}rankdir=TB; fontname="Helvetica"; compound=true;',
        f'{_INDENT}node [fontname="Helvetica", fontsize=11, shape=box, style="rounded,filled"];',
        f'{_INDENT}edge [color="{LIGHT["faint"]}", arrowsize=0.7];',
        *(_given_node(v, key, program) for v, key in given.items()),
        *_scopes(program, number),
        *_edges(program, number, given),
        "}",
    ]
    return "\n".join(lines)


def quoted(text: str) -> str:
    r"""A text as a string of Graphviz; its line breaks are kept.

    >>> print(quoted('say "x"\ny'))
    "say \"x\"\ny"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _given(program: Program) -> list[Variable]:
    """List the feeds, state and constants read by ops other than updates, which read state of their own."""
    read = dict.fromkeys(v for op in program.ops if op.made_by is not Pass.UPDATE for v in op.inputs)
    given = {*program.inputs, *program.state, *program.constants}
    return [v for v in read if v in given]


def _given_node(v: Variable, key: str, program: Program) -> str:
    lane = "forward" if v in program.inputs else "state"
    label = quoted(f"{v.name}\n{short_type(v)}")
    return f"{_INDENT}{key} [label={label}, shape=ellipse, {_colours(lane)}];"


def _colours(lane: str) -> str:
    return f'fillcolor="{LIGHT[f"{lane}-soft"]}", color="{LIGHT[lane]}"'


def _scopes(program: Program, number: Mapping[Op, str]) -> Iterator[str]:
    """The ops, those of a scope and a pass in a cluster."""
    tree: dict[str, object] = {}
    for op, scope in own_scopes(program).items():
        at = tree
        for part in (str(op.made_by), *scope.split("/")) if scope else ():
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[number[op]] = op
    yield from _clusters(tree, program, 1, [0])


def _clusters(tree: Mapping[str, object], program: Program, depth: int, count: list[int]) -> Iterator[str]:
    indent = _INDENT * depth
    for key, value in tree.items():
        if isinstance(value, Op):
            wide = ", penwidth=3" if program.loss in value.outputs else ""
            label = quoted("\n".join((value.type, *map(short_type, value.outputs[:1]))))
            yield f"{indent}{key} [label={label}, {_colours(str(value.made_by))}{wide}];"
        elif isinstance(value, Mapping):
            count[0] += 1
            yield f"{indent}subgraph cluster_{count[0]} {{"
            yield f'{indent}{_INDENT}label={quoted(key)}; style="rounded"; color="{LIGHT["line"]}";'
            yield from _clusters(value, program, depth + 1, count)
            yield f"{indent}}}"


def _edges(program: Program, number: Mapping[Op, str], given: Mapping[Variable, str]) -> Iterator[str]:
    """One edge for each Variable that an op reads; dashed for what the backward pass reads of the forward."""
    makers = producers(program)
    seen: set[tuple[str, str]] = set()
    for op in program.ops:
        for v in op.inputs:
            maker = makers.get(v)
            source = number[maker] if maker is not None else given.get(v)
            if source is None or (source, number[op]) in seen:
                continue
            seen.add((source, number[op]))
            yield f"{_INDENT}{source} -> {number[op]} [{_look(maker, op)}];"


def _look(maker: Op | None, op: Op) -> str:
    if op.made_by is Pass.BACKWARD and (maker is None or maker.made_by is Pass.FORWARD):
        return f'color="{LIGHT["line"]}", style=dashed, constraint=false'
    return f'color="{LIGHT[str(op.made_by)]}"'
