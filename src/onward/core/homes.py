"""Where an op belongs: beside which forward op, and in which scope people look for it.

A gradient op belongs to the forward op it differentiates, a sum of gradients where the gradient op belongs
that reads it, an update op to the op that first reads its parameter. Where a Program does not say what an op
belongs to, the flow of its values does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onward.core.calls import called_scopes
from onward.core.check import expect_program
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers, producers
from onward.core.words import Kind, Pass

Homes = Mapping[Op, Op | None]


def spine_of(program: Program) -> tuple[Op, ...]:
    """The ops in whose order a picture goes down: the forward ops; if there are none, the backward ops."""
    for made_by in Pass:
        found = tuple(op for op in program.ops if op.made_by is made_by)
        if found:
            return found
    return ()


def homes(program: Program) -> Homes:
    """For each op the forward op it belongs to; None where it belongs to several, or to none.

    Args:
        program: at any stage; one without forward ops is led by its backward ops.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(x @ w), jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> found = homes(program)
        >>> [(op.type, found[op].type) for op in program.ops if op.type in ("dot_general_grad", "sgd")]
        [('dot_general_grad', 'dot_general'), ('sgd', 'dot_general')]
    """
    expect_program(program, "homes")
    return _Homes(program, spine_of(program)).found()


def scopes(program: Program) -> Mapping[Op, str]:
    """For each op the scope in which people look for it: its own, or that of the op it belongs to.

    Where nobody named a scope, the calls of the user's functions are it: ``called_scopes``.

    Args:
        program: at any stage.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     with jax.named_scope("layer"):
        ...         y = x @ params
        ...     return total(y)
        >>> def total(y):
        ...     return jnp.sum(y)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> [(op.type, scope) for op, scope in scopes(program).items() if op.made_by is not ow.Pass.BACKWARD]
        [('dot_general', 'layer'), ('reduce_sum', 'total'), ('count', ''), ('sgd', 'layer')]
    """
    found = homes(program)
    named = called_scopes(spine_of(program))
    return {op: named.get(home, home.scope) if home is not None else op.scope for op, home in found.items()}


def own_scopes(program: Program) -> Mapping[Op, str]:
    """For each op the scope that it stands in itself: as it is named, else by the calls that led to it.

    A gradient op stands where its forward op does, an update in no scope but one that was named.
    """
    found = homes(program)
    named = called_scopes(spine_of(program))

    def scope(op: Op) -> str:
        home = found[op] if op.made_by in (Pass.FORWARD, Pass.BACKWARD) else None
        called = "" if home is None else named.get(home, home.scope)
        return op.scope if home is None or called == home.scope else called

    return {op: scope(op) for op in program.ops}


def scoped_names(program: Program) -> Mapping[Variable, str]:
    """The names of what is computed in scopes that nobody named, below these.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def layer(x):
        ...     return jnp.tanh(x)
        >>> program = ow.trace(lambda w: jnp.sum(layer(layer(w))), jnp.ones(3))
        >>> list(scoped_names(program).values())
        ['layer_0/tanh', 'layer_1/tanh_1']
    """
    named = called_scopes(spine_of(program))
    called = ((op, scope) for op, scope in named.items() if scope != op.scope)
    return {v: f"{scope}/{v.name}" for op, scope in called for v in op.outputs}


class _Homes:
    """The search for homes: first those that ops declare, then what neighbours tell."""

    def __init__(self, program: Program, spine: Sequence[Op]) -> None:
        self.program = program
        self.place = {op: i for i, op in enumerate(spine)}
        self.makers = producers(program)
        self.readers = consumers(program)
        self.homes: dict[Op, Op | None] = {op: op for op in spine}
        self.before: dict[Variable, list[Variable]] = {}
        for old, new in program.next_state.items():
            self.before.setdefault(new, []).append(old)

    def found(self) -> Homes:
        """The home of every op."""
        gradients = list(self.others(Pass.BACKWARD))
        for op in gradients:
            if (home := self.maker(op.of)) is not None:
                self.homes[op] = home
        for op in reversed(gradients):
            if op not in self.homes:
                self.homes[op] = self.of_reader(op)
        for op in gradients:
            if self.homes[op] is None:
                self.homes[op] = self.of_flow(op) or self.maker(self.program.loss)
        for op in self.others(Pass.COLLECTIVE, Pass.UPDATE):
            self.homes[op] = self.of_update(op)
        for op in reversed(list(self.others(Pass.COLLECTIVE, Pass.UPDATE))):
            if self.homes[op] is None:
                self.homes[op] = self.common(
                    self.homes[r] for v in op.outputs for r in self.readers.get(v, ())
                )
        return {op: self.homes[op] for op in self.program.ops}

    def others(self, *passes: Pass) -> Iterable[Op]:
        return (op for op in self.program.ops if op.made_by in passes and op not in self.place)

    def maker(self, v: Variable | None) -> Op | None:
        """The op of the spine that makes a Variable; a loop of micro-batches is none of it."""
        op = None if v is None else self.makers.get(v)
        return op if op in self.place else None

    def of_reader(self, op: Op) -> Op | None:
        """The home of the first gradient op that reads this one and has a home."""
        readers = (r for v in op.outputs for r in self.readers.get(v, ()) if r.made_by is Pass.BACKWARD)
        return next((home for r in readers if (home := self.homes.get(r)) is not None), None)

    def of_flow(self, op: Op) -> Op | None:
        """The last forward op whose values it reads; else the first that the gradients it reads lead to."""
        forward = [self.makers[v] for v in op.inputs if v in self.makers and self.makers[v] in self.place]
        if forward:
            return max(forward, key=self.place.__getitem__)
        near = [self.above(v, home) for v in op.inputs if v in self.makers and (home := self.home(v))]
        return min(near, key=self.place.__getitem__) if near else None

    def home(self, v: Variable) -> Op | None:
        return self.homes.get(self.makers[v])

    def above(self, gradient: Variable, home: Op) -> Op:
        """The op that made the first input of ``home`` with the gradient's dtype and shape; else ``home``."""
        makers = (self.makers.get(v) for v in home.inputs if v.type == gradient.type)
        return next((maker for maker in makers if maker in self.place), home)

    def of_update(self, op: Op) -> Op | None:
        """The first reader of the state that it updates; else the common home of the ops it reads from."""
        replaced = [old for v in op.outputs for old in self.before.get(v, ())]
        trained = [old for old in replaced if old.kind is Kind.PARAMETER] or replaced
        if (home := self.common(filter(None, map(self.first_reader, trained)))) is not None:
            return home
        made = (self.makers[v] for v in op.inputs if v in self.makers)
        return self.common(self.homes.get(maker) for maker in made if self.homes.get(maker) is not None)

    def first_reader(self, v: Variable) -> Op | None:
        return next((reader for reader in self.readers.get(v, ()) if reader in self.place), None)

    def common(self, homes: Iterable[Op | None]) -> Op | None:
        """The one home that all of these are."""
        different = set(homes)
        return different.pop() if len(different) == 1 else None
