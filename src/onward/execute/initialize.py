"""The first values of a Program's state: what is given is copied, the rest is initialized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, StateError, UnknownNameError, nearest
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.patterns import filled
from onward.core.jaxprs.signature import BodySignature
from onward.core.placement import whole_shape
from onward.core.program import SEED, Op, Program, Variable
from onward.core.structure import Structure, describe
from onward.core.words import Placement
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.state import copied, stored

_SENT = 2**24  # numbers

Place = Callable[[Variable, Any], Any]
"""From a state Variable and its first value to that value where it is to lie."""


def where_it_is(v: Variable, value: Any) -> Any:
    """The first value of a state Variable as it was made."""
    return value


@uninterrupted
def initialized(
    program: Program, given: Mapping[Variable, Any], seed: int, place: Place = where_it_is
) -> dict[Variable, Any]:
    """Every state Variable with its value: the given ones, and what the initializers make of the seed.

    An initializer runs only if something that it makes is not given. Each value is placed before the next
    one is made, so that no device need hold all.

    Raises:
        StateError: some state is neither given nor made.
    """
    values: dict[Variable, Any] = {SEED: seed_of(seed), **given}
    for op in program.initializers:
        if all(v in values for v in op.outputs):
            continue
        made = _numbers(op) or _run(op)(*(values[v] for v in op.inputs))
        for v, value in zip(op.outputs, made, strict=True):
            if v not in values:
                values[v] = place(v, copied(_everywhere(value, v, program), v.dtype))
    del values[SEED]
    if lacking := [v.name for v in program.state if v not in values]:
        raise StateError(
            f"Nothing here makes a first value of {', '.join(map(repr, lacking[:5]))}, which {program.name} "
            "keeps. A Program from a file goes on from the State that load_step returned beside it."
        )
    return values


def _numbers(op: Op) -> list[np.ndarray] | None:
    """Arrays of one number each, as most of what optimizers keep, without a kernel for each shape.

    What is large a device fills sooner than the host sends it.
    """
    return filled(op.body) if sum(v.size for v in op.outputs) <= _SENT else None


def _run(op: Op) -> Callable[..., list[Any]]:
    """The function of an initializer: of several equations one program, not one for each.

    What draws at random draws by a number of its own, so no two are one program; its equations are shared.
    """
    is_alike = len(op.body.equations) > 1 and SEED not in op.inputs
    return _compiled(_InitializerRun(op.body.signature, op.body)) if is_alike else op.body


@dataclass(frozen=True)
class _InitializerRun:
    """Equal to all that compute the same."""

    signature: BodySignature
    body: Body = field(compare=False)


@lru_cache(256)
def _compiled(initializer: _InitializerRun) -> Callable[..., list[Any]]:
    return compiled_alone(initializer.body.__call__)


def _everywhere(value: Any, v: Variable, program: Program) -> Any:
    """The first value over all devices: of all parts, or the same for each device."""
    if v.placement is Placement.SHARDED:
        return value
    spread = np.broadcast_to if isinstance(value, np.ndarray) else jnp.broadcast_to
    return spread(value, whole_shape(v, program.replicas))


def first_values(
    program: Program, parameters: Any, state: Any, seed: int, place: Place
) -> dict[Variable, Any]:
    """Every state Variable with its first value, of what a person gives to ``init``.

    Raises:
        ArgumentError: containers, shapes or dtypes that differ from the traced ones.
    """
    signature = program.signature
    if signature is None:
        raise ArgumentError(f"Program {program.name!r} was not traced, so it has no init.")
    if is_declared(program):
        given = by_name(program, parameters, place)
    else:
        if parameters is None:
            raise ArgumentError(
                f"{program.name} begins with parameters of yours: step.init({signature.names[0]})."
            )
        given = by_structure(signature.parameters, parameters, signature.names[0], place)
    if (signature.model_state is None) != (state is None):
        if state is None:
            advice = f"carries model state: step.init({', '.join(signature.names[:2])})"
        else:
            advice = f"was traced without state=, and data is for the step: step.init({signature.names[0]})"
        raise ArgumentError(f"{program.name} {advice}.")
    if signature.model_state is not None:
        given |= by_structure(signature.model_state, state, signature.names[1], place)
    return initialized(program, given, seed, place)


def is_declared(program: Program) -> bool:
    """Whether the Program declares all its parameters itself, so that none need be given."""
    made = {v for op in program.initializers for v in op.outputs}
    signature = program.signature
    return made.issuperset(program.parameters if signature is None else signature.parameters.variables)


def by_structure(
    structure: Structure, tree: Any, what: str, place: Place = where_it_is
) -> dict[Variable, Any]:
    """Copies of the arrays in a person's containers."""
    arrays = structure.flatten(tree, what)
    return {
        v: place(v, stored(value, v, f"{what}: {v.name!r}"))
        for v, value in zip(structure.variables, arrays, strict=True)
    }


def by_name(program: Program, values: Any, place: Place = where_it_is) -> dict[Variable, Any]:
    """Copies of values given by name, for some of the state."""
    if values is None:
        return {}
    if _holds_nothing(program, values):
        return {}
    if not program.state:
        raise ArgumentError(
            f"{program.name} reads no parameters, so it takes none: init(). What it computes depends on "
            "the data alone; if that is not meant, prune or trace a target that reads parameters."
        )
    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"{program.name} declares its parameters itself: init() makes them. To begin with your own, give "
            f"them by name, init({{'fc_0/w': array}}), not {describe(values)}."
        )
    declared = () if program.signature is None else program.signature.parameters.variables
    state = {v.name: v for v in (*program.state, *declared)}
    for name in values:
        if name not in state:
            raise UnknownNameError(f"{program.name} keeps nothing named {name!r}. {nearest(name, state)}")
    given = {state[n]: stored(value, state[n], f"init: {n!r}") for n, value in values.items()}
    return {v: place(v, value) for v, value in given.items()}


def _holds_nothing(program: Program, values: Any) -> bool:
    """Whether these are the containers without an array that the Program was traced with."""
    structure = None if program.signature is None else program.signature.parameters
    if structure is None or structure.variables:
        return False
    return bool(jax.tree.structure(values) == structure.treedef)


def seed_of(seed: int) -> Any:
    """The seed as the initializers read it."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ArgumentError(f"The seed is {seed!r}; expected a whole number from 0 to 2**32 - 1.")
    return jax.device_put(np.uint32(seed))
