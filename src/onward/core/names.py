"""Unique names, the same ones in the same order every time."""

from collections.abc import Iterable


class Names:
    """Hands out names that are not taken: the first ``x`` is ``x``, the next one ``x_1``.

    >>> names = Names()
    >>> names.new("x"), names.new("x"), names.new("y")
    ('x', 'x_1', 'y')
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._next = dict.fromkeys(taken, 1)

    def new(self, name: str) -> str:
        """This name if it is free, else the name with the next free number."""
        count = self._next.get(name)
        if count is None:
            self._next[name] = 1
            return name
        while (candidate := f"{name}_{count}") in self._next:
            count += 1
        self._next[name] = count + 1
        self._next[candidate] = 1
        return candidate
