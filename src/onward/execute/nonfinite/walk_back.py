"""Walk back from a value that must be finite and is not, through others like it, to the op that began it.

A value that is not finite and reaches nothing that is looked at is harmless: minus infinity in a mask, which
a softmax makes zero. So the walk begins at the end. It follows a NaN through NaNs only, for an infinity
beside it may be there on purpose; where a NaN has no NaN before it, an infinity may have made it, and the
walk goes on through infinities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.reading import program_of
from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable, programs_within
from onward.core.walk import producers
from onward.core.words import Kind
from onward.develop.roll.literals import numbers
from onward.execute.nonfinite.flags import Bad, Flags, bad_in, is_float


@dataclass(frozen=True)
class BadValue:
    """A value that is not finite in some way: the Variable, the device, the way."""

    variable: Variable
    device: int
    bad: Bad


@dataclass(frozen=True)
class FaultOrigin:
    """Where what is not finite began: the op and its first bad output; of what is given, no op.

    ``is_written``: such a number stands in the code of the op.
    """

    place: BadValue
    op: Op | None
    is_written: bool = False


@dataclass
class FaultWalk:
    """Where the walk from some places arrives.

    Attributes:
        births: the ops that make what is not finite of what is finite, or NaN of infinity.
        on_purpose: the ops in whose code an infinity is written, and constants.
        given: the inputs and state that were not finite before.
    """

    births: list[FaultOrigin]
    on_purpose: list[FaultOrigin]
    given: list[FaultOrigin]

    def first(self, program: Program) -> FaultOrigin | None:
        """The origin to report: a given value before a computed one, a computed one before one on purpose."""
        number = {op: i for i, op in enumerate(program.ops)}
        order = {v: i for i, v in enumerate((*program.inputs, *program.state))}
        if self.given:
            return min(self.given, key=lambda o: (order[o.place.variable], o.place.device))
        made = self.births or [o for o in self.on_purpose if o.op is not None]
        if made:
            return min(made, key=lambda o: (*_order(o, number), o.place.device))
        return next(iter(self.on_purpose), None)


def _order(origin: FaultOrigin, number: Mapping[Op, int]) -> tuple[int, int]:
    """Where an op stands among all, and the value among its outputs."""
    assert origin.op is not None
    return number[origin.op], origin.op.outputs.index(origin.place.variable)


def walk_back(program: Program, flags: Flags, starts: Iterable[BadValue], devices: int = 1) -> FaultWalk:
    """Walk from these places to where they began.

    Args:
        program: what ran.
        flags: of all its floats.
        starts: the values that should be finite and are not.
        devices: how many it ran on; what a collective op gives comes from all of them.
    """
    makers = producers(program)
    walk = FaultWalk([], [], [])
    left, seen = list(starts), set[BadValue]()
    while left:
        place = left.pop()
        if place in seen:
            continue
        seen.add(place)
        op = makers.get(place.variable)
        if op is None:
            is_constant = place.variable.kind is Kind.CONSTANT
            (walk.on_purpose if is_constant else walk.given).append(FaultOrigin(place, None))
            continue
        before = list(_before(op, flags, place, devices))
        began = not before or (place.bad is Bad.NAN and before[0].bad is not Bad.NAN)
        if began:
            origin = FaultOrigin(_first_output(op, flags, place), op, writes(op.body, place.bad))
            meant = origin.is_written and place.bad is not Bad.NAN
            (walk.on_purpose if meant else walk.births).append(origin)
        left += before
    return walk


def _before(op: Op, flags: Flags, place: BadValue, devices: int) -> list[BadValue]:
    """The inputs of an op that may have made a value not finite: for a NaN only NaNs, if there are any."""
    found = [
        BadValue(v, d, bad)
        for d in (range(devices) if op.body.collectives else (place.device,))
        for v in dict.fromkeys(op.inputs)
        for bad in sorted(bad_in(flags, v, d))
    ]
    if place.bad is Bad.NAN:
        return [p for p in found if p.bad is Bad.NAN] or found
    if all(of(name).keeps_sign for name in op.body.primitives):
        return [p for p in found if p.bad is place.bad]
    return found


def _first_output(op: Op, flags: Flags, place: BadValue) -> BadValue:
    """The first output of an op that is not finite in this way."""
    found = (v for v in op.outputs if place.bad in bad_in(flags, v, place.device))
    return BadValue(next(found, place.variable), place.device, place.bad)


def writes(body: Body, bad: Bad) -> bool:
    """Whether a NaN, or an infinity of either sign, stands in the code of a Body, however deep.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> body = body_of(lambda x: [jnp.maximum(x, -jnp.inf)], jnp.ones(3))
    >>> writes(body, Bad.PLUS), writes(body, Bad.NAN)
    (True, False)
    """
    if isinstance(body, DescribedBody):  # of its numbers only the words are known
        return ("nan" if bad is Bad.NAN else "inf") in {str(x).lstrip("-") for x in body.operands}
    if any(_holds(x, bad) for x in numbers(body)):
        return True
    is_one = len(body.equations) == 1
    inner = tuple(programs_within(body).values()) if is_one else (program_of(body.closed, "body"),)
    return any(_has_constant(part, bad) or any(writes(op.body, bad) for op in part.ops) for part in inner)


def _has_constant(program: Program, bad: Bad) -> bool:
    return any(is_float(v) and _holds(np.asarray(x), bad) for v, x in program.constants.items())


def _holds(array: np.ndarray, bad: Bad) -> bool:
    return bool(np.any(np.isnan(array) if bad is Bad.NAN else np.isinf(array)))
