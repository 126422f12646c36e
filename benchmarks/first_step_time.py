"""How long does a person wait for the first step of a deep model?

Onward: trace, derive, plan, lower, compile, ``init`` and the first step. By hand: ``jax.jit`` of
``jax.value_and_grad`` and an optax update, ``optimizer.init`` and the first step. Each in a new process,
after all imports, with JAX's persistent compilation cache off. The losses of ten steps must agree.
"""

from __future__ import annotations

from benchmarks.contest import check_agreement, start
from benchmarks.harness import ONWARD, Measure, Row, in_turn, ratio_row
from benchmarks.sides import REFERENCE
from benchmarks.worker import SideError

_TARGETS = {"24-layer transformer": 0.2, "100-layer MLP": 0.2, "100-layer MLP, batch 1": None}
_BUDGET = 200.0  # seconds for one workload, after which no further round begins


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each deep model."""
    works = list(_TARGETS)[: 1 if quick else None]
    return [_row(work, rounds or (2 if quick else 3), quick) for work in works]


def _row(work: str, rounds: int, quick: bool) -> Row:
    case, target = f"{work}, first step", None if quick else _TARGETS[work]
    losses: list[list[float]] = []
    sides = {name: _first_step(name, work, quick, losses) for name in (REFERENCE, ONWARD)}
    try:
        times = in_turn(sides, rounds, _BUDGET, least=1)
    except SideError as error:
        return Row(case, REFERENCE, target=target, note=f"failed: {error}")
    return ratio_row(case, REFERENCE, times[ONWARD], times[REFERENCE], target=target)


def _first_step(side: str, work: str, quick: bool, losses: list[list[float]]) -> Measure:
    """Measure one side from nothing, and hold its losses against those that were there before."""

    def measure() -> float:
        started = start(side, work, quick)
        started.close()
        losses.append(started.report.losses)
        check_agreement(losses[-1], losses[0])
        return started.report.first

    return measure
