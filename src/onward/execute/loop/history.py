"""The numbers of a training, one record a step, kept without waiting for the device.

A step returns its loss before it is computed. History keeps the promise, and turns promises into numbers in
bulk: when it is read, or when a record is so old that it has long been computed.

>>> history = History()
>>> for step in range(1, 4):
...     history.record(step=step, epoch=0, loss=1.0 / step)
>>> history.record(step=3, epoch=0, test_loss=0.5)
>>> history["loss"]
array([1.        , 0.5       , 0.33333333,        nan])
>>> history
History(3 steps: loss 1 -> 0.3333, test_loss 0.5 -> 0.5)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.pointing import Pointing
from onward.core.structure import describe
from onward.execute.loop.watch_history import WatchHistory

WAITING = (
    1000  # records that may stay on the device; twice as many at most, as they are fetched by the thousand
)
NAN = float("nan")


_NOTHING = "No step was made yet: where training is done already, a Trainer that resumes it has none to make."


class History(Mapping[str, np.ndarray], Pointing):
    """Metrics by name, each an array of one float64 a record, NaN where a record lacks that metric.

    ``"step"`` and ``"epoch"`` are names like the others, and come first. Reading waits for the device.

    Attributes:
        watched: what ``watch`` looked at, in the steps in which it did.
    """

    def __init__(self) -> None:
        self.watched = WatchHistory()
        self._columns: dict[str, array[float]] = {}
        self._fetched = 0
        self._waiting: list[dict[str, Any]] = []
        self._lock = RLock()  # one thread may record while another one reads

    def record(self, /, *, step: int, epoch: int, **values: Any) -> None:
        """Append one record; does not wait for values that are still computing.

        Args:
            step: how many steps were done.
            epoch: the epoch, counted from 0.
            **values: scalars: numbers, NumPy or JAX.

        Raises:
            ArgumentError: a value that is not a scalar.
        """
        row = {"step": step, "epoch": epoch, **values}
        _expect_numbers(row)
        with self._lock:
            for name in row:
                if name not in self._columns:
                    self._columns[name] = array("d")
            self._waiting.append(row)
            if len(self._waiting) >= 2 * WAITING:
                self._fetch(WAITING)

    def amend(self, /, **values: Any) -> None:
        """Add values to the last record, such as those of a test after it.

        >>> history = History()
        >>> history.record(step=1, epoch=0, loss=0.5)
        >>> history.record(step=2, epoch=0, loss=0.4)
        >>> history.amend(test_loss=0.6)
        >>> history["test_loss"]
        array([nan, 0.6])
        """
        expect_metrics(values)
        _expect_numbers(values)
        with self._lock:
            if not self._waiting and not self._fetched:
                raise ArgumentError(
                    "History.amend: there is no record yet; record(step=..., epoch=...) comes first."
                )
            for name, value in values.items():
                self._columns.setdefault(name, array("d"))
                if self._waiting:
                    self._waiting[-1][name] = value
                else:
                    column = self._columns[name]
                    column.extend([NAN] * (self._fetched - len(column)))
                    column[-1] = float(value)

    def arrange(self, *names: str) -> None:
        """Put the records in the order of these metrics, the first one first; equal ones stay as they came.

        >>> history = History()
        >>> for step in (2, 1):
        ...     history.record(step=step, epoch=0, loss=1 / step)
        >>> history.arrange("step")
        >>> history["loss"]
        array([1. , 0.5])
        """
        with self._lock:
            keys = [self[name] for name in reversed(names)]
            order = np.lexsort(keys)
            self._columns = {name: array("d", x[order].tobytes()) for name, x in self.columns().items()}

    def of(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which a metric was measured, and its values there: what one plots.

        >>> history = History()
        >>> for step in range(1, 5):
        ...     history.record(step=step, epoch=0, loss=1 / step)
        >>> history.amend(test_loss=0.3)
        >>> history.of("test_loss")
        (array([4.]), array([0.3]))
        """
        values = self[name]
        measured = ~np.isnan(values)
        return self["step"][measured], values[measured]

    def __getitem__(self, name: str) -> np.ndarray:
        """One metric over all records.

        Raises:
            UnknownNameError: no record has it.
        """
        if name not in self._columns:
            advice = nearest(str(name), self._columns) if self._columns else _NOTHING
            raise UnknownNameError(f"The history has no {name!r}. {advice}")
        with self._lock:
            self._fetch(len(self._waiting))
            return np.array(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def get(self, name: str, default: Any = None) -> Any:
        """One metric over all records, or ``default`` when no record has it."""
        return self[name] if name in self._columns else default

    def known(self) -> dict[str, np.ndarray]:
        """Every metric over the records that are computed by now; does not wait for the device.

        >>> history = History()
        >>> history.record(step=1, epoch=0, loss=0.5)
        >>> history.known()["loss"]
        array([0.5])
        """
        with self._lock:
            waiting = enumerate(self._waiting)
            self._fetch(next((i for i, row in waiting if not _is_ready(row)), len(self._waiting)))
            return {name: np.array(column) for name, column in self._columns.items()}

    def as_dict(self) -> dict[str, list[float]]:
        """The same as plain lists, for ``json.dump`` and the like.

        >>> history = History()
        >>> history.record(step=1, epoch=0, loss=0.5)
        >>> history.as_dict()
        {'step': [1.0], 'epoch': [0.0], 'loss': [0.5]}
        >>> History.from_dict(history.as_dict()) == history
        True
        """
        return {name: column.tolist() for name, column in self.columns().items()}

    def columns(self) -> dict[str, np.ndarray]:
        """Every metric over all records, of one moment; waits for the device."""
        with self._lock:
            self._fetch(len(self._waiting))
            return {name: np.array(column) for name, column in self._columns.items()}

    @classmethod
    def from_dict(cls, columns: Mapping[str, Sequence[float] | np.ndarray]) -> History:
        """The History that ``as_dict`` was asked of; training may go on recording in it.

        Raises:
            ArgumentError: columns of unequal length, or of something else than numbers.
        """
        history = cls()
        own = {name: _column(name, column) for name, column in _listed(columns)}
        lengths = {name: len(column) for name, column in own.items()}
        for name, length in lengths.items():
            first = next(iter(lengths))
            if length != lengths[first]:
                raise ArgumentError(
                    f"History.from_dict: {first!r} has {lengths[first]} records and {name!r} has {length}; "
                    "expected one number a record in each. Give NaN where there is none."
                )
        history._columns = own
        history._fetched = max(lengths.values(), default=0)
        return history

    def _fetch(self, count: int) -> None:
        """Turn the oldest waiting records into numbers, all transfers under way at once."""
        rows, start = self._waiting[:count], self._fetched
        if jax.default_backend() != "cpu":
            _send(rows)
        for name, column in self._columns.items():
            numbers = [_number(row.get(name, NAN)) for row in rows]
            del column[start:]  # what an interrupted fetch has left
            column.extend([NAN] * (start - len(column)) + numbers)
        self._fetched = start + len(rows)
        del self._waiting[:count]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        ours, theirs = self.as_dict(), other.as_dict()
        same = (np.array_equal(ours[k], theirs[k], equal_nan=True) for k in ours if k in theirs)
        return list(ours) == list(theirs) and all(same)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return History.from_dict, (self.as_dict(),)

    def __repr__(self) -> str:
        if not self._columns:
            return "History(0 steps)"
        steps = len(set(self["step"].tolist()))
        names = [name for name in self._columns if name not in ("step", "epoch")][:3]
        shown = ", ".join(f"{name} {_ends(self[name])}" for name in names)
        return f"History({steps} step{'s' * (steps != 1)}{': ' * bool(shown)}{shown})"


def expect_metrics(values: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for a metric that would stand in the place of the step or the epoch."""
    if taken := values.keys() & {"step", "epoch"}:
        raise ArgumentError(
            f"History: no metric is named {min(taken)!r}, which every record counts itself; give it another "
            "name."
        )


def _expect_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if getattr(value, "shape", None) != () and not isinstance(value, int | float):
            raise ArgumentError(
                f"History: {name!r} is {describe(value)}; expected one number. Record its mean, or a "
                "metric for each of its entries."
            )
        if getattr(getattr(value, "dtype", None), "kind", "") == "c":
            raise ArgumentError(
                f"History: {name!r} is {value.dtype}; expected a real number. Record abs(z) of it; or z.real "
                "and z.imag, a metric each."
            )


def _listed(columns: Any) -> Any:
    """The columns of a History by name, as pairs."""
    if isinstance(columns, Mapping):
        return columns.items()
    raise ArgumentError(
        f"History.from_dict was given {describe(columns)}; expected a list of numbers for each name, as "
        "as_dict returns: {'step': [1, 2], 'epoch': [0, 0], 'loss': [0.5, 0.4]}."
    )


def _column(name: str, values: Any) -> array[float]:
    """One metric over all records."""
    try:
        numbers = np.asarray(values)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "biuf"):
            raise ValueError
        return array("d", numbers.astype(float).tobytes())
    except (TypeError, ValueError):
        raise ArgumentError(
            f"History.from_dict: {name!r} is {describe(values)}; expected a real number for each record, "
            "and NaN where there is none."
        ) from None


def _send(rows: Sequence[Mapping[str, Any]]) -> None:
    """Begin every transfer to the host, so that the latencies pass together."""
    for row in rows:
        for value in row.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()


def _is_ready(row: Mapping[str, Any]) -> bool:
    return all(x.is_ready() for x in row.values() if hasattr(x, "is_ready"))


def _number(value: Any) -> float:
    """A scalar as a float; by way of NumPy, which takes a fifth of the time of ``float(jax_array)``."""
    return float(value if isinstance(value, int | float) else np.asarray(value))


def _ends(column: np.ndarray) -> str:
    numbers = column[~np.isnan(column)]
    return f"{numbers[0]:.4g} -> {numbers[-1]:.4g}" if len(numbers) else "nan"
