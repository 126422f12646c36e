"""The arguments to trace with, from the command line: ``x=f32[32,4] params/w=f32[4,1] key=seed``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError
from onward.define.trace import takes_arguments
from onward.shell.user_code import attribute, called, names_in, signature_of

_TYPE = re.compile(r"([A-Za-z]\w*)?\[([\d,\s]*)\]")
_SHORT = re.compile(r"(f|bf|i|u|c)(\d+)")
_WHOLE = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}


def fed(feed: Iterable[str], module: ModuleType) -> Mapping[str, Any]:
    """Parse ``NAME=WHAT`` and ``NAME/PATH=WHAT`` into the type or value of each argument.

    Args:
        feed: WHAT is a type as a listing shows it, ``f32[32,4]``, or the name of something in the module; a
            function without arguments is called.
        module: where names are looked up.

    Raises:
        ArgumentError: something that is neither, or an argument that is given twice.
    """
    leaves: dict[tuple[str, ...], Any] = {}
    for text in feed:
        name, equals, what = text.partition("=")
        path = tuple(name.split("/"))
        if not equals or not all(path):
            raise ArgumentError(f"--feed was given {text!r}; expected NAME=TYPE, such as 'x=f32[32,4]'.")
        if path in leaves:
            raise ArgumentError(f"--feed gives {name!r} twice.")
        leaves[path] = _type(what) if _TYPE.fullmatch(what) else _value(module, what)
    named: Mapping[str, Any] = _tree(leaves, "")
    return named


def is_maker(value: Any) -> bool:
    """Whether something is a function that can be called without arguments."""
    return inspect.isroutine(value) and not takes_arguments(value)


def value_of(name: str, value: Any) -> Any:
    """A value, or what a function without arguments returns.

    Raises:
        ArgumentError: a function that takes arguments, since there are none to pass, or that raises an error.
    """
    if inspect.isroutine(value) and takes_arguments(value):
        raise ArgumentError(
            f"{name}{signature_of(value)} takes arguments, so it cannot be called here. Name a value, or a "
            "function without arguments that returns it."
        )
    return called(name, value) if inspect.isroutine(value) else value


def arguments_of(
    function: Any, given: Mapping[str, Any], first: Sequence[Any], module: ModuleType
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function in order, and what is left for the data that it declares.

    Args:
        function: what is traced.
        given: by name.
        first: by place; what is given by name replaces it.
        module: where the function stands; what has the names of its arguments there is offered.

    Raises:
        ArgumentError: an argument that nothing gives; the message says what to write.
    """
    expected = [p for p in inspect.signature(function).parameters.values() if p.kind in _BY_PLACE]
    values = {**dict(zip((p.name for p in expected), first, strict=False)), **given}
    last = max((i for i, p in enumerate(expected) if p.name in values), default=-1)
    missing = [
        p.name for i, p in enumerate(expected) if p.name not in values and (p.default is p.empty or i < last)
    ]
    if missing:
        raise ArgumentError(_missing(function, missing, module))
    places = [values[p.name] for p in expected[: last + 1]]
    names = {p.name for p in expected}
    return [*places, *first[len(expected) :]], {n: x for n, x in given.items() if n not in names}


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _value(module: ModuleType, name: str) -> Any:
    """The value of a name in a module, or the result of the function of this name."""
    try:
        found = attribute(module, name)
    except ArgumentError as error:
        raise ArgumentError(f"{name!r} is not a type like 'f32[32,4]' or 'i32[32]', and {error}") from None
    return value_of(name, found)


def _type(text: str) -> jax.ShapeDtypeStruct:
    """The type that a listing shows as ``f32[32,4]``; also ``float32[32,4]``.

    >>> _type("bf16[8, 4]"), _type("int32[8]").dtype
    (ShapeDtypeStruct(shape=(8, 4), dtype=bfloat16), dtype('int32'))
    """
    found = _TYPE.fullmatch(text)
    assert found is not None
    name = found[1] or "float32"
    short = _SHORT.fullmatch(name)
    try:
        dtype = jnp.dtype(_WHOLE[short[1]] + short[2] if short else name)
        shape = tuple(int(n) for n in found[2].split(",") if n.strip())
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{text!r} is not a type: {error}. Write the dtype and the shape, such as 'f32[32,4]', "
            "'i32[32]', 'bool[8]', 'f32[]'."
        ) from None
    return jax.ShapeDtypeStruct(shape, dtype)


def _tree(leaves: Mapping[tuple[str, ...], Any], path: str) -> Any:
    """The containers that paths describe: dicts, and lists where the keys count from 0."""
    if () in leaves:
        if len(leaves) > 1:
            raise ArgumentError(f"--feed gives {path!r} whole and in parts; give one of them.")
        return leaves[()]
    branches: dict[str, dict[tuple[str, ...], Any]] = {}
    for (key, *rest), value in leaves.items():
        branches.setdefault(key, {})[tuple(rest)] = value
    built = {key: _tree(branch, f"{path}/{key}".strip("/")) for key, branch in branches.items()}
    numbers = [str(i) for i in range(len(built))]
    return [built[n] for n in numbers] if path and set(numbers) == built.keys() else built


def _missing(function: Any, missing: Sequence[str], module: ModuleType) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    known = set(names_in(module))
    words = [f"{n}={n}" if n in known else f"'{n}=f32[...]'" for n in missing]
    return (
        f"{name}{signature_of(function)} cannot be traced without {', '.join(missing)}. Say "
        f"for each what it is, by its type or by a name in the file: --feed {' '.join(words)} (containers by "
        f"their paths: '{missing[0]}/w=f32[4,1]'). Or name a function that returns all of them: --args NAME."
    )
