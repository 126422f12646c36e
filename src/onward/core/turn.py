"""One turn of a ``scan`` as a Program, and what each of its inputs is called with.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def loop(a, x):
...     return jax.lax.scan(lambda x, _: (a * x, x), x, length=3)
>>> turn = ScanTurn.of(ow.graph.body_of(loop, jnp.float32(2.0), jnp.float32(1.0)))
>>> [len(group) for group in (turn.fixed, turn.carried, turn.cut)]
[1, 1, 0]
>>> last, before = turn.scan(turn.once, [jnp.float32(2.0), jnp.float32(1.0)])
>>> float(last), before.tolist()
(8.0, [1.0, 2.0, 4.0])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.joining import joined
from onward.core.jaxprs.loops import carry_of
from onward.core.program import Program, Variable, programs_within


@dataclass(frozen=True, eq=False)
class ScanTurn:
    """A ``scan`` by its parts.

    Attributes:
        program: one turn. Its inputs are fixed for all turns, then carried from turn to turn, then cut from
            what is stacked; its outputs are carried on, then stacked.
        operands: for each input the position among the inputs of the Body, or the number that stands there.
        length: how many turns.
        backwards: whether the last one comes first.
        unroll: how many turns are compiled as one.
    """

    program: Program
    operands: tuple[int | Any, ...]
    first_carried: int
    count_carried: int
    length: int
    backwards: bool
    unroll: int

    @staticmethod
    def of(body: Body) -> ScanTurn | None:
        """The parts of a loop; None where a Body is none, or is called with what cannot be told apart."""
        program = programs_within(body).get("jaxpr")
        told = body.attributes
        if program is None or "length" not in told or "constant" in body.operands:
            return None
        numbers = zip(body.operands, body.numbers, program.inputs, strict=True)
        operands = tuple(x if isinstance(x, int) else np.asarray(n, v.dtype) for x, n, v in numbers)
        backwards, unroll = told["reverse"] == "True", int(told.get("unroll", 1))
        return ScanTurn(program, operands, *carry_of(body), int(told["length"]), backwards, unroll)

    @property
    def fixed(self) -> tuple[Variable, ...]:
        """The inputs that are the same in all turns."""
        return self.program.inputs[: self.first_carried]

    @property
    def carried(self) -> tuple[Variable, ...]:
        """The inputs that the turn before has made."""
        return self.program.inputs[self.first_carried : self.first_carried + self.count_carried]

    @property
    def cut(self) -> tuple[Variable, ...]:
        """The inputs of which each turn gets its own."""
        return self.program.inputs[self.first_carried + self.count_carried :]

    @property
    def stacked(self) -> tuple[Variable, ...]:
        """The outputs of which those of all turns come in one array."""
        return self.program.outputs[self.count_carried :]

    def given(self, values: Sequence[Any]) -> list[Any]:
        """The operands of the loop, of what its Body is called with."""
        return [values[x] if isinstance(x, int) else x for x in self.operands]

    def once(self, *values: Any) -> list[Any]:
        """One turn, computed."""
        program = self.program
        given = [*program.inputs, *program.constants]
        body = joined(program.ops, given, program.outputs, is_inner=True)
        return body(*values, *program.constants.values())

    def computed(
        self, given: Sequence[Variable], wanted: Sequence[Variable], effects: bool = False
    ) -> Callable[..., list[Any]]:
        """The function from some values of a turn to others, with what it does beside if ``effects``."""
        program = self.program
        ops, missing = [], {*wanted} - {*given}
        for op in reversed(program.ops):
            if not missing.isdisjoint(op.outputs) or (effects and op.body.has_effects):
                ops.append(op)
                missing = (missing | {*op.inputs}) - {*given}
        constants = {v: value for v, value in program.constants.items() if v in missing}
        body = joined(ops[::-1], [*given, *constants], wanted)
        return lambda *values: body(*values, *constants.values())

    def scan(self, turn: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
        """The results of the loop with a function in place of its turn."""
        given = self.given(values)
        begin, end = self.first_carried, self.first_carried + self.count_carried
        return self.loop(lambda *inputs: turn(*given[:begin], *inputs), given[begin:end], given[end:])

    def loop(self, turn: Callable[..., list[Any]], start: Sequence[Any], cut: Sequence[Any]) -> list[Any]:
        """The results of a loop of as many turns in the same order, of other things carried and cut."""

        def body(carried: Sequence[Any], now: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            found = turn(*carried, *now)
            return found[: len(start)], found[len(start) :]

        last, stacked = lax.scan(body, [*start], [*cut], self.length, self.backwards, self.unroll)
        return [*last, *stacked]
