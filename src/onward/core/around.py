"""The variables around a function that its code reads, and a word where one has changed since.

A function is traced again for data of another length, for a test and for a part of the batch. JAX would take
what stands around it by then, such as a helper from a cell of a notebook that was run again, and the Programs
of one model would be those of two. Where something has changed, the function is traced once more for data of
before: it matters if that is another computation now.

>>> import jax.numpy as jnp
>>> scale = 2.0
>>> def loss(w, x):
...     return jnp.sum(scale * w * x)
>>> around = Around(loss)
>>> scale = 3.0
>>> around.changed()
'scale, which was 2.0 and is 3.0'
"""

from __future__ import annotations

import dis
import inspect
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from onward.core.keys import key_of
from onward.core.program import Op, Program
from onward.core.source import is_of_user, named, user_level

_READS = {"LOAD_GLOBAL": "global", "LOAD_DEREF": "closed"}
_NUMBERS = (bool, int, float, str, type(None))


class Around:
    """The variables that a function, and the functions of the user that it calls, read when it was traced.

    Only functions, classes and plain numbers are looked at. In another process nothing is known of them.
    """

    def __init__(self, function: Any = None) -> None:
        self._function, self._before = function, _seen(function)

    def changed(self) -> str:
        """The first variable that is another one now, in words; empty if none is."""
        now = _seen(self._function)
        before, self._before = self._before, now
        places = (place for place in now if place in before and before[place][0] != now[place][0])
        return next((f"{p[-1]}, which was {before[p][1]} and is {now[p][1]}" for p in places), "")

    def warn(self, name: str, is_same: Callable[[], bool]) -> None:
        """Warn that a function is traced again though what it reads has changed; once for each change.

        Args:
            name: that of the function.
            is_same: whether it computes the same as before, found by a trace.
        """
        if (found := self.changed()) and not is_same():
            warnings.warn(_CHANGED.format(name=name, found=found), stacklevel=user_level())

    def __reduce__(self) -> tuple[Any, ...]:
        return Around, ()


_CHANGED = (
    "{name} is traced again, for data of another length, a part of the batch or a test, and reads {found}. "
    "This Program is of another function than those before it. Trace {name} again, or call minimize again, "
    "so that all of them are of one; give it a number that changes as an argument."
)


def compute_the_same(program: Program, other: Program) -> bool:
    """Whether two Programs have the same computations, numbers and names, op for op."""
    constants = ([(v.name, key_of(x)) for v, x in p.constants.items()] for p in (program, other))
    is_as_long = len(program.ops) == len(other.ops)
    return is_as_long and operator.eq(*constants) and all(map(_are_alike, program.ops, other.ops))


def _are_alike(op: Op, other: Op) -> bool:
    named, theirs = (([v.name for v in o.inputs], [v.name for v in o.outputs]) for o in (op, other))
    return op.type == other.type and named == theirs and op.body.signature == other.body.signature


def _seen(function: Any) -> dict[tuple[str, str], tuple[Hashable, str]]:
    """For each variable that is read, by function and name, what it does, and the same in words."""
    found: dict[tuple[str, str], tuple[Hashable, str]] = {}
    waiting, known = functions_of(function), set[CodeType]()
    while waiting:
        reader = waiting.pop(0)
        if reader.__code__ in known:
            continue
        known.add(reader.__code__)
        for name, value in read_around(reader):
            if isinstance(value, _NUMBERS):
                if name not in _assigned(reader.__code__):
                    found[reader.__qualname__, name] = (type(value), repr(value)), repr(value)
            elif inner := functions_of(value):
                does = tuple(map(_key_of, inner))
                found[reader.__qualname__, name] = does, _place(inner[0].__code__)
                waiting += inner
    return found


def functions_of(value: Any) -> list[FunctionType]:
    """The functions of the user that are called when this is, or in a method of it."""
    if not callable(value):
        return []
    if isinstance(value, partial):
        return functions_of(value.func)
    if isinstance(value, MethodType):
        return [*functions_of(value.__func__), *functions_of(type(value.__self__))]
    if inspect.getattr_static(value, "__wrapped__", None) is not None:  # a jitted function
        return functions_of(value.__wrapped__)
    home = value if isinstance(value, type) else type(value)
    held = [value] if isinstance(value, FunctionType) else map(_unwrapped, vars(home).values())
    return [f for f in held if isinstance(f, FunctionType) and _is_of_user(f.__code__.co_filename)]


def _unwrapped(method: Any) -> Any:
    """The function that a library wrapped, as flax does with the methods of modules."""
    return inspect.unwrap(method) if isinstance(method, FunctionType) else method


def _is_of_user(file: str) -> bool:
    return is_of_user(file) and file != "<string>"  # which has the methods of dataclasses


def read_around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables around a function that it, or a function inside it, reads; attributes those of modules.

    >>> from math import pi
    >>> dict(read_around(lambda r: pi * r))
    {'pi': 3.141592653589793}
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: x.cell_contents for name, x in cells if x != CellType()}  # an empty one is assigned later
    around = {"global": function.__globals__, "closed": closed}
    for where, (name, *attributes) in _places(function.__code__):
        if name not in around[where]:  # of Python itself, or without a value yet
            continue
        value = around[where][name]
        yield name, value
        for attribute in attributes:
            if not isinstance(value, ModuleType):
                break
            name, value = f"{name}.{attribute}", vars(value).get(attribute)
            yield name, value


@lru_cache(maxsize=4096)
def _places(code: CodeType) -> list[tuple[str, tuple[str, ...]]]:
    """Each variable that code reads from around it, with the attributes of it that it reads on."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for inner in codes_within(code):
        goes_on = False
        for at in dis.get_instructions(inner):
            if at.opname in _READS:
                found.append((_READS[at.opname], (at.argval,)))
            elif goes_on and at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                where, path = found.pop()
                found.append((where, (*path, at.argval)))
            else:
                goes_on = False
                continue
            goes_on = True
    return list(dict.fromkeys(found))


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of all functions and classes inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_within(inner)


@lru_cache(maxsize=4096)
def _assigned(code: CodeType) -> set[str]:
    """The variables around a function that it assigns itself, as one that counts its calls does."""
    within = (at for inner in codes_within(code) for at in dis.get_instructions(inner))
    return {at.argval for at in within if at.opname in ("STORE_GLOBAL", "STORE_DEREF")}


def _key_of(function: FunctionType) -> Hashable:
    """Equal for functions that do the same, but for the variables around them and defaults of containers."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return _does(function.__code__), tuple(repr(x) if isinstance(x, _NUMBERS) else "" for x in defaults)


@lru_cache(maxsize=4096)
def _does(code: CodeType) -> Hashable:
    """Equal for code that does the same, wherever it stands.

    How a method is called depends on whether a module is imported in the same cell, and places with that.
    """
    steps = (at for at in dis.get_instructions(code) if at.opname != "PUSH_NULL")
    return tuple((at.opname.replace("METHOD", "ATTR"), _read_by(at)) for at in steps)


def _read_by(at: dis.Instruction) -> Hashable:
    if isinstance(at.argval, CodeType):
        return _does(at.argval)
    return None if at.opcode in dis.hasjrel else (type(at.argval), repr(at.argval))


def _place(code: CodeType) -> str:
    return f"that of {named(code.co_filename)}:{code.co_firstlineno}"
