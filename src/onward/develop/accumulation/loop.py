"""The forward and backward pass as one op, which runs them on micro-batches one after the other.

Given a Program and the same Program at the size of a micro-batch, ``with_loop`` tells which ops go into the
loop and which read what the loop made, and wires the one op between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.check import check
from onward.core.errors import GraphError
from onward.core.homes import own_scopes
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.tracing import along, traced
from onward.core.lower import lower
from onward.core.marks import ACCUMULATE
from onward.core.names import Names
from onward.core.program import Op, Partition, Program, Variable, programs_within
from onward.core.words import Pass
from onward.develop.accumulation.loop_ops import LoopCut, expect_no_data_in_updates, expect_same_graph
from onward.develop.accumulation.micro_batches import Accumulation, CutBatch, Values
from onward.develop.accumulation.statistics import numbers_of
from onward.develop.over_batch.known import Follows, How


class MicroBatchLoop(Body):
    """The body of an ``accumulate`` op, which lets the Program of one iteration be inspected."""

    def __init__(self, closed: Any, plan: LoopPlan) -> None:
        super().__init__(closed)
        self.plan, self.turn = plan, plan.turn

    @property
    def attributes(self) -> Mapping[str, str]:
        """How many micro-batches there are."""
        return {"steps": str(self.plan.how.steps)}

    def over_mesh(self, how: Partition) -> Body:
        """The same loop where each micro-batch is split over a mesh as the batch is."""
        return self.plan.over(how).op().body


@programs_within.register
def _programs_within(body: MicroBatchLoop) -> Mapping[str, Program]:
    """The Program that is run on each micro-batch."""
    return {"micro_batch": body.turn}


def with_loop(program: Program, micro: Program, how: Accumulation) -> Program:
    """The Program whose forward and backward pass are one op, a loop over those of ``micro``.

    What other ops, outputs and the next state read stays the same Variables.

    Raises:
        GraphError: a value that cannot be put together from those of micro-batches, state as long as the
            batch, or an update that looks at the batch itself.
        RecipeError: at the size of a micro-batch the function builds another graph.
    """
    whole, part = (LoopCut(p, how) for p in (program, micro))
    expect_same_graph(whole, part)
    expect_no_data_in_updates(whole, how.split)
    plan = LoopPlan(whole, part, how)
    op = plan.op()
    ops = (*whole.before, op, *whole.after)
    carried = {program[old.name]: new for old, _, new in plan.threaded}
    guarded = {old for old, new in program.next_state.items() if new in whole.proposed}
    following = {
        old: new if old in guarded else carried.get(old, new) for old, new in program.next_state.items()
    }
    read = {v for o in ops for v in o.inputs} | {
        *program.outputs,
        *following.values(),
        *(g for _, g in program.gradients),
    }
    constants = {v: value for v, value in program.constants.items() if v in read}
    return replace(program, ops=ops, next_state=following, constants=constants)


@dataclass(frozen=True)
class LoopResult:
    """The result of the loop for a Variable: a sum over micro-batches, or made of all their values.

    These are laid along an axis, or the ``extreme`` of them is taken.
    """

    whole: Variable
    part: Variable
    axis: int | None
    is_weighed: bool
    extreme: How | None = None

    @property
    def is_sum(self) -> bool:
        """Whether nothing has to be kept of a micro-batch but what it adds."""
        return self.axis is None and self.extreme is None

    @property
    def sum_type(self) -> Type:
        """The type of the sum: floats in float32 or more."""
        dtype = self.part.dtype
        wide = jnp.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, np.inexact) else dtype
        return Type(self.part.shape, wide)

    def joined(self, parts: Any) -> Any:
        """The array of the whole batch from ``[steps, ...]``, without the padding."""
        if self.extreme is not None:
            if self.extreme is How.SAME:  # maybe a key, which has no extreme
                return parts[0]
            return jnp.min(parts, 0) if self.extreme is How.LEAST else jnp.max(parts, 0)
        if not self.whole.size:
            return jnp.zeros(self.whole.shape, self.whole.dtype)
        assert self.axis is not None
        laid = jnp.moveaxis(parts, 0, self.axis)
        shape = (*self.part.shape[: self.axis], -1, *self.part.shape[self.axis + 1 :])
        whole = lax.slice_in_dim(laid.reshape(shape), 0, self.whole.shape[self.axis], axis=self.axis)
        return whole.astype(self.whole.dtype) if self.is_weighed else whole


def _is_extreme(v: Variable, follows: Follows) -> bool:
    """Whether a value is that of one micro-batch: the largest, the smallest, or the same in all."""
    is_same = follows == Follows(How.SAME) and not v.is_float
    return is_same or follows.kind in (How.MOST, How.LEAST)


class LoopPlan:
    """The plan of the loop: the Variables that it is given, carries, adds up and joins.

    Attributes:
        turn: the Program of one micro-batch.
        threaded: state of the micro-batch, what replaces it there, and what does in the whole Program.
        sums: the results that are added up.
        joined: those that are made of the values of all micro-batches.
        batch: the batch as micro-batches.
    """

    def __init__(self, whole: LoopCut, part: LoopCut, how: Accumulation) -> None:
        self.whole, self.part, self.how = whole, part, how
        self.long, self.short = how.rows(whole.program), how.rows(part.program)
        self.of_loss = whole.merged_into([whole.program.loss])
        told = whole.told_of(dict(how.told))
        self.added = {v for v, follows in told.items() if follows == Follows(How.MEAN, 1)}
        self.extremes = {v: follows.kind for v, follows in told.items() if _is_extreme(v, follows)}
        numbers = numbers_of(part.program, part.read)
        names = Names(whole.program.variables)
        self.threaded = tuple(self._thread(old, new, names) for old, new in part.threaded.items())
        found: dict[Variable, LoopResult] = {}
        carried = {new for _, _, new in self.threaded}
        for v, p in zip(whole.ports, part.ports, strict=True):
            if v in whole.made and v not in carried and v not in found:
                found[v] = self._result(v, p)
        self.sums = tuple(r for r in found.values() if r.is_sum)
        self.joined = tuple(r for r in found.values() if not r.is_sum)
        self.turn = self._turn(numbers)
        given = (*(v for v in self.turn.inputs if v.name in how.split), *numbers)
        self.batch = CutBatch(whole.program, how, given, numbers)

    def with_turn(self, turn: Program, sums: tuple[LoopResult, ...]) -> LoopPlan:
        """The same with another Program of a turn, whose results are these sums and what is joined."""
        found = copy(self)
        found.turn, found.sums = turn, sums
        return found

    def over(self, mesh: Partition) -> LoopPlan:
        """The same where each micro-batch is split over a mesh as the batch is."""
        found = copy(self)
        found.batch = replace(self.batch, mesh=mesh)
        return found

    @cached_property
    def before(self) -> Mapping[Variable, Variable]:
        """The Variables made before the loop, by those that stand for them in a turn."""
        made, whole = ([v for op in cut.before for v in op.outputs] for cut in (self.part, self.whole))
        return dict(zip(made, whole, strict=True))

    def _thread(self, old: Variable, new: Variable, names: Names) -> tuple[Variable, Variable, Variable]:
        """State of the micro-batch, the Variable that replaces it there, and the one in the whole Program."""
        program = self.whole.program
        mine = program[old.name]
        if (mine.shape, mine.dtype) != (old.shape, old.dtype):
            raise GraphError(
                f"{program.name}: the state {old.name!r} is {mine.type} for the batch and {old.type} for a "
                "micro-batch. accumulate hands state on from one micro-batch to the next: keep none that is "
                "as long as the batch."
            )
        following = self.whole.following[mine]
        if following not in self.whole.made:  # another state Variable, as it was before the last turn
            if following is not program.next_state[mine]:
                raise GraphError(
                    f"{program.name}: {old.name!r} takes the value of another state Variable, and a guard "
                    "stands between them. Accumulate first: guard(accumulate(program, steps))."
                )
            following = Variable(names.new(f"next({old.name})"), old.shape, old.dtype)
        return old, new, following

    def _result(self, whole: Variable, part: Variable) -> LoopResult:
        """How a Variable of the whole batch comes from those of the micro-batches."""
        lengths = zip(whole.shape, part.shape, strict=False)
        grown = [axis for axis, (n, m) in enumerate(lengths) if n != m]
        fits = len(whole.shape) == len(part.shape) and len(grown) <= 1
        if grown and fits:
            fits = whole.shape[grown[0]] * self.short == part.shape[grown[0]] * self.long
        if fits and not grown and whole in self.extremes:
            return LoopResult(whole, part, None, False, self.extremes[whole])
        if not fits or not (grown or jnp.issubdtype(whole.dtype, np.number)):
            raise GraphError(
                f"{self.whole.program.name}: {whole.name!r} is {whole.type} for the batch and {part.type} "
                "for a micro-batch, and nothing says how to put it together, for it "
                f"{'is not a number' if fits else 'grows in another way than the batch'}. Return and carry "
                "floats, which are averaged, integers, which are summed, or arrays with one axis as long as "
                "the batch."
            )
        of_loss = whole in self.whole.late or whole in self.of_loss
        is_mean = not (self.how.is_sum and of_loss) and whole not in self.added
        weighed = whole.is_float and is_mean and (not grown or whole in self.whole.late)
        return LoopResult(whole, part, grown[0] if grown else None, weighed)

    def _turn(self, numbers: tuple[Variable, ...]) -> Program:
        """The Program of one turn."""
        micro, cut = self.part.program, self.part
        read = cut.read | {v for old, new, _ in self.threaded for v in (old, new)}
        results = tuple(r.part for r in (*self.sums, *self.joined))
        fed = [v for op in cut.before for v in op.outputs if v in cut.read]
        return check(
            replace(
                micro,
                name="micro_batch",
                inputs=(
                    *(v for v in micro.inputs if v in read or v.name == self.how.weight),
                    *fed,
                    *numbers,
                ),
                state=tuple(v for v in micro.state if v in read),
                constants={v: x for v, x in micro.constants.items() if v in read and v not in numbers},
                ops=cut.loop,
                outputs=results,
                next_state={old: new for old, new, _ in self.threaded},
                gradients=tuple((p, g) for p, g in micro.gradients if g in cut.made and p in read),
                initializers=(),
                loss=micro.loss if micro.loss in cut.made else None,
                hyperparameters=tuple(v for v in micro.hyperparameters if v in read),
                signature=None,
                recipe=None,
            )
        )

    def op(self) -> Op:
        """The one op."""
        turn, program = self.turn, self.whole.program
        given = {v.name: v for v in (*program.inputs, *program.state)}
        read = [v for v in (*turn.inputs, *turn.state) if v not in self.batch.numbers]
        inputs = {v: self.before.get(v) or given[v.name] for v in read}
        position = {v: i for i, v in enumerate(v for op in program.ops for v in op.outputs)}
        outputs = [*(new for *_, new in self.threaded), *(r.whole for r in (*self.sums, *self.joined))]
        outputs.sort(key=lambda v: position.get(v, len(position)))

        def run(*values: Any) -> list[Any]:
            found = self.run(dict(zip(inputs, values, strict=True)))
            return [found[v] for v in outputs]

        axis = program.replicas
        with nullcontext() if axis is None else along(axis):
            closed = traced(run, *(v.aval for v in inputs.values()))
        body = MicroBatchLoop(closed, self)
        return Op(ACCUMULATE, tuple(inputs.values()), tuple(outputs), body, Pass.BACKWARD)

    def run(self, env: Values) -> Values:
        """The values that the loop makes, from those it is given."""
        pieces = self.batch.pieces(env)
        scales = self.batch.scales(pieces)

        def body(carry: Any, given: Any) -> tuple[Any, list[Any]]:
            own = (*(old for old, *_ in self.threaded), *self.batch.given)
            mine = dict(zip(own, (*carry[0], *given[0]), strict=True))
            state, added, parts = self._one({**env, **mine}, given[1])
            sums = [total + x.astype(total.dtype) for total, x in zip(carry[1], added, strict=True)]
            return (state, sums), parts

        zeros = [jnp.zeros(r.sum_type.shape, r.sum_type.dtype) for r in self.sums]
        start = [env[old] for old, *_ in self.threaded]
        (state, sums), parts = lax.scan(body, (start, zeros), (pieces, scales), self.how.steps)
        return {
            **{new: x for (*_, new), x in zip(self.threaded, state, strict=True)},
            **{r.whole: x.astype(r.whole.dtype) for r, x in zip(self.sums, sums, strict=True)},
            **{r.whole: r.joined(x) for r, x in zip(self.joined, parts, strict=True)},
        }

    def _one(self, env: Values, scale: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Of one micro-batch the next state, what is added to the sums, and what is joined."""
        turn, count = self.turn, len(self.threaded)
        run = lower(turn, [*(new for _, new, _ in self.threaded), *turn.outputs], scopes=own_scopes(turn))
        found = run([env[v] for v in turn.state], [env[v] for v in turn.inputs])
        pairs = zip((*self.sums, *self.joined), found[count:], strict=True)
        scaled = [self.share(r, x, scale) for r, x in pairs]
        return list(map(_strong, found[:count])), scaled[: len(self.sums)], scaled[len(self.sums) :]

    def share(self, result: LoopResult, x: Any, scale: Any) -> Any:
        """The share of a micro-batch in a result; of a mean 0 if none of its examples counts, even if NaN."""
        if not result.is_weighed:
            return x
        wide = x.astype(jnp.promote_types(x.dtype, np.float32))
        if scale is None:
            return wide * (1 / self.how.steps)
        return jnp.where(scale == 0, 0, wide * scale)


def _strong(x: Any) -> Any:
    """A value whose dtype is not weak, as the state it replaces is."""
    return x.astype(x.dtype) if jnp.issubdtype(x.dtype, np.number) else x
