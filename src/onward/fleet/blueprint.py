"""A Program as it is sent to another process: the function and the transforms, to be traced there again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from onward.core.program import Program, Recipe
from onward.core.recipe import build, recipe_of
from onward.derive.optimizer import Optimizer
from onward.distribute.split.cut import Split
from onward.distribute.split.devices import TrainerDevices
from onward.distribute.split.local import split_local
from onward.distribute.split.split import split


@dataclass(frozen=True)
class Blueprint:
    """A description of a Program and its split, from which another process makes both again.

    Arrays and jaxprs are not part of it: what travels is the user's function, the names of the transforms,
    and types. That the other process makes the same graph of it is proven by ``Split.fingerprint``.
    """

    recipe: Recipe
    data: tuple[Any, ...]
    servers: int
    count: int
    lazy: tuple[str, ...]
    rows: bool
    outer: Optimizer | None
    x64: bool
    devices: TrainerDevices | None = None
    takes_all: bool = False

    @classmethod
    def of(
        cls,
        program: Program,
        servers: int,
        count: int,
        lazy: Iterable[str] = (),
        rows: bool = True,
        outer: Optimizer | None = None,
    ) -> Blueprint:
        """The blueprint of ``split(program, servers, count)``, or with ``outer`` of ``split_local``."""
        recipe = recipe_of(program, "in another process", "Build it with optimizer.minimize")
        assert program.signature is not None
        data = tuple(s.unflatten(v.aval for v in s.variables) for s in program.signature.data)
        stripped = Recipe(recipe.origin, steps=recipe.steps)
        return cls(stripped, data, servers, count, tuple(lazy), rows, outer, _has_x64())

    def over(self, devices: TrainerDevices | None, takes_all: bool) -> Blueprint:
        """The blueprint for trainers of these devices; or of all that JAX shows each of them.

        Tables then travel whole.

        Raises:
            GraphError: lazy tables.
        """
        if devices is None:
            return self
        devices.expect_whole_tables(self.lazy)
        return replace(self, devices=devices, takes_all=takes_all, rows=False)

    def own_devices(self) -> TrainerDevices | None:
        """The devices of a trainer in this process; None: one."""
        if self.devices is None or not self.takes_all:
            return self.devices
        return self.devices.counting(jax.local_device_count())

    def program(self) -> Program:
        """The training Program, for one device."""
        if _has_x64() != self.x64:
            jax.config.update("jax_enable_x64", self.x64)
        return build(self.recipe, self.data)

    def split(self) -> Split:
        """The cut of the training Program."""
        if self.outer is not None:
            return split_local(self.program(), self.servers, self.count, self.outer)
        return split(self.program(), self.servers, self.count, rows=self.rows, lazy=self.lazy)


def _has_x64() -> bool:
    """Whether JAX computes with 64 bits."""
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
