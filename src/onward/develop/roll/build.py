"""A run of layers as three kinds of ops: ``stack`` what each layer has of its own, ``scan``, ``unstack``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.tracing import traced
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.variable import holds_keys
from onward.core.words import Kind
from onward.develop.roll.literals import numbers, with_numbers
from onward.develop.roll.run import From, LayerRead, LayerRun, Place
from onward.develop.roll.stacks import stack, starred, unstack

Number = tuple[int, int]
"""A number in the equation of an op: which op of a layer, and which of its numbers."""

Slot = tuple[Place, tuple[Variable, ...]]
"""What is carried: what makes it, as many layers ago as there are Variables that the first layers read."""


class Layers(Body):
    """The body of a ``scan`` op made of a run: a layer, and how many times it is computed."""

    def __init__(self, closed: Any, run: LayerRun, scope: str) -> None:
        super().__init__(closed)
        self.times: int = run.times
        self.period: int = run.period
        self.parameters: int = run.parameters
        self.scope = scope


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The context of a loop in the Program that it goes into.

    Attributes:
        read: what is read of the layers by others.
        constants: the values of constants.
        names: those that are taken.
        inner: rolls what repeats within one layer.
    """

    read: frozenset[Variable]
    constants: Mapping[Variable, Any]
    names: Names
    inner: Callable[[Program], Program]


@dataclass(eq=False)
class RolledLoop:
    """The ops that stand for a run, and the constants that they add."""

    run: LayerRun
    around: Surroundings
    constants: dict[Variable, Any] = field(default_factory=dict)
    stacks: list[Op] = field(default_factory=list)
    shared: dict[LayerRead, Variable] = field(default_factory=dict)
    stacked: dict[LayerRead | Number, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.run.layers[0]
        self.scope, self.source = _common_scope(first), first[0].source
        if self.source is not None:
            self.source = self.source.over([op.source for op in ops] for ops in self.run.layers)
        reads = dict.fromkeys(read for reads in self.run.reads for read in reads)
        self.carried: list[Slot] = _slots(read for read in reads if read.source is From.CARRY)
        for read in reads:
            if read.source is From.SHARED:
                self.shared[read] = read.values[0]
            elif read.source is From.STACKED:
                self.place(read)
        self.lifted = {i for i in range(self.run.period) if self.lift(i)}
        self.handed_out = self.per_layer()

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops, in order."""
        parts = {place: self.unstack(place) for place in self.handed_out}
        scan = self.scan({place: op.inputs[0] for place, op in parts.items()})
        return (*self.stacks, scan, *parts.values())

    def place(self, read: LayerRead) -> None:
        """Decide how the loop gets what each layer has of its own: constants as one array, others stacked."""
        known = [self.around.constants.get(v) for v in read.values]
        name = f"stack({starred(read.values)})"
        if any(value is None for value in known) or holds_keys(read.values[0].dtype):
            name = self.around.names.new(name)
            self.stacks.append(stack(read.values, name, self.scope, self.source))
            self.stacked[read] = self.stacks[-1].outputs[0]
            return
        arrays = list(map(np.asarray, known))
        if all(_same(arrays[0], array) for array in arrays[1:]):
            self.shared[read] = read.values[0]
        else:
            self.stacked[read] = self.constant(np.stack(arrays), name)

    def lift(self, i: int) -> bool:
        """Make the numbers in the ops at this place data of the loop, if they differ from layer to layer."""
        found = [numbers(ops[i].body) for ops in self.run.layers]
        if all(_same(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)):
            return False
        for k, values in enumerate(zip(*found, strict=True)):
            name = f"stack(number of {self.run.layers[0][i].type})"
            self.stacked[i, k] = self.constant(np.stack(values), name)
        return True

    def constant(self, value: Any, name: str) -> Variable:
        """A new constant."""
        v = Variable(self.around.names.new(name), tuple(value.shape), value.dtype, Kind.CONSTANT)
        self.constants[v] = jnp.asarray(value)
        return v

    def per_layer(self) -> dict[Place, tuple[int, ...]]:
        """The layers whose value at each place is read outside of the loop, other than the final carries."""
        found: dict[Place, list[int]] = {}
        ends = set(self.ends())
        for t, ops in enumerate(self.run.layers):
            for i, op in enumerate(ops):
                for k, v in enumerate(op.outputs):
                    if v in self.around.read and v not in ends:
                        found.setdefault((i, k), []).append(t)
        return {place: tuple(which) for place, which in found.items()}

    def ends(self) -> dict[Variable, int]:
        """The final carries that are read outside of the loop, each with its index among all carries."""
        ends: dict[Variable, int] = {}
        for n, ((i, k), begin) in enumerate(self.carried):
            v = self.run.layers[-len(begin)][i].outputs[k]
            if v in self.around.read:
                ends.setdefault(v, n)
        return ends

    def unstack(self, place: Place) -> Op:
        """The op that gives the Variables of single layers back."""
        i, k = place
        values = [ops[i].outputs[k] for ops in self.run.layers]
        name = self.around.names.new(f"scan({starred(values)})")
        part = Variable(name, (self.run.times, *values[0].shape), values[0].dtype)
        which = self.handed_out[place]
        return unstack(part, which, [values[t] for t in which], self.scope, self.source)

    def scan(self, parts: Mapping[Place, Variable]) -> Op:
        """The op that runs the layers; ``parts`` are what it hands out of each."""
        ends = self.ends()
        begins = (begin[0] for _, begin in self.carried)
        inputs = tuple(dict.fromkeys((*self.shared.values(), *begins, *self.stacked.values())))
        layer = self.layer(parts)

        def run(*values: Any) -> list[Any]:
            final, laid = self.turns(layer, dict(zip(inputs, values, strict=True)))
            return [*(final[n] for n in ends.values()), *laid]

        closed = traced(run, *(v.aval for v in inputs))
        body = Layers(closed, self.run, self.scope)
        outputs = (*ends, *parts.values())
        return Op("scan", inputs, outputs, body, scope=self.scope, source=self.source)

    def turns(self, layer: Program, env: Mapping[Variable, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run the layers: what the last one hands on, and what each hands out."""
        fixed = [env[v] for v in self.shared.values()]
        count = len(self.carried)

        def turn(carry: Any, own: Any) -> Any:
            found = _run(layer, (*fixed, *carry, *own))
            return list(map(_strong, found[:count])), found[count:]

        begin = [_strong(env[begin[0]]) for _, begin in self.carried]
        final, laid = lax.scan(turn, begin, [env[v] for v in self.stacked.values()], self.run.times)
        return final, laid

    def layer(self, parts: Iterable[Place]) -> Program:
        """One layer as a Program, that is fed what is shared, handed on, and its own."""
        ops = self.run.layers[0]
        given = self.given()
        wired = tuple(self.wired(i, op, given) for i, op in enumerate(ops))
        handed_on = (
            given[place, begin[1:]] if len(begin) > 1 else ops[place[0]].outputs[place[1]]
            for place, begin in self.carried
        )
        outputs = (*handed_on, *(ops[i].outputs[k] for i, k in parts))
        return self.around.inner(Program("layer", tuple(given.values()), ops=wired, outputs=outputs))

    def given(self) -> dict[Any, Variable]:
        """The Variables that a layer is fed, each by the value that it takes."""
        names = Names(v.name for op in self.run.layers[0] for v in op.outputs)
        alike: dict[Any, Variable] = {**self.shared, **{slot: slot[1][0] for slot in self.carried}}
        given = {key: (v.name, v.shape, v.dtype) for key, v in alike.items()}
        own = {key: (v.name, v.shape[1:], v.dtype) for key, v in self.stacked.items()}
        return {
            key: Variable(names.new(name), shape, dtype, Kind.DATA)
            for key, (name, shape, dtype) in {**given, **own}.items()
        }

    def wired(self, i: int, op: Op, given: Mapping[Any, Variable]) -> Op:
        """An op of the first layer, as it stands in the loop."""
        inputs = [self.inside(read, given) for read in self.run.reads[i]]
        if i not in self.lifted:
            return replace(op, inputs=tuple(inputs))
        own = (given[i, k] for k in range(len(numbers(op.body))))
        return replace(op, inputs=(*inputs, *own), body=with_numbers(op.body))

    def inside(self, read: LayerRead, given: Mapping[Any, Variable]) -> Variable:
        """The Variable that an op of the first layer reads, as it stands in the loop."""
        if read.place is None:
            return given[read]
        if read.source is From.CARRY:
            return given[read.place, read.values]
        return self.run.layers[0][read.place[0]].outputs[read.place[1]]


def _slots(reads: Iterable[LayerRead]) -> list[Slot]:
    """The carried values; one read from several layers back passes through a slot per layer on the way."""
    slots: dict[Slot, None] = {}
    for read in reads:
        if read.place is not None:
            slots.update(((read.place, read.values[n:]), None) for n in range(len(read.values)))
    return list(slots)


def _run(program: Program, values: Iterable[Any]) -> list[Any]:
    """The outputs of a Program without state, computed in its named scopes."""
    env: dict[Variable, Any] = dict(program.constants)
    env.update(zip(program.inputs, values, strict=True))
    for op in program.ops:
        with jax.named_scope(op.scope or op.type):
            env.update(zip(op.outputs, op.body(*(env[v] for v in op.inputs)), strict=True))
    return [env[v] for v in program.outputs]


def _common_scope(ops: Sequence[Op]) -> str:
    """The scope that all ops stand in, as far as it is one."""
    first, *others = (op.scope.split("/") for op in ops)
    count = 0
    while count < len(first) and all(scope[: count + 1] == first[: count + 1] for scope in others):
        count += 1
    return "/".join(first[:count])


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays are equal to the bit."""
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _strong(x: Any) -> Any:
    """A value whose dtype is not weak, as what is handed on must be."""
    return x if holds_keys(x.dtype) else lax.convert_element_type(x, x.dtype)
