"""From what a trace found to the forward Program: names, structures, declared Variables, initializers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, TraceError
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.reading import read_jaxpr
from onward.core.names import Names
from onward.core.program import SEED, Op, Program, Variable
from onward.core.structure import Signature, Static, Structure, describe
from onward.core.words import Kind
from onward.define.arguments import Leaf, Specification
from onward.define.context import Context, Declared


@dataclass(frozen=True)
class Traced:
    """A traced jaxpr, the containers of what the function returned, and what it declared."""

    closed: Any
    treedef: Any
    statics: Sequence[Static | None]
    context: Context

    @property
    def count(self) -> int:
        """How many arrays the function returned for the person."""
        return sum(s is None for s in self.statics)

    @property
    def labels(self) -> dict[int, str]:
        """The names of outputs, by position: ``next(x)`` for what is assigned, then those of layers."""
        extra = self.context.extra
        start = len(self.closed.jaxpr.outvars) - len(extra.bounds) - len(extra.labels) - len(extra.assigned)
        names = [*(f"next({name})" for name in extra.assigned), *extra.labels]
        return {start + i: name for i, name in enumerate(names)}

    def result(self, outputs: Sequence[Variable]) -> Structure:
        """The containers with the Variables that the function returned."""
        supply = iter(outputs)
        return Structure(self.treedef, tuple(next(supply) if s is None else s for s in self.statics))


def assemble(
    found: Traced,
    name: str,
    parameters: Specification | None,
    state: Specification | None,
    data: Sequence[Specification],
    has_aux: bool,
) -> Program:
    """The forward Program: arguments first, then what is declared, each in order."""
    names = Names()
    structures = {s: _declare(s, kind, names) for s, kind in _arguments(parameters, state, data)}
    declared = {n: _variable(n, d, names) for n, d in found.context.declared.items()}
    given = [v for structure in structures.values() for v in structure.variables]
    read = read_jaxpr(found.closed, given, names, declared, found.labels)
    carried = structures[state].variables if state is not None else ()
    assigned = [declared[n] for n in found.context.extra.assigned]
    outputs, rest = read.outputs[: found.count], iter(read.outputs[found.count :])
    next_state = {old: next(rest) for old in (*carried, *assigned)}
    inputs = [v for s in data for v in structures[s].variables]
    own = [v for v in declared.values() if v.kind is Kind.DATA]
    bounded = read.outputs[len(read.outputs) - len(found.context.extra.bounds) :]
    return Program(
        name=name,
        inputs=(*inputs, *own),
        state=tuple(v for v in (*given, *declared.values()) if v not in {*inputs, *own}),
        constants=read.constants,
        ops=read.ops,
        outputs=tuple(dict.fromkeys(outputs)),
        next_state=next_state,
        initializers=_initializers(found.context, declared),
        loss=outputs[0] if outputs and (has_aux or len(outputs) == 1) else None,
        bounds={
            v: bound
            for v, bound in zip(bounded, found.context.extra.bounds, strict=True)
            if v in {*inputs, *own}
        },
        signature=Signature(
            parameters=structures[parameters] if parameters is not None else _by_name(declared),
            model_state=structures[state] if state is not None else None,
            data=(*(structures[s] for s in data), *map(_alone, own)),
            names=(
                *([] if parameters else ["parameters"]),
                *(s.name for s in structures),
                *(v.name for v in own),
            ),
            result=found.result(outputs),
            has_aux=has_aux,
        ),
    )


def _arguments(
    parameters: Specification | None, state: Specification | None, data: Sequence[Specification]
) -> list[tuple[Specification, Kind]]:
    """The arguments in order, with the kind of their Variables."""
    kinds = [(parameters, Kind.PARAMETER), (state, Kind.STATE), *((s, Kind.DATA) for s in data)]
    return [(s, kind) for s, kind in kinds if s is not None]


def _variable(name: str, declared: Declared, names: Names) -> Variable:
    """The Variable of a declaration, which has just the name it was given."""
    if names.new(name) != name:
        raise TraceError(
            f"The {declared.kind} {name!r} declared at {declared.line} has the name of an argument of the "
            "traced function. Give it another name."
        )
    return Variable(name, tuple(declared.type.shape), declared.type.dtype, declared.kind)


def _by_name(declared: dict[str, Variable]) -> Structure:
    """Declared parameters as people get them back: a dict by name."""
    parameters = {name: v for name, v in sorted(declared.items()) if v.kind is Kind.PARAMETER}
    return Structure(jax.tree.structure(dict.fromkeys(parameters, 0)), tuple(parameters.values()))


def _alone(v: Variable) -> Structure:
    return Structure(jax.tree.structure(0), (v,))


def _initializers(context: Context, declared: dict[str, Variable]) -> tuple[Op, ...]:
    """The operators that compute the first values of what is declared, each run once per Variable."""
    return tuple(
        initialization(declared[name], d.initializer or _fresh_key)
        for name, d in context.declared.items()
        if d.kind is not Kind.DATA
    )


def initialization(v: Variable, initializer: Callable[..., Any]) -> Op:
    """The operator that gives a Variable its first value: a function of the seed and of the name alone."""
    if not callable(initializer):
        raise ArgumentError(
            f"The initializer of {v.name!r} is {describe(initializer)}; expected one of "
            "onward.initializer, or a function (key, shape, dtype) -> array."
        )
    salt = zlib.crc32(v.name.encode())

    def first(seed: Any) -> list[Any]:
        key = jax.random.fold_in(jax.random.key(seed), salt)
        try:
            value = initializer(key, v.shape, v.dtype)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"The initializer of {v.name!r} cannot make shape {v.shape}: {error}. It is called as "
                "initializer(key, shape, dtype)."
            ) from error
        if np.shape(value) != v.shape:
            raise ArgumentError(
                f"The initializer of {v.name!r} made {describe(value)}; expected an array of shape {v.shape}."
            )
        return [value]

    body, kept = body_of(first, SEED.aval).restricted([0])
    kind = getattr(initializer, "name", getattr(initializer, "__name__", "initialize")).strip("_")
    return Op(kind, (SEED,) if kept else (), (v,), body)


def _fresh_key(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return key


def _declare(specification: Specification, kind: Kind, names: Names) -> Structure:
    """The Variables of one argument."""
    return Structure(
        specification.treedef,
        tuple(
            Variable(names.new(_name(leaf, specification, kind)), *_typed(leaf), _leaf_kind(leaf, kind))
            if isinstance(leaf, Leaf)
            else leaf
            for leaf in specification.leaves
        ),
    )


def _name(leaf: Leaf, specification: Specification, kind: Kind) -> str:
    if not leaf.path:
        return specification.name
    if kind is Kind.PARAMETER and not specification.is_sequence:
        return leaf.path
    return f"{specification.name}/{leaf.path}"


def _typed(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    return tuple(leaf.type.shape), leaf.type.dtype


def _leaf_kind(leaf: Leaf, kind: Kind) -> Kind:
    """Integers, booleans and random keys among the parameters are state: they are never trained."""
    trainable = jax.numpy.issubdtype(leaf.type.dtype, np.inexact)
    return Kind.STATE if kind is Kind.PARAMETER and not trainable else kind
