"""What does it cost to trace a function and derive its backward pass?

Against ``jax.jit(jax.value_and_grad(loss)).trace``, which does the same for JAX, on a transformer of 2,
12 and 48 unrolled layers (d 128, 4 heads, seq 16, batch 2). Both sides are given a new function object
every time, so that neither finds the trace of the last round in a cache.

    derive          trace and derive, after one round to warm up
    cold            the same as the first thing that a new process does
    and lower       trace, derive and lower to StableHLO, warm, every layer by itself
    roll and lower  trace, derive, make one loop of the layers, lower that: what precedes XLA in ``compile``
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import onward as ow
from benchmarks.harness import Measure, Row, compare, seconds
from benchmarks.models import Model, transformer
from onward.core.lower import lower
from onward.develop.roll.roll import roll

_LAYERS = (2, 12, 48)
_TARGETS = {12: 1.2, 48: 1.0}
_ROLLED_TARGETS = {48: 0.7}
_AGAINST = "value_and_grad"


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """The rows of all depths; ``quick`` leaves out those that start processes."""
    return [row for layers in ((3,) if quick else _LAYERS) for row in _rows(layers, rounds, quick)]


def _rows(layers: int, rounds: int | None, quick: bool) -> list[Row]:
    model = _model(layers)
    name, target = f"{layers} layers", _TARGETS.get(layers)
    warm, few = (rounds or 2, rounds or 2) if quick else (rounds or 20, rounds or 5)
    derive = _fresh(_derive_ours, model), _fresh(_derive_peer, model)
    lowered = _fresh(_lower_ours, model), _fresh(_lower_peer, model)
    for side in (*derive, *lowered):
        side()
    rows = [compare(f"derive, {name}", _AGAINST, *derive, warm, target)]
    if not quick:
        cold = _in_new_process("ours", layers), _in_new_process("peer", layers)
        rows.append(compare(f"cold, {name}", _AGAINST, *cold, few))
    rows.append(compare(f"and lower, {name}", _AGAINST, *lowered, few))
    if layers > 2:
        rolled = _fresh(_roll_ours, model)
        rolled()
        target = _ROLLED_TARGETS.get(layers)
        rows.append(compare(f"roll and lower, {name}", _AGAINST, rolled, lowered[1], few, target))
    return rows


def _model(layers: int) -> Model:
    return transformer(layers, seq=16, batch=2)


def _derive_ours(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Any:
    return ow.append_backward(ow.trace(loss, params, *data))


def _derive_peer(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Any:
    return jax.jit(jax.value_and_grad(loss)).trace(params, *data)


def _lower_ours(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Any:
    return _lowered(_derive_ours(loss, params, data))


def _roll_ours(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Any:
    return _lowered(roll(_derive_ours(loss, params, data)))


def _lowered(program: ow.Program) -> Any:
    wanted = [*program.outputs, *(gradient for _, gradient in program.gradients)]
    types = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in vs] for vs in (program.state, program.inputs)]
    return jax.jit(lower(program, wanted)).lower(*types)


def _lower_peer(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Any:
    return _derive_peer(loss, params, data).lower()


_COLD = {"ours": _derive_ours, "peer": _derive_peer}


def _fresh(side: Callable[..., Any], model: Model) -> Measure:
    """Measure one side on a function that no cache has seen."""

    def measure() -> float:
        def loss(params: Any, *data: Any) -> Any:
            return model.loss(params, *data)

        return seconds(lambda: side(loss, model.params, model.data))

    return measure


def _in_new_process(side: str, layers: int) -> Measure:
    command = [sys.executable, "-m", "benchmarks.derive_time", side, str(layers)]
    root = Path(__file__).parents[1]

    def measure() -> float:
        return float(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)

    return measure


if __name__ == "__main__":
    print(_fresh(_COLD[sys.argv[1]], _model(int(sys.argv[2])))())
