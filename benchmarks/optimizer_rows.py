"""The optimizers of the contest in ``steps_to_loss``: what each of them is given, in a few lines.

As in the speedrun, the optimizer of a row updates the matrices of the layers. Embedding, head and vectors go
beside each of them to the same AdamW (``aside``). ``ROWS`` has the learning rate of each and the length of
its run, ``PUBLISHED`` two rows of the speedrun's own table, with their numbers.

>>> list(ROWS)[:4], ROWS["Muon"].build(ROWS["Muon"].tuned).name
(['SGD', 'Momentum', 'Adam', 'AdamW'], 'muon')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onward as ow
from onward.core.program import Variable

_FALLING = 0.7  # of a run, in which the rate goes to zero
_RISING = 0.05


@dataclass(frozen=True)
class Tuned:
    """The largest learning rate of a run, and its number of steps."""

    rate: float
    steps: int

    def falling(self, rate: float | None = None, warmup: int | None = None) -> ow.schedule.Schedule:
        """Up in the first steps, a twentieth unless given, and to zero in the last seven tenths."""
        peak, rising = rate or self.rate, max(1, int(_RISING * self.steps)) if warmup is None else warmup
        begin, falling = peak / max(1, rising), max(1, int(_FALLING * self.steps))
        return ow.schedule.wsd(peak, steps=self.steps, decay=falling, warmup=rising, begin=begin)

    def staying(self) -> ow.schedule.Schedule:
        """Up in the same way, and then as it is."""
        rising = max(1, int(_RISING * self.steps))
        return ow.schedule.warmup(self.rate, steps=rising, begin=self.rate / rising)


@dataclass(frozen=True)
class Row:
    """An optimizer of the contest, and what it is run with."""

    build: Callable[[Tuned], ow.Optimizer]
    tuned: Tuned


def aside(
    run: Tuned,
    embed: float = 0.3,
    head: float = 0.004,
    vectors: float = 0.015,
    warmup: int | None = None,
    decay: float = 0.0,
) -> list[ow.Group]:
    """What is not a matrix of a layer: AdamW with the speedrun's numbers, the same beside every optimizer."""
    rates = {"embed": ("embed", embed), "head": ("head/w", head), "vectors": (is_vector, vectors)}
    return [
        ow.Group(where, ow.AdamW(run.falling(rate, warmup), 0.8, 0.95, 1e-10, decay), name=name)
        for name, (where, rate) in rates.items()
    ]


def is_vector(parameter: Variable) -> bool:
    """Whether a parameter is not a matrix."""
    return len(parameter.shape) < 2


def sgd(run: Tuned) -> ow.Optimizer:
    """The gradient as it is."""
    return ow.SGD(run.falling(), groups=aside(run))


def momentum(run: Tuned) -> ow.Optimizer:
    """Nesterov's form."""
    return ow.Momentum(run.falling(), 0.9, nesterov=True, groups=aside(run))


def adam(run: Tuned) -> ow.Optimizer:
    """The variance forgets as fast as is usual for language models."""
    return ow.Adam(run.falling(), beta2=0.95, groups=aside(run))


def adamw(run: Tuned) -> ow.Optimizer:
    """As Adam, with decay."""
    return ow.AdamW(run.falling(), beta2=0.95, weight_decay=0.1, groups=aside(run))


def lion(run: Tuned) -> ow.Optimizer:
    """The decay is larger than AdamW's, as the rate is smaller."""
    return ow.Lion(run.falling(), beta2=0.98, weight_decay=0.5, groups=aside(run))


def muon(run: Tuned) -> ow.Optimizer:
    """Jordan's, which is the default."""
    return ow.Muon(run.falling(), groups=aside(run))


def soap(run: Tuned) -> ow.Optimizer:
    """A new basis every fifth step."""
    return ow.SOAP(run.falling(), every=5, groups=aside(run))


def shampoo(run: Tuned) -> ow.Optimizer:
    """Running means of the statistics, and new roots every fifth step."""
    return ow.Shampoo(run.falling(), decay=0.95, every=5, groups=aside(run))


def psgd(run: Tuned) -> ow.Optimizer:
    """Factors that are fitted at every step."""
    return ow.optimizer.PSGDKron(run.falling(), warmup=run.steps, groups=aside(run))


def schedule_free(run: Tuned) -> ow.Optimizer:
    """The rate of the matrices does not fall; the loss is that of the average."""
    return ow.optimizer.ScheduleFreeAdamW(run.staying(), beta2=0.95, groups=aside(run))


def prodigy(run: Tuned) -> ow.Optimizer:
    """The rate is a factor of the one that it finds itself."""
    return ow.optimizer.Prodigy(run.falling(), beta2=0.95, groups=aside(run))


def sophia(run: Tuned) -> ow.Optimizer:
    """A look at the Hessian at every tenth step costs two more gradients there."""
    return ow.optimizer.Sophia(run.falling(), groups=aside(run))


def published_adam(run: Tuned) -> ow.Optimizer:
    """Result 2 of the speedrun's track 3."""
    groups = aside(run, 0.3, 1 / 320, 0.01, warmup=250)
    return ow.AdamW(run.falling(warmup=250), 0.9, 0.95, 1e-10, 0.1, groups=groups)


def published_muon(run: Tuned) -> ow.Optimizer:
    """Result 36 of the speedrun's track 3."""
    groups = aside(run, 0.7, 0.004, 0.015, warmup=0, decay=0.001)
    return ow.Muon(run.falling(warmup=0), rules=[ow.WeightDecay(0.05)], groups=groups)


ROWS = {
    "SGD": Row(sgd, Tuned(2.83, 300)),
    "Momentum": Row(momentum, Tuned(0.566, 300)),
    "Adam": Row(adam, Tuned(0.004, 300)),
    "AdamW": Row(adamw, Tuned(0.002, 300)),
    "Lion": Row(lion, Tuned(0.000707, 300)),
    "Muon": Row(muon, Tuned(0.02, 300)),
    "SOAP": Row(soap, Tuned(0.008, 300)),
    "Shampoo": Row(shampoo, Tuned(0.00566, 300)),
    "PSGD": Row(psgd, Tuned(0.004, 300)),
    "Schedule-Free": Row(schedule_free, Tuned(0.008, 300)),
    "Prodigy": Row(prodigy, Tuned(4, 300)),
    "Sophia": Row(sophia, Tuned(0.004, 300)),
}
PUBLISHED = {
    "Adam-published": Row(published_adam, Tuned(0.0015, 5625)),
    "Muon-published": Row(published_muon, Tuned(0.025, 3250)),
}
