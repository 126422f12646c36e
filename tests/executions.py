"""One definition, five executions: every optimizer on one device and elsewhere, as a table.

Each optimizer trains a small network in float64 for some steps on one device. The same Program then runs
replicated on two devices, with sharded updates (ZeRO-1), split for two trainers and two parameter servers
(one server where its rule looks across parameters), and accumulated over two micro-batches. A cell holds the
largest difference of any parameter, relative to the largest number of that parameter, or why a transform
refuses. The matrix is square: where a gradient leaves several directions of an axis empty, the
eigenvectors in SOAP are arbitrary, and so is what rounding makes of them.

    python -m tests.executions [name ...]
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from tests.distribute.split.by_hand import ByHand, parts_of

import onward as ow
from onward.core.columns import columns
from onward.derive import optimizers

STEPS = 6
LIMIT = 1e-9
WAYS = ("replicated", "sharded", "servers", "accumulated")


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden * params["scale"] - y) ** 2)


@cache
def data():
    draw = np.random.default_rng(0)
    params = {"b": np.full(4, 0.1), "scale": np.array(1.5), "w": draw.normal(size=(4, 4))}
    return params, [(x, np.sin(x * 2)) for x in draw.normal(size=(STEPS, 8, 4))]


def named(name):
    """An optimizer with its defaults, by its name."""
    return getattr(optimizers, name)()


def run(program, load=None):
    """The parameters by name after all steps."""
    params, batches = data()
    step = ow.compile(program)
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, *batch)
    return {k: np.asarray(v) for k, v in state.parameters.items()}


def by_servers(program):
    params, batches = data()
    try:
        cut = ow.split(program, servers=2, trainers=2)
    except ow.GraphError as error:
        if "Take one server" not in str(error):
            raise
        cut = ow.split(program, servers=1, trainers=2)
    hand = ByHand(
        cut.at([jax.ShapeDtypeStruct((len(x) // 2, *x.shape[1:]), x.dtype) for x in batches[0]]), params
    )
    for batch in batches:
        hand.step([dict(zip(("x", "y"), part, strict=True)) for part in parts_of(batch, 2)])
    return hand.parameters()


def executed(program, way):
    """The parameters when the Program runs in this way.

    Raises:
        GraphError: a transform refuses.
    """
    if way == "replicated":
        return run(ow.replicate(program, 2))
    if way == "sharded":
        return run(ow.replicate(program, 2, ow.Sharded()))
    if way == "servers":
        return by_servers(program)
    return run(ow.accumulate(program, 2))


def compared(name):
    """For each way the largest relative difference, or the words of the refusal."""
    with jax.enable_x64(True):
        params, batches = data()
        program = named(name).minimize(loss, params, *batches[0])
        expected = run(program)
        moved = max(np.max(np.abs(expected[k] - params[k])) for k in params)
        assert moved > 0, f"{name} moves nothing, which compares nothing"
        cells = {}
        for way in WAYS:
            try:
                found = executed(program, way)
            except ow.GraphError as error:
                cells[way] = str(error)
                continue
            cells[way] = max(
                float(np.max(np.abs(found[k] - v)) / np.max(np.abs(v))) for k, v in expected.items()
            )
        return cells


def is_optimizer(name):
    return isinstance(getattr(optimizers, name), type)


def main(names):
    names = names or [name for name in optimizers.__all__ if is_optimizer(name)]
    rows, reasons = [("optimizer", "type", *WAYS)], {}
    wrong = 0
    for name in names:
        cells = compared(name)
        shown = []
        for value in cells.values():
            if isinstance(value, str):
                reason = re.sub(rf"\b{name}\b", "it", value)
                shown.append(f"refused {reasons.setdefault(reason, len(reasons) + 1)}")
            else:
                wrong += value > LIMIT
                shown.append(f"{value:.0e}" + (" !" if value > LIMIT else ""))
        rows.append((name, str(getattr(optimizers, name).type), *shown))
        print(f"{len(rows) - 1} of {len(names)}", end="\r", file=sys.stderr)
    print(columns(rows))
    for reason, number in reasons.items():
        print(f"refused {number}: {reason}")
    return wrong


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    sys.exit(main(sys.argv[1:]))
