"""What do more devices bring, and what does each way of merging gradients cost?"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import jax

from benchmarks import models, multi_device
from benchmarks.device.part import Case, Column, Part, Sheet
from benchmarks.device.works import WORKS
from benchmarks.harness import Row
from onward.core.show import human_bytes

_WORK = "GPT-2 124M, float32"


def _merged(merge: str, sheet: Sheet) -> None:
    """One way of merging, on all devices: a row against each step by hand, and pmap against shard_map."""
    count = jax.device_count()
    if count < 2:
        kind = jax.devices()[0].device_kind
        sheet.leave_out("devices", f"it needs two devices or more, and JAX shows one ({kind}). {_TO_TRY}")
        return
    model = _model(count, sheet.tiny)
    case = multi_device.adam_case("GPT-2" if not sheet.tiny else "MLP", model)
    rounds = sheet.rounds
    one = multi_device.plain(multi_device.adam_case(case.name, _model(1, sheet.tiny)), multi_device.RATE)
    alone = median([one.seconds(1) for _ in range(rounds + 2)][1:])
    bench = multi_device.Bench(case, count, rounds, sheet.rounds <= 2)
    result = bench.result(merge, alone)
    for row in (*result.rows, bench.by_pmap(merge)):
        _row(result, row, merge, count, sheet)


def _row(result: Any, row: Row, merge: str, count: int, sheet: Sheet) -> None:
    sheet.row(
        work=result.model,
        devices=count,
        merge=merge,
        side=row.side,
        against=row.against,
        rounds=row.rounds,
        seconds=row.time,
        ratio=row.ratio,
        low=row.low,
        high=row.high,
        efficiency=result.efficiency * result.seconds / (row.time or result.seconds),
        sent=result.sent,
        bound=result.sent / result.bound if result.bound else None,
    )


def _model(devices: int, tiny: bool) -> models.Model:
    """Of a batch for so many devices."""
    work = WORKS[_WORK]
    if tiny:
        return models.mlp((8, 16, 4), 4 * devices)
    return work.having(batch=work.sizes["batch"] * devices).model()


_TO_TRY = "To try on the host: XLA_FLAGS=--xla_force_host_platform_device_count=8"
_CASES: dict[str, Case] = {merge: partial(_merged, merge) for merge in multi_device.MERGES}

PART = Part(
    name="devices",
    question="what do more devices bring, and what does each merge cost?",
    columns=(
        Column("work", "work"),
        Column("devices", "devices"),
        Column("merge", "merge"),
        Column("side", "side"),
        Column("against", "against"),
        Column("rounds", "rounds"),
        Column("time", "seconds", lambda x: f"{x * 1e3:.3g} ms"),
        Column("ratio", "ratio", "{:.2f}".format),
        Column("min", "low", "{:.2f}".format),
        Column("max", "high", "{:.2f}".format),
        Column("scaling", "efficiency", "{:.2f}".format),
        Column("sent", "sent", human_bytes),
        Column("over the least", "bound", "{:.3f}".format),
    ),
    cases=_CASES,
    share=3,
    legend=(
        "scaling: examples/s over those of one device times the number of devices; host devices share the "
        "cores, so there it says nothing.\nsent: bytes that each device sends in a step, on a ring; the "
        "least is 2 (n - 1) / n times those of the parameters."
    ),
)
