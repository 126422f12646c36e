"""Walks over a Program: who makes what, what a target needs, what is alive when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from onward.core.errors import UnknownNameError, nearest
from onward.core.program import Op, Program, Target, Variable
from onward.core.transform import transform

Where = str | Variable | Callable[[Variable], bool]


def producers(program: Program) -> Mapping[Variable, Op]:
    """The op that gives each computed Variable its value."""
    return {v: op for op in program.ops for v in op.outputs}


def consumers(program: Program) -> Mapping[Variable, tuple[Op, ...]]:
    """The ops that read each Variable."""
    found: dict[Variable, list[Op]] = {}
    for op in program.ops:
        for v in op.inputs:
            found.setdefault(v, []).append(op)
    return {v: tuple(ops) for v, ops in found.items()}


def ancestors(program: Program, targets: Iterable[Variable]) -> set[Variable]:
    """Every Variable that the targets depend on, the targets included."""
    needed = set(targets)
    for op in reversed(program.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
    return needed


def descendants(program: Program, sources: Iterable[Variable]) -> set[Variable]:
    """Every Variable that depends on a source, the sources included."""
    reached = set(sources)
    for op in program.ops:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)
    return reached


def liveness(program: Program) -> list[set[Variable]]:
    """For each op, the computed Variables that are alive once it has run."""
    alive = {*program.outputs, *program.next_state.values()}
    after: list[set[Variable]] = []
    computed = {v for op in program.ops for v in op.outputs}
    alive &= computed
    for op in reversed(program.ops):
        after.append(alive | set(op.outputs))
        alive = (alive - set(op.outputs)) | (set(op.inputs) & computed)
    return after[::-1]


@transform
def prune(program: Program, targets: Sequence[str | Variable]) -> Program:
    """The part of a Program that computes these targets, which become its outputs.

    State that no remaining op reads is dropped, and nothing is updated unless the target is the op
    that updates it. An op with effects (a debug print) stays when everything it reads stays. A forward
    op that saved residuals only for a backward pass that is gone takes its first form again.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    >>> len(program.ops), len(ow.prune(program, ["mul"]).ops)
    (7, 1)
    """
    outputs = tuple(find(program, t) for t in targets)
    needed = needed_ops(program, outputs)
    used = set(outputs).union(*(op.inputs for op in needed))
    differentiated = {op.of for op in needed}
    ops = tuple(op if op.outputs and op.outputs[0] in differentiated else _primal_form(op) for op in needed)
    computed = {v for op in ops for v in op.outputs}
    return replace(
        program,
        inputs=tuple(v for v in program.inputs if v in used),
        state=tuple(v for v in program.state if v in used),
        constants={v: c for v, c in program.constants.items() if v in used},
        ops=ops,
        outputs=outputs,
        next_state={old: new for old, new in program.next_state.items() if old in used and new in computed},
        gradients=tuple((p, g) for p, g in program.gradients if p in used and g in computed),
        initializers=tuple(op for op in program.initializers if any(v in used for v in op.outputs)),
        loss=program.loss if program.loss in outputs else None,
        hyperparameters=tuple(v for v in program.hyperparameters if v in used),
    )


def needed_ops(program: Program, targets: Iterable[Variable]) -> list[Op]:
    """The ops that compute the targets, in order, with the effects that watch only them."""
    needed = ancestors(program, targets)
    given = {*program.inputs, *program.state, *program.constants}
    return [
        op
        for op in program.ops
        if not needed.isdisjoint(op.outputs)
        or (op.body.has_effects and all(v in needed or v in given for v in op.inputs))
    ]


def _primal_form(op: Op) -> Op:
    """The op as it was before it saved residuals for its gradient op."""
    if op.primal is None:
        return op
    return replace(op, outputs=op.outputs[: len(op.primal.out_avals)], body=op.primal, primal=None)


def find(program: Program, target: str | Variable | Target) -> Variable:
    """The Variable of a Program that a name, a Variable of another Program or an op stands for."""
    if isinstance(target, Target):
        return target.op.outputs[0]
    return program[target.name if isinstance(target, Variable) else target]


def select(variables: Sequence[Variable], where: Iterable[Where], what: str) -> tuple[Variable, ...]:
    """The Variables that names, patterns (``"layers/*/w"``), Variables or predicates pick out.

    Raises ``UnknownNameError`` for one that picks nothing.
    """
    if isinstance(where, str | Variable) or callable(where):
        where = [where]
    chosen: set[Variable] = set()
    by_name = {v.name: v for v in variables}
    for choice in where:
        found = _matches(variables, by_name, choice)
        if not found:
            raise UnknownNameError(_nothing_found(choice, by_name, what))
        chosen.update(found)
    return tuple(v for v in variables if v in chosen)


def _matches(variables: Sequence[Variable], by_name: Mapping[str, Variable], choice: Where) -> list[Variable]:
    if isinstance(choice, Variable):
        choice = choice.name
    if not isinstance(choice, str):
        return [v for v in variables if choice(v)]
    if choice in by_name:
        return [by_name[choice]]
    return [v for v in variables if fnmatchcase(v.name, choice)]


def _nothing_found(choice: Where, by_name: Mapping[str, Variable], what: str) -> str:
    if isinstance(choice, Variable):
        choice = choice.name
    if not isinstance(choice, str):
        return f"{what}: the predicate {choice!r} picks none of {len(by_name)} Variables."
    return f"{what}: nothing is named {choice!r}. {nearest(choice, by_name)}"
