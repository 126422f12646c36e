"""The rules of the graph: every Program keeps them, every transform ends by checking them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onward.core.errors import ArgumentError, GraphError
from onward.core.meshes import check_partition
from onward.core.placement import check_placement
from onward.core.program import SEED, Op, Program, Variable
from onward.core.structure import describe
from onward.core.whole import expect_whole
from onward.core.words import Placement


def expect_program(program: Any, what: str) -> None:
    """Raise ``ArgumentError`` for what is not a Program, such as the function to trace one from."""
    if not isinstance(program, Program):
        called = getattr(program, "__name__", None)
        advice = getattr(program, "advice", None) if hasattr(type(program), "advice") else None
        found = f"the function {called!r}" if callable(program) and called else describe(program)
        found = repr(program) if advice else found  # ours, which shows itself in a line
        raise ArgumentError(f"{what} was given {found}; expected a Program. {advice or _MAKE_ONE}")


_MAKE_ONE = "Make one: trace(function, params, *data), or optimizer.minimize(function, params, *data)."


def expect_switches(what: str, choices: tuple[bool | None, ...] = (True, False), **given: Any) -> None:
    """Raise ``ArgumentError`` for an option, by its name, that is none of these."""
    for word, value in given.items():
        if not any(value is choice for choice in choices):
            meant = ", or None for where it gains something" if None in choices else ""
            raise ArgumentError(f"{what}: {word} is {value!r}; expected True or False{meant}.")


def check(program: Program) -> Program:
    """Return the Program if it keeps the rules of the graph, else raise ``GraphError``.

    Every Variable is given a value exactly once, before it is read; names are unique; the inputs and
    outputs of every op have the types its body has; what replaces a state Variable has its type;
    every gradient has the type of its parameter; what is placed replicated stays equal on all devices;
    what is split over a mesh is divided by its axes; what was loaded from a file reads what it read there.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w: jnp.sum(w), jnp.ones(3))
    >>> ow.check(program) is program
    True
    """
    expect_program(program, "check")
    known = _Known(program.name)
    known.give((*program.inputs, *program.state, *program.constants), "the head of the Program")
    for op in program.ops:
        known.read(op.inputs, op)
        known.give(op.outputs, op)
        _check_types(program, op)
    known.read(program.outputs, "the outputs")
    known.read(program.next_state.values(), "next_state")
    _check_next_state(program)
    known.read((g for _, g in program.gradients), "gradients")
    known.read(program.losses, "losses")
    for parameter, gradient in program.gradients:
        _same_type(program, parameter, gradient, "the gradient of")
    _check_initializers(program)
    check_placement(program)
    check_partition(program)
    expect_whole(program)
    return program


class _Known:
    """The Variables that have a value so far."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.variables: set[Variable] = set()
        self.names: set[str] = set()

    def give(self, variables: Iterable[Variable], where: object) -> None:
        for v in variables:
            if v in self.variables:
                raise GraphError(f"{self.program}: {where} gives {v.name!r} a value a second time.")
            if v.name in self.names:
                raise GraphError(f"{self.program}: {where} uses the name {v.name!r} a second time.")
            self.variables.add(v)
            self.names.add(v.name)

    def read(self, variables: Iterable[Variable], where: object) -> None:
        for v in variables:
            if v not in self.variables:
                raise GraphError(
                    f"{self.program}: {where} reads {v.name!r} before anything gives it a value."
                )


def _check_types(program: Program, op: Op) -> None:
    for side, variables, types in (
        ("input", op.inputs, op.body.in_avals),
        ("output", op.outputs, op.body.out_avals),
    ):
        if len(variables) != len(types):
            raise GraphError(
                f"{program.name}: op {op!r} has {len(variables)} {side}s, its body has {len(types)}."
            )
        for v, t in zip(variables, types, strict=True):
            if v.shape != t.shape or v.dtype != t.dtype:
                raise GraphError(
                    f"{program.name}: {side} {v.name!r} of op {op!r} is {v.type}, "
                    f"its body has {t.dtype}{list(t.shape)}."
                )


def _check_next_state(program: Program) -> None:
    state = set(program.state)
    for old, new in program.next_state.items():
        if old not in state:
            raise GraphError(f"{program.name}: next_state replaces {old.name!r}, which is not state.")
        _same_type(program, old, new, "what replaces")


def _check_initializers(program: Program) -> None:
    made = {v for op in program.initializers for v in op.outputs}
    signature = program.signature  # a parameter may be given, and kept in another form only
    given = () if signature is None else signature.parameters.variables
    passed = [v for v in given if v not in program.state]
    known = _Known(f"{program.name}, initializers")
    known.variables.add(SEED)
    known.give((v for v in (*program.state, *passed) if v not in made), "the state that is passed in")
    for op in program.initializers:
        known.read(op.inputs, op)
        known.give(op.outputs, op)
        if all(v.placement is not Placement.SHARDED for v in op.outputs):  # of those, all parts end to end
            _check_types(program, op)
    if surplus := made - {*program.state, *passed}:
        raise GraphError(f"{program.name}: initializers make {surplus}, which are not state.")


def _same_type(program: Program, old: Variable, new: Variable, words: str) -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise GraphError(
            f"{program.name}: {words} {old.name!r} ({old.type}) is {new.name!r} ({new.type}); "
            "the types must be equal."
        )
