"""In which dtype each op of a forward pass computes, by its role, and the casts that this takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from onward.core.errors import UnknownNameError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.retyped import retyped
from onward.core.jaxprs.signature import BodySignature
from onward.core.marks import CAST
from onward.core.names import Names
from onward.core.primitives.traits import Precision
from onward.core.program import Op, Program, Variable
from onward.core.walk import Where, consumers, producers, select
from onward.core.words import Kind, Pass
from onward.develop.mixed.products import Float8, Float8Products
from onward.develop.mixed.within import InputReading, is_run_with_gain, lowered_run

_FULL = np.dtype(np.float32)


class Lowering:
    """One walk over the ops: ``low`` and ``full`` hold each float32 Variable as it was asked for so far.

    Args:
        program: a forward Program, or what an op of one runs.
        dtype: the low one.
        kept: the activations, and what is given, whose ops compute in float32.
        float8: which products are taken in float8.
        readings: of what an op runs, how each input is read; its results are handed out as they are computed.
    """

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        kept: Collection[Variable] = (),
        float8: Float8 | None = None,
        readings: Mapping[Variable, InputReading] | None = None,
    ) -> None:
        self.source, self.dtype = program, dtype
        self.names = Names(program.variables)
        self.is_inner = readings is not None
        self.readings = readings or {}
        self.returned = set[Variable]() if self.is_inner else {*program.outputs, *program.next_state.values()}
        self.made = producers(program)
        self.kept = {v for v in kept if v in self.made}
        self.kept_given = {v for v in kept if v not in self.made}
        self.kept_given |= {v for v, reading in self.readings.items() if reading.is_kept}
        self.low: dict[Variable, Variable] = {}
        self.full: dict[Variable, Variable] = {}
        self.computed_low: set[Variable] = set()
        self.bodies: dict[Any, Body | None] = {}
        self.ops: list[Op] = []
        chosen = [v for v, reading in self.readings.items() if reading.is_chosen]
        given = chosen if self.is_inner else None
        self.products = Float8Products(program, float8, self.names, self.ops, given) if float8 else None
        self.wide = self.only_read_wide()
        self.is_changed = False
        for v, reading in self.readings.items():
            if reading.is_low:
                self.lowered(v)

    def program(self) -> Program:
        """The Program with every op in the dtype of its role."""
        for op in self.source.ops:
            if self.is_low(op):
                self.append_low(op)
            elif not self.append_run(op):
                self.append_full(op)
        if self.products and not self.is_inner:
            return self.products.program()
        return replace(self.source, ops=tuple(self.ops))

    def inner_program(self) -> Program | None:
        """The Program as an op runs it, its inputs and outputs of the dtype that they are read or made in."""
        program = self.program()
        if not self.is_changed:
            return None
        inputs, outputs = (
            tuple(self.low[v] if v in self.computed_low else v for v in group)
            for group in (program.inputs, program.outputs)
        )
        return replace(program, inputs=inputs, outputs=outputs)

    def only_read_wide(self) -> set[Op]:
        """The ops that follow what they read, and whose results only ops read that compute in float32."""
        readers = consumers(self.source)
        handed_on = {*self.source.outputs} if self.is_inner else set[Variable]()
        wide: set[Op] = set()
        for op in reversed(self.source.ops):
            after = [reader for v in op.outputs for reader in readers.get(v, ())]
            is_read_low = any(r not in wide and (self.enters(r) or self.may_be_low(r)) for r in after)
            if not (_gains(op) or self.enters(op) or is_read_low) and handed_on.isdisjoint(op.outputs):
                wide.add(op)
        return wide

    def is_kept(self, op: Op) -> bool:
        """Whether an op stays in float32 because of what it computes or reads."""
        return not (self.kept.isdisjoint(op.outputs) and self.kept_given.isdisjoint(op.inputs))

    def enters(self, op: Op) -> bool:
        """Whether an op runs something that is lowered, with what is kept left out in there."""
        return op.made_by is Pass.FORWARD and self.kept.isdisjoint(op.outputs) and is_run_with_gain(op)

    def may_be_low(self, op: Op) -> bool:
        """Whether the role of an op lets it compute in the low dtype."""
        if self.is_kept(op) or op.made_by is not Pass.FORWARD or not self._is_real(op):
            return False
        row = op.primitive
        if row.precision is Precision.FULL:
            return _is_relu(op)
        if row.leaves_float16 and self.dtype == np.float16:
            return False
        return self.body(op) is not None

    def _is_real(self, op: Op) -> bool:
        """Whether an op reads and gives float32, integers and truth values only: no other floats, no keys.

        But a product may read what is in the low dtype already, such as weights that were cast by hand.
        """
        read = (v for v in op.inputs if not (_gains(op) and v.dtype == self.dtype))
        kinds = (getattr(v.dtype, "kind", "V") for v in (*read, *op.outputs) if v.dtype != _FULL)
        return all(kind in "biu" for kind in kinds)

    def is_low(self, op: Op) -> bool:
        """Whether an op computes in the low dtype here."""
        if op in self.wide or not self.may_be_low(op):
            return False
        read = [v for v in op.inputs if v.dtype == _FULL]
        if _gains(op):
            return bool(read)
        others = [v for v in read if v not in self.computed_low]
        return len(others) < len(read) and all(map(self.is_pliant, others))

    def is_pliant(self, v: Variable) -> bool:
        """Whether a value gives way to those beside it: a parameter or a number, however it is laid out."""
        op = self.made.get(v)
        if op is None:
            is_known_so = v in self.readings and self.readings[v].is_pliant
            return is_known_so or v.kind in (Kind.PARAMETER, Kind.FROZEN)
        row = op.primitive
        is_layout = row.lays_out and row.precision is Precision.FOLLOWS
        return is_layout and self.body(op) is not None and all(map(self.is_pliant, op.inputs))

    def body(self, op: Op) -> Body | None:
        """The body of an op in the low dtype; None if it cannot compute in that."""
        key = op.body.signature
        if key not in self.bodies:
            self.bodies[key] = retyped(op.body, self.dtype)
        return self.bodies[key]

    def append_full(self, op: Op) -> None:
        """Add an op as it is, what it reads cast up."""
        read = tuple(self.as_full(v, op) for v in op.inputs)
        self.ops.append(op if read == op.inputs else replace(op, inputs=read))

    def append_run(self, op: Op) -> bool:
        """Add an op with what it runs in the low dtype; False if nothing of that is."""
        if not self.enters(op):
            return False
        found = lowered_run(op, [self.reading(v, op) for v in op.inputs], self.dtype, self.lower_inner)
        if found is None:
            return False
        self.is_changed = True
        pairs = zip(op.inputs, found.reads, strict=True)
        inputs = tuple(self.low[v] if is_low else self.as_full(v, op) for v, is_low in pairs)
        outputs = tuple(
            self.lowered(v) if is_low else v for v, is_low in zip(op.outputs, found.gives, strict=True)
        )
        self.ops.append(replace(op, inputs=inputs, outputs=outputs, body=found.body))
        self.return_full(op)
        return True

    def reading(self, v: Variable, op: Op) -> InputReading:
        """How what an op runs is to read a Variable."""
        is_pliant = v.dtype == _FULL and v not in self.computed_low and self.is_pliant(v)
        products = self.products
        is_chosen = products is not None and op in products.chosen and v in products.weights
        return InputReading(v in self.computed_low, is_pliant, v in self.kept_given, is_chosen)

    def lower_inner(self, program: Program, readings: Mapping[Variable, InputReading]) -> Program | None:
        """The Program that an op runs, lowered; None if nothing of it is."""
        float8 = self.products.asked if self.products else None
        return Lowering(program, self.dtype, float8=float8, readings=readings).inner_program()

    def append_low(self, op: Op) -> None:
        """Add an op that reads and gives the low dtype; what is returned of that is cast up."""
        self.is_changed = True
        if _is_relu(op):
            self.append_cast_back(op)
            return
        body = self.body(op)
        assert body is not None
        outputs = tuple(self.lowered(v) for v in op.outputs)
        inputs = tuple(self.as_low(v, op) for v in op.inputs)
        if self.products and op in self.products.chosen:
            self.products.append(op, body, inputs, outputs)
        else:
            self.ops.append(replace(op, inputs=inputs, outputs=outputs, body=body))
        self.return_full(op)

    def append_cast_back(self, op: Op) -> None:
        """Add an op that computes in float32 between two casts."""
        wide = {v: replace(v, name=self.names.new(f"{_FULL}({v.name})")) for v in op.outputs}
        inputs = tuple(self.as_full(v, op) for v in op.inputs)
        self.ops.append(replace(op, inputs=inputs, outputs=tuple(wide.values())))
        for v, found in wide.items():
            self.cast(found, self.lowered(v), op)
        self.return_full(op)

    def lowered(self, v: Variable) -> Variable:
        """The Variable of the low dtype that an op gives in place of this one, under its name if it can."""
        if v.dtype != _FULL:
            return v
        name = self.names.new(f"{self.dtype}({v.name})") if v in self.returned else v.name
        self.low[v] = replace(v, name=name, dtype=self.dtype)
        self.computed_low.add(v)
        return self.low[v]

    def return_full(self, op: Op) -> None:
        """Cast up what of an op's results the Program returns or carries on."""
        for v in op.outputs:
            if v in self.returned and v in self.low:
                self.full[v] = self.cast(self.low[v], v, op)

    def as_low(self, v: Variable, reader: Op) -> Variable:
        """A Variable as an op of the low dtype reads it."""
        if v.dtype != _FULL:
            return v
        if v not in self.low:
            new = Variable(self.names.new(f"{self.dtype}({v.name})"), v.shape, self.dtype)
            self.low[v] = self.cast(v, new, reader)
        return self.low[v]

    def as_full(self, v: Variable, reader: Op) -> Variable:
        """A Variable as an op of float32 reads it."""
        if v not in self.computed_low:
            return v
        if v not in self.full:
            new = Variable(self.names.new(f"{_FULL}({v.name})"), v.shape, _FULL)
            self.full[v] = self.cast(self.low[v], new, reader)
        return self.full[v]

    def cast(self, old: Variable, new: Variable, beside: Op) -> Variable:
        """Add the op that makes one Variable of another, in the scope of the op that it is for."""
        body = _cast(old.shape, old.dtype, new.dtype)
        self.ops.append(Op(CAST, (old,), (new,), body, scope=beside.scope, source=beside.source))
        return new


def kept_variables(program: Program, keep: Iterable[Where], strict: bool) -> set[Variable]:
    """The chosen activations, parameters and data.

    Unless ``strict``, a choice may pick nothing: a test Program lacks some of what is trained.
    """
    chosen: set[Variable] = set()
    for choice in keep:
        try:
            chosen.update(select(tuple(program.variables.values()), [choice], "mixed_precision, keep"))
        except UnknownNameError:
            if strict:
                raise
    return chosen


def _gains(op: Op) -> bool:
    """Whether it is for such ops that a network trains in a low precision."""
    return op.primitive.precision is Precision.LOW


def _is_relu(op: Op) -> bool:
    """Whether it is ``jax.nn.relu``, which has a rule of its own and makes nothing larger."""
    if len(op.inputs) != 1 or not op.body.has_custom_rule:
        return False
    (v,) = op.inputs
    return op.body.signature == _relu(v.shape, v.dtype)


@lru_cache(maxsize=1024)
def _relu(shape: tuple[int, ...], dtype: Any) -> BodySignature:
    return body_of(lambda x: [jax.nn.relu(x)], Type(shape, dtype)).signature


@lru_cache(maxsize=1024)
def _cast(shape: tuple[int, ...], old: Any, new: Any) -> Body:
    return body_of(lambda x: [x.astype(new)], Type(shape, old))
