"""Convert the state of readers and callbacks to the JSON data of a checkpoint, and back.

>>> told = plain({"best": float("inf"), "seen": (1, b"x"), "mean": np.float32(0.5)})
>>> told
{'best': {'float': 'inf'}, 'seen': [1, {'base64': 'eA=='}], 'mean': 0.5}
>>> restored(told)
{'best': inf, 'seen': [1, b'x'], 'mean': 0.5}
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import jax
import numpy as np

from onward.core.structure import describe
from onward.execute.disk.encoding import PLAIN

_LARGEST = 2**20  # bytes of an array; readers are asked after every batch


def plain(value: Any) -> Any:
    """A state as JSON data. Tuples become lists; bytes, arrays, NaN and infinity become dicts of one word.

    Raises:
        TypeError: something else is in it, or an array of more than 1 MiB.
    """
    if value is None or isinstance(value, str | bool | int):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value) if isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"base64": b64encode(value).decode()}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray | jax.Array) and value.dtype.name in PLAIN and value.nbytes <= _LARGEST:
        data = np.ascontiguousarray(value)
        return {"array": [data.dtype.name, list(np.shape(value)), b64encode(data.tobytes()).decode()]}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        told = {name: plain(v) for name, v in value.items()}
        return {"dict": told} if len(told) == 1 and told.keys() <= _BACK.keys() else told
    raise TypeError(f"its state holds {describe(value)}")


def restored(value: Any) -> Any:
    """The inverse of ``plain``."""
    if isinstance(value, list):
        return [restored(v) for v in value]
    if isinstance(value, Mapping):
        (word, *more) = value or ("",)
        if not more and word in _BACK:
            return _BACK[word](value[word])
        return _dict(value)
    return value


def _dict(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: restored(v) for name, v in value.items()}


def _array(told: Any) -> np.ndarray:
    dtype, shape, data = told
    return np.frombuffer(bytearray(b64decode(data)), dtype).reshape(shape)


_BACK: Mapping[str, Callable[[Any], Any]] = {
    "base64": b64decode,
    "float": float,
    "array": _array,
    "dict": _dict,
}
