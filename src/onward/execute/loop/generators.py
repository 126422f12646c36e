"""Random generators that a reader draws its order from, and does not say how far they are.

>>> rng = np.random.default_rng(0)
>>> def shuffled():
...     return rng.permutation(4)
>>> untold_generator(shuffled)
'rng'
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np

from onward.execute.loop.reader import tells_where_it_stands

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


def untold_generator(reader: Any) -> str:
    """The name of a generator that a reader holds, and no checkpoint keeps; empty where none is seen.

    A reader with ``state_dict`` keeps it itself, and one with ``set_epoch`` is told what to begin from.
    """
    if tells_where_it_stands(reader) or hasattr(reader, "set_epoch"):
        return ""
    return next((name for name, value in _held(reader).items() if isinstance(value, _KINDS)), "")


def _held(reader: Any) -> Mapping[str, Any]:
    """The attributes of an object by name; of a function, the variables that it reads from around it."""
    if not isinstance(reader, FunctionType):
        return dict(getattr(reader, "__dict__", {}))
    found = inspect.getclosurevars(reader)
    return {**found.globals, **found.nonlocals}
