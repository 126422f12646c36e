"""What does it cost to look at every step, and to keep the state where one is not finite?

``compile(program, check_finite=True)`` against ``compile(program)``, of the same Program. The step that is
looked at reads all of the next state once more, and gradients where that would not show them, and chooses
between the state before and after. So it costs as much as a part of an update: little where a model computes
long for each parameter, much where the update is most of the step, as in the MLP. ``guard(program)``, which
looks at the gradients and leaves bad steps out, stands beside it; so does the unchecked step itself: how far
a median can be off.

All sides run in one process, in turn in every round, each call waited for by its loss. Before anything is
timed, the losses of the first ten steps must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onward as ow
from benchmarks.contest import check_agreement
from benchmarks.harness import Row, Side, in_turn, ratio_row
from benchmarks.models import Model
from benchmarks.sides.by_onward import OPTIMIZERS
from benchmarks.workloads import WORKLOADS, Workload
from onward.develop.guard import guard

_TARGETS = {"4-layer transformer": 1.05}
_ROUND = 0.25  # seconds that one side of a round lasts at least
_UNCHECKED, _CHECKED, _AGAIN, _GUARDED = "unchecked", "check_finite", "unchecked, again", "guard"
_CASES = ("4-layer transformer", "MLP, Adam", "CNN, Momentum")

SIDES: dict[str, Callable[[ow.Program], ow.Step]] = {
    _UNCHECKED: ow.compile,
    _CHECKED: partial(ow.compile, check_finite=True),
    _GUARDED: lambda program: ow.compile(guard(program)),
    _AGAIN: ow.compile,
}


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each side of each workload."""
    rows = []
    for name in _CASES[:1] if quick else _CASES:
        work = WORKLOADS[name].small if quick else WORKLOADS[name]
        sides = _sides(work)
        count = 1 if quick else int(_ROUND / sides[_UNCHECKED].seconds(5)) + 1
        measures = {side: partial(run.seconds, count) for side, run in sides.items()}
        times = in_turn(measures, rounds or (2 if quick else 30))
        for side in (_CHECKED, _GUARDED, _AGAIN):
            target = _TARGETS.get(name) if side == _CHECKED and not quick else None
            rows.append(ratio_row(name, _UNCHECKED, times[side], times[_UNCHECKED], target=target, side=side))
    return rows


def _sides(work: Workload) -> dict[str, Side]:
    """The compiled steps, each with its state, checked against each other."""
    model = work.model()
    program = OPTIMIZERS[work.optimizer](work.rate).minimize(model.loss, model.params, *model.data)
    sides, expected = {}, None
    for name, compiled in SIDES.items():
        step = compiled(program)
        side = sides[name] = Side(step, step.init(model.params), model.data)
        losses = _losses(side, model)
        check_agreement(losses, expected or losses)
        expected = expected or losses
    return sides


def _losses(side: Side, model: Model) -> list[float]:
    """Those of its first ten steps."""
    found = []
    for _ in range(10):
        side.state, out = side.step(side.state, *model.data)
        found.append(float(out.loss))
    return found
