"""A Program as a pure function of its parameters and its data, for other functions to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, GraphError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.recipe import rebuilt
from onward.core.structure import Structure
from onward.execute.feeds import Feeds
from onward.execute.state import State


def applied(program: Program, state: State, parameters: Any, data: Sequence[Any]) -> Any:
    """The results of a forward Program for these parameters and data; all else that it reads is in the State.

    Raises:
        ArgumentError: other containers, shapes or dtypes than it takes, or the wrong number of arguments.
        GraphError: a Program from a file, through which ``jax.vmap`` does not go.
    """
    signature = program.signature
    if signature is None or len(signature.data) != len(data):
        names = () if signature is None else signature.names[-len(signature.data) :] if signature.data else ()
        raise ArgumentError(
            f"{program.name!r} was called with {len(data)} arguments after the parameters; expected "
            f"model(parameters, {', '.join(names)}), where model.parameters are its own."
        )
    is_none = parameters is None and not signature.parameters.variables
    given = {} if is_none else _values(signature.parameters, parameters, signature.names[0])
    for v, x in given.items():
        _expect_type(v, x)
    arrays = (
        [s.flatten(d, n) for s, d, n in zip(signature.data, data, signature.names[-len(data) :], strict=True)]
        if data
        else []
    )
    arrays = _converted(program, arrays)
    return _returned(_fitting(program, arrays), state, {v.name: x for v, x in given.items()}, arrays)


def _converted(program: Program, arrays: list[list[Any]]) -> list[list[Any]]:
    """The data in the dtypes of the Program, where a step would take it; what nothing reads stays."""
    fed = _fed(program, arrays)
    read = Feeds(program).converted([fed[v] for v in program.inputs])
    fed |= dict(zip(program.inputs, read, strict=True))
    assert program.signature is not None
    return [[fed[v] for v in s.variables] for s in program.signature.data]


def _fed(program: Program, arrays: list[list[Any]]) -> dict[Variable, Any]:
    assert program.signature is not None
    pairs = zip(program.signature.data, arrays, strict=True)
    return {v: x for s, xs in pairs for v, x in zip(s.variables, xs, strict=True)}


def _returned(program: Program, state: State, given: dict[str, Any], arrays: list[list[Any]]) -> Any:
    signature = program.signature
    assert signature is not None
    kept = [given[v.name] if v.name in given else state[v.name] for v in program.state]
    fed = _fed(program, arrays)
    wanted = signature.result.variables
    values = [jnp.asarray(fed[v], v.dtype) for v in program.inputs]
    try:
        results = lower(program, wanted)(kept, values)
    except NotImplementedError as error:
        if program.code is None:
            raise
        raise GraphError(_IN_ONE_PIECE.format(file=program.code.file, said=error)) from error
    return signature.result.unflatten(results)


_IN_ONE_PIECE = (
    "{file} holds the network as compiled code, through which JAX does not transform ({said}). In place of "
    "jax.vmap, call the model with one batch of all examples, model(params, x.reshape(-1, *x.shape[2:])); or "
    "go through them one by one, jax.lax.map(lambda x: model(params, x), xs)."
)


def _values(structure: Structure, tree: Any, what: str) -> dict[Variable, Any]:
    return dict(zip(structure.variables, structure.flatten(tree, what), strict=True))


def _expect_type(v: Variable, value: Any) -> None:
    """Raise ``ArgumentError`` for a parameter of another shape or dtype."""
    found = jnp.shape(value), jnp.result_type(value)
    if found != (v.shape, v.dtype):
        raise ArgumentError(f"{v.name!r} is {found[1]}{list(found[0])}; expected {v.type}.")


def _fitting(program: Program, arrays: list[list[Any]]) -> Program:
    """The Program for data of these shapes."""
    assert program.signature is not None
    shapes = [tuple(map(jnp.shape, xs)) for xs in arrays]
    if shapes == [tuple(v.shape for v in s.variables) for s in program.signature.data]:
        return program
    types = (
        s.unflatten(jax.ShapeDtypeStruct(shape, v.dtype) for v, shape in zip(s.variables, found, strict=True))
        for s, found in zip(program.signature.data, shapes, strict=True)
    )
    return rebuilt(program, tuple(types))
