"""The backward pass that computes again what was not kept, each segment once its gradient arrives.

Before the first op of the backward pass that needs something of a segment stands one
``optimization_barrier``, through which pass the kept values that the segment is computed from, and the
gradient that arrives. Without it XLA would see the same computation twice and merge both.

XLA for CPU forgets barriers before it puts ops in order, and would run the second computation right after the
first. So behind the barrier one number of each kept value is written once more, by a choice that reads the
gradient: NaN if that is NaN, which the gradients computed from both would be anyway, else the same number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.marks import Mark
from onward.core.names import Names
from onward.core.program import Op, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.variable import holds_keys
from onward.core.words import Pass
from onward.develop.recompute.activations import Activations

BARRIER = Mark("optimization_barrier")


@transform(phase=Phase.BACKWARD)
def keeping(program: Program, kept: tuple[str, ...], begins: tuple[str, ...], tied: bool = True) -> Program:
    """Keep the values of the forward pass with these names; recompute all else that the backward pass reads.

    Adds ops, and changes what ops of the backward pass read. ``begins``: what the first op of each segment
    computes. A name that no Variable has is passed over. ``tied``: let kept values wait for the gradient that
    arrives, also where barriers are forgotten; within a turn of a loop that has no forward pass of its own
    there is nothing to keep apart.

    Raises:
        GraphError: most of these names are unknown.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.exp(x @ w)))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 3)), jnp.ones((4, 3)))
        >>> names = list(keeping(program, ("dot_general",), ()).variables)
        >>> "again(exp)" in names, "again(dot_general)" in names
        (True, False)
    """
    known = program.variables
    if kept and 2 * sum(name in known for name in kept) < len(kept):
        raise GraphError(
            f"Program {program.name!r} lacks most of the activations that recompute chose to keep: a "
            "transform put others in their place. Recompute after it: recompute(roll(program), budget)."
        )
    found = Activations(program, [known[name] for name in kept if name in known])
    return _Recomputing(found, set(begins), tied).program()


class _Recomputing:
    """One walk over the ops: ``stands[v]`` is what an op of the backward pass reads in place of v."""

    def __init__(self, found: Activations, begins: set[str], tied: bool) -> None:
        self.found, self.tied = found, tied
        self.names = Names(found.program.variables)
        forward = found.forward
        self.begins = [i for i, op in enumerate(forward) if any(v.name in begins for v in op.outputs)]
        self.needed = self._needed()
        self.again = sorted({found.position[v] for v in self.needed})
        self.stands: dict[Variable, Variable] = {}
        self.begun: set[int] = set()
        self.ops: list[Op] = []

    def _needed(self) -> set[Variable]:
        """The values to recompute: those that the backward pass reads but does not have, and their inputs."""
        found = self.found
        needed = found.read - found.there
        for op in reversed(found.forward):
            if not needed.isdisjoint(op.outputs):
                needed.update(v for v in op.inputs if v not in found.there)
        return needed

    def program(self) -> Program:
        """The Program whose backward pass reads what is computed again."""
        for op in self.found.program.ops:
            self.ops.append(self._served(op) if op.made_by is Pass.BACKWARD else op)
        read = {v for op in self.ops for v in op.inputs}
        read |= {*self.found.program.outputs, *self.found.program.next_state.values()}
        return replace(self.found.program, ops=tuple(_without_residuals(op, read) for op in self.ops))

    def _served(self, op: Op) -> Op:
        """An op of the backward pass that reads what was computed again just before it."""
        missing = [v for v in op.inputs if v in self.needed]
        gradients = {v: v for v in op.inputs if v not in self.found.made and v not in self.found.there}
        for i in sorted(self._makers(missing)):
            segment = bisect_right(self.begins, i)
            if segment not in self.begun:
                self.begun.add(segment)
                gradients.update(self._barrier(segment, list(gradients.values()), gradients))
            self._run_again(self.found.forward[i])
        new = {**self.stands, **gradients}
        if new.keys().isdisjoint(op.inputs):
            return op
        return replace(op, inputs=tuple(new.get(v, v) for v in op.inputs))

    def _makers(self, missing: Iterable[Variable]) -> set[int]:
        """The ops, by their numbers, that have to run again for these."""
        makers: set[int] = set()
        open_ = [v for v in missing if v not in self.stands]
        while open_:
            i = self.found.position[open_.pop()]
            if i not in makers:
                makers.add(i)
                inputs = self.found.forward[i].inputs
                open_ += [v for v in inputs if v in self.needed and v not in self.stands]
        return makers

    def _barrier(
        self, segment: int, arriving: Sequence[Variable], names: dict[Variable, Variable]
    ) -> dict[Variable, Variable]:
        """Put the inputs of a segment and the arriving gradients behind a barrier; return the gradients."""
        ops = [self.found.forward[i] for i in self.again if bisect_right(self.begins, i) == segment]
        leaves = list(dict.fromkeys(v for op in ops for v in self._leaves(op)))
        inputs = (*(self.stands.get(v, v) for v in leaves), *arriving)
        outputs = tuple(replace(v, name=self.names.new(f"barrier({v.name})")) for v in (*leaves, *arriving))
        self.ops.append(
            Op(
                type=BARRIER,
                inputs=inputs,
                outputs=outputs,
                body=_barrier_of(tuple(v.aval for v in inputs), len(leaves) if self.tied else len(inputs)),
                made_by=Pass.BACKWARD,
                scope=ops[0].scope,
            )
        )
        self.stands.update(zip(leaves, outputs, strict=False))
        behind = dict(zip(arriving, outputs[len(leaves) :], strict=True))
        return {v: behind[now] for v, now in names.items()}

    def _leaves(self, op: Op) -> list[Variable]:
        """The inputs that a recomputed op reads behind the barrier: enough to differ from the original op."""
        made = [v for v in op.inputs if v in self.found.made and v in self.found.there]
        if made or any(v in self.needed for v in op.inputs):
            return [v for v in made if v in self.found.depends]
        return [v for v in op.inputs if v in self.found.depends]

    def _run_again(self, op: Op) -> None:
        wanted = [j for j, v in enumerate(op.outputs) if v in self.needed]
        body, chosen = op.body, tuple(range(len(op.inputs)))
        if len(wanted) < len(op.outputs):
            body, chosen = op.body.restricted(wanted)
        outputs = [
            replace(op.outputs[j], name=self.names.new(f"again({op.outputs[j].name})")) for j in wanted
        ]
        self.stands.update(zip((op.outputs[j] for j in wanted), outputs, strict=True))
        inputs = tuple(self.stands.get(op.inputs[i], op.inputs[i]) for i in chosen)
        self.ops.append(
            Op(op.type, inputs, tuple(outputs), body, Pass.BACKWARD, op.scope, op.source, of=op.outputs[0])
        )


def _without_residuals(op: Op, read: set[Variable]) -> Op:
    """The op without its residuals, if they are no longer read."""
    if op.primal is None or op.primal.has_custom_rule:
        return op
    count = len(op.primal.out_avals)
    if not read.isdisjoint(op.outputs[count:]):
        return op
    return replace(op, outputs=op.outputs[:count], body=op.primal, primal=None)


@lru_cache(maxsize=1024)
def _barrier_of(types: tuple[Any, ...], leaves: int) -> Body:
    def barrier(*values: Any) -> list[Any]:
        behind = lax.optimization_barrier(values)
        if len(behind) == leaves:
            return list(behind)
        late = jnp.isnan(lax.slice(behind[-1].reshape(-1), (0,), (1,))[0])
        return [*(_tied(x, late) for x in behind[:leaves]), *behind[leaves:]]

    return body_of(barrier, *types)


def _tied(x: Any, late: Any) -> Any:
    """The same array, which cannot be there before a bool that is False."""
    if not x.size or holds_keys(x.dtype):
        return x
    zero = (0,) * x.ndim
    first = lax.slice(x, zero, (1,) * x.ndim)
    none = jnp.nan if jnp.issubdtype(x.dtype, np.inexact) else 0
    return lax.dynamic_update_slice(x, jnp.where(late, jnp.asarray(none, x.dtype), first), zero)
