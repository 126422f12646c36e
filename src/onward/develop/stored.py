"""Activations in host memory: what the backward pass reads lies there from the end of its use before that.

The op ``store`` takes a value to the host, behind the last op of the forward pass that reads it, the op
``fetch`` brings it back, before the first op of the backward pass that does. What a loop stacks up turn by
turn, and a loop of the backward pass takes apart again, is moved turn by turn, within both: moved as a whole
it would lie on the device at the end of the one and at the beginning of the other, where most is.

No barrier holds a ``fetch`` back: XLA's compiler for TPUs sets out early as long as there is memory for it,
and waits where there is none.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(jnp.exp(x @ w)), jnp.ones((3, 3)), jnp.ones((2, 3)))
>>> print(*(op.type for op in stored(program, ("exp",)).ops[:7]))
dot_general exp reduce_sum store div ones div_grad
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax

from onward.core.builder import Builder
from onward.core.errors import GraphError, UnknownNameError
from onward.core.jaxprs.body import Body, Wire, body_of
from onward.core.jaxprs.edited import given_on_host
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.loops import result_of
from onward.core.jaxprs.reading import program_of
from onward.core.lower import lower
from onward.core.marks import FETCH, STACK, STORE, WATCH
from onward.core.memories import on_host
from onward.core.program import Op, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.turn import ScanTurn
from onward.core.walk import Where, select
from onward.core.words import Pass

HERE, THERE = jax.memory.Space.Device, jax.memory.Space.Host


@transform(phase=Phase.HOST)
def stored(program: Program, where: Iterable[Where]) -> Program:
    """The Program whose backward pass reads these activations from host memory."""
    saved = Saved(program)
    chosen = dict.fromkeys(saved.root(v) for v in saved.meant(where))
    return _Moved(saved, tuple(chosen)).program()


def stored_values(program: Program) -> tuple[Variable, ...]:
    """The values that lie in host memory between the forward and the backward pass."""
    found: list[Variable] = []
    for op in program.ops:
        found += _on_host(op) if op.made_by is Pass.FORWARD else ()
        if op.made_by is Pass.BACKWARD and "micro_batch" in op.subprograms:
            found += stored_values(op.subprograms["micro_batch"])
    return tuple(found)


def _on_host(op: Op) -> list[Variable]:
    return [op.outputs[i] for i in sorted(on_host(op.body))]


class Saved:
    """The values of a forward pass that its backward pass reads, each by all of its names.

    An op that saves what it reads hands it on under another name: that is the same array.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.makers: dict[Variable, Op] = {}
        self.readers: dict[Variable, list[Op]] = {}
        self._roots: dict[Variable, Variable] = {}
        for op in program.ops:
            for v in op.inputs:
                self.readers.setdefault(self.root(v), []).append(op)
            for v, wire in zip(op.outputs, _wires(op), strict=True):
                self.makers[v] = op
                if wire is not None:
                    self._roots[v] = self.root(wire)
        self.results = {self.root(v) for v in (*program.outputs, *program.next_state.values())}

    def root(self, v: Variable) -> Variable:
        """The Variable whose array this one is."""
        return self._roots.get(v, v)

    @cached_property
    def candidates(self) -> tuple[Variable, ...]:
        """The values that can lie in host memory, each by the first of its names, in their order."""
        return tuple(v for v in self.makers if self.root(v) is v and self.obstacle(v) is None)

    def meant(self, where: Iterable[Where]) -> tuple[Variable, ...]:
        """The chosen values; a pattern or a predicate chooses of what can be moved."""
        chosen: list[Variable] = []
        for choice in where:
            named = self.named(choice)
            picked = [named] if named is not None else select(self.names, [choice], "offload")
            for kept in map(self.kept, picked):
                if (obstacle := self.obstacle(kept[0])) is not None:
                    raise GraphError(f"offload: {kept[0].name!r} of {self.program.name!r} {obstacle}")
                chosen += kept
        return tuple(chosen)

    def kept(self, v: Variable) -> tuple[Variable, ...]:
        """The value, if the backward pass reads it, or what the op that makes it saves in its place."""
        maker = self.makers.get(v)
        if maker is None or self.backward(v):
            return (v,)
        count = len(maker.outputs if maker.primal is None else maker.primal.out_avals)
        return tuple(u for u in maker.outputs[count:] if self.backward(u) or self._is_stored(u)) or (v,)

    def _is_stored(self, v: Variable) -> bool:
        return v in _on_host(self.makers[v]) or any(op.type is STORE for op in self.readers.get(v, ()))

    @property
    def names(self) -> tuple[Variable, ...]:
        """All names of what can be moved."""
        there = {*self.candidates}
        return tuple(v for v in self.makers if there.issuperset(map(self.root, self.kept(v))))

    def named(self, choice: Any) -> Variable | None:
        """The Variable of this name, or None."""
        name = choice if isinstance(choice, str) else getattr(choice, "name", None)
        return self.program.variables.get(name) if isinstance(name, str) else None

    def picks(self, choice: Where) -> bool:
        """Whether a choice means an activation."""
        if (named := self.named(choice)) is not None:
            return named not in self.program.state
        return picks(self.names, choice)

    def backward(self, v: Variable) -> list[Op]:
        """The ops of the backward pass that read a value."""
        return [op for op in self.readers.get(self.root(v), ()) if op.made_by is Pass.BACKWARD]

    def is_moved_by_turns(self, v: Variable) -> bool:
        """Whether loops alone make and read a value, a part in each turn."""
        maker, readers = self.makers[v], self.readers[v]
        if any(op.made_by is not Pass.BACKWARD for op in readers):
            return False
        return _Opened.of(maker.body).stacks(maker.outputs.index(v)) and all(
            _Opened.of(op.body).cuts([i for i, x in enumerate(op.inputs) if self.root(x) is v])
            for op in readers
        )

    def obstacle(self, v: Variable) -> str | None:
        """Why a value cannot lie in host memory until the backward pass reads it; None if it can."""
        v, maker = self.root(v), self.makers.get(self.root(v))
        if maker is None:
            return f"is {v.kind}, which lies on the device for the whole step. Leave it out of where=."
        if maker.made_by is not Pass.FORWARD:
            return f"is made by {maker.type}{maker.at} in the {maker.made_by} pass. Leave it out of where=."
        readers = self.readers.get(v, ())
        if maker.type is STACK:
            return "is a stack of parameters, which lie so on the device. Leave it out of where=."
        if self._is_stored(v):
            return "lies in host memory already."
        if not self.backward(v):
            return (
                "is read by no op of the backward pass, so that nothing keeps it after the forward pass. "
                "Leave it out of where=."
            )
        late = next((op for op in readers if op.made_by is Pass.UPDATE and op.type is not WATCH), None)
        if late is not None:
            return (
                f"is read by {late.type}{late.at} in the update as well, until which the device would hold "
                "it again. Leave it out of where=."
            )
        if v in self.results:
            return "is a result of the step, which the device holds to its end. Leave it out of where=."
        if not v.shape or v.is_key:
            return "is a single number or a random key. Leave it out of where=."
        return None


def picks(variables: Sequence[Variable], choice: Where) -> bool:
    """Whether a choice means one of these Variables."""
    try:
        return bool(select(variables, [choice], "offload"))
    except UnknownNameError:
        return False


def _wires(op: Op) -> Iterator[Variable | None]:
    """For each output of an op what it is another name of: an input, or an output before it."""
    for wire in op.body.wires:
        if isinstance(wire, Wire):
            yield None if wire.input is None else op.inputs[wire.input]
        else:
            yield None if wire is None else op.outputs[wire]


@dataclass(frozen=True, eq=False)
class _Moved:
    """The Program whose backward pass reads some values from host memory."""

    saved: Saved
    chosen: Sequence[Variable]

    def program(self) -> Program:
        """The checked Program."""
        builder = Builder(self.saved.program)
        there: dict[Variable, Variable] = {}
        here: dict[Variable, Variable] = {}
        behind = self._stores()
        for op in self.saved.program.ops:
            if op.made_by is Pass.BACKWARD:
                for v in self._fetched(op):
                    if v not in here:
                        here[v] = self._fetch(builder, v, there[v])
                builder.append(self._reading(op, here))
            else:
                builder.append(self._storing(op))
            for v in behind.get(op, ()):
                there[v] = self._store(builder, v)
        return builder.program()

    def _store(self, builder: Builder, v: Variable) -> Variable:
        maker = self.saved.makers[v]
        told = {"scope": maker.scope, "source": maker.source, "made_by": Pass.FORWARD}
        return builder.behind(v, STORE, moved(v.shape, v.dtype, THERE), f"stored({v.name})", **told)

    def _fetch(self, builder: Builder, v: Variable, there: Variable) -> Variable:
        maker = self.saved.makers[v]
        told = {"scope": maker.scope, "source": maker.source, "made_by": Pass.BACKWARD}
        body = moved(v.shape, v.dtype, HERE)
        return builder.behind(there, FETCH, body, f"fetched({v.name})", **told)

    @cached_property
    def _within(self) -> frozenset[Variable]:
        """Those that are moved turn by turn, within the loops that make and read them."""
        return frozenset(filter(self.saved.is_moved_by_turns, self.chosen))

    def _stores(self) -> Mapping[Op, Sequence[Variable]]:
        """For each op the values that go to the host behind it: no later forward op reads them."""
        behind: dict[Op, list[Variable]] = {}
        for v in self.chosen:
            if v not in self._within:
                early = [op for op in self.saved.readers[v] if op.made_by is Pass.FORWARD]
                behind.setdefault([self.saved.makers[v], *early][-1], []).append(v)
        return behind

    def _fetched(self, op: Op) -> list[Variable]:
        """The values that an op of the backward pass reads and that are on the host as a whole."""
        read = dict.fromkeys(map(self.saved.root, op.inputs))
        return [v for v in self.chosen if v in read and v not in self._within]

    def _reading(self, op: Op, here: Mapping[Variable, Variable]) -> Op:
        """An op of the backward pass, reading what was fetched, or from the host in each of its turns."""
        roots = [self.saved.root(v) for v in op.inputs]
        given = [i for i, r in enumerate(roots) if r in self._within]
        inputs = tuple(
            r if r in self._within else here.get(r, v) for r, v in zip(roots, op.inputs, strict=True)
        )
        if inputs == op.inputs and not given:
            return op
        return replace(op, inputs=inputs, body=_Opened.of(op.body).moving(inputs=given) if given else op.body)

    def _storing(self, op: Op) -> Op:
        """An op of the forward pass; a loop puts some of what it stacks up into host memory in each turn."""
        at = [i for i, v in enumerate(op.outputs) if v in self._within]
        return replace(op, body=_Opened.of(op.body).moving(outputs=at)) if at else op


@dataclass(frozen=True, eq=False)
class _Opened:
    """The equations of a Body, each an op, and the turns of those that are loops."""

    body: Body
    program: Program

    @staticmethod
    def of(body: Body) -> _Opened:
        """The equations of a Body."""
        return _Opened(body, program_of(body.closed, "body"))

    def stacks(self, output: int) -> bool:
        """Whether a loop makes an output, stacked over its turns, and nothing else here reads it."""
        v = self.program.outputs[output]
        if self.program.outputs.count(v) > 1 or self._readers([v]):
            return False
        for op in self.program.ops:
            if v in op.outputs and (turn := ScanTurn.of(op.body)) is not None:
                return result_of(op.body, op.outputs.index(v)) >= turn.count_carried
        return False

    def cuts(self, inputs: Sequence[int]) -> bool:
        """Whether these inputs are read by loops alone, each of whose turns gets its own of them."""
        given = {self.program.inputs[i] for i in inputs}
        return given.isdisjoint(self.program.outputs) and all(
            (turn := ScanTurn.of(op.body)) is not None and given.isdisjoint(_shared(op, turn))
            for op in self._readers(given)
        )

    def _readers(self, given: Collection[Variable]) -> list[Op]:
        return [op for op in self.program.ops if any(v in given for v in op.inputs)]

    def moving(self, inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> Body:
        """The same, given these inputs in host memory, of which these outputs come there."""
        given = {self.program.inputs[i] for i in inputs}
        made = {self.program.outputs[i] for i in outputs}
        ops = tuple(_moving(op, given, made) for op in self.program.ops)
        run = lower(replace(self.program, ops=ops), self.program.outputs)
        return given_on_host(lambda *values: run((), values), self.body.in_types, inputs)


def _shared(op: Op, turn: ScanTurn) -> list[Variable]:
    """The operands of a loop of which not each turn gets its own."""
    begin = turn.first_carried + turn.count_carried
    return [op.inputs[x] for x in turn.operands[:begin] if isinstance(x, int)]


def _moving(op: Op, given: Collection[Variable], made: Collection[Variable]) -> Op:
    """A loop whose turns bring their own of some operands to the device, of some results to the host."""
    inputs = [i for i, v in enumerate(op.inputs) if v in given]
    there = {result_of(op.body, j) for j, v in enumerate(op.outputs) if v in made}
    turn = ScanTurn.of(op.body) if inputs or there else None
    if turn is None:
        return op
    here = {i for i, x in enumerate(turn.operands) if isinstance(x, int) and x in inputs}

    def once(*values: Any) -> list[Any]:
        results = turn.once(*_put(values, here, HERE))
        return _put(results, there, THERE)

    def run(*values: Any) -> list[Any]:
        results = turn.scan(once, values)
        return [results[result_of(op.body, j)] for j in range(len(op.body.out_avals))]

    return replace(op, body=given_on_host(run, op.body.in_types, inputs))


def _put(values: Sequence[Any], at: Collection[int], space: Any) -> list[Any]:
    """These values, of which those at some positions are brought into a memory."""
    return [jax.device_put(x, space) if i in at else x for i, x in enumerate(values)]


@lru_cache(maxsize=1024)
def moved(shape: tuple[int, ...], dtype: Any, space: Any) -> Body:
    """The body of an op that brings an array of this type into a memory."""
    return body_of(lambda x: [jax.device_put(x, space)], Type(shape, dtype))
