"""Which questions about free lengths a function asks while it is traced, to which a symbol answers No.

A symbol of ``jax.export`` raises where an answer depends on its value, but not here: it equals no number and
no other symbol, an expression of it counts as true, and no table has it as a key. So a function that asks
``x.shape[0] % 16 == 0`` is traced as if that never held. Here each such question is heard, and lengths found
for which the answer is Yes. What JAX itself asks is left out, which allows for symbols.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np
from jax import export

from onward.core.source import user_line
from onward.serve.export.dimensions import names_in, valued

_JAX = str(Path(jax.__file__).parent)
_SEARCHED = range(1, 1025)
_KEYS = 8
_listening = threading.RLock()


@dataclass(frozen=True)
class Question:
    """Whether an expression of free lengths is 0.

    Attributes:
        asked: the expression, as JAX writes it: ``"b - 100"``, ``"mod(b, 16)"``.
        line: the user's line that asks.
    """

    asked: str
    line: str

    def yes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes of the lengths in it for which the answer is Yes, one of them another than in these.

        None where it is Yes already, or none are found.

        >>> Question("b - t", "").yes({"b": 4, "t": 3}), Question("mod(b, 16)", "").yes({"b": 4})
        ({'b': 3, 't': 3}, {'b': 16})
        """
        names = sorted(names_in(self.asked))
        if self._value(sizes) == 0:
            return None
        tried = ({**sizes, name: n} for name in names for n in self._candidates(sizes, name))
        found = next((some for some in tried if self._value(some) == 0), None)
        return found and {name: found[name] for name in names}

    def _candidates(self, sizes: Mapping[str, int], name: str) -> Iterator[int]:
        """Lengths to try: the root of a line through two points, small ones, and pairs of its numbers."""
        first, second = (self._value({**sizes, name: n}) for n in (1, 2))
        if first is not None and second is not None and first != second:
            root, rest = divmod(first, first - second)
            yield from () if rest or root < 0 else (1 + root,)
        yield from _SEARCHED
        numbers = {1, *map(int, re.findall(r"\d+", self.asked))}
        pairs = product(sorted(numbers), repeat=2)
        yield from (n for x, y in pairs for n in (x * y, x + y, x - y) if n > 0)

    def _value(self, sizes: Mapping[str, int]) -> int | None:
        try:
            return int(valued(self.asked, sizes))
        except ValueError:
            return None


@contextmanager
def heard(symbols: Iterable[Any]) -> Iterator[list[Question]]:
    """The questions that the function of a trace within this block asks of symbols, each once.

    JAX tells nobody of them, so the class of its symbols has other operators meanwhile. They answer as ever.
    """
    kind: Any = type(next(iter(symbols)))
    equal, differs, hashed = kind.__eq__, kind.__ne__, kind.__hash__
    ear = _Ear()

    def __eq__(self: Any, other: Any) -> Any:  # noqa: N807
        answer = equal(self, other)
        if answer is False:
            ear.hear(self, [other])
        return answer

    def __ne__(self: Any, other: Any) -> Any:  # noqa: N807
        answer = differs(self, other)
        if answer is True:
            ear.hear(self, [other])
        return answer

    def __hash__(self: Any) -> Any:  # noqa: N807
        ear.hear(self)
        return hashed(self)

    def __bool__(self: Any) -> bool:  # noqa: N807
        ear.hear(self, [0])
        return True

    operators = [__eq__, __ne__, __hash__] + [__bool__] * (not hasattr(kind, "__bool__"))
    with _listening:
        before = {f.__name__: vars(kind).get(f.__name__) for f in operators}
        for operator in operators:
            setattr(kind, operator.__name__, operator)
        try:
            yield ear.questions
        finally:
            for name, own in before.items():
                if own is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, own)


class _Ear:
    """Takes down what is asked in the thread that made it, but for what JAX asks."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self._thread = threading.get_ident()
        self._is_deaf = False

    def hear(self, length: Any, others: Collection[Any] | None = None) -> None:
        """Take down whether a length is one of these; None: whether it is a key of a table that asks."""
        frame = sys._getframe(2)
        if self._is_deaf or frame.f_code.co_filename.startswith(_JAX):
            return
        if threading.get_ident() != self._thread:
            return
        self._is_deaf = True  # what follows compares symbols itself
        try:
            for other in _keys(frame) if others is None else others:
                self._take_down(length, other)
        finally:
            self._is_deaf = False

    def _take_down(self, length: Any, other: Any) -> None:
        if not (export.is_symbolic_dim(other) or isinstance(other, int | np.integer)):
            return
        try:
            apart = length - other
        except ValueError:  # a symbol of another trace
            return
        if export.is_symbolic_dim(apart) and (asked := str(apart)) not in [q.asked for q in self.questions]:
            self.questions.append(Question(asked, user_line()))


def _keys(frame: FrameType) -> list[int]:
    """Numbers that may be keys of a table that a function reads: those in its code and in what that names."""
    code = frame.f_code
    near = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in code.co_names)]
    within = (getattr(x, "__dict__", {}).get(name) for x in near for name in code.co_names)
    tables = (x for x in chain(near, within) if isinstance(x, dict | set | frozenset))
    found = chain(_constants(code), chain.from_iterable(tables))
    return [*dict.fromkeys(x for x in found if type(x) is int and x > 0)][:_KEYS]


def _constants(code: CodeType) -> Iterator[Any]:
    for x in code.co_consts:
        yield from x if isinstance(x, tuple | frozenset) else (x,)
