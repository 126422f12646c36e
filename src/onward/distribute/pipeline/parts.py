"""The Programs of the parts of a Program: what each reads of the others, and what the others read of it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from onward.core.check import check
from onward.core.cost import cost
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.loops import gives_results
from onward.core.jaxprs.reading import read_jaxpr
from onward.core.names import Names
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.distribute.pipeline.halves import in_halves

Key = TypeVar("Key", bound=Hashable)
_DOUBLE = 1.1  # how much dearer than one op two may be that compute its outputs apart


def parts_of(
    source: Program,
    groups: Mapping[Key, Sequence[Op]],
    results: Mapping[Variable, Key],
    fed: Collection[Variable] = (),
) -> Mapping[Key, Program]:
    """A Program for each group of ops: its outputs are what other groups read, and the results.

    Args:
        source: the Program whose ops they are.
        groups: the ops of each part, in order.
        results: what is wanted, and the part that hands it out, whether it computes it or only reads it.
        fed: state that each run is given as data.
    """
    made = {v: key for key, ops in groups.items() for op in ops for v in op.outputs}
    read: dict[Variable, set[Key]] = {}
    for key, ops in groups.items():
        for v in dict.fromkeys(v for op in ops for v in op.inputs):
            read.setdefault(v, set()).add(key)
    handed = {v: key for v, key in made.items() if read.get(v, set()) - {key}}
    found = {}
    for key in dict.fromkeys((*groups, *results.values())):
        own = groups.get(key, ())
        asked = [v for v, of in results.items() if of == key]
        sent = [v for op in own for v in op.outputs if handed.get(v) == key]
        name = "_".join(map(str, key)) if isinstance(key, tuple) else str(key)
        found[key] = _part(source, f"{source.name}_{name}", own, dict.fromkeys((*sent, *asked)), fed)
    return found


def _part(
    source: Program, name: str, ops: Sequence[Op], outputs: Iterable[Variable], fed: Collection[Variable]
) -> Program:
    outputs = tuple(outputs)
    made = {v for op in ops for v in op.outputs}
    read = [v for v in dict.fromkeys((*(v for op in ops for v in op.inputs), *outputs)) if v not in made]
    held = {v for v in source.state if v not in fed}
    return check(
        Program(
            name,
            inputs=tuple(v for v in read if v not in held and v not in source.constants),
            state=tuple(v for v in read if v in held),
            constants={v: source.constants[v] for v in read if v in source.constants},
            ops=tuple(ops),
            outputs=outputs,
        )
    )


def taken_apart(op: Op, names: Names, constants: dict[Variable, Any]) -> Sequence[Op]:
    """The equations of an op, each an op of its own; ``constants`` get those that stand in it."""
    read = read_jaxpr(op.body.closed, op.inputs, names)
    constants.update(read.constants)
    made = {v for o in read.ops for v in o.outputs}
    ends: dict[Variable, Variable] = {}
    copies = []
    for inner, outer in zip(read.outputs, op.outputs, strict=True):
        if inner in made and inner not in ends:
            ends[inner] = outer
        else:
            body = body_of(lambda x: [x], inner.aval)
            copies.append(Op("copy", (ends.get(inner, inner),), (outer,), body))

    def mapped(variables: Sequence[Variable]) -> tuple[Variable, ...]:
        return tuple(ends.get(v, v) for v in variables)

    return [
        replace(op, type=o.type, inputs=mapped(o.inputs), outputs=mapped(o.outputs), body=o.body, primal=None)
        for o in (*read.ops, *copies)
    ]


def apart(
    ops: Sequence[Op],
    first: Collection[Variable],
    then: Collection[Variable],
    names: Names,
    constants: dict[Variable, Any],
) -> tuple[list[Op], list[Op]]:
    """The ops that compute what is wanted first, and those that compute the rest from what these made.

    An op that computes some of both becomes two, unless they would do the same work twice; the second half of
    a loop reads what the first one stacks for it.

    Args:
        ops: in order.
        first: what is wanted first.
        then: all that is wanted.
        names: for what is new.
        constants: they get those of ops that are taken apart.
    """
    ops = [o for op in ops for o in (taken_apart(op, names, constants) if _holds_loop(op) else [op])]
    needed = set(first)
    early = []
    rest: dict[Op, Op] = {}
    for op in reversed(ops):
        wanted = [i for i, v in enumerate(op.outputs) if v in needed]
        if wanted:
            part, rest[op] = in_halves(op, wanted, names) or (_cheapest(op, wanted), op)
            early.append(part)
            needed.update(part.inputs)
    made = {v for op in early for v in op.outputs}
    needed = set(then)
    late = []
    for op in (rest.get(op, op) for op in reversed(ops)):
        wanted = [i for i, v in enumerate(op.outputs) if v in needed and v not in made]
        if wanted:
            part = _of_outputs(op, wanted)
            late.append(part)
            needed.update(part.inputs)
    return early[::-1], late[::-1]


def _holds_loop(op: Op) -> bool:
    """Whether an op is a loop and more, if only a value that it passes on."""
    is_loop = any(of(call.primitive).runs is Runs.SCAN for call in op.body.calls)
    return is_loop and not gives_results(op.body)


def _cheapest(op: Op, wanted: Sequence[int]) -> Op:
    """The op that computes these outputs, or all if the others would cost as much again."""
    others = [i for i in range(len(op.outputs)) if i not in wanted]
    if not others:
        return op
    part = _of_outputs(op, wanted)
    both = cost(part).flops + cost(_of_outputs(op, others)).flops
    return part if both <= _DOUBLE * cost(op).flops else op


def _of_outputs(op: Op, wanted: Sequence[int]) -> Op:
    if len(wanted) == len(op.outputs):
        return op
    body, kept = op.body.restricted(wanted)
    return Op(
        op.type,
        tuple(op.inputs[i] for i in kept),
        tuple(op.outputs[i] for i in wanted),
        body,
        op.made_by,
        op.scope,
        op.source,
        op.of,
    )
