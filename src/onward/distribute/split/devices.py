"""A trainer of several devices: each takes its part of the batch; their gradients are merged, then sent once.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
>>> cut = ow.split(ow.replicate(program, devices=4), servers=1)
>>> [op.type for op in cut.trainer.ops if op.made_by == "collective"], cut.trainer["x"].shape
(['recv', 'all_mean', 'all_mean', 'send'], (2, 3))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.core.errors import GraphError
from onward.core.program import Applied, Program, Replicas
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.walk import name_of
from onward.core.words import Placement
from onward.distribute.merge import Merge
from onward.distribute.replicate import devices_step, replicated

_TAKE = "Take Average(), Sum(), or one of them in Bucketed(): replicate(program, devices, Average())"


@dataclass(frozen=True)
class TrainerDevices:
    """The devices that a trainer takes its batch over.

    Attributes:
        replicas: how many, and what they do with it.
        merge: how their gradients become one.
        split: the names of the data of which each has a part.
    """

    replicas: Replicas
    merge: Merge
    split: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> TrainerDevices:
        """The devices of a replicated Program.

        Raises:
            GraphError: its devices update, too.
        """
        assert program.recipe is not None
        (step,) = program.recipe.of(replicated)
        replicas, merge, names = step.arguments
        kind, name = type(merge), type(merge).__name__
        if kind.update is not Merge.update or kind.apply is not Merge.apply or merge.period != 1:
            raise GraphError(
                f"split: {name} is about what each device updates, and here the servers update: a trainer "
                f"merges the gradients of its devices, and sends them. {_TAKE}. Updates of its own between "
                "two meetings a trainer makes with cluster.train(mode=cluster.Local(every))."
            )
        return cls(replicas, merge, tuple(names))

    def counting(self, count: int) -> TrainerDevices:
        """The same for this number of devices."""
        return replace(self, replicas=replace(self.replicas, count=count))

    @property
    def step(self) -> Applied:
        """The step of a recipe that lays out a batch over them."""
        return devices_step(self.replicas, self.merge, self.split)

    def over(self, program: Program) -> Program:
        """A training Program on these devices."""
        recipe = recipe_of(program, "on the devices of a trainer", "Give each trainer one device")
        return build(recipe.including(self.step), whole_types(program))

    def expect_nothing_kept(self, own: Program) -> None:
        """Refuse a strategy that keeps something on each device: a trainer that is replaced begins again."""
        if kept := [v for v in own.state if v.placement is Placement.PER_REPLICA]:
            raise GraphError(
                f"split: {type(self.merge).__name__} keeps {kept[0].name!r} on each device from step to "
                "step, and a trainer keeps nothing: what it had would be lost with it, and with it a part of "
                f"the gradient. {_TAKE}."
            )

    def expect_whole_tables(self, lazy: Sequence[Any]) -> None:
        """Refuse lazy tables: the devices together read other rows than each."""
        if lazy:
            raise GraphError(
                f"split: lazy updates of {name_of(lazy[0])!r} touch the rows that were sent, and where a "
                "trainer has several devices tables travel whole. Leave lazy= out, or give each device a "
                "trainer of its own."
            )
