"""Parameters that several stages read: each adds up its part of the gradient, and sends it once a step.

The gradient of such a parameter, as of an embedding that is also the last layer, is a sum over its readers.
Within the loop over micro-batches every stage would send its part with each of them, so that sum comes after.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean(jnp.tanh(x @ w) @ w.T)
>>> program = ow.accumulate(ow.SGD(0.1).minimize(loss, jnp.ones((3, 8)), jnp.ones((8, 3))), 2)
>>> turn = loop_of(program).turn
>>> apart = summed_in_stages(program, {op: int("_1" in op.outputs[0].name) for op in turn.ops})
>>> [v.name for v in program.ops[0].outputs], [v.name for v in apart.ops[0].outputs]
(['div', 'grad(w)'], ['div', 'grad(w)_1', 'grad(w)_2'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from onward.core.jaxprs.body import body_of
from onward.core.names import Names
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers
from onward.develop.accumulation.loop import LoopPlan, with_loop
from onward.distribute.pipeline.loops import loop_of
from onward.distribute.pipeline.stages import Stages, is_gradient_sum


@dataclass(frozen=True)
class SharedSum:
    """A sum of gradients that several stages have parts of.

    Attributes:
        op: the sum, by the name of its result.
        then: the linear ops that hand it on to where it is added up over micro-batches, such as a cast.
        terms: for each stage which inputs of the sum are made there.
    """

    op: str
    then: tuple[str, ...]
    terms: Mapping[int, Sequence[int]]

    @property
    def result(self) -> str:
        """The name of what is added up over micro-batches."""
        return (self.op, *self.then)[-1]


def summed_in_stages(accumulated: Program, inside: Stages) -> Program:
    """The Program that accumulates, with the sums of gradients of several stages behind its loop.

    Args:
        accumulated: whose loop holds the forward and backward pass.
        inside: the stage of each op of a turn.
    """
    plan = loop_of(accumulated)
    sums = _sums(plan, {v.name: stage for op, stage in inside.items() for v in op.outputs})
    if not sums:
        return accumulated
    whole, part = (_in_groups(cut.program, sums) for cut in (plan.whole, plan.part))
    behind = plan.how.behind.union(found.result for found in sums)
    return with_loop(whole, part, replace(plan.how, behind=behind))


def _sums(plan: LoopPlan, stage: Mapping[str, int]) -> list[SharedSum]:
    """The sums over several stages that nothing else in the loop reads."""
    found = []
    readers, results = consumers(plan.turn), {r.part for r in plan.sums}
    for op in filter(is_gradient_sum, plan.turn.ops):
        v, then = op.outputs[0], list[str]()
        while v not in results and len(read := readers.get(v, ())) == 1 and _hands_on(read[0]):
            (v,) = read[0].outputs
            then.append(v.name)
        terms = dict[int, list[int]]()
        if v in results and v not in readers and all(x.name in stage for x in op.inputs):
            for i, x in enumerate(op.inputs):
                terms.setdefault(stage[x.name], []).append(i)
        if len(terms) > 1:
            found.append(SharedSum(op.outputs[0].name, tuple(then), terms))
    return found


def _hands_on(op: Op) -> bool:
    """Whether an op is linear in one gradient, so that it can be done to each part of a sum."""
    is_one = len(set(op.inputs)) == len(op.outputs) == 1
    return is_one and all(of(primitive).linear is Linear.FIRST for primitive in op.body.primitives)


def _in_groups(program: Program, sums: Sequence[SharedSum]) -> Program:
    """A Program that adds up the gradients of each stage first, and hands on each such sum by itself."""
    names = Names(program.variables)
    made = {op.outputs[0].name: op for op in program.ops if op.outputs}
    replaced: dict[str, list[Op]] = {}

    def another(op: Op) -> Variable:
        return replace(op.outputs[0], name=names.new(op.outputs[0].name))

    for found in sums:
        op, ops, totals = made[found.op], list[Op](), list[Variable]()
        for places in found.terms.values():
            terms = [op.inputs[i] for i in places]
            if len(terms) > 1:
                ops.append(_sum(op, terms, another(op)))
            total = ops[-1].outputs[0] if len(terms) > 1 else terms[0]
            for step in (made[name] for name in found.then):
                ops.append(replace(step, inputs=(total,) * len(step.inputs), outputs=(another(step),)))
                total = ops[-1].outputs[0]
            totals.append(total)
        ops.append(_sum(op, totals, made[found.result].outputs[0]))
        replaced |= {name: [] for name in (found.op, *found.then)} | {found.result: ops}
    groups = (replaced.get(op.outputs[0].name if op.outputs else "", [op]) for op in program.ops)
    return replace(program, ops=tuple(chain.from_iterable(groups)))


def _sum(op: Op, terms: Sequence[Variable], total: Variable) -> Op:
    body = body_of(lambda *x: [sum(x[1:], x[0])], *(v.aval for v in terms))
    return replace(op, inputs=tuple(terms), outputs=(total,), body=body)
