"""The roles of the Variables and ops of an inspected step: loss, gradients, facing forward ops."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp

from onward.core.primitives.traits import Runs
from onward.core.program import Op, Variable
from onward.core.words import Pass
from onward.explain.inspect.opened import OpenedBody
from onward.explain.inspect.passes import is_mixed

Pair = tuple[Variable, Variable]


def facing(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops, each backward op with the forward op that it belongs to, where that can be told.

    JAX gives the transpose of an equation the place in the code of that equation. Where several forward ops
    stand in one place, the calls that led to them decide, and then, for the layers that a Python loop makes,
    what the backward op shares with them; it goes from the last to the first.
    """
    towards = dict(_towards_loss(ops))
    forward: dict[tuple[str, str, int], list[tuple[int, Op]]] = {}
    found: list[Op] = []
    last = 0
    for i, op in enumerate(ops):
        place = _place(op)
        if i in towards:
            last = i  # of several losses each has its backward pass behind it
            if place is not None:
                forward.setdefault(place, []).append((i, op))
        if op.made_by is not Pass.BACKWARD or place is None or place not in forward:
            found.append(op)
            continue
        last, best = _nearest(op, forward[place], last)
        found.append(replace(op, of=best.outputs[0]))
    return tuple(found)


def _towards_loss(ops: Sequence[Op]) -> list[tuple[int, Op]]:
    """The forward ops that compute results, not those that only save something for the backward pass."""
    used = {v for op in ops if op.made_by in (Pass.FORWARD, Pass.BACKWARD) for v in op.inputs}
    needed: set[Variable] = set()
    found = []
    for i in reversed(range(len(ops))):
        op = ops[i]
        counts = used.isdisjoint(op.outputs) or not needed.isdisjoint(op.outputs)
        if op.made_by is Pass.FORWARD and op.inputs and op.outputs and counts:
            needed.update(op.inputs)
            found.append((i, op))
    return found[::-1]


def _place(op: Op) -> tuple[str, str, int] | None:
    """Scope, file and line."""
    if op.source is None or not op.source.file:
        return None
    return op.scope, op.source.file, op.source.line


def _nearest(op: Op, candidates: Sequence[tuple[int, Op]], last: int) -> tuple[int, Op]:
    """The candidate that has most in common with a backward op, walking from the end to the front."""
    if len(candidates) == 1:
        return candidates[0]
    reads = set(op.inputs)

    def common(candidate: tuple[int, Op]) -> tuple[int, int, bool, bool, int]:
        i, forward = candidate
        shared = len(reads.intersection((*forward.inputs, *forward.outputs)))
        transposed = forward.type == (op.primitive.transposes or op.type)
        return _same_calls(op, forward), shared, transposed, i <= last, i

    return max(candidates, key=common)


def _same_calls(op: Op, other: Op) -> int:
    """How many calls led to both."""
    calls, others = (x.source.calls if x.source is not None else () for x in (op, other))
    return next((i for i, (a, b) in enumerate(zip(calls, others, strict=False)) if a != b), len(others))


def gradients_of(ops: Sequence[Op], following: Mapping[Variable, Variable]) -> tuple[Pair, ...]:
    """The pairs (parameter, gradient) that can be told: both are of one type.

    From the next value of an array back over updating ops, by way of Variables of its shape alone, stands its
    gradient, if the update does not put several arrays into one.
    """
    order = {v: i for i, op in enumerate(ops) for v in op.outputs}
    pairs = []
    for old, gradients in _gradients_behind(ops, following).items():
        found = [g for g in gradients if g.dtype == old.dtype]
        if found:
            pairs.append((old, max(found, key=order.__getitem__)))
    return tuple(pairs)


def _gradients_behind(
    ops: Sequence[Op], following: Mapping[Variable, Variable]
) -> dict[Variable, list[Variable]]:
    """For floating point state the gradients of its shape that the update makes its next value from.

    What is made from the next value of other weights, as a slowly moving copy is, has not their gradient.
    """
    makers = {v: op for op in ops for v in op.outputs}
    read = _read_forward(ops)
    weights = {new for old, new in following.items() if old in read}
    behind = {}
    for old, new in following.items():
        if jnp.issubdtype(old.dtype, jnp.inexact) and new in makers and makers[new].made_by is Pass.UPDATE:
            others = {v for v in weights if v is not new and v.dtype == old.dtype}
            behind[old] = _differentiated(old, new, makers, others)
    return behind


def _differentiated(
    old: Variable, new: Variable, makers: Mapping[Variable, Op], others: set[Variable]
) -> list[Variable]:
    """The gradients of the shape of a Variable that its next value is made from, not by way of others."""
    seen, waiting, found = {new, *others}, [new], []
    while waiting:
        v = waiting.pop()
        maker = makers.get(v)
        if maker is None:
            continue
        if maker.made_by in (Pass.BACKWARD, Pass.COLLECTIVE):
            found += [v] if jnp.issubdtype(v.dtype, jnp.inexact) and _may_be_gradient(v, maker) else []
        elif maker.made_by is Pass.UPDATE:
            near = [x for x in maker.inputs if x.shape == old.shape and x not in seen]
            seen.update(near)
            waiting.extend(near)
    return found


def _may_be_gradient(v: Variable, maker: Op) -> bool:
    """Whether no branch makes something else of gradients, as a line search does, and gives that."""
    if not isinstance(maker.body, OpenedBody) or maker.primitive.runs is not Runs.BRANCH:
        return True
    turns, place = maker.body.turns, maker.outputs.index(v)
    made = {(i, x): op.made_by for i, t in enumerate(turns) for op in t.turn.ops for x in op.outputs}
    found = [made.get((i, t.turn.outputs[t.told.results[place]])) for i, t in enumerate(turns)]
    return any(made_by in (Pass.BACKWARD, Pass.COLLECTIVE) for made_by in found)


def parameters_among(
    ops: Sequence[Op], following: Mapping[Variable, Variable], within: Collection[Variable] = ()
) -> set[Variable]:
    """The state that is trained: the forward pass reads it, and it has a gradient of any type.

    ``within``: what loops train.

    Where no such gradient can be told apart, as when the update works on all of them laid end to end: the
    floating point arrays that the forward pass reads and the update replaces.
    """
    read = _read_forward(ops)
    behind = _gradients_behind(ops, following)
    sure = {*within, *(v for v in behind if v in read and behind[v])}
    return sure or {v for v in behind if v in read and v.ndim}


def _read_forward(ops: Sequence[Op]) -> set[Variable]:
    """The Variables read by the forward pass, or by an op that is forward and backward at once."""
    needed: set[Variable] = set()
    for op in reversed(ops):
        marked = op.made_by in (Pass.FORWARD, Pass.BACKWARD)
        if marked and (op.made_by is Pass.FORWARD or is_mixed(op) or not needed.isdisjoint(op.outputs)):
            needed.update(_read_within(op, op.body) if isinstance(op.body, OpenedBody) else op.inputs)
    return needed


def _read_within(op: Op, body: OpenedBody) -> Iterator[Variable]:
    """The Variables that an opened op is given and that a forward pass within reads."""
    for opened in body.turns:
        read = _read_forward(opened.turn.ops)
        given = zip(opened.turn.inputs, opened.told.given, strict=True)
        yield from (op.inputs[at] for v, at in given if at is not None and v in read)


def likely_loss(ops: Sequence[Op], outputs: Iterable[Variable]) -> Variable | None:
    """The result that is the loss, where nothing shows at which number the backward pass begins.

    A mean over devices, a number of the forward pass, or what a loop that accumulates gradients returns;
    None if there are several.
    """
    makers = {v: op for op in ops for v in op.outputs}
    scalars = [v for v in outputs if v in makers and not v.shape and jnp.issubdtype(v.dtype, jnp.inexact)]
    if not any(op.made_by is Pass.BACKWARD for op in ops):
        return None
    for is_loss in (
        lambda op: op.made_by is Pass.COLLECTIVE,
        lambda op: op.made_by is Pass.FORWARD,
        is_mixed,
        lambda op: any(v in makers and is_mixed(makers[v]) for v in op.inputs),
    ):
        if found := [v for v in scalars if is_loss(makers[v])]:
            return found[0] if len(found) == 1 else None
    return None
