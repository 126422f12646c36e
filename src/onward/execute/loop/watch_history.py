"""The statistics of a training, of the steps in which ``watch`` looked, kept without waiting for the device.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.5).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
>>> step = ow.compile(ow.watch(program, gradients=True, statistics=["norm", "max"], every=2))
>>> state, history = step.init(jnp.ones(2)), WatchHistory()
>>> for n in range(1, 6):
...     state, out = step(state, jnp.array([3.0 * n, 4.0 * n]))
...     history.record(out.watched, step=n)
>>> history
WatchHistory(3 steps: 1 to 5, of grad(w))
>>> history.of("grad(w)", "norm")
(array([1, 3, 5]), array([ 5., 15., 25.]))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple

import jax
import numpy as np

from onward.core.errors import UnknownNameError, nearest
from onward.core.words import some
from onward.develop.watch.reading import Watched, sent

WAITING = 200  # records that may stay on the device; twice as many at most


class WatchedStep(NamedTuple):
    """A step in which was looked, and what was seen."""

    step: int
    epoch: int
    seen: Mapping[str, Mapping[str, Any]]


class WatchHistory(Sequence[WatchedStep]):
    """The statistics of each step in which they were computed, in order. Reading waits for the device.

    Attributes:
        subjects: of what each thing is: ``"value"``, ``"gradient"`` or ``"update"``, and the Variable's name.
    """

    def __init__(self) -> None:
        self._moments: list[WatchedStep] = []
        self._waiting: list[tuple[int, int, Watched]] = []
        self.subjects: dict[str, tuple[str, str]] = {}
        self._lock = RLock()  # one thread may record while another one reads

    def record(self, watched: Watched, /, *, step: int, epoch: int = 0) -> None:
        """Append what a step returned, if it looked; does not wait for it.

        Args:
            watched: ``out.watched``.
            step: how many steps were done.
            epoch: the epoch, counted from 0.
        """
        if not watched.parts:
            return
        with self._lock:
            if not self.subjects.keys() >= watched.subjects.keys():
                self.subjects |= watched.subjects
            self._waiting.append((step, epoch, watched))
            if len(self._waiting) >= 2 * WAITING:
                self._fetch(WAITING)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the watched values, such as ``"grad(w)"``."""
        return tuple(dict.fromkeys(label for moment in self for label in moment.seen))

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of all statistics."""
        return tuple(dict.fromkeys(name for m in self for found in m.seen.values() for name in found))

    def of(self, label: str, statistic: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps at which a statistic was computed, and its values there: what one plots.

        Of histograms and other statistics of several numbers the values are an array of objects.

        Raises:
            UnknownNameError: there is no such thing.
        """
        here = [m for m in self if statistic in m.seen.get(label, {})]
        if not here:
            known = self.labels if label not in self.labels else self.statistics
            wrong = label if label not in self.labels else statistic
            raise UnknownNameError(f"The history has no {statistic!r} of {label!r}. {nearest(wrong, known)}")
        found = [m.seen[label][statistic] for m in here]
        steps = np.array([m.step for m in here])
        if all(isinstance(x, float) for x in found):
            return steps, np.array(found)
        values = np.empty(len(found), object)
        values[:] = found
        return steps, values

    def known(self) -> Sequence[WatchedStep]:
        """The moments that are computed by now, in order; does not wait for the device."""
        with self._lock:
            waiting = enumerate(self._waiting)
            self._fetch(next((i for i, (*_, w) in waiting if not w.is_ready), len(self._waiting)))
            return list(self._moments)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each thing and step, as ``pandas.DataFrame`` takes them; without histograms.

        >>> WatchHistory().rows()
        []
        """
        return [
            {
                "step": moment.step,
                "epoch": moment.epoch,
                "name": label,
                **{name: x for name, x in found.items() if isinstance(x, float)},
            }
            for moment in self
            for label, found in moment.seen.items()
        ]

    def __getitem__(self, number: Any) -> Any:
        """A moment by its number, or several by a slice."""
        return self._all()[number]

    def __iter__(self) -> Iterator[WatchedStep]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> list[WatchedStep]:
        with self._lock:
            self._fetch(len(self._waiting))
            return list(self._moments)

    def _fetch(self, count: int) -> None:
        """Turn the oldest waiting records into numbers; those of steps that did not look are dropped."""
        rows = self._waiting[:count]
        if jax.default_backend() != "cpu":
            for *_, watched in rows:
                sent(watched)
        self._moments += [WatchedStep(step, epoch, dict(w)) for step, epoch, w in rows if w.step is not None]
        del self._waiting[:count]

    def __repr__(self) -> str:
        moments = self._all()
        if not moments:
            return "WatchHistory(0 steps)"
        steps = f"{len(moments)} step{'s' * (len(moments) != 1)}: {moments[0].step} to {moments[-1].step}"
        return f"WatchHistory({steps}, of {some(self.labels, 3)})"
