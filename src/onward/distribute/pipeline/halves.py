"""A backward loop as two: what the stage before waits for, turn by turn, then the gradients of parameters.

The first loop stacks what the second one reads of each of its turns, and no product is computed twice.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])
>>> def grads(w, x):
...     return jax.grad(loss, (0, 1))(w, x)
>>> program = ow.trace(grads, jnp.ones((4, 3, 3)), jnp.ones((8, 3)))
>>> loop = program.ops[-1]
>>> [v.type for v in loop.outputs]
['float32[8,3]', 'float32[4,3,3]']
>>> first, then = in_halves(loop, [0], Names())
>>> [v.type for v in first.outputs], [v.type for v in then.outputs]
(['float32[8,3]', 'float32[4,8,3]'], ['float32[4,3,3]'])
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from onward.core.cost import cost, size
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.loops import gives_results, result_of
from onward.core.names import Names
from onward.core.program import Op, Variable
from onward.core.turn import ScanTurn

_WORTH = 0.1  # the least share of the operations of a loop for which it becomes two


def in_halves(op: Op, wanted: Collection[int], names: Names) -> tuple[Op, Op] | None:
    """A loop that gives these outputs, and one that computes the others of what it hands on.

    None where it is no ``scan``, or where hardly anything is left for the second one.

    Args:
        op: maybe a loop.
        wanted: which of its outputs come first.
        names: for what the first loop hands to the second.
    """
    turn = ScanTurn.of(op.body)
    if turn is None or op.body.has_effects or not gives_results(op.body):
        return None
    halves = _Halves(op, turn, wanted)
    return halves.ops(names) if halves.is_worth_it else None


class _Halves:
    """The parts of a turn: for results that come first, and for the others.

    Attributes:
        first: the results of the loop that come first, with what turns carry on for them.
        then: the others.
        handed: what the second loop reads of a turn of the first.
    """

    def __init__(self, op: Op, turn: ScanTurn, wanted: Collection[int]) -> None:
        self._op, self._turn = op, turn
        self._results = [result_of(op.body, j) for j in range(len(op.outputs))]
        program = turn.program
        self.first, read = self._closed({self._results[j] for j in wanted}, frozenset())
        made = [v for o in program.ops if not read.isdisjoint(o.outputs) for v in o.outputs]
        self.first |= {i for i in self._results if i >= turn.count_carried and program.outputs[i] in made}
        again = {v for o in program.ops if _is_cheap_again(o) for v in o.outputs}
        carried = [v for i, v in enumerate(turn.carried) if i in self.first]
        given = [*carried, *(v for v in made if v not in again)]
        self.then, read = self._closed({*self._results} - self.first, frozenset(given))
        self.handed = [v for v in given if v in read]
        late = [o for o in program.ops if not read.difference(given).isdisjoint(o.outputs)]
        self.is_worth_it = _flops(late) >= _WORTH * _flops(program.ops) > 0

    def ops(self, names: Names) -> tuple[Op, Op]:
        """Both loops."""
        kind, length = self._op.type, self._turn.length
        saved = [Variable(names.new(f"saved({kind})"), (length, *v.shape), v.dtype) for v in self.handed]
        return self._loop(self.first, made=saved), self._loop(self.then, given=saved)

    def _closed(self, results: set[int], given: frozenset[Variable]) -> tuple[set[int], set[Variable]]:
        """These results with what turns carry on for them, and all that they are computed of.

        What is ``given`` is read, and not computed.
        """
        program, carried = self._turn.program, self._turn.carried
        while True:
            read = {program.outputs[i] for i in results}
            for op in reversed(program.ops):
                if not read.isdisjoint(op.outputs) and not given.issuperset(read.intersection(op.outputs)):
                    read.update(op.inputs)
            more = {i for i, v in enumerate(carried) if v in read and v not in given} - results
            if not more:
                return results, read
            results = results | more

    def _loop(self, results: set[int], made: Sequence[Variable] = (), given: Sequence[Variable] = ()) -> Op:
        """The loop of these results, which stacks what is handed on, or is given the stacks."""
        op, turn = self._op, self._turn
        cut, also = self.handed if given else [], self.handed if made else []
        order = sorted(results)
        wanted = [*(turn.program.outputs[i] for i in order), *also]
        read = self._closed(results, frozenset(cut))[1].union(also).difference(cut)
        fixed, rows = ([v for v in group if v in read] for group in (turn.fixed, turn.cut))
        carried = [turn.carried[i] for i in order if i < turn.count_carried]
        compute = turn.computed([*fixed, *carried, *rows, *cut], wanted)
        operand = dict(zip(turn.program.inputs, turn.operands, strict=True))
        places = {x: None for v in (*fixed, *carried, *rows) if isinstance(x := operand[v], int)}
        outputs = [j for j, result in enumerate(self._results) if result in results]

        def run(*values: Any) -> list[Any]:
            at = dict(zip(places, values, strict=False))
            groups = ([operand[v] for v in group] for group in (fixed, carried, rows))
            same, start, own = ([at[x] if isinstance(x, int) else x for x in group] for group in groups)
            stacks = values[len(places) :]
            found = turn.loop(lambda *now: compute(*same, *now), start, [*own, *stacks])
            by_result = dict(zip(order, found, strict=False))
            return [*(by_result[self._results[j]] for j in outputs), *found[len(order) :]]

        inputs = (*(op.inputs[x] for x in places), *given)
        body = body_of(run, *(v.aval for v in inputs))
        return replace(op, inputs=inputs, outputs=(*(op.outputs[j] for j in outputs), *made), body=body)


def _is_cheap_again(op: Op) -> bool:
    """Whether it only moves numbers, and takes no more bytes than it gives."""
    moved = op.primitive.moves is not None
    return moved and sum(map(size, op.inputs)) <= sum(map(size, op.outputs))


def _flops(ops: Sequence[Op]) -> float:
    return sum(cost(op).flops for op in ops)
