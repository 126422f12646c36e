"""Walks over a Program: who makes what, what a target needs, what is alive when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import jax

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.program import Op, Program, Target, Variable
from onward.core.structure import describe
from onward.core.transform import transform
from onward.core.words import Pass


class Named(Protocol):
    """Something that stands for the Variable of its name, such as a declaration made outside of a trace."""

    @property
    def name(self) -> str | None:
        """The name of the Variable."""


# A declaration made outside of a trace is Named; for a type checker it is the array that it stands for.
Where = str | Variable | Named | jax.Array | Callable[[Variable], bool]


def producers(program: Program) -> Mapping[Variable, Op]:
    """The op that gives each computed Variable its value."""
    expect_program(program, "producers")
    return {v: op for op in program.ops for v in op.outputs}


def consumers(program: Program) -> Mapping[Variable, tuple[Op, ...]]:
    """The ops that read each Variable."""
    expect_program(program, "consumers")
    found: dict[Variable, list[Op]] = {}
    for op in program.ops:
        for v in op.inputs:
            found.setdefault(v, []).append(op)
    return {v: tuple(ops) for v, ops in found.items()}


def ancestors(program: Program, targets: Where | Iterable[Where]) -> set[Variable]:
    """Every Variable that the targets depend on, the targets included.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    >>> sorted(v.name for v in ow.graph.ancestors(program, "mul"))
    ['mul', 'w', 'x']
    """
    needed = _found(program, targets, "ancestors")
    for op in reversed(program.ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
    return needed


def descendants(program: Program, sources: Where | Iterable[Where]) -> set[Variable]:
    """Every Variable that depends on a source, the sources included."""
    reached = _found(program, sources, "descendants")
    for op in program.ops:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)
    return reached


def liveness(program: Program) -> list[set[Variable]]:
    """For each op, the computed Variables that are alive once it has run."""
    expect_program(program, "liveness")
    alive = {*program.outputs, *program.next_state.values()}
    after: list[set[Variable]] = []
    computed = {v for op in program.ops for v in op.outputs}
    alive &= computed
    for op in reversed(program.ops):
        after.append(alive | set(op.outputs))
        alive = (alive - set(op.outputs)) | (set(op.inputs) & computed)
    return after[::-1]


@transform
def prune(program: Program, targets: str | Variable | Target | Sequence[str | Variable | Target]) -> Program:
    """The part of a Program that computes these targets, which become its outputs.

    State that no remaining op reads is dropped, and nothing is updated unless a target is made by the op
    that updates it. An op with effects (a debug print) stays when everything it reads stays. A forward
    op that saved residuals only for a backward pass that is gone takes its first form again.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    >>> len(program.ops), len(ow.prune(program, ["mul"]).ops)
    (7, 1)
    """
    outputs = tuple(dict.fromkeys(find(program, t) for t in _aimed(targets)))
    needed = needed_ops(program, outputs)
    used = set(outputs).union(*(op.inputs for op in needed))
    differentiated = {op.of for op in needed}
    ops = tuple(op if differentiated & {*op.outputs[:1]} else _primal_form(op, used) for op in needed)
    initializers = _initializers(program, used)
    used.update(v for op in initializers for v in (*op.inputs, *op.outputs))
    computed = {v for op in ops for v in op.outputs}
    makers = (op for op in ops if op.made_by is not Pass.BACKWARD)
    aimed = {v for op in makers if not set(op.outputs).isdisjoint(outputs) for v in op.outputs} | set(outputs)
    return replace(
        program,
        inputs=tuple(v for v in program.inputs if v in used),
        state=tuple(v for v in program.state if v in used),
        constants={v: c for v, c in program.constants.items() if v in used},
        ops=ops,
        outputs=outputs,
        next_state={old: new for old, new in program.next_state.items() if old in used and new in aimed},
        gradients=tuple((p, g) for p, g in program.gradients if p in used and g in computed),
        initializers=initializers,
        loss=program.loss if program.loss in outputs else None,
        losses={v: trained for v, trained in program.losses.items() if v in outputs},
        hyperparameters=tuple(v for v in program.hyperparameters if v in used),
        bounds={v: bound for v, bound in program.bounds.items() if v in used},
    )


def _aimed(targets: Any) -> list[Any]:
    """The targets of ``prune``, which have names of their own: patterns are for what changes many."""
    if isinstance(targets, Iterable) or name_of(targets) is not None or isinstance(targets, Target):
        return listed(targets)
    raise ArgumentError(
        f"prune was given {describe(targets)}; expected what is to be computed: a name, a Variable, or "
        "several of them, prune(program, [program.loss]). print(program) lists all names."
    )


def _initializers(program: Program, used: set[Variable]) -> tuple[Op, ...]:
    """The initializers of the state that is used, and of what these read."""
    kept: list[Op] = []
    needed = set(used)
    for op in reversed(program.initializers):
        if not needed.isdisjoint(op.outputs):
            kept.append(op)
            needed.update(op.inputs)
    return tuple(kept[::-1])


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


def _primal_form(op: Op, used: set[Variable]) -> Op:
    """The op as it was before it saved residuals for its gradient op, unless one of these is used."""
    if op.primal is None:
        return op
    count = len(op.primal.out_avals)
    if not used.isdisjoint(op.outputs[count:]):
        return op
    return replace(op, outputs=op.outputs[:count], body=op.primal, primal=None)


def substitute(program: Program, replacement: Mapping[Variable, Variable]) -> Program:
    """The Program with some Variables replaced by others of their type, wherever they stand."""

    def new(v: Variable) -> Variable:
        return replacement.get(v, v)

    def rewired(op: Op) -> Op:
        if not replacement.keys().isdisjoint((*op.inputs, *op.outputs)) or op.of in replacement:
            inputs, outputs = tuple(map(new, op.inputs)), tuple(map(new, op.outputs))
            return replace(op, inputs=inputs, outputs=outputs, of=op.of and new(op.of))
        return op

    return replace(
        program,
        inputs=tuple(map(new, program.inputs)),
        state=tuple(map(new, program.state)),
        constants={new(v): value for v, value in program.constants.items()},
        ops=tuple(map(rewired, program.ops)),
        outputs=tuple(map(new, program.outputs)),
        next_state={new(old): new(following) for old, following in program.next_state.items()},
        gradients=tuple((new(p), new(g)) for p, g in program.gradients),
        initializers=tuple(map(rewired, program.initializers)),
        loss=program.loss and new(program.loss),
        losses={new(v): tuple(map(new, trained)) for v, trained in program.losses.items()},
        hyperparameters=tuple(map(new, program.hyperparameters)),
        limits={new(v): limit for v, limit in program.limits.items()},
        bounds={new(v): bound for v, bound in program.bounds.items()},
        signature=program.signature and program.signature.mapped(new),
    )


def with_results(program: Program, new: Callable[[Variable], Variable]) -> Program:
    """The Program that returns ``new(v)`` in place of each result ``v``."""
    signature = program.signature
    assert signature is not None
    return replace(
        program,
        outputs=tuple(map(new, program.outputs)),
        loss=program.loss and new(program.loss),
        signature=replace(signature, result=signature.result.mapped(new)),
    )


def find(program: Program, target: Any) -> Variable:
    """The Variable of a Program that a name, a Variable of another Program or an op stands for."""
    if isinstance(target, Target):
        return program[target.op.outputs[0]]
    name = name_of(target)
    if name is None:
        raise UnknownNameError(
            f"{target!r} has no name in Program {program.name!r}: it is not a layer's result. Give it one: "
            "jax.ad_checkpoint.checkpoint_name, or name= of a layer."
        )
    return program[name]


def _found(program: Program, targets: Any, what: str) -> set[Variable]:
    """The Variables that are meant; one of any Program stands for itself."""
    expect_program(program, what)
    return {t if isinstance(t, Variable) else find(program, t) for t in listed(targets)}


def name_of(target: Any) -> str | None:
    """The name that a string, a Variable or a declaration stands for."""
    return target if isinstance(target, str) else getattr(target, "name", None)


def listed(choice: Any) -> list[Any]:
    """Several choices as a list; one alone as a list of one."""
    alone = isinstance(choice, str | Target) or hasattr(choice, "name") or callable(choice)
    if not alone and not isinstance(choice, Iterable):
        raise ArgumentError(
            f"{describe(choice)} picks nothing; expected names, patterns such as 'layers/*/w', Variables, "
            "or a predicate of them."
        )
    return [choice] if alone else list(choice)


def meant(choice: Any, what: str, all_of_it: str) -> list[Any] | None:
    """The choices of an argument ``where=``, None if it was not given.

    An empty one raises ``ArgumentError``: it is what a search that found nothing gives, and means no more.
    """
    if choice is None:
        return None
    if not (choices := listed(choice)):
        raise ArgumentError(
            f"{what}: where is empty, so nothing is meant. A search that finds nothing gives that. Leave "
            f"{what} away then, or leave where= out {all_of_it}."
        )
    return choices


def select(variables: Sequence[Variable], where: Iterable[Where], what: str) -> tuple[Variable, ...]:
    """The Variables that names, patterns (``"layers/*/w"``), Variables or predicates pick out.

    Raises ``UnknownNameError`` for one that picks nothing.
    """
    chosen: set[Variable] = set()
    by_name = {v.name: v for v in variables}
    for choice in listed(where):
        found = _matches(variables, by_name, choice)
        if not found:
            raise UnknownNameError(_nothing_found(choice, by_name, what))
        chosen.update(found)
    return tuple(v for v in variables if v in chosen)


def _matches(variables: Sequence[Variable], by_name: Mapping[str, Variable], choice: Where) -> list[Variable]:
    name = name_of(choice)
    if name is None:
        return [v for v in variables if callable(choice) and _picks(choice, v)]
    if name in by_name:
        return [by_name[name]]
    return [v for v in variables if fnmatchcase(v.name, name)]


def _picks(predicate: Callable[[Variable], bool], v: Variable) -> bool:
    """Whether a predicate picks a Variable; ``ArgumentError`` if it cannot tell."""
    try:
        return bool(predicate(v))
    except Exception as error:
        raise ArgumentError(
            f"The predicate {predicate!r} cannot tell whether it picks {v!r}: {type(error).__name__}: "
            f"{error}. It takes a Variable, with name, shape, dtype and kind, and returns True or False."
        ) from error


def _nothing_found(choice: Where, by_name: Mapping[str, Variable], what: str) -> str:
    name = name_of(choice)
    if name is None and not callable(choice):
        return f"{what}: {describe(choice)} names no Variable. {nearest('', by_name)}"
    if name is None:
        return f"{what}: the predicate {choice!r} picks none of {len(by_name)} Variables."
    return f"{what}: nothing is named {name!r}. {nearest(name, by_name)}"
