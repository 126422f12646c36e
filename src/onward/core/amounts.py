"""Numbers of bytes as people write them: ``"80GB"``, ``"40 GiB"``, 1024."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.structure import describe, is_number

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_in(text: str) -> float | None:
    """The bytes that a number with a unit names; None for any other text.

    >>> bytes_in("80GB"), bytes_in("1.5 KiB"), bytes_in("80")
    (80000000000.0, 1536.0, None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b\s*", text, re.I)
    return None if found is None else float(found[1]) * _UNITS[(found[2] or "").lower()]


def whole_bytes(given: Any) -> int | None:
    """The bytes that a whole number names, also one written as a float, or a text with a unit; else None.

    >>> whole_bytes(1024), whole_bytes(80e9), whole_bytes("1.5 KiB"), whole_bytes(0.5), whole_bytes("0.5")
    (1024, 80000000000, 1536, None, None)
    """
    named = bytes_in(given) if isinstance(given, str) else None
    if named is not None:
        return int(named)
    if not is_number(given) or not isfinite(given) or int(given) != given:
        return None
    return int(given)


def bytes_of(given: Any, what: str) -> int:
    """A number of bytes, given as a whole number or with a unit.

    >>> bytes_of("64MiB", "chunk: memory"), bytes_of(64e6, "chunk: memory")
    (67108864, 64000000)
    >>> bytes_of("much", "memory")
    Traceback (most recent call last):
    onward.core.errors.ArgumentError: memory is 'much'; expected bytes, a whole number or such as '64MB'.
    """
    count = whole_bytes(given)
    if count is None or count < 1:
        raise ArgumentError(f"{what} is {describe(given)}; expected bytes, a whole number or such as '64MB'.")
    return count
