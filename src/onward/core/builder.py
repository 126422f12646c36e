"""A builder of Programs: adds ops and state to one, under names that are free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.core.check import check
from onward.core.jaxprs.body import Body, body_of
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import substitute
from onward.core.words import Kind, Pass, Placement, UpdateType


class Builder:
    """The ops so far, the state that was added, what replaces state, new names, and names that are free.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    >>> builder = Builder(program, program.ops)
    >>> double = body_of(lambda x: [2 * x], jax.ShapeDtypeStruct((), jnp.float32))
    >>> (twice,) = builder.add("double", [program.loss], ["twice"], double)
    >>> builder.program(outputs=(twice,)).ops[-1]
    twice = double(2.0, reduce_sum)

    Args:
        source: the Program that grows.
        ops: those that stand already; others are woven in one by one, with ``append``.
        taken: the names that are not free; those of all Variables of the source unless given.
        made_by: the pass whose ops are added.
    """

    def __init__(
        self,
        source: Program,
        ops: Iterable[Op] = (),
        *,
        taken: Iterable[str] | None = None,
        made_by: Pass = Pass.FORWARD,
    ) -> None:
        self.source = source
        self.names = Names(source.variables if taken is None else taken)
        self.state: list[Variable] = []
        self.initializers: list[Op] = []
        self.next_state: dict[Variable, Variable] = {}
        self.renamed: dict[Variable, Variable] = {}
        self._ops = list(ops)
        self._made_by = made_by
        self._made: dict[Hashable, Any] = {}

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops so far."""
        return tuple(self._ops)

    def append(self, op: Op) -> None:
        """Add an op that is there already."""
        self._ops.append(op)

    def add(
        self,
        kind: str,
        inputs: Sequence[Variable],
        outputs: Sequence[str | Variable],
        body: Body | Callable[..., list[Any]],
        update: UpdateType | None = None,
        replaces: Sequence[Variable] = (),
        **fields: Any,
    ) -> tuple[Variable, ...]:
        """Add an op; returns what it computes.

        Args:
            kind: its type, in a word.
            inputs: what it reads.
            outputs: what it computes: Variables, or names for new ones, which get a number if they are taken.
            body: how; or the function of what it reads.
            update: how far it looks, if it is one of the update pass.
            replaces: state Variables whose next values it computes, behind ``outputs``.
            fields: of the ``Op``, such as ``scope``.
        """
        body = body if isinstance(body, Body) else body_of(body, *(v.aval for v in inputs))
        types = zip([*outputs, *(f"next({v.name})" for v in replaces)], body.out_avals, strict=True)
        made = tuple(self.named(v, t) if isinstance(v, str) else v for v, t in types)
        self.follow(dict(zip(replaces, made[len(outputs) :], strict=True)))
        told = {"made_by": self._made_by, **fields}
        self._ops.append(Op(kind, tuple(inputs), made, body, update=update, **told))
        return made

    def behind(
        self, v: Variable, kind: str, body: Body | Callable[..., list[Any]], name: str = "", **fields: Any
    ) -> Variable:
        """The result of an op that reads this Variable alone, named ``kind(v)`` unless told otherwise."""
        return self.add(kind, [v], [name or f"{kind}({v.name})"], body, **fields)[0]

    def named(self, name: str, like: Any, kind: Kind = Kind.ACTIVATION) -> Variable:
        """A new Variable of the shape and dtype of another, by this name or the next one that is free."""
        return Variable(self.names.new(name), tuple(like.shape), like.dtype, kind)

    def carry(
        self,
        name: str,
        first: Callable[[], Any] | Body,
        kind: str = "constant",
        placement: Placement = Placement.REPLICATED,
        reads: Sequence[Variable] = (),
    ) -> Variable:
        """Add a state Variable that begins with what ``first`` computes.

        Args:
            name: its name, if it is free.
            first: the first value.
            kind: the type of the op that makes it.
            placement: where it lies.
            reads: the state that ``first`` is computed of, if it is a Body that reads some.
        """
        body = first if isinstance(first, Body) else body_of(lambda: [first()])
        v = replace(self.named(name, body.out_avals[0], Kind.STATE), placement=placement)
        self.state.append(v)
        self.initializers.append(Op(kind, tuple(reads), (v,), body, self._made_by))
        return v

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of ``make()``, which is called once for each key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def follow(self, pairs: Mapping[Variable, Variable]) -> None:
        """Let state Variables be replaced by these after a step."""
        self.next_state.update(pairs)

    def rename(self, v: Variable, name: str) -> None:
        """Let a Variable of the Program have this name, or the next one that is free, wherever it stands."""
        self.renamed[v] = replace(v, name=self.names.new(name))

    def program(self, **changes: Any) -> Program:
        """The checked Program with these ops, this state and these names."""
        grown = replace(
            self.source,
            ops=self.ops,
            state=(*self.source.state, *self.state),
            next_state={**self.source.next_state, **self.next_state},
            initializers=(*self.source.initializers, *self.initializers),
            **changes,
        )
        return check(substitute(grown, self.renamed) if self.renamed else grown)


def op_of(
    kind: str,
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    function: Callable[..., list[Any]],
    made_by: Pass,
    **fields: Any,
) -> Op:
    """The op that computes a function of these Variables."""
    body = body_of(function, *(v.aval for v in inputs))
    return Op(kind, tuple(inputs), tuple(outputs), body, made_by, **fields)


def with_behind(
    program: Program, chosen: Container[Variable], kind: str, word: str, body: Callable[[Variable], Body]
) -> Program:
    """The Program with an op behind each chosen value, which all later ops read in place of it.

    Args:
        program: the Program.
        chosen: values that ops compute.
        kind: the type of the new ops.
        word: the name of the new value of ``v`` is ``word(v)``.
        body: computes the new value, of the same type.
    """
    builder = Builder(program)
    instead: dict[Variable, Variable] = {}
    for op in program.ops:
        is_read = not instead.keys().isdisjoint(op.inputs)
        builder.append(replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)) if is_read else op)
        for v in (v for v in op.outputs if v in chosen):
            instead[v] = replace(v, name=builder.names.new(f"{word}({v.name})"))
            builder.append(Op(kind, (v,), (instead[v],), body(v), op.made_by, op.scope, op.source))
    return replace(program, ops=builder.ops)


def given_way(program: Program, taken: Collection[str]) -> dict[Variable, Variable]:
    """For each value that ops compute under a name that is taken, the same one by a name that is free."""
    names = Names((*taken, *program.variables))
    computed = (v for op in program.ops for v in op.outputs if v.name in taken)
    return {v: replace(v, name=names.new(v.name)) for v in computed}
