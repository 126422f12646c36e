"""Which products are taken in float8, and the ops that this takes: scales, and histories of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from onward.core.builder import Builder, op_of
from onward.core.errors import GraphError, UnknownNameError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.tracing import current_axis
from onward.core.marks import FLOAT8_PRODUCT, REMEMBER
from onward.core.names import Names
from onward.core.primitives.table import of
from onward.core.primitives.traits import Work
from onward.core.program import Op, Program, Variable
from onward.core.walk import Where, select
from onward.core.words import Pass
from onward.develop.mixed.float8 import (
    forward_scale,
    largest,
    product,
    remembered,
    scale_of_history,
)
from onward.develop.mixed.within import is_run_with_gain


@dataclass(frozen=True)
class Float8:
    """The wishes of a user for float8.

    Attributes:
        where: which products; None for those that read a parameter, but for the last.
        scaling: "current" or "delayed".
        history: of how many steps delayed scaling knows the largest values.
    """

    where: tuple[Where, ...] | None
    scaling: str
    history: int


class Float8Products:
    """Adds float8 products to the ops of a walk, and the state that their scales need.

    Attributes:
        chosen: the products, and the ops that run some.
        weights: the parameters that they are chosen by, in any layout.
    """

    def __init__(
        self,
        program: Program,
        asked: Float8,
        names: Names,
        ops: list[Op],
        given: Collection[Variable] | None = None,
    ) -> None:
        self.builder = Builder(program)
        self.builder.names = names
        self.asked, self.ops, self.history = asked, ops, asked.history
        is_inner = given is not None  # no turn hands scales to the next
        self.is_delayed = asked.scaling == "delayed" and not is_test(program) and not is_inner
        found = chosen_products(program, asked.where) if given is None else _reading(program, given)
        self.chosen, self.weights = found
        self.scales: dict[Variable, Variable] = {}

    def append(self, op: Op, body: Body, inputs: tuple[Variable, ...], outputs: tuple[Variable, ...]) -> None:
        """Add the float8 product that takes the place of one in bfloat16."""
        (call,) = body.calls
        a, b = (inputs[i] for i in body.operands if isinstance(i, int))
        dimensions, precision = call.params["dimension_numbers"], call.params["precision"]
        scaled = product(dimensions, precision, outputs[0].dtype)
        reads = [a, b, self.scale(a, op), self.scale(b, op)]
        self.ops.append(
            op_of(
                FLOAT8_PRODUCT,
                reads,
                outputs,
                lambda *operands: [scaled(*operands)],
                Pass.FORWARD,
                scope=op.scope,
                source=op.source,
            )
        )

    def scale(self, v: Variable, reader: Op) -> Variable:
        """The scale of a tensor, whose ops stand where it is first asked for."""
        if v not in self.scales:
            amax = self.added("largest", largest, [v], f"largest({v.name})", reader)
            source, kind = amax, forward_scale
            if self.is_delayed:
                source, kind = self.remember(v, amax, reader), scale_of_history
            self.scales[v] = self.added("scale_of", kind, [source], f"scale_of({v.name})", reader)
        return self.scales[v]

    def remember(self, v: Variable, amax: Variable, reader: Op) -> Variable:
        """The history of a tensor's largest values before this step."""
        axis = current_axis()
        if axis is not None:  # the state is one for all devices
            most = partial(lax.pmax, axis_name=axis.name)
            amax = self.added("all_max", most, [amax], f"all_max({amax.name})", reader, Pass.COLLECTIVE)
        past = self.builder.carry(f"largest_of({v.name})", lambda: jnp.zeros(self.history, jnp.float32))
        after = self.added(REMEMBER, remembered, [amax, past], f"next({past.name})", reader)
        self.builder.follow({past: after})
        return past

    def added(
        self,
        kind: str,
        function: Callable[..., Any],
        reads: list[Variable],
        name: str,
        reader: Op,
        made_by: Pass = Pass.FORWARD,
    ) -> Variable:
        """The one result of an op in the scope of the product that it is for."""
        body = body_of(lambda *values: [function(*values)], *(v.aval for v in reads))
        v = self.builder.named(name, body.out_avals[0])
        self.ops.append(Op(kind, tuple(reads), (v,), body, made_by, reader.scope, reader.source))
        return v

    def program(self) -> Program:
        """The checked Program with the ops of the walk, and the state."""
        for op in self.ops:
            self.builder.append(op)
        return self.builder.program()


class ChosenProducts(NamedTuple):
    """Products, the ops that run some among them, and the parameters by which they are chosen."""

    ops: set[Op]
    weights: set[Variable]


def chosen_products(program: Program, where: Iterable[Where] | None) -> ChosenProducts:
    """The products that are asked for."""
    found = _hidden(program) if where is None else _named(program, where)
    if not found.ops and not is_test(program):
        tried = "beside its last one" if where is None else f"among {where!r}"
        raise GraphError(
            f"mixed_precision: Program {program.name!r} has no product to take in float8 {tried}. Name the "
            "results of products, or parameters that they read, by where=; '*' is all, the last included. "
            "Within while loops, branches and functions with a gradient rule of their own there is none."
        )
    return found


def _hidden(program: Program) -> ChosenProducts:
    """The products that read a parameter and that another product follows."""
    all_of_them, leading = _reading(program, program.parameters), set[Variable]()
    found: set[Op] = set()
    for op in reversed(program.ops):
        follows = not leading.isdisjoint(op.outputs)
        if op in all_of_them.ops and follows:
            found.add(op)
        if follows or any(of(name).is_product for name in op.body.primitives):
            leading.update(op.inputs)
    return ChosenProducts(found, all_of_them.weights)


def _named(program: Program, where: Iterable[Where]) -> ChosenProducts:
    """The products that compute what is chosen, or that read a chosen parameter."""
    chosen: set[Variable] = set()
    for choice in where:
        try:
            chosen.update(select(tuple(program.variables.values()), [choice], "mixed_precision, where"))
        except UnknownNameError:
            if not is_test(program):
                raise
    computing = {op for op in program.ops if _is_product(op) and not chosen.isdisjoint(op.outputs)}
    reading = _reading(program, chosen.intersection(program.state))
    return ChosenProducts(computing | reading.ops, reading.weights)


def _reading(program: Program, parameters: Iterable[Variable]) -> ChosenProducts:
    """The products that read these."""
    weights = _laid_out(program, parameters)
    ops = (op for op in program.ops if _is_product(op) or is_run_with_gain(op))
    return ChosenProducts({op for op in ops if not weights.isdisjoint(op.inputs)}, weights)


def _laid_out(program: Program, parameters: Iterable[Variable]) -> set[Variable]:
    """The parameters, and what holds their numbers in another layout."""
    found = set(parameters)
    for op in program.ops:
        if op.primitive.lays_out and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def is_test(program: Program) -> bool:
    """Whether a Program is traced for tests."""
    return program.recipe is not None and not program.recipe.origin.training


def _is_product(op: Op) -> bool:
    return op.primitive.work is Work.PRODUCT and op.made_by is Pass.FORWARD
