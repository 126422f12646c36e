"""What do more devices bring, and what does it cost to merge gradients over them?

Every device has a batch of its own size, so that n devices do n times the work. Adam on all sides, data on
the devices already, each step waited for. Before anything is timed, all sides must agree after three steps.

    by pmap          the step by hand: ``jax.pmap`` of ``jax.value_and_grad``, ``lax.pmean`` and the update
    sharded jit      the step by hand for one device, ``jax.jit`` given data that lies on all of them
    one device       for one device only: the same Program, not replicated

    examples/s       of all devices together
    scaling          efficiency: examples/s over n times those of the Program on one device, not replicated
    merging          time of the merging operators alone, over that of the step: as much as could be saved
    sent             bytes that each device sends in a step, by the collectives of the graph, on a ring
    bound            sent over 2 (n - 1) / n times the bytes of the parameters, the least for an exact mean
    state, peak      bytes on the first device: those of the State, and the most so far where it is counted

With a choice:

    python -m benchmarks.multi_device --devices 1,2,4,8 --merge average,bucketed,sharded \\
        --model mlp,resnet,transformer --json results.json --plot results.png

Where there is one processor, ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` makes eight devices of
it. They share its cores, so that efficiency says nothing there; the ratios and the bytes do. On host
devices a replicated step waits for its end, since a second one in flight can starve its collectives; the step
by hand does not wait. What that costs was not measured by itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import onward as ow
from benchmarks import models
from benchmarks.by_hand import Case, adam, check_agreement
from benchmarks.harness import Row, Side, compare
from benchmarks.models import Model
from benchmarks.report import environment, table

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

_AXIS = "replicas"
RATE, _VISIBLE_RATE = 1e-6, 1e-3
_ROUND = 0.02  # seconds that one side of a round lasts at least
_TARGET = 1.02
_MODELS: dict[str, Callable[[int, bool], Model]] = {
    "mlp": lambda n, quick: models.mlp((8, 8, 4), 2 * n) if quick else models.mlp(batch=128 * n),
    "resnet": lambda n, quick: models.resnet((4, 8), 8, 2 * n) if quick else models.resnet(batch=16 * n),
    "transformer": lambda n, quick: (
        models.transformer(1, 8, 2, 4, 2 * n) if quick else models.transformer(batch=8 * n)
    ),
}
MERGES: dict[str, ow.Merge] = {
    "average": ow.Average(),
    "bucketed": ow.merge.Bucketed(),
    "sharded": ow.Sharded(),
    "low_precision": ow.merge.LowPrecision(),
    "top_k": ow.merge.TopK(),
    "power_sgd": ow.merge.PowerSGD(1),
}
EXACT = ("average", "bucketed", "sharded")
_HEAD = [
    *("model", "merge", "devices", "batch", "step", "examples/s", "scaling", "merging"),
    *("sent", "bound", "state", "peak"),
]


@dataclass(frozen=True)
class Result:
    """One model on so many devices, merged in one way; seconds of a step are the median of the rounds."""

    model: str
    merge: str
    devices: int
    batch: int
    seconds: float
    throughput: float
    efficiency: float
    merging: float
    sent: float
    bound: float
    state: int
    peak: int | None
    rows: tuple[Row, ...]


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """The comparisons with steps by hand, for as many devices as there are."""
    counts = (1, 2) if quick else (1, 2, 4, 8)
    there = tuple(n for n in counts if n <= jax.device_count())
    results = measure(tuple(_MODELS), EXACT, there, rounds, quick)
    print(f"\n{scaling(results)}")
    return [row for result in results for row in result.rows]


def measure(
    names: Sequence[str],
    merges: Sequence[str],
    devices: Sequence[int],
    rounds: int | None = None,
    quick: bool = False,
) -> list[Result]:
    """All combinations, one after the other."""
    rounds = rounds or (2 if quick else 20)
    results = []
    for name in names:
        make = _MODELS[name]
        one = plain(adam_case(name, make(1, quick)), RATE)
        alone = median(one.seconds(1) for _ in range(rounds + 2))
        for n in devices:
            bench = Bench(adam_case(name, make(n, quick)), n, rounds, quick)
            results += [bench.result(merge, alone) for merge in merges]
    return results


class Bench:
    """One model on so many devices, against the steps by hand, which are compiled once."""

    def __init__(self, case: Case, devices: int, rounds: int, quick: bool) -> None:
        self.case, self.devices, self.rounds, self.quick = case, devices, rounds, quick
        self.batch = case.model.data[0].shape[0]
        self.timed = {name: make(case, RATE, devices) for name, make in _BY_HAND.items()}
        if devices == 1:
            self.timed["one device"] = plain(case, RATE)

    def result(self, merge: str, alone: float) -> Result:
        """All about one way of merging; ``alone`` is the step of a single device."""
        self.check(merge)
        ours = _replicated(self.case, RATE, self.devices, merge)
        rows = tuple(self.compared(merge, name, ours, peer) for name, peer in self.timed.items())
        seconds = median(row.time for row in rows)
        program = ours.step.program
        plan = ow.plan(program)
        return Result(
            model=self.case.name,
            merge=merge,
            devices=self.devices,
            batch=self.batch,
            seconds=seconds,
            throughput=self.batch / seconds,
            efficiency=alone / seconds,
            merging=_merging(program, self.rounds) / seconds,
            sent=plan.sent,
            bound=plan.bound,
            state=_on_first(ours.state.values),
            peak=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            rows=rows,
        )

    def by_pmap(self, merge: str) -> Row:
        """The step of Onward as pmap runs it, beside itself by shard_map."""
        sides = (_replicated(self.case, RATE, self.devices, merge, by) for by in ("pmap", "shard_map"))
        return replace(self.compared(merge, "by shard_map", *sides), side="onward, by pmap")

    def check(self, merge: str) -> None:
        """All sides must move the parameters to the same place, if the merge is exact."""
        for name, make in _BY_HAND.items() if MERGES[merge].exact else ():
            if name == "sharded jit" and merge != "average":
                continue  # it knows of no merge: once is enough
            ours = _replicated(self.case, _VISIBLE_RATE, self.devices, merge)
            check_agreement(self.case, ours, make(self.case, _VISIBLE_RATE, self.devices))

    def compared(self, merge: str, against: str, ours: Side, peer: Side) -> Row:
        case = f"{self.case.name}, {merge}, {self.devices} device{'s' if self.devices > 1 else ''}"
        lasting = 0.0 if self.quick else _ROUND
        shortest = min(min(side.seconds(2), side.seconds(2)) for side in (ours, peer))
        count = int(lasting / shortest) + 1
        sides = (partial(side.seconds, count) for side in (ours, peer))
        aims = merge == "average" and against != "sharded jit" and not self.quick
        return compare(case, against, *sides, self.rounds, _TARGET if aims else None)


def adam_case(name: str, model: Model) -> Case:
    """A model with Adam, in Onward and by hand."""
    return Case(name, model, ow.Adam, adam, 2)


def plain(case: Case, rate: float) -> Side:
    """Its step on one device, not replicated."""
    loss, params, data = case.model
    step = ow.compile(case.optimizer(rate).minimize(loss, params, *data))
    return Side(step, step.init(params), data)


def _replicated(case: Case, rate: float, devices: int, merge: str, by: str = "shard_map") -> Side:
    loss, params, data = case.model
    program = case.optimizer(rate).minimize(loss, params, *data)
    step = ow.compile(ow.replicate(program, devices, MERGES[merge], _AXIS), by=by)
    return Side(step, step.init(params), jax.device_put(data, _over(devices, PartitionSpec(_AXIS))))


def _pmapped(case: Case, rate: float, devices: int) -> Side:
    """The step by hand: the mean of value and gradient, and the same update on every device."""

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots, t = state
        found = jax.value_and_grad(case.model.loss)(params, *data)
        value, gradient = jax.lax.pmean(found, _AXIS)
        return (*case.rule(params, gradient, slots, t + 1, rate), t + 1), value

    data = [x.reshape(devices, -1, *x.shape[1:]) for x in case.model.data]
    axes = (None, *(0 for _ in data))
    chosen = jax.devices()[:devices]
    mapped = jax.pmap(step, _AXIS, in_axes=axes, out_axes=(None, None), devices=chosen, donate_argnums=0)
    placed = jax.device_put(data, _over(devices, PartitionSpec(_AXIS)))
    return Side(mapped, _first_state(case, devices), placed)


def _sharded_jit(case: Case, rate: float, devices: int) -> Side:
    """The step by hand for one device; where the data lies tells XLA what to do."""

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots, t = state
        value, gradient = jax.value_and_grad(case.model.loss)(params, *data)
        return (*case.rule(params, gradient, slots, t + 1, rate), t + 1), value

    everywhere, data = _over(devices, PartitionSpec()), _over(devices, PartitionSpec(_AXIS))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(everywhere, everywhere))
    return Side(jitted, _first_state(case, devices), jax.device_put(case.model.data, data))


_BY_HAND = {"by pmap": _pmapped, "sharded jit": _sharded_jit}


def _first_state(case: Case, devices: int) -> Any:
    params = case.model.params
    slots = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(case.slots))
    state = jax.tree.map(jnp.copy, (params, slots, jnp.int32(0)))
    return jax.device_put(state, _over(devices, PartitionSpec()))


def _over(devices: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), (_AXIS,)), spec)


def _merging(program: ow.Program, rounds: int) -> float:
    """How long the collective operators take when there is nothing else to do."""
    ops = [op for op in program.ops if op.made_by == "collective" and op.body.collectives]

    def part(values: list[list[Array]]) -> list[Array]:
        found = [y for op, inputs in zip(ops, values, strict=True) for y in op.body(*inputs)]
        return [y[None] for y in found]

    assert program.replicas is not None
    count = program.replicas.count
    values = [[jnp.ones(v.shape, v.dtype) for v in op.inputs] for op in ops]
    spread = jax.shard_map(
        part,
        mesh=_over(count, PartitionSpec()).mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(_AXIS),
        check_vma=False,
    )
    jitted = jax.jit(spread)
    placed = jax.device_put(values, _over(count, PartitionSpec()))
    side = Side(lambda state, *data: (state, jitted(data[0])), (), (placed,))
    return median([side.seconds(2) for _ in range(rounds + 1)][1:])


def _on_first(arrays: Sequence[Array]) -> int:
    """The bytes that arrays take of the first device's memory."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == first)


def scaling(results: Sequence[Result]) -> str:
    """What is not a comparison with a peer, as plain text in columns."""
    lines = [_HEAD, *map(_cells, results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _cells(r: Result) -> list[str]:
    return [
        r.model,
        r.merge,
        str(r.devices),
        str(r.batch),
        f"{r.seconds * 1e3:.3g} ms",
        f"{r.throughput:.0f}",
        f"{r.efficiency:.2f}",
        f"{r.merging:.2f}",
        f"{r.sent / 2**10:.1f} KiB",
        f"{r.sent / r.bound:.3f}" if r.bound else "",
        f"{r.state / 2**10:.1f} KiB",
        "" if r.peak is None else f"{r.peak / 2**20:.0f} MiB",
    ]


def plot(results: Sequence[Result], path: str | Path) -> None:
    """Throughput over the number of devices, a panel for each model, and what would be ideal."""
    if Figure is None:
        raise SystemExit('A plot needs matplotlib: pip install "onward[plot]", or leave out --plot.')
    names = list(dict.fromkeys(r.model for r in results))
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = [r for r in results if r.model == name]
        for merge in dict.fromkeys(r.merge for r in mine):
            points = [(r.devices, r.throughput) for r in mine if r.merge == merge]
            axes.plot(*zip(*points, strict=True), "o-", label=merge)
        ideal = mine[0].throughput / mine[0].efficiency / mine[0].devices
        counts = sorted({r.devices for r in mine})
        axes.plot(counts, [ideal * n for n in counts], "k--", label="n times one")
        axes.set(title=name, xlabel="devices", ylabel="examples/s", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def _chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return names

    return read


def _counts(text: str) -> list[int]:
    counts, there = [int(word) for word in text.split(",")], jax.device_count()
    if max(counts) > there:
        raise argparse.ArgumentTypeError(
            f"{max(counts)} devices, and JAX shows {there} ({jax.default_backend()}). To try more on the "
            f"host, set XLA_FLAGS=--xla_force_host_platform_device_count={max(counts)}."
        )
    return counts


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run what was chosen, print both tables, write JSON and the plot if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multi_device", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--devices", type=_counts, default=[1, jax.device_count()], help="such as 1,2,4,8")
    parser.add_argument("--merge", type=_chosen([*MERGES]), default=[*EXACT], help=f"of {', '.join(MERGES)}")
    parser.add_argument(
        "--model", type=_chosen([*_MODELS]), default=[*_MODELS], help=f"of {', '.join(_MODELS)}"
    )
    parser.add_argument("--rounds", type=int, help="how often to compare the two sides of each row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", metavar="PATH", help="write the numbers to this file as well")
    parser.add_argument("--plot", metavar="PATH", help="draw examples/s over devices into this file")
    chosen = parser.parse_args(arguments)
    print(", ".join(f"{key} {value}" for key, value in environment().items()), flush=True)
    results = measure(chosen.model, chosen.merge, chosen.devices, chosen.rounds, chosen.quick)
    print(f"\n{scaling(results)}\n\n{table([row for r in results for row in r.rows])}")
    if chosen.json:
        found = {"environment": environment(), "results": [asdict(r) for r in results]}
        Path(chosen.json).write_text(json.dumps(found, indent=2) + "\n")
    if chosen.plot:
        plot(results, chosen.plot)
    return results


if __name__ == "__main__":
    main()
