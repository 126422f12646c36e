"""The bytes of state and data that each device of a partitioned Program keeps, known before it runs.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean((x @ w) ** 2)
>>> program = ow.Adam(1e-3).minimize(loss, jnp.ones((64, 32)), jnp.ones((8, 64)))
>>> print(ow.plan(ow.partition(program, {"data": 8}, {"*": "data"})))
Plan of loss over data 8, 8 devices: each keeps 3.3 KiB of 26.0 KiB
<BLANKLINE>
           split as         whole  each device
parameter  P('data',)     8.0 KiB      1.0 KiB
state      on every one      20 B         20 B
state      P('data',)    16.0 KiB      2.0 KiB
feed       P('data',)     2.0 KiB        256 B
<BLANKLINE>
What devices send is for JAX's partitioner to find: print(ow.collectives(program)).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onward.core.columns import columns
from onward.core.meshes import part_size, specs_of
from onward.core.program import Program
from onward.core.show import human_bytes, nbytes
from onward.core.words import Kind
from onward.develop.offload import offloaded

HOST_STATE = "state in host memory"
_SENT = "What devices send is for JAX's partitioner to find: print(ow.collectives(program))."


@dataclass(frozen=True)
class MeshPlan:
    """The bytes that each device of a mesh keeps of a partitioned Program.

    Attributes:
        name: the Program's.
        mesh: the lengths of its axes, in words.
        devices: how many.
        rows: for each kind of Variable and each way to split it the bytes of whole arrays, and of the parts
            on one device.
    """

    name: str
    mesh: str
    devices: int
    rows: tuple[tuple[str, str, int, int], ...]

    @property
    def kept(self) -> int:
        """The bytes on each device, without what lies in host memory for it."""
        return sum(part for kind, *_, part in self.rows if kind != HOST_STATE)

    @property
    def whole(self) -> int:
        """The bytes of all arrays."""
        return sum(whole for *_, whole, _ in self.rows)

    def __str__(self) -> str:
        told = f"each keeps {human_bytes(self.kept)} of {human_bytes(self.whole)}"
        head = f"Plan of {self.name} over {self.mesh}, {self.devices} devices: {told}"
        rows = [("", "split as", "whole", "each device")]
        rows += [(kind, how, human_bytes(n), human_bytes(part)) for kind, how, n, part in self.rows]
        return f"{head}\n\n{columns(rows, right=[2, 3])}\n\n{_SENT}"

    __repr__ = __str__


def mesh_plan(program: Program) -> MeshPlan:
    """Count the bytes that each device keeps of a partitioned Program."""
    assert program.partition is not None
    specs, mesh, there = specs_of(program), program.partition.mesh, offloaded(program)
    whole: Counter[tuple[str, str]] = Counter()
    part: Counter[tuple[str, str]] = Counter()
    given = dict.fromkeys((*program.parameters, *program.state, *program.inputs))
    for v in given:
        own = HOST_STATE if v in there else "state"
        kind = {Kind.PARAMETER: "parameter", Kind.DATA: "feed"}.get(v.kind, own)
        key = kind, str(specs.get(v.name, "on every one"))
        whole[key] += nbytes(v)
        part[key] += nbytes(v) // max(1, v.size) * part_size(v, specs.get(v.name), mesh)
    rows = tuple((*key, whole[key], part[key]) for key in whole)
    return MeshPlan(program.name, str(program.partition), program.partition.count, rows)
