"""The cores of a CPU as devices: a step that runs on all of them, and is that of one device for its user.

XLA's CPU compiler leaves cores idle in much of what it runs. So the Program is replicated, one replica on
each core with its part of the batch, and gradients are exchanged in one flat sum. State, results and names
are those of one device: what cannot be made so is refused, or stays on one core where the choice is free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from onward.core.compiler import AFFECTED
from onward.core.cost import cost
from onward.core.errors import ArgumentError, GraphError, OnwardError
from onward.core.first_use import at_first_call
from onward.core.marks import OWN_KEY
from onward.core.meshes import expect_no_partition
from onward.core.primitives.table import of
from onward.core.program import Program
from onward.core.recipe import recipe_of
from onward.core.show import human_bytes, nbytes
from onward.core.structure import describe, is_count, is_word
from onward.develop.batch import WEIGHT, batch_names
from onward.develop.roll.roll import rolls_of

AUTO = "auto"
_over_cores = at_first_call("onward.execute.over_cores", "over_cores")
_OPERATIONS = 4 * 10**8  # a step of fewer is over before two cores have met
_PER_BYTE = 500  # operations for each byte of gradients: below, exchange and update on every core cost more
_FLAG = "xla_force_host_platform_device_count"
_TOO_LATE = (
    "compile: cores={asked!r}, and JAX has begun with {found} host device{s} in this process; each core "
    "that is used is one. Write at the top of the script, before anything makes an array:\n"
    "    import jax\n"
    '    jax.config.update("jax_num_cpu_devices", {count})'
)


@dataclass(frozen=True)
class Cores:
    """How many cores a Program is to run on.

    Attributes:
        count: how many there are for it.
        is_free: whether fewer, or one, may be taken where that is better.
    """

    count: int
    is_free: bool = False

    @classmethod
    def of(cls, asked: Any) -> Cores | None:
        """The cores that a person asked for, with a host device for each; None for one device.

        Raises:
            ArgumentError: no number of cores, too many, no CPU, or JAX has begun with fewer host devices.
        """
        if asked is None:
            return None
        if not (is_count(asked) or is_word(asked, [AUTO])):
            raise ArgumentError(
                f"compile: cores is {describe(asked)}; expected how many, at least 1, or 'auto'."
            )
        there = _there()
        count = there if asked == AUTO else int(asked)
        _ask_for_devices(count)
        if (platform := jax.default_backend()) != "cpu":
            raise ArgumentError(f"compile: cores={asked!r} is about a CPU, and JAX runs on {platform} here.")
        found = jax.local_device_count()
        if asked == AUTO:
            return cls(min(count, found), True)
        if found < count:
            raise ArgumentError(
                _TOO_LATE.format(asked=asked, found=found, s="" if found == 1 else "s", count=count)
            )
        return cls(count)

    def __call__(self, program: Program, fetch: Sequence[str]) -> tuple[Program, str]:
        """The Program that runs on these cores, or as it is, and in words which."""
        if self.count == 1:
            return program, _ONE_DEVICE if self.is_free and _there() > 1 else ""
        rows = self._rows(program)
        count = (
            max((n for n in range(1, self.count + 1) if rows % n == 0), default=1)
            if self.is_free
            else self.count
        )
        if rows == 0 or rows % count or count == 1:
            return program, f"cores: one, for {self.count} do not divide a batch of {rows} rows"
        if self.is_free and (reason := _gains_little(program)):
            return program, f"cores: one: {reason}"
        try:
            made: Program = _over_cores(program, count, rows, fetch)
        except OnwardError as error:
            if not self.is_free:
                raise
            return program, f"cores: one: {error}"
        draws = any(op.type is OWN_KEY for op in made.ops)
        if draws and self.is_free:
            return program, "cores: one: it draws at random, and every core would draw numbers of its own"
        return made, _words(program, count, rows, draws)

    def expect(self, program: Program) -> None:
        """Raise unless the Program can run on these cores, where they were asked for.

        Raises:
            GraphError: it is replicated, or was loaded from a file.
            ArgumentError: they do not divide its batch.
        """
        instead = "It runs on the devices of the mesh: leave out cores=."
        expect_no_partition(program, "compile: cores", instead)
        if program.replicas is not None:
            raise GraphError(
                f"compile: {program.name!r} is replicated for {program.replicas.count} devices already. Give "
                "compile(program, cores=...) the Program as it was before replicate."
            )
        if self.is_free or self.count == 1:
            return
        if program.code is not None:
            raise GraphError(
                f"compile: {program.name!r} was loaded from {program.code.file}, for one device. Trace the "
                "code of the network to run it on several cores."
            )
        rows = self._rows(program)
        if rows == 0 or rows % self.count:
            raise ArgumentError(
                f"compile: {self.count} cores do not divide the batch of {program.name!r}, which has {rows} "
                f"rows. Trace it with {max(1, -(-rows // self.count)) * self.count}; batches of other "
                "lengths run on one core then."
            )

    def _rows(self, program: Program) -> int:
        recipe = recipe_of(program, "at one core's part of the batch", "Leave out cores=")
        names = batch_names(program, (), WEIGHT, recipe.origin.fixed_data)
        return next((v.shape[0] for v in program.inputs if v.name in names), 0)


def _gains_little(program: Program) -> str:
    """Why a step gains too little from several cores; empty if it gains."""
    if rolls_of(program):
        return "its layers run in one loop, which two cores would hardly make faster"
    work, sent = cost(program).flops, _exchanged(program)
    if work < _OPERATIONS:
        return f"{work / 1e6:,.0f} million operations are over before several cores have met"
    if work < _PER_BYTE * sent:
        return f"{work / sent:,.0f} operations for each byte of gradients, and {_PER_BYTE} pay"
    if AFFECTED and any(of(name).is_slow_in_loop for op in program.ops for name in op.body.primitives):
        return "as this jaxlib is cured, a convolution takes all cores by itself"
    return ""


def _exchanged(program: Program) -> int:
    return sum(nbytes(g) for _, g in program.gradients)


def _words(program: Program, count: int, rows: int, draws: bool) -> str:
    drawn = "; every core draws random numbers of its own" if draws else ""
    sent = human_bytes(_exchanged(program))
    return f"cores: {count}, each with {rows // count} of {rows} rows; {sent} of gradients exchanged{drawn}"


def _there() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_in_flags() -> bool:
    """Whether the environment says how many host devices there are."""
    return _FLAG in os.environ.get("XLA_FLAGS", "")


def _ask_for_devices(count: int) -> None:
    """Let JAX begin with so many host devices, if it has not begun and nobody said how many."""
    config: Any = jax.config
    if is_in_flags() or config.jax_num_cpu_devices > 0:
        return
    with suppress(RuntimeError):  # it has begun
        jax.config.update("jax_num_cpu_devices", count)


_ONE_DEVICE = (
    "cores: one, for JAX began with one host device; jax.config.update('jax_num_cpu_devices', n) at the top "
    "of the script makes more"
)
