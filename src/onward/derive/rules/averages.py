"""Averages of the parameters over the steps, to evaluate a model with; what is trained stays as it is.

``for_evaluation`` makes the test Program that reads the averages. It is a Program like any other, over the
same state, so that nobody has to remember to swap parameters.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.5, rules=[ow.EMA(0.5)]).minimize(lambda w: jnp.sum(w**2) / 2, jnp.ones(1))
>>> step, test = ow.compile(program), ow.compile(ow.for_evaluation(program))
>>> state, _ = step(step.init(jnp.ones(1)))
>>> state.parameters.tolist(), state["w/average"].tolist(), float(test(state)[1].loss)
([0.5], [0.75], 0.28125)
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.derive.rule import Hyperparameter, ParameterRule, Slots, expect_steps


class RunningAverage(ParameterRule):
    """The base of what keeps an ``average`` of a parameter, which begins with its first value."""

    def init(self, parameter: Any) -> Slots:
        """The average so far: the parameter."""
        return {"average": parameter}

    def evaluated(self, parameter: Any, slots: Slots) -> Any:
        """The average."""
        return slots["average"]


class EMA(RunningAverage):
    """An exponential moving average of the parameters, which begins with their first value.

    ``average <- decay average + (1 - decay) w``; with ``ramp`` the decay of step t is at most
    ``(1 + t) / (10 + t)``, so that early steps are soon forgotten (as in TensorFlow).

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, with weights
    that fall off, as in Tarvainen and Valpola, Mean Teachers, 2017, section 2.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(1e-3, rules=[ow.EMA(0.999)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> [v.name for v in program.state if "/" in v.name]
        ['ema/decay', 'w/mean', 'w/variance', 'w/average']
    """

    decay: Hyperparameter = 0.999
    ramp: bool = False
    below_one: ClassVar[tuple[str, ...]] = ("decay",)

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter as it is, and the next average."""
        step = self.step.astype(self.decay.dtype)
        decay = jnp.minimum(self.decay, (1 + step) / (10 + step)) if self.ramp else self.decay
        return updated, {"average": slots["average"] + (1 - decay) * (updated - slots["average"])}


class PolyakAverage(RunningAverage):
    """The plain mean of the parameters over the steps from ``begin`` on; before that the parameters.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, section 2.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(0.5, rules=[ow.rule.PolyakAverage()])
        >>> step = ow.compile(optimizer.minimize(lambda w: jnp.sum(w**2) / 2, jnp.ones(1)))
        >>> state = step.init(jnp.ones(1))
        >>> for _ in range(2):
        ...     state, _ = step(state)
        >>> state["w/average"].tolist()
        [0.375]
    """

    begin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_steps(self, "begin", 0)

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter as it is, and the next mean."""
        count = jnp.maximum(self.step - self.begin + 1, 1)
        share = 1 / count.astype(jnp.abs(updated).dtype)
        return updated, {"average": slots["average"] + share * (updated - slots["average"])}


class SWA(RunningAverage):
    """Stochastic weight averaging: the mean of the parameters at every ``every``-th step from ``begin`` on.

    Before ``begin``, the average is what the parameters are. Let the learning rate be high from ``begin`` on,
    or cyclic with the period ``every`` (``schedule.cyclic``). Statistics of batch normalization belong to the
    trained parameters: run some batches in training mode before evaluating.

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018,
    algorithm 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> rule = ow.SWA(begin=2, every=2)
        >>> step = ow.compile(ow.SGD(1.0, rules=[rule]).minimize(lambda w: -w, jnp.float32(0)))
        >>> state = step.init(jnp.float32(0))
        >>> for _ in range(6):
        ...     state, _ = step(state)
        >>> float(state.parameters), float(state["w/average"])        # of 4 and 6
        (6.0, 5.0)
    """

    begin: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_steps(self, "begin", 0)
        expect_steps(self, "every", 1)

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter as it is, and the next average."""
        done = self.step + 1 - self.begin
        count = jnp.maximum(done // self.every, 1).astype(jnp.abs(updated).dtype)
        met = (done <= 0) | (done % self.every == 0)
        average = jnp.where(met, slots["average"] + (updated - slots["average"]) / count, slots["average"])
        return updated, {"average": average}
