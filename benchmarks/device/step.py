"""How long does a step take, beside the best one written by hand and torch.compile?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from statistics import median
from typing import Any

import jax

import onward as ow
from benchmarks.contest import check_agreement
from benchmarks.device import peaks, switches
from benchmarks.device.found import memory_limit
from benchmarks.device.part import Case, Column, Part, Sheet, is_out_of_memory, reason_of
from benchmarks.device.precision import ROUNDOFF, product_precision
from benchmarks.device.steps import HAND, MIXED, ONWARD, TORCH, Sides, Torch, losses, prepared, why_no_torch
from benchmarks.device.works import WORKS, Work
from benchmarks.harness import Measure, Side, in_turn

_ROUND = 0.05  # seconds that one side of a round lasts at least
_PART_OF_MEMORY = 0.85
_PART_OF_TIME = 0.8
_SWITCHED = ("GPT-2 124M, bfloat16", "LSTM")
Makes = dict[str, Callable[[], Side | Torch]]


def _beside(work: Work, sheet: Sheet) -> None:
    """Onward, torch.compile, and the step by hand, at a batch that fits."""
    work = _that_fits(work, sheet)
    while True:
        try:
            return _compared(work, sheet)
        except Exception as error:
            if not is_out_of_memory(error) or work.sizes["batch"] < 2:
                raise
            sheet.note(f"{work.name}: a batch of {work.sizes['batch']} does not fit, so half of it is tried")
            work = work.having(batch=work.sizes["batch"] // 2)


def _compared(work: Work, sheet: Sheet) -> None:
    sides = prepared(work, sheet)
    makes: Makes = {HAND: sides.by_hand, ONWARD: sides.onward}
    if work.dtype != "float32" and work.kind == "gpt2":
        makes[MIXED] = sides.mixed
    _measured(sides, makes, HAND, sheet)


def _beside_torch(work: Work, sheet: Sheet) -> None:
    """torch.compile beside the step by hand, in a process of theirs: it may take long to compile."""
    if reason := why_no_torch(work):
        sheet.note(reason)
        return
    sides = prepared(work, sheet)
    _measured(sides, {HAND: sides.by_hand, TORCH: sides.torch}, HAND, sheet, {TORCH})


def _switched(work: Work, sheet: Sheet) -> None:
    """What compile does by itself, each flipped, beside the default."""
    sides = prepared(work, sheet)
    program, usual, nothing = sides.program(), sides.onward(), []
    for name in switches.NAMES:
        label, step = switches.flipped(program, name)
        if step is None:
            nothing.append(label.removeprefix("onward, "))
            continue
        makes: Makes = {ONWARD: lambda: usual, label: lambda step=step: sides.of_step(step)}
        usual.state = usual.step.init(sides.model.params)
        _measured(sides, makes, ONWARD, sheet, {label}, 1 / len(switches.NAMES))
    if nothing:
        sheet.note(f"{work.name}: changes nothing here: {', '.join(nothing)}")


def _measured(
    sides: Sides,
    makes: Makes,
    against: str,
    sheet: Sheet,
    shown: Collection[str] | None = None,
    part: float = _PART_OF_TIME,
) -> None:
    """A row for each side that is there and computes the same as the first."""
    running: dict[str, Side | Torch] = {}
    expected: list[float] = []
    for name, make in makes.items():
        try:
            running[name] = make()
            found = losses(running[name])
            expected = expected or found
            check_agreement(found, expected, _roundoff(sides.work))
        except Exception as error:
            running.pop(name, None)
            if name == against or (name == ONWARD and is_out_of_memory(error)):
                raise
            sheet.leave_out(f"{sides.work.name}, {name}", reason_of(error))
    measures = {name: _measure(side, sheet) for name, side in running.items()}
    in_turn(measures, 2)
    times = in_turn(measures, sheet.rounds, part * sheet.left, least=2)
    for name in running if shown is None else shown & running.keys():
        _row(sides, name, times[name], times[against], against, sheet)


def _row(sides: Sides, name: str, times: Any, others: Any, against: str, sheet: Sheet) -> None:
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    seconds, tokens = median(times), sides.work.tokens(sides.model)
    plain, whole = sides.work.flops(sides.model)
    known = peaks.peak(sides.work.dtype)
    sheet.row(
        work=sides.work.name,
        batch=sides.work.sizes.get("batch"),
        layers=sides.work.sizes.get("layers"),
        side=name,
        against=None if name == against else against,
        rounds=len(times),
        seconds=seconds,
        ratio=None if name == against else median(ratios),
        low=None if name == against else min(ratios),
        high=None if name == against else max(ratios),
        tokens=tokens / seconds,
        flops=whole / seconds,
        mfu_6n=known and plain / seconds / known[0],
        mfu=known and whole / seconds / known[0],
    )
    if known:
        sheet.note(f"peak in {sides.work.dtype}: {known[0] / 1e12:g} TFLOP/s, {known[1]}")
    else:
        sheet.note(f"no peak of {jax.devices()[0].device_kind} is known, so there is no MFU")


def _measure(side: Side | Torch, sheet: Sheet) -> Measure:
    """A round of a side: as many steps as last, one where few rounds are asked for."""
    count = 1

    def measure() -> float:
        nonlocal count
        found = side.seconds(count)
        count = 1 if sheet.rounds <= 2 else int(_ROUND / found) + 1
        return found

    return measure


def _roundoff(work: Work) -> float:
    """Of a loss, a mean of many numbers: an eighth of a rounding of the dtype, or of products."""
    product = product_precision() if work.dtype == "float32" else work.dtype
    return max(2e-6, ROUNDOFF[product] / 8)


def _that_fits(work: Work, sheet: Sheet) -> Work:
    """With as many layers as the device holds twice over, for two sides are measured in turn."""
    limit = memory_limit()
    if work.kind != "llama" or sheet.tiny or limit is None:
        return work
    one, two = (_needs(work.having(layers=n)) for n in (1, 2))
    each = two - one
    layers = max(1, int((_PART_OF_MEMORY * limit - one) // each) + 1)
    sheet.note(
        f"{work.name}: {layers} layers, for two steps in turn are foretold to take {one / 2**30:.1f} GiB "
        f"with one layer, {each / 2**30:.1f} GiB more with each further one, of {limit / 2**30:.1f} GiB"
    )
    return work.having(layers=layers)


def _needs(work: Work) -> int:
    """The bytes of a step at its peak, with the state of another side beside it."""
    model = work.shapes("xla")
    attention = work.shapes("cudnn") if jax.default_backend() == "gpu" else model
    optimizer = ow.Adam(work.rate)
    program = optimizer.minimize(attention.loss, attention.params, *attention.data)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params)) * 4
    return ow.memory(program).peak + state


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {name: partial(_beside, work) for name, work in WORKS.items()}
    cases |= {f"on and off, {name}": partial(_switched, WORKS[name]) for name in _SWITCHED}
    return cases | {f"{TORCH}, {name}": partial(_beside_torch, work) for name, work in WORKS.items()}


def _ratio(number: float) -> str:
    return f"{number:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"


PART = Part(
    name="step",
    question="how long does a step take, beside the best one by hand and torch.compile?",
    columns=(
        Column("work", "work"),
        Column("batch", "batch"),
        Column("side", "side"),
        Column("against", "against"),
        Column("rounds", "rounds"),
        Column("time", "seconds", _milliseconds),
        Column("ratio", "ratio", _ratio),
        Column("min", "low", _ratio),
        Column("max", "high", _ratio),
        Column("tokens/s", "tokens", "{:.0f}".format),
        Column("GFLOP/s", "flops", lambda x: f"{x / 1e9:.4g}"),
        Column("MFU 6N", "mfu_6n", lambda x: f"{100 * x:.1f} %"),
        Column("MFU", "mfu", lambda x: f"{100 * x:.1f} %"),
    ),
    cases=_cases(),
    share=6,
    legend=(
        f"{peaks.FORMULAS} ResNet-50: 3 x the FLOP of the forward pass by ow.cost.\n"
        "tokens: words, images of ResNet-50, rows of an MLP, turns of an LSTM. ratio: of the rounds, below 1 "
        "is faster.\nby hand: jit, value_and_grad and optax, donated; a scan over layers; an LSTM whose "
        "first products are one."
    ),
)
