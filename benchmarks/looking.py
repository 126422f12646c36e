"""What does it cost to look at a training step, beside compiling it?

CPU seconds of each tool against those of ``compile`` of the same Program, in one process that is warm:
``save`` with its check for batches of any length, ``find_nonfinite`` of a step whose numbers overflow,
``compare`` with the same Program over two micro-batches, and what only reads the Program. Of an MLP of 80
layers, once compiled with its layers as a loop, which is what ``compile`` does, and once without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import jax

import onward as ow
from benchmarks.harness import Measure, Row, in_turn, ratio_row
from benchmarks.models import Model, mlp

_LAYERS, _QUICK = 80, 2
_AT_MOST = 3.0  # times what compiling costs


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each tool, against both ways to compile."""
    layers = _QUICK if quick else _LAYERS
    _measures(mlp((4, 4, 4), 2))["save"]()
    measures = _measures(mlp((32,) * (layers + 1) + (10,), 16))
    times = in_turn(measures, rounds or 1)
    return [
        ratio_row(f"{layers}-layer MLP, {name}", peer, times[name], times[peer], target=_target(name, quick))
        for peer in _COMPILED
        for name in times
        if name not in _COMPILED
    ]


def _target(tool: str, quick: bool) -> float | None:
    """How many times as long as compiling a tool may take; a comparison compiles two Programs."""
    return None if quick else _AT_MOST * (2 if tool == "compare" else 1)


_COMPILED: Mapping[str, bool | None] = {"compile": None, "compile, roll=False": False}


def _measures(model: Model) -> dict[str, Measure]:
    """What each tool costs for the training Program of a model."""

    def loss(params: Any, *data: Any) -> Any:
        return model.loss(params, *data)

    program = ow.Adam(0.001).minimize(loss, model.params, *model.data)
    step = ow.compile(program)
    state = step.init(model.params)
    large = step.init(jax.tree.map(lambda x: 1e20 * x, model.params))
    tools: dict[str, Callable[[], Any]] = {
        **{name: lambda roll=roll: ow.compile(program, roll=roll) for name, roll in _COMPILED.items()},
        "save": lambda: _save(step, state),
        "find_nonfinite": lambda: ow.find_nonfinite(step, large, model.data),
        "compare": lambda: ow.compare(program, ow.accumulate(program, 2), state, *model.data),
        "summary": lambda: str(ow.summary(program)),
        "memory": lambda: str(ow.memory(program)),
        "draw": lambda: ow.draw(program).svg,
    }
    return {name: lambda tool=tool: _cpu_seconds(tool) for name, tool in tools.items()}


def _save(step: ow.Step, state: ow.State) -> None:
    with TemporaryDirectory() as folder:
        ow.save(step, Path(folder) / "step.model", state)


def _cpu_seconds(tool: Callable[[], Any]) -> float:
    begin = process_time()
    tool()
    return process_time() - begin
