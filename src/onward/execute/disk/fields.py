"""The fields of JSON that anybody may have written: of the type that is expected, or a ValueError says so."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
TWICE = "an object holds the same name twice"


def parse(text: bytes | str) -> Any:
    """The data of a text that is JSON; raises ValueError at NaN, infinity, and a name that stands twice.

    >>> parse('{"step": 7}')
    {'step': 7}
    """
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these names; raises ValueError at one that stands twice."""
    found = dict(pairs)
    expect(len(found) == len(pairs), TWICE)
    return found


def take(record: Any, name: str, kind: type[T]) -> T:
    """A field of exactly this type; raises ValueError if it is missing or another."""
    value = record.get(name) if isinstance(record, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{name!r} is {type(value).__name__}; expected {kind.__name__}")
    return value


def natural(record: Any, name: str) -> int:
    """A field that is a whole number and not negative."""
    value = take(record, name, int)
    expect(0 <= value < 2**63, f"{name!r} is out of range")
    return value


def one_of(value: str, known: Iterable[str]) -> str:
    """A word out of a closed list."""
    expect(value in (known := list(known)), f"{value[:40]!r} is none of {', '.join(known)}")
    return value


def expect(holds: bool, otherwise: str) -> None:
    """Raise ValueError unless something holds."""
    if not holds:
        raise ValueError(otherwise)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
