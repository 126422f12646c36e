"""Whether a batch that is filled up with examples of weight 0 gives what its own examples would.

An example that fills up is another one once more, with the weight 0. It adds nothing to a sum of numbers that
are 0 wherever the weight is, whatever the example is: multiplied by it, or chosen by it. Any other sum, a
number of rows that the function was traced with, the largest or smallest of what reads the weights, and what
is computed of several examples side by side may be another one.

>>> import jax.numpy as jnp, onward as ow
>>> from onward.develop.over_batch.walk import follow
>>> def losses(w, x, example_weight):
...     each = (x @ w) ** 2
...     return jnp.mean(each * example_weight), jnp.sum(each), jnp.sum(each * example_weight)
>>> traced = [ow.trace(losses, jnp.ones(3), jnp.ones((n, 3)), jnp.ones(n)) for n in (8, 4)]
>>> following = follow(*traced, 2, {"x", "example_weight"})
>>> for what, why in misled(traced[1], following, "example_weight"):
...     print(what, why)
the result 'div' is divided by a number of rows
the result 'reduce_sum_1' adds up numbers that are not 0 at weight 0
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from onward.core.jaxprs.loops import result_of
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Reduces
from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.develop.over_batch.known import OWN, SAME, Following, How

_COUNTED = "is divided by a number of rows"
_COUNT = "is a number of rows"
_PLAIN = "adds up numbers that are not 0 at weight 0"
_EXTREME = "is the largest or smallest of numbers that read the weights"
_GROUPED = "reads examples in groups, into which others may come"
_NUMBERS = (0.7, -1.3, 2.9, 0.2)  # examples, to see what does not depend on them
_INTEGERS = (1, 3, 2, 5)


def misled(
    part: Program,
    following: Following,
    weight: str,
    behind: Collection[Op] = (),
    of_whole: Collection[tuple[str, str]] = (),
) -> tuple[tuple[str, str], ...]:
    """The loss, results and state that may be other ones where the batch is filled up, in words, and why.

    Args:
        part: the forward Program of a part of the batch.
        following: how it follows that of the whole.
        weight: the name of the data that says how much each example counts.
        behind: the ops that run once, for all parts.
        of_whole: the ops that read a value of the batch as it was fed, by their first result, and that value.
    """
    if weight not in part:
        return ()
    filler, results = _Filler(part, following, {part[weight]: 0}, {part[weight]}), _results(part)
    found = {what: filler.why(v, behind, of_whole) for v, what in results.items() if v in following.found}
    return _loss_first(found)


def misled_as_one(part: Program, following: Following, weight: str) -> tuple[tuple[str, str], ...]:
    """The same of a batch that is taken as one, whose examples may see those that fill it up."""
    found = {what: _of_others(part, following, v) for v, what in _results(part).items()}
    return _loss_first(found | dict(misled(part, following, weight)))


def _of_others(part: Program, following: Following, result: Variable) -> str:
    """Why a result reads examples together; empty if it does not."""
    if near := following.reaching(part, [result]).mixing:
        op, why = near[0]
        return f"is made by {op.type!r}{op.at}, which {why}"
    found = following.found.get(result, OWN)
    is_known = found.kind is not How.OWN and (found.layout is None or found.layout.blocks == 1)
    return "" if is_known else "does not hold each example once, in their order"


def _results(part: Program) -> dict[Variable, str]:
    results = {v: f"the result {v.name!r}" for v in part.outputs}
    results |= {new: f"the state {old.name!r}" for old, new in part.next_state.items()}
    return results | ({} if part.loss is None else {part.loss: "the loss"})


def _loss_first(whys: dict[str, str]) -> tuple[tuple[str, str], ...]:
    told = [(what, why) for what, why in whys.items() if why]
    return tuple(sorted(told, key=lambda pair: pair[0] != "the loss"))


class _Filler:
    """An example of weight 0.

    Attributes:
        numbers: those of it, and of all examples, that are the same whatever they are.
        reads: what is computed of its weight.
        whys: the ops that make of the examples another number with it, and why.
    """

    def __init__(
        self, part: Program, following: Following, numbers: dict[Variable, Any], reads: set[Variable]
    ) -> None:
        self.part, self.following, self.made = part, following, producers(part)
        self.numbers, self.reads = numbers, reads
        self.whys: dict[Op, str] = dict.fromkeys(following.counted, _COUNTED)
        for op in part.ops:
            if self._makes_groups(op):
                self.whys[op] = _GROUPED
            self._follow(op)

    def why(self, result: Variable, behind: Collection[Op], of_whole: Collection[tuple[str, str]]) -> str:
        """Why a result may be another one; empty if it is the same."""
        found = self.following.found[result]
        if result in self.following.constants or (result in self.part.constants and found.power):
            return _COUNT
        seen, waiting, whys = set[Op](), [result], []
        while waiting:
            op = self.made.get(waiting.pop())
            if op is None or op in seen:
                continue
            seen.add(op)
            if op in self.whys and op not in behind:
                whys.append(self.whys[op])
            waiting += [v for v in op.inputs if (op.outputs[0].name, v.name) not in of_whole]
        return min(whys, default="", key=[_PLAIN, _EXTREME, _COUNTED, _GROUPED].index)

    def _follow(self, op: Op) -> None:
        if op in self.following.within:
            self._follow_within(op, *self.following.within[op])
            return
        kinds = {self._kind(v) for v in op.outputs}
        rows = [v for v in op.inputs if self._kind(v) is How.ROWS]
        reads = not self.reads.isdisjoint(op.inputs)
        if How.ROWS in kinds or not rows:
            number = self._number(op)
            self.numbers.update((v, number) for v in op.outputs if number is not None)
            self.reads.update(op.outputs if reads else ())
        elif How.MEAN in kinds and rows and not self._adds_nothing(op, rows):
            self.whys[op] = _PLAIN
        elif reads and not kinds.isdisjoint([How.MOST, How.LEAST]):
            self.whys[op] = _EXTREME

    def _follow_within(self, op: Op, part: Program, following: Following) -> None:
        """Follow what an op runs; its inputs are the operands, numbers among them."""
        given = dict(zip(part.inputs, op.body.operands, strict=True))
        read = {v: op.inputs[i] for v, i in given.items() if isinstance(i, int)}
        numbers = {v: self.numbers[x] for v, x in read.items() if x in self.numbers}
        inner = _Filler(part, following, numbers, {v for v, x in read.items() if x in self.reads})
        for i, v in enumerate(op.outputs):
            made = part.outputs[result_of(op.body, i)]
            if made in inner.numbers:
                self.numbers[v] = inner.numbers[made]
            if made in inner.reads:
                self.reads.add(v)
            if self._kind(v) is How.MEAN and following.found[made] == SAME and inner.numbers.get(made) != 0:
                self.whys[op] = _PLAIN  # a loop adds it up
            if (why := inner.why(made, (), ())) and self.whys.get(op) != _PLAIN:
                self.whys[op] = why

    def _makes_groups(self, op: Op) -> bool:
        """Whether it lays several examples side by side, those that fill up a device among them."""
        read = (self.following.found[v].layout for v in op.inputs)
        return op in self.following.groups and not any(x and x.each < 1 for x in read)

    def _kind(self, v: Variable) -> How:
        return self.following.found[v].kind

    def _adds_nothing(self, op: Op, rows: Sequence[Variable]) -> bool:
        """Whether an op that adds up examples adds 0 for this one."""
        calls = list(op.body.calls)
        if len(calls) != 1 or calls[0].inner:
            return not self.reads.isdisjoint(rows)  # what it does within is not looked at
        zeros = [v for v in rows if self.numbers.get(v) == 0]
        return op.inputs[0] in zeros if of(calls[0].primitive).linear is Linear.FIRST else bool(zeros)

    def _number(self, op: Op) -> Any:
        """The number that an op makes of this example, None if it depends on the example."""
        calls = list(op.body.calls)
        if len(calls) != 1 or calls[0].inner or len(op.outputs) != 1:
            return None
        row = of(calls[0].primitive)
        pairs = zip(op.body.operands, op.body.numbers, strict=True)
        given = [self.numbers.get(op.inputs[i]) if isinstance(i, int) else number for i, number in pairs]
        if row.is_elementwise:
            return None if self.numbers.keys().isdisjoint(op.inputs) and op.inputs else self._probed(op)
        if row.linear is Linear.EACH:
            return 0 if 0 in given else None
        first = given[0] if given else None
        if row.reduces in (Reduces.LARGEST, Reduces.SMALLEST):
            return first
        if row.moves is None and row.linear is not Linear.FIRST:
            return None
        if row.linear is Linear.TOGETHER and any(number != first for number in given):
            return None
        return first if row.moves is not None or first == 0 else None

    def _probed(self, op: Op) -> Any:
        """The number that an op makes of numbers of which some are known, None if the others change it."""
        if any(v.is_key for v in (*op.inputs, *op.outputs)):
            return None
        made = []
        with jax.ensure_compile_time_eval():
            for turn in range(4):
                values = [
                    np.asarray(self.numbers.get(v, _example(v, turn + i, turn >> i)), v.dtype)
                    for i, v in enumerate(op.inputs)
                ]
                made.append(np.asarray(op.body(*values)[0]))
        return made[0].item() if all(np.array_equal(x, made[0]) for x in made) else None


def _example(v: Variable, number: int, bit: int) -> Any:
    """A number of an example."""
    if v.dtype == bool:
        return bool(bit & 1)
    return (_NUMBERS if v.is_float else _INTEGERS)[number % 4]
