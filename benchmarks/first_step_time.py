"""How long does a person wait for the first step?

Onward: trace, derive, plan, lower, compile, ``init`` and the first step. By hand: ``jax.jit`` of
``jax.value_and_grad`` and an optax update, ``optimizer.init`` and the first step; and of deep models the same
as a scan over layers whose arrays are stacked; of 100 layers only the scan, for without one their compilation
takes minutes and 19 GB with JAX 0.12. Each in a new process, after all imports, with JAX's persistent
compilation cache off. The losses of ten steps must agree.
"""

from __future__ import annotations

from benchmarks.contest import check_agreement, start
from benchmarks.harness import ONWARD, Measure, Row, in_turn, ratio_row
from benchmarks.sides import REFERENCE, SCAN
from benchmarks.worker import SideError

_AS_PLAIN = {REFERENCE: 1.0}
_CASES: dict[str, dict[str, float | None]] = {
    "24-layer transformer": {REFERENCE: None, SCAN: 1.0},
    "100-layer MLP": {SCAN: 1.0},
    "100-layer MLP, batch 1": {SCAN: None},
    "MLP, Adam": _AS_PLAIN,
    "4-layer transformer": _AS_PLAIN,
    "CNN, Momentum": _AS_PLAIN,
    "LSTM, Adagrad": _AS_PLAIN,
    "1,000 leaves, SGD": _AS_PLAIN,
}
_BUDGET = 60.0  # seconds for one workload, after which no further round begins


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each model and each step by hand; ``quick`` takes the first of them."""
    if quick:
        return _rows("24-layer transformer", {REFERENCE: None}, rounds or 2, quick=True)
    return [row for work, rivals in _CASES.items() for row in _rows(work, rivals, rounds or 7)]


def _rows(work: str, rivals: dict[str, float | None], rounds: int, quick: bool = False) -> list[Row]:
    case = f"{work}, first step"
    losses: list[list[float]] = []
    sides = {name: _first_step(name, work, quick, losses) for name in (*rivals, ONWARD)}
    try:
        times = in_turn(sides, rounds, _BUDGET, least=1)
    except SideError as error:
        return [Row(case, rival, target=target, note=f"failed: {error}") for rival, target in rivals.items()]
    return [ratio_row(case, r, times[ONWARD], times[r], target=target) for r, target in rivals.items()]


def _first_step(side: str, work: str, quick: bool, losses: list[list[float]]) -> Measure:
    """Measure one side from nothing, and hold its losses against those that were there before."""

    def measure() -> float:
        started = start(side, work, quick)
        started.close()
        losses.append(started.report.losses)
        check_agreement(losses[-1], losses[0])
        return started.report.first

    return measure
