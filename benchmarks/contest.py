"""All sides of one workload: started one after the other, checked against each other, measured in turn.

Only one of them computes at any time. Each is compared with ``jit + optax``, round by round, unless told
otherwise.

    rows = contest("MLP, Adam", ["onward", "torch"], rounds=20, targets={"onward": 1.0})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import nan
from statistics import median

from benchmarks.harness import Row, in_turn, ratio_row
from benchmarks.sides import PEERS, REFERENCE, SIDES
from benchmarks.worker import Local, SideError, Worker
from benchmarks.workloads import WORKLOADS

_ROUND = 0.1  # seconds that one side of a round lasts at least
_BUDGET = 150.0  # seconds after which no further round begins

Running = Local | Worker


def contest(
    work: str,
    sides: Sequence[str],
    rounds: int | None = None,
    targets: Mapping[str, float] | None = None,
    quick: bool = False,
    against: Mapping[str, str] | None = None,
    memory: bool = False,
) -> list[Row]:
    """How long a step takes on each side, beside that of another.

    Args:
        work: a key of ``WORKLOADS``.
        sides: keys of ``SIDES``.
        rounds: how often to measure all of them; 20 unless given.
        targets: ratios to reach, by side.
        quick: in tiny, and in this process.
        against: with whom to compare a side, if not with ``jit + optax``.
        memory: also say how much temporary memory a side takes, over that of the other.
    """
    rivals = {side: (against or {}).get(side, REFERENCE) for side in sides}
    with ExitStack() as stack:
        running, failed = _start(work, dict.fromkeys((REFERENCE, *rivals.values(), *sides)), quick, stack)
        shown = {*rivals, *rivals.values()} if memory else set()
        bytes_of = {name: side.temporary() for name, side in running.items() if name in shown}
        busy: dict[str, list[float]] = {name: [] for name in running}
        measures = {name: _measure(name, side, failed, busy[name], quick) for name, side in running.items()}
        in_turn(measures, 1 if quick else 2)  # to warm up, and to see how many steps make a round
        for cores in busy.values():
            cores.clear()
        times = in_turn(measures, rounds or (2 if quick else 20), _BUDGET)
    rows = []
    for side, rival in rivals.items():
        target = None if quick else (targets or {}).get(side)
        if side in failed:
            rows.append(Row(work, rival, target=target, side=side, note=f"failed: {failed[side]}"))
        elif broken := {rival, REFERENCE} & set(failed):
            note = f"not compared, for {' and '.join(sorted(broken))} failed"
            rows.append(Row(work, rival, target=target, side=side, note=note))
        else:
            more = {"note": _note(bytes_of.get(side), bytes_of.get(rival)), "cores": median(busy[side])}
            rows.append(ratio_row(work, rival, times[side], times[rival], target=target, side=side, **more))
    return rows


def peers_of(work: str, peers: Sequence[str] = PEERS) -> list[str]:
    """Those of other libraries that are installed and have the model."""
    return [name for name in peers if SIDES[name].fits(WORKLOADS[work]) and SIDES[name].is_installed]


def start(side: str, work: str, quick: bool = False) -> Running:
    """A side in a process of its own; in tiny, and in this one, if it has to be quick."""
    return Local(side, WORKLOADS[work].small) if quick else Worker(side, work)


def check_agreement(losses: Sequence[float], expected: Sequence[float], roundoff: float = 2e-6) -> None:
    """Raise ``SideError`` unless the losses of the first steps are the expected ones.

    They are to move, and to be apart by a hundredth of that at most, beside rounding.
    """
    rounding = roundoff * max(map(abs, expected))
    moved = max(expected) - min(expected)
    if not moved > 10 * rounding:
        raise SideError(f"the losses hardly move: from {expected[0]} to {expected[-1]}")
    for i, (a, b) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(a - b) <= 0.01 * moved + rounding:
            raise SideError(f"another loss at step {i}: {a}, expected {b}")


def _start(
    work: str, sides: Mapping[str, None], quick: bool, stack: ExitStack
) -> tuple[dict[str, Running], dict[str, str]]:
    """The sides that run and agree with the first of them, and why the others do not."""
    running: dict[str, Running] = {}
    failed: dict[str, str] = {}
    for name in sides:
        try:
            side = start(name, work, quick)
            stack.callback(side.close)
            check_agreement(side.report.losses, running.get(REFERENCE, side).report.losses)
        except SideError as error:
            failed[name] = str(error)
            if name == REFERENCE:
                break
        else:
            running[name] = side
    return running, failed


def _measure(
    name: str, side: Running, failed: dict[str, str], busy: list[float], quick: bool
) -> Callable[[], float]:
    """Measure a side for as long as a round lasts, and how many cores it keeps busy; NaN once it failed."""
    count = 1

    def measure() -> float:
        nonlocal count
        if name in failed:
            return nan
        try:
            found = side.seconds(count)
        except SideError as error:
            failed[name] = str(error)
            return nan
        busy.append(side.cores)
        count = 1 if quick else int(_ROUND / found) + 1
        return found

    return measure


def _note(ours: int | None, theirs: int | None) -> str:
    return f"{ours / theirs:.2f} of the memory" if ours and theirs else ""
