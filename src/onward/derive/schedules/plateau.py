"""Lower a hyperparameter when a metric no longer improves: a callback, since no step tells when that is.

A schedule is a function of the step, computed inside of the training step. This one hears numbers on the host
and sets the Variable of the hyperparameter, which compiles nothing.
"""

# ruff: noqa: N801 - a person calls this class like the schedules

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from onward.core.errors import ArgumentError, HyperparameterError, UnknownNameError, nearest
from onward.core.structure import describe
from onward.derive.schedules.checks import number, one_of, whole

Holder = TypeVar("Holder")

_NO_SCHEDULE = (
    "plateau was called with {given}; expected an Event of a Trainer. It is a callback that hears a metric, "
    "and no schedule, which is a function of the step. Give the optimizer a number, SGD(0.1), and pass this "
    "to the Trainer: trainer.train(reader, callbacks=[{self}]). In a loop of your own: state = "
    "plateau.update(state, loss)."
)


@dataclass(frozen=True)
class PlateauMemory:
    """The state of a plateau: what it keeps of the values that it was given.

    Attributes:
        best: the best one; None before the first.
        waited: how many came since it was last improved on or acted.
        cooling: how many more do not count.
        lowers: whether the last one was one too many.
        moment: where the metric is looked for, once it was found: ``"epoch"`` or ``"test"``.
    """

    best: float | None = None
    waited: int = 0
    cooling: int = 0
    lowers: bool = False
    moment: str | None = None


class plateau:
    """Multiplies a hyperparameter by ``rate`` when a value has not improved ``patience`` times in a row.

    As a callback of a Trainer it looks at a metric after each test or epoch, wherever it appears first (after
    an epoch, ``loss`` is that of its last batch):

        trainer.train(reader, test=test, callbacks=[ow.schedule.plateau("test_loss", patience=3)])

    In a loop of your own, tell it the values: ``state = plateau.update(state, loss)``.

    An improvement is more than ``threshold`` times the size of the best value; NaN and infinity are none.
    After it has acted, ``cooldown`` values do not count. Torch's ``ReduceLROnPlateau`` waits for one value
    more, its threshold of a negative best lies on the wrong side; Keras compares with a difference
    (``min_delta``), not a ratio; optax scales the update in place of the learning rate.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015, section 3.4, who did it by hand.

    Args:
        monitor: the name of the metric, for the callback.
        rate: the factor, below 1.
        patience: how many values in a row without improvement it takes.
        cooldown: how many values are not counted after that.
        threshold: which part of the best value counts as an improvement.
        end: the value that it does not go below.
        mode: ``"min"`` when smaller is better, ``"max"`` when larger is.
        name: the hyperparameter. It must be a number, not a schedule.

    Attributes:
        heard: what it remembers.

    Raises:
        HyperparameterError: a number that is negative, not finite, or out of range.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0)))
        >>> state, lower = step.init(jnp.float32(1.0)), ow.schedule.plateau(rate=0.5, patience=2)
        >>> for loss in [1.0, 0.9, 0.95, 0.9, 0.9, 0.9]:
        ...     state = lower.update(state, loss)
        ...     print(loss, float(state["learning_rate"]))
        1.0 0.5
        0.9 0.5
        0.95 0.5
        0.9 0.25
        0.9 0.25
        0.9 0.125
    """

    def __init__(
        self,
        monitor: str = "test_loss",
        *,
        rate: float = 0.1,
        patience: int = 10,
        cooldown: int = 0,
        threshold: float = 1e-4,
        end: float = 0.0,
        mode: str = "min",
        name: str = "learning_rate",
    ) -> None:
        one_of("plateau", "mode", mode, ("min", "max"))
        self.monitor, self.mode, self.name = _word("monitor", monitor), mode, _word("name", name)
        self.rate = number("plateau", "rate", rate, above=True)
        self.patience = whole("plateau", "patience", patience, 1)
        self.cooldown = whole("plateau", "cooldown", cooldown, 0)
        self.threshold = number("plateau", "threshold", threshold)
        self.end = number("plateau", "end", end)
        for word, value in (("rate", self.rate), ("threshold", self.threshold)):
            if value >= 1:
                raise HyperparameterError(f"plateau: {word} is {value}; expected a number below 1.")
        self.heard = PlateauMemory()
        self._lacking: dict[str, Mapping[str, Any]] = {}

    def __call__(self, event: Any) -> None:
        """Look at an Event of a Trainer.

        Raises:
            ArgumentError: it is no Event; no epoch and no test has such a metric, or it is not one number.
            UnknownNameError: the trainer keeps no such hyperparameter.
        """
        if not hasattr(event, "kind"):
            raise ArgumentError(_NO_SCHEDULE.format(given=describe(event), self=self))
        if event.kind == "begin":
            self._lacking = {}
            if event.step == 0:
                self.heard = PlateauMemory()
            self._find(event.trainer)
        elif event.kind in ("epoch", "test") and self.heard.moment in (None, str(event.kind)):
            self._look(event)
        elif event.kind == "end" and self._lacking and self.heard.moment is None:
            names = [name for metrics in self._lacking.values() for name in metrics]
            hint = "" if "test" in self._lacking else " No test ran: metrics of tests need test data."
            raise ArgumentError(
                f"plateau: there is no metric {self.monitor!r}. {nearest(self.monitor, names)}{hint}"
            )

    def update(self, holder: Holder, value: Any) -> Holder:
        """Hear a value, and lower the hyperparameter if it is time to.

        Args:
            holder: a State; or a Trainer or a Session, which is changed in place.
            value: one number.

        Returns:
            The State to go on with, or the same Trainer or Session.
        """
        found: Any = holder
        before = float(found[self.name])
        self.heard = self.after(self.heard, _number(value))
        following = max(before * self.rate, self.end)
        if not self.heard.lowers or following >= before:
            return holder
        if not hasattr(found, "replace"):
            found[self.name] = np.asarray(following, np.asarray(found[self.name]).dtype)
            return holder
        replaced = found.replace({self.name: following})
        return holder if replaced is None else replaced

    def after(self, heard: PlateauMemory, value: float) -> PlateauMemory:
        """Return the memory after one more value; a pure function.

        Example:
            >>> lower = plateau(patience=2)
            >>> heard = lower.after(lower.after(PlateauMemory(), 1.0), 1.0)
            >>> heard.waited, heard.lowers, lower.after(heard, 1.0).lowers
            (1, False, True)
        """
        better = self._improves(heard.best, value)
        waited = 0 if better or heard.cooling else heard.waited + 1
        lowers = waited >= self.patience
        return PlateauMemory(
            best=value if better else heard.best,
            waited=0 if lowers else waited,
            cooling=self.cooldown if lowers else max(heard.cooling - 1, 0),
            lowers=lowers,
            moment=heard.moment,
        )

    def state_dict(self) -> dict[str, Any]:
        """The memory for a Trainer's checkpoint, with which training resumes as if never interrupted."""
        return asdict(self.heard)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory that ``state_dict`` returned."""
        self.heard = PlateauMemory(**state)

    def __repr__(self) -> str:
        return f"plateau({self.monitor!r}, rate={self.rate}, patience={self.patience}, name={self.name!r})"

    def _find(self, trainer: Any) -> None:
        try:
            trainer[self.name]
        except UnknownNameError as error:
            raise UnknownNameError(
                f"plateau: {error} If {self.name} follows a schedule, it cannot be set: give the optimizer a "
                "number."
            ) from None

    def _look(self, event: Any) -> None:
        moment = str(event.kind)
        if self.monitor not in event.metrics:
            self._lacking[moment] = event.metrics
            return
        self.update(event.trainer, event.metrics[self.monitor])
        self.heard = replace(self.heard, moment=moment)

    def _improves(self, best: float | None, value: float) -> bool:
        if best is None or not isfinite(value):
            return isfinite(value)
        gain = best - value if self.mode == "min" else value - best
        return gain > self.threshold * abs(best)


def _number(value: Any) -> float:
    if np.shape(value) != () or isinstance(value, str | bool) or value is None:
        raise ArgumentError(f"plateau: it was told {describe(value)}; expected one number, such as a mean.")
    return float(value)


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        example = "'test_loss'" if name == "monitor" else "'learning_rate'"
        raise HyperparameterError(
            f"plateau: {name} is {describe(value)}; expected a name, such as {example}."
        )
    return value
