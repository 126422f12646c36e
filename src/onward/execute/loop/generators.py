"""Random generators that a reader draws its order from, and does not say how far they are.

>>> rng = np.random.default_rng(0)
>>> def shuffled():
...     return rng.permutation(4)
>>> untold_generator(shuffled)
'rng'
>>> untold_generator(lambda: np.random.permutation(4))
'np.random.permutation'
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from onward.core.around import codes_within, read_around
from onward.core.source import user_level
from onward.core.structure import describe
from onward.execute.loop.reader import tells_where_it_stands

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


def expect_told(reader: Any) -> None:
    """Warn of a reader that draws from a generator which no checkpoint keeps."""
    if name := untold_generator(reader):
        warnings.warn(_UNTOLD.format(reader=describe(reader), name=name), stacklevel=user_level())


def untold_generator(reader: Any) -> str:
    """The name of a generator that a reader holds, and no checkpoint keeps; empty where none is seen.

    A reader with ``state_dict`` keeps it itself, and one with ``set_epoch`` is told what to begin from.
    """
    with suppress(Exception):  # readers can be anything, and a warning must not end a training
        if not tells_where_it_stands(reader) and not hasattr(reader, "set_epoch"):
            return next((name for name, value in _held(reader) if _draws(value)), "")
    return ""


def _draws(value: Any) -> bool:
    """Whether a value is a generator, or a method of one, as ``np.random.permutation`` is."""
    return isinstance(value, _KINDS) or isinstance(getattr(value, "__self__", None), _KINDS)


def _held(reader: Any) -> Iterator[tuple[str, Any]]:
    """The values that a reader can draw from, by name: arguments, attributes, variables read by its code."""
    if isinstance(reader, partial):
        bound = inspect.signature(reader.func).bind_partial(*reader.args, **reader.keywords)
        yield from bound.arguments.items()
        yield from _held(reader.func)
    elif isinstance(reader, MethodType):
        yield from getattr(reader.__self__, "__dict__", {}).items()
        yield from _held(reader.__func__)
    elif isinstance(reader, FunctionType):
        yield from _read(reader)
    else:
        yield from getattr(reader, "__dict__", {}).items()
        methods = (getattr(type(reader), name, None) for name in ("__iter__", "__call__"))
        for method in methods:
            if isinstance(method, FunctionType):
                yield from _read(method)


def _read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The defaults of a function, and the variables around it that it, or a function inside it, reads.

    Nothing where it calls ``seed``, so that it begins from there each time. Attributes are those of modules.
    """
    if any("seed" in code.co_names for code in codes_within(function.__code__)):
        return
    yield from ((p.name, p.default) for p in inspect.signature(function).parameters.values())
    yield from read_around(function)


_UNTOLD = (
    "The reader is {reader}, which uses a random generator, {name}, and has no state_dict: checkpoints do "
    "not keep how far that is, so a training that is resumed may read in another order. Give the reader "
    "state_dict() and load_state_dict(state), or draw from the number of the epoch: def read(epoch): rng = "
    "np.random.default_rng(epoch)."
)
