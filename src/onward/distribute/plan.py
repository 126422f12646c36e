"""The bytes that each device of a replicated Program sends and keeps, known before it runs.

Of a Program that was split for trainers and servers, ``plan`` says the same: see ``Traffic``.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean((x @ w) ** 2)
>>> program = ow.Momentum(0.1).minimize(loss, jnp.ones((64, 32)), jnp.ones((8, 64)))
>>> print(ow.plan(ow.replicate(program, devices=4, merge=ow.Sharded())))
Plan of loss on 4 devices: each sends 12.0 KiB at every step
<BLANKLINE>
collective             by                    sends
scatter_mean(grad(w))  reduce_scatter      6.0 KiB
next(w)                all_gather          6.0 KiB
all_mean(div)          psum                    6 B
all                                       12.0 KiB  1.00 of an all-reduce of the gradients
<BLANKLINE>
keeps on each device
parameters             as all              8.0 KiB
state                  as all                 12 B
state                  a part              2.0 KiB
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, overload

from onward.core.check import expect_program
from onward.core.columns import columns
from onward.core.errors import GraphError
from onward.core.jaxprs.devices import Collective
from onward.core.primitives.table import of
from onward.core.primitives.traits import Exchanges
from onward.core.program import Op, Program, Replicas, Variable
from onward.core.show import human_bytes, nbytes
from onward.core.words import Kind, Placement
from onward.develop.offload import offloaded
from onward.distribute.mesh_plan import MeshPlan, mesh_plan
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.split.cut import Split
from onward.distribute.split.traffic import Traffic, traffic

_PLACES = {
    Placement.REPLICATED: "as all",
    Placement.PER_REPLICA: "its own",
    Placement.SHARDED: "a part",
}


@dataclass(frozen=True)
class Exchange:
    """One op in which the devices exchange numbers.

    Attributes:
        name: what it makes.
        by: the collective primitives of JAX in it.
        bytes: how many each device sends at a step, if each sends to its neighbour on a ring; a mean over
            steps where it is made at every so many only.
        every: at every how many steps it is made.
    """

    name: str
    by: tuple[str, ...]
    bytes: float
    every: int


@dataclass(frozen=True)
class Plan:
    """The bytes that each device of a Program sends at a step, and those that it keeps.

    Attributes:
        name: the Program's.
        devices: how many.
        exchanges: the ops in which they exchange numbers, in order.
        kept: for parameters and other state, by placement, the bytes on each device.
        bound: what each device sends at least so that all know the sum of all gradients: an all-reduce on a
            ring, 2 (n - 1) / n of their bytes.
    """

    name: str
    devices: int
    exchanges: tuple[Exchange, ...]
    kept: tuple[tuple[str, Placement, int], ...]
    bound: float

    @property
    def sent(self) -> float:
        """The bytes that each device sends at a step, on the average."""
        return sum(e.bytes for e in self.exchanges)

    def __str__(self) -> str:
        on = f"{self.devices} device{'' if self.devices == 1 else 's'}"
        sent = human_bytes(round(self.sent))
        often = all(e.every == 1 for e in self.exchanges)
        how = "at every step" if often else "at a step, on the average"
        rows = [("collective", "by", "sends", "")]
        rows += [
            (e.name, " + ".join(e.by), human_bytes(round(e.bytes)), _rarely(e.every)) for e in self.exchanges
        ]
        share = f"{self.sent / self.bound:.2f} of an all-reduce of the gradients" if self.bound else ""
        rows += [("all", "", sent, share), ("", "", "", "")]
        rows += [("keeps on each device", "", "", "")]
        rows += [(what, _PLACES[place], human_bytes(size), "") for what, place, size in self.kept]
        return f"Plan of {self.name} on {on}: each sends {sent} {how}\n\n{columns(rows, right=[2])}"


@overload
def plan(program: Program) -> Plan | Any: ...  # a MeshPlan where it is partitioned, which no type tells


@overload
def plan(program: Split) -> Traffic: ...


@overload
def plan(program: Pipeline) -> Pipeline: ...


def plan(program: Program | Split | Pipeline) -> Plan | MeshPlan | Traffic | Pipeline:
    """Compute the bytes that each device, or each server of a Split, sends at a step and keeps.

    Of a partitioned Program, what each device keeps: what it sends is for JAX's partitioner to find, and
    ``collectives`` tells it. A Pipeline prints what each of its stages keeps and sends, and is its own plan.

    Bytes sent are those of the ring algorithms, which send least: 2 (n - 1) / n of what goes into an
    all-reduce, (n - 1) / n of what goes into a reduce-scatter or comes out of an all-gather. What a ``while``
    loop sends is counted once.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms, 2009, section 4.

    Raises:
        GraphError: the Program is not replicated.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(100), jnp.ones((8, 100)))
        >>> found = ow.plan(ow.replicate(program, devices=8))
        >>> [(e.name, e.bytes) for e in found.exchanges], found.bound
        ([('all_mean(grad(w))', 700.0), ('all_mean(div)', 7.0)], 700.0)
        >>> found = ow.plan(ow.split(program, servers=2))
        >>> [server.kept for server in found.servers], [found.up(i) for i in (0, 1)]
        ([208, 200], [200, 204])
    """
    if isinstance(program, Split):
        return traffic(program)
    if isinstance(program, Pipeline):
        return program
    expect_program(program, "plan")
    if program.partition is not None:
        return mesh_plan(program)
    replicas = program.replicas
    if replicas is None:
        raise GraphError(
            f"Program {program.name!r} runs on one device, which sends nothing. Replicate it first: "
            "plan(replicate(program, devices)), or split it: plan(split(program, servers)), or over a mesh: "
            "plan(partition(program, mesh, where))."
        )
    n = replicas.count
    weights = sum(nbytes(p) for p, _ in program.gradients)
    return Plan(
        name=program.name,
        devices=n,
        exchanges=tuple(_exchange(op, replicas) for op in program.ops if op.body.collectives),
        kept=tuple(_kept(program.state, offloaded(program))),
        bound=2 * (n - 1) / n * weights,
    )


def _exchange(op: Op, replicas: Replicas) -> Exchange:
    found = op.body.collectives
    always = [c for c in found if c.always]
    sent = sum(_sent(c, replicas.count) / (1 if c.always else replicas.every) for c in found)
    return Exchange(
        name=_name(op),
        by=tuple(dict.fromkeys(c.kind for c in found)),
        bytes=sent,
        every=1 if always else replicas.every,
    )


def _sent(collective: Collective, n: int) -> float:
    """The bytes that each device sends on a ring."""
    exchange = of(collective.kind).exchanges
    if exchange is Exchanges.GATHER:
        return (n - 1) * collective.bytes
    if exchange is Exchanges.SHIFT:
        return collective.bytes
    ways = 1 if exchange in (Exchanges.SCATTER, Exchanges.SWAP, Exchanges.COPY) else 2
    return ways * (n - 1) / n * collective.bytes


def _kept(state: Iterable[Variable], there: Collection[Variable]) -> list[tuple[str, Placement, int]]:
    """The bytes for one device, of the parameters and of the other state, on it and in host memory."""
    sizes: dict[tuple[str, Placement], int] = {}
    for v in state:
        own = "state in host memory" if v in there else "state"
        key = ("parameters" if v.kind is Kind.PARAMETER else own, v.placement)
        sizes[key] = sizes.get(key, 0) + nbytes(v)
    return sorted((what, placement, size) for (what, placement), size in sizes.items())


def _rarely(every: int) -> str:
    return "" if every == 1 else f"at every {every} steps; a mean"


def _name(op: Op) -> str:
    first, *others = (v.name for v in op.outputs)
    return f"{op.type}: {first} and {len(others)} more" if others else first
