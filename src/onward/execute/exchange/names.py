"""A table from the names of arrays in someone else's file to names here, read in both directions.

>>> table = NameTable({"h.{n}.attn.weight": ("layers/{n}/w", (1, 0)), "h.{n}.attn.mask": None})
>>> table.here("h.3.attn.weight"), table.here("h.3.attn.mask"), table.here("norm")
(('layers/3/w', (1, 0)), None, ('norm', None))
>>> table.there("layers/3/w")
('h.3.attn.weight', (1, 0))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from onward.core.errors import ArgumentError
from onward.core.structure import describe

Axes: TypeAlias = tuple[int, ...] | None
_FIELD = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class NameRow:
    """One row: a pattern there, the pattern here, and the axes there in the order that they have here.

    Without a pattern here the array is left out.
    """

    there: str
    here: str | None
    axes: Axes = None

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], re.Pattern[str] | None]:
        """Those names there and here that fit, with a group for each field."""
        return _pattern(self.there), None if self.here is None else _pattern(self.here)


class NameTable:
    """Rows from names there to names here; the first that fits counts, a name without a row is the same.

    ``{word}`` in a pattern stands for one part of a name, without ``.`` and ``/``. A row is a name here, a
    pair of it and the axes as for ``numpy.transpose``, or None for an array that is left out.

    Raises:
        ArgumentError: a row of another form, or one whose two patterns have different fields.
    """

    def __init__(self, rows: Mapping[str, Any] | None) -> None:
        if not isinstance(rows, Mapping | None):
            raise ArgumentError(
                f"names is {describe(rows)}; expected a dict from the names in the file to names here."
            )
        self.rows = [_row(there, row) for there, row in (rows or {}).items()]

    def here(self, name: str) -> tuple[str, Axes] | None:
        """The name here of an array there, and its axes; None for one that is left out."""
        for row in self.rows:
            if found := row.patterns[0].fullmatch(name):
                return None if row.here is None else (_filled(row.here, found), row.axes)
        return name, None

    def there(self, name: str) -> tuple[str, Axes]:
        """The name there of an array here, and the axes that undo those of the row."""
        for row in self.rows:
            if row.patterns[1] is not None and (found := row.patterns[1].fullmatch(name)):
                back = None if row.axes is None else tuple(int(axis) for axis in np.argsort(row.axes))
                return _filled(row.there, found), back
        return name, None


def _row(there: str, row: Any) -> NameRow:
    here, axes = row if isinstance(row, tuple | list) and len(row) == 2 else (row, None)
    is_order = axes is None or (isinstance(axes, tuple | list) and sorted(axes) == list(range(len(axes))))
    if not isinstance(there, str) or not isinstance(here, str | None) or not is_order:
        raise ArgumentError(
            f"names: the row of {there!r} is {row!r}; expected a name here, 'layers/{{n}}/w', or a pair of "
            "it and the order of the axes, ('layers/{n}/w', (1, 0)), or None to leave the array out."
        )
    fields = _FIELD.findall(there)
    same = here is None or sorted(fields) == sorted(_FIELD.findall(here))
    if not same or len(set(fields)) != len(fields) or not all(map(str.isidentifier, fields)):
        raise ArgumentError(
            f"names: {there!r} and {here!r} have other fields; expected the same words in both, each once, "
            "as in 'h.{n}.weight': 'layers/{n}/w'."
        )
    return NameRow(there, here, None if axes is None else tuple(axes))


def _pattern(names: str) -> re.Pattern[str]:
    parts = _FIELD.split(names)
    return re.compile(
        "".join(rf"(?P<{part}>[^./]+)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    )


def _filled(pattern: str, fields: re.Match[str]) -> str:
    return _FIELD.sub(lambda field: fields[field[1]], pattern)
