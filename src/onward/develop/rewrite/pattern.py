"""A pattern: a small JAX function as a graph of ops, at the types at which it is looked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, TraceError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.reading import program_of
from onward.core.jaxprs.tracing import traced
from onward.core.program import Program
from onward.core.source import function_name
from onward.core.structure import describe
from onward.core.walk import ancestors

_RANKS = 5  # that are tried for arguments of which nothing is told
_LIKE = " Say what it is called with, arrays of any lengths: like=(jnp.ones((8, 4)), jnp.ones((4, 2)))."


class Pattern:
    """A function of arrays, read as ops: at the types of ``like``, and at any others.

    >>> import jax
    >>> swish = Pattern(lambda x: x * jax.nn.sigmoid(x))
    >>> [op.type for op in swish.sketches[0].ops]
    ['logistic', 'mul']

    Attributes:
        function: of arrays, to an array or several.
        like: a type for each of its arguments; None where they are numbers, or arrays of equal ranks.
        types: those of ``like``, else a float32 number for each argument.
    """

    def __init__(self, function: Callable[..., Any], like: Any = None) -> None:
        self.function = function
        self.types = _types(function, like)
        self.like = None if like is None else self.types
        self._read: dict[tuple[Any, ...], Program | None] = {}

    @property
    def name(self) -> str:
        """The name of the function; where it stands, if it has none."""
        return function_name(self.function)

    @cached_property
    def sketches(self) -> tuple[Program, ...]:
        """The ops at the types of ``like``; else at each rank at which they are others.

        What depends on lengths may be another op elsewhere.
        """
        found: dict[tuple[str, ...], Program] = {}
        for rank in range(1 if self.like else _RANKS):
            types = self.types if not rank else [Type((2,) * rank, t.dtype) for t in self.types]
            closed = self.body(types).closed if not rank else None
            program = self.at(types) if closed is None else program_of(closed, self.name)
            if program is not None:
                found.setdefault(tuple(op.type for op in program.ops), program)
        return tuple(found.values())

    def at(self, types: Sequence[Type]) -> Program | None:
        """The ops at these types; None where the function does not take them."""
        key = tuple((t.shape, t.dtype) for t in types)
        if key not in self._read:
            try:
                self._read[key] = program_of(traced(self.flat, *types), self.name)
            except Exception:
                self._read[key] = None
        return self._read[key]

    def body(self, types: Sequence[Type]) -> Body:
        """The computation at these types.

        Raises:
            TraceError: the function does not take them.
        """
        try:
            return body_of(self.flat, *types)
        except Exception as error:
            shown = ", ".join(map(shown_type, types))
            told = f"{type(error).__name__}: {error}."
            instead = _LIKE if isinstance(error, TypeError | ValueError | IndexError) else ""
            raise TraceError(
                f"rewrite: {self.name} cannot be traced with {shown}: {told}{instead}"
            ) from error

    def flat(self, *values: Any) -> list[Any]:
        """Its results in a row."""
        return [jnp.asarray(x) for x in jax.tree.leaves(self.function(*values))]

    def expect_called_as(self, pattern: Pattern) -> None:
        """Raise unless it takes as many arguments as the pattern that it replaces."""
        try:
            told = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        try:
            told.bind(*pattern.types)
        except TypeError as error:
            count = len(pattern.types)
            raise ArgumentError(
                f"rewrite: the pattern {pattern.name} takes {count} argument{'s' * (count != 1)}, and the "
                f"replacement {self.name} is written for others: {error}. Write both with the same "
                "arguments, in the same order."
            ) from error

    def expect_whole(self) -> None:
        """Raise unless its results are computed, of all of its arguments."""
        program = self.sketches[0]
        made = {v for op in program.ops for v in op.outputs}
        if not program.outputs or not made.issuperset(program.outputs):
            raise ArgumentError(
                f"rewrite: the pattern {self.name} returns what no op of it computes. Expected a function "
                "whose results are computed of its arguments."
            )
        if len(set(program.outputs)) < len(program.outputs):
            raise ArgumentError(f"rewrite: the pattern {self.name} returns a value twice. Return it once.")
        read = ancestors(program, program.outputs)
        for i, v in enumerate(program.inputs):
            if v not in read:
                raise ArgumentError(
                    f"rewrite: the pattern {self.name} does not use its argument {i}, so nothing says what "
                    "it is where the pattern occurs. Leave it away."
                )


def shown_type(t: Any) -> str:
    """A type as listings show it."""
    return f"{np.dtype(t.dtype).name if not _is_key(t) else t.dtype}[{','.join(map(str, t.shape))}]"


def _is_key(t: Any) -> bool:
    return bool(jnp.issubdtype(t.dtype, jax.dtypes.prng_key))


def _types(function: Callable[..., Any], like: Any) -> tuple[Type, ...]:
    """A type for each argument of a function: as told, else one float32 each."""
    if not callable(function):
        raise ArgumentError(
            f"rewrite was given {describe(function)} for a pattern or a replacement; expected functions of "
            "arrays, such as lambda x: x * jax.nn.sigmoid(x)."
        )
    if like is None:
        return (Type((), jnp.float32),) * _count(function)
    given: Iterable[Any] = like if isinstance(like, tuple | list) else (like,)
    try:
        return tuple(Type(np.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x)) for x in given)
    except TypeError as error:
        raise ArgumentError(
            f"rewrite: like is {describe(like)}; expected an array for each argument of the pattern, such as "
            "(jnp.ones((8, 4)), jnp.ones((4, 2))); their lengths do not matter."
        ) from error


def _count(function: Callable[..., Any]) -> int:
    """How many arguments a function needs."""
    try:
        told = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in told)
