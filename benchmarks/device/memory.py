"""How much memory does a step take, measured and foretold, and which batch is the largest that fits?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import onward as ow
from benchmarks.device.found import memory_limit, memory_peak
from benchmarks.device.part import Case, Column, Part, Sheet, is_out_of_memory
from benchmarks.device.steps import HAND, ONWARD, Sides, prepared
from benchmarks.device.works import WORKS, Work
from benchmarks.harness import Side
from onward.core.show import human_bytes

_WORKS = ("GPT-2 124M, bfloat16", "LSTM", "ResNet-50, bfloat16")
_LARGEST = "GPT-2 124M, bfloat16"
_HALF = "onward, recompute(0.7)"
_MOST = 1 << 16  # examples
_NOT_COUNTED = "a CPU counts no memory: measured is what XLA says of the compiled step"


def _taken(work: Work, side: str, sheet: Sheet) -> None:
    """The peak of one side, in a process that has run nothing else."""
    sides = prepared(work, sheet)
    if side == HAND:
        found, program = sides.by_hand(), None
    else:
        program = sides.program()
        if side == _HALF:
            program = ow.recompute(program, 0.7)
        found = sides.of_step(ow.compile(program))
    for leaf in jax.tree.leaves(sides.model.params):
        leaf.delete()
    counted = memory_peak() is not None
    if counted:
        found.seconds(2)
    else:
        sheet.note(_NOT_COUNTED)
    measured = memory_peak() if counted else _of_compiled(found)
    foretold = None if program is None else ow.memory(program).peak
    sheet.row(
        work=work.name,
        batch=sides.work.sizes.get("batch"),
        side=side,
        measured=measured,
        foretold=foretold,
        off=None if foretold is None or not measured else foretold / measured - 1,
    )


def _of_compiled(side: Side) -> int:
    """What XLA says that a step takes: what it reads, returns in places of its own, and needs between."""
    function = getattr(side.step, "function", side.step)
    jitted = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=0)
    found = jitted.lower(side.state, *side.data).compile().memory_analysis()
    own = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + found.temp_size_in_bytes + own)


def _largest(work: Work, sheet: Sheet) -> None:
    """The largest batch that fits, of powers of two, beside the largest that ow.memory foretells."""
    limit = memory_limit()
    if limit is None:
        sheet.leave_out("the largest batch that fits", "a CPU has no memory of its own that JAX would count")
        return
    work = work.sized(sheet.tiny)
    foretold = _last(lambda batch: _foretold(work, batch) <= limit)
    fits = _last(lambda batch: _runs(work, batch, sheet), max(foretold, 1))
    sheet.row(work=f"{work.name}, largest batch", batch=fits, side=ONWARD, largest=fits, expected=foretold)


def _last(holds: Callable[[int], bool], begin: int = 1) -> int:
    """The largest power of two for which something holds, looked for from ``begin``; 0 if there is none."""
    if holds(begin):
        while begin < _MOST and holds(2 * begin):
            begin *= 2
        return begin
    while begin > 1:
        begin //= 2
        if holds(begin):
            return begin
    return 0


def _foretold(work: Work, batch: int) -> int:
    return ow.memory(_program(work.having(batch=batch).shapes(), work)).peak


def _program(model: Any, work: Work) -> ow.Program:
    return ow.Adam(work.rate).minimize(model.loss, model.params, *model.data)


def _runs(work: Work, batch: int, sheet: Sheet) -> bool:
    """Whether two steps of a batch do; what runs out of time counts as what does not."""
    if sheet.left < 5:
        sheet.note(f"{work.name}: a batch of {batch} was not tried, for the time is used up")
        return False
    try:
        model = work.having(batch=batch).model()
        Sides(work.having(batch=batch), model, "xla").onward().seconds(2)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in _WORKS:
        for side in (HAND, ONWARD, *((_HALF,) if WORKS[name].has_attention else ())):
            cases[f"{name}, {side}"] = partial(_taken, WORKS[name], side)
    return cases | {"the largest batch that fits": partial(_largest, WORKS[_LARGEST])}


PART = Part(
    name="memory",
    question="how much memory does a step take, measured and foretold?",
    columns=(
        Column("work", "work"),
        Column("batch", "batch"),
        Column("side", "side"),
        Column("measured", "measured", human_bytes),
        Column("by ow.memory", "foretold", human_bytes),
        Column("off by", "off", "{:+.0%}".format),
        Column("fits", "largest"),
        Column("foretold to fit", "expected"),
    ),
    cases=_cases(),
    share=3,
    legend="measured: peak_bytes_in_use of the device in a process that ran this step alone.",
)
