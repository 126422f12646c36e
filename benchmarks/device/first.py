"""How long does a person wait for the first step?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import onward as ow
from benchmarks.device.part import Case, Cells, Column, Part, Sheet
from benchmarks.device.steps import HAND, ONWARD, TORCH, Sides, Torch, prepared, why_no_torch
from benchmarks.device.works import WORKS, Work
from benchmarks.harness import Side

_ROLLED, _UNROLLED, _NO_SCAN = "onward, roll=True", "onward, roll=False", "by hand, no scan"
_WORKS = ("GPT-2 124M, bfloat16", "LSTM")


def _compiled(sides: Sides, roll: bool | None = None) -> Side:
    return sides.of_step(ow.compile(sides.program(), roll=roll))


def _maker(sides: Sides, side: str) -> Callable[[], Side | Torch]:
    """From the model and its batch, which are there, to a side whose first step may be taken."""
    best = sides.best()
    makers: dict[str, Callable[[], Side | Torch]] = {
        HAND: partial(sides.by_hand, best),
        _NO_SCAN: partial(sides.by_hand, sides.model),
        ONWARD: partial(_compiled, sides),
        _ROLLED: partial(_compiled, sides, True),
        _UNROLLED: partial(_compiled, sides, False),
        TORCH: sides.torch,
    }
    return makers[side]


def _first(work: Work, side: str, sheet: Sheet) -> None:
    """Seconds from minimize, or from jit, to the end of the first step."""
    if side == TORCH and (reason := why_no_torch(work)):
        sheet.note(reason)
        return
    make = _maker(prepared(work, sheet), side)
    begin = perf_counter()
    make().seconds(1)
    sheet.row(work=work.name, side=side, seconds=perf_counter() - begin)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in _WORKS:
        work = WORKS[name]
        layered = (_ROLLED, _UNROLLED, _NO_SCAN) if work.has_attention else ()
        for side in (HAND, ONWARD, *layered, TORCH):
            cases[f"{name}, {side}"] = partial(_first, work, side)
    return cases


def _complete(rows: list[Cells]) -> None:
    """The seconds of each over those of the step by hand of the same work."""
    by_hand = {row["work"]: row["seconds"] for row in rows if row["side"] == HAND}
    for row in rows:
        row["ratio"] = row["seconds"] / by_hand[row["work"]] if row["work"] in by_hand else None


PART = Part(
    name="first",
    question="how long does a person wait for the first step?",
    columns=(
        Column("work", "work"),
        Column("side", "side"),
        Column("seconds", "seconds", "{:.2f}".format),
        Column("over by hand", "ratio", "{:.2f}".format),
    ),
    cases=_cases(),
    share=4,
    legend=(
        "Each in a process of its own, once, after all imports and after the parameters were drawn there; no "
        "cache of compilations.\nOnward: minimize, compile, init, one step. By hand: jit, the optimizer's "
        "init, one step; a scan over layers, unless it says no scan."
    ),
    complete=_complete,
)
