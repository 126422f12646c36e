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
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from onward.core.keys import key_of
from onward.core.program import Op, Program
from onward.core.source import is_of_user, named, user_level

_READS = {"LOAD_GLOBAL": "global", "LOAD_DEREF": "closed"}
# How a method is called depends on whether a module is imported in the same cell.
_SKIPPED = ("PUSH_NULL", "EXTENDED_ARG")
_PLAIN = (bool, int, float, str, type(None))


class Around:
    """The variables that a function, and the functions of the user that it calls, read when it was traced.

    Functions, classes and plain values are looked at; not what lies in containers and attributes, or rules
    of ``custom_vjp``. In another process nothing is known of them.
    """

    def __init__(self, function: Any = None) -> None:
        self._function, self._before = function, _seen(function)

    def changed(self) -> str:
        """The first variable that is another one now, in words; empty if none is."""
        now = _seen(self._function)
        before, self._before = self._before, now
        places = (place for place in now if place in before and before[place].does != now[place].does)
        return next((f"{p[-1]}, which was {before[p].words} and is {now[p].words}" for p in places), "")

    def warn(self, name: str, is_same: Callable[[], bool]) -> None:
        """Warn that a function is traced again though what it reads has changed; once for each change.

        Args:
            name: that of the function.
            is_same: whether it computes the same as before, found by a trace; one that fails is another.
        """
        if found := self.changed():
            with suppress(Exception):
                if is_same():
                    return
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


class _Read(NamedTuple):
    """The value of a variable: equal ``does`` for what does the same, and the same in words."""

    does: Hashable
    words: str


def _seen(function: Any) -> dict[tuple[str, int, str], _Read]:
    """The variables that are read, each by a function, which of those of its name it is, and its own name."""
    found: dict[tuple[str, int, str], _Read] = {}
    with suppress(Exception):  # objects can be anything, and a look at them must not end a trace
        waiting, known, names = functions_of(function), set[int](), Counter[str]()
        while waiting:
            reader = waiting.pop(0)
            if id(reader) in known:
                continue
            known.add(id(reader))
            name, assigned = reader.__qualname__, _instructions(reader.__code__).assigned
            names[name] += 1
            for variable, value in read_around(reader):
                functions = [] if variable in assigned else functions_of(value)
                if variable not in assigned and (told := _told(value, functions)) is not None:
                    found[name, names[name], variable] = told
                    waiting += functions
    return found


def _told(value: Any, functions: Sequence[FunctionType]) -> _Read | None:
    """The value of a variable as it is known, given what it calls; None if nothing is known of it."""
    if isinstance(value, _PLAIN):
        return _Read((type(value), repr(value)), _short(value))
    given = (*value.args, *value.keywords.values()) if isinstance(value, partial) else ()
    if functions:
        place = f"that of {named(functions[0].__code__.co_filename)}:{functions[0].__code__.co_firstlineno}"
        return _Read((_plain(given), tuple(map(_key_of, functions))), place)
    with suppress(Exception):  # attributes of objects can be anything
        if isinstance(value.__qualname__, str):
            return _Read((value.__module__, value.__qualname__), f"{value.__module__}.{value.__qualname__}")
    return None


def functions_of(value: Any) -> list[FunctionType]:
    """The functions of the user that are called when this is, or in a method of it."""
    if isinstance(value, partial):
        return functions_of(value.func)
    if isinstance(value, MethodType):
        return [*functions_of(value.__func__), *functions_of(type(value.__self__))]
    home = value if isinstance(value, type) else type(value)
    own = (c for c in home.__mro__ if _is_class_of_user(c.__module__))
    held = [f for c in own for f in vars(c).values() if _may_be_method(f)]
    return [f for x in (value, *held) for f in _unwrapped(x) if _is_of_user(f.__code__.co_filename)]


@cache
def _is_class_of_user(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "builtins" and (file is None or is_of_user(file))


def _may_be_method(value: Any) -> bool:
    is_plain = type(value).__module__ == "builtins"
    return not is_plain or isinstance(value, FunctionType | staticmethod | classmethod)


def _unwrapped(value: Any) -> list[FunctionType]:
    """A function, and those that it wraps, as jit does, decorators, and flax the methods of modules."""
    found: list[Any] = []
    value = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
    while value is not None and not any(value is f for f in found):
        found.append(value)
        wraps = inspect.getattr_static(value, "__wrapped__", None) is not None
        value = value.__wrapped__ if wraps else None
    return [f for f in found if isinstance(f, FunctionType)]


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
    for where, (name, *attributes) in _instructions(function.__code__).reads:
        if name not in around[where]:  # of Python itself, or without a value yet
            continue
        value = around[where][name]
        yield name, value
        for attribute in attributes:
            if not isinstance(value, ModuleType):
                break
            name, value = f"{name}.{attribute}", vars(value).get(attribute)
            yield name, value


class _Instructions(NamedTuple):
    """The instructions of code, as far as they tell what it does.

    Attributes:
        reads: each variable around it, with the attributes of it that are read on.
        assigned: the variables around it that it assigns itself, as one that counts its calls does.
        does: equal for code that does the same, wherever it stands.
    """

    reads: tuple[tuple[str, tuple[str, ...]], ...]
    assigned: frozenset[str]
    does: Hashable


@lru_cache(maxsize=2**16)
def _instructions(code: CodeType) -> _Instructions:
    reads: list[tuple[str, tuple[str, ...]]] = []
    assigned, does, goes_on = set[str](), list[Hashable](), False
    for at in dis.get_instructions(code):
        if at.opname in _SKIPPED:
            continue
        does.append((at.opname.replace("METHOD", "ATTR"), _argument(at)))
        if at.opname in _READS:
            reads.append((_READS[at.opname], (at.argval,)))
        elif goes_on and at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            where, path = reads.pop()
            reads.append((where, (*path, at.argval)))
        elif at.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            assigned.add(at.argval)
        goes_on = at.opname in _READS or (goes_on and at.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for inner in filter(_is_code, code.co_consts):
        within = _instructions(inner)
        reads += within.reads
        assigned |= within.assigned
    return _Instructions(tuple(dict.fromkeys(reads)), frozenset(assigned), tuple(does))


def _argument(at: dis.Instruction) -> Hashable:
    """The argument of an instruction, but for places in the code."""
    if isinstance(at.argval, CodeType):
        return _instructions(at.argval).does
    return None if at.opcode in dis.hasjrel else (type(at.argval), repr(at.argval))


def _is_code(value: Any) -> bool:
    return isinstance(value, CodeType)


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of all functions and classes inside it."""
    yield code
    for inner in filter(_is_code, code.co_consts):
        yield from codes_within(inner)


def _key_of(function: FunctionType) -> Hashable:
    """Equal for functions that do the same, but for the variables around them and defaults of containers."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return _instructions(function.__code__).does, _plain(defaults)


def _plain(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(repr(x) if isinstance(x, _PLAIN) else "" for x in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
