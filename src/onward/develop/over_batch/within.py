"""How the results of a loop, a branch or a function that is called follow the batch: by what they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, starmap
from operator import and_

from onward.core.jaxprs.body import Body, Call
from onward.core.jaxprs.loops import carry_of, result_of
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves, Runs
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants
from onward.develop.over_batch.apart import is_opaque
from onward.develop.over_batch.known import (
    COUNTED,
    ODD,
    OWN,
    SAME,
    BatchWalk,
    ExampleLayout,
    Following,
    Follows,
    How,
)
from onward.develop.over_batch.operands import COUNTS, Operands
from onward.develop.over_batch.rules import seen_by_rule

_SOLVER = 2  # behind the product with the matrix, and with its transpose
_WITHIN = " within"
_SEE = "computes a statistic of the examples within"
_SEE_OTHERS = "reads more of the batch than one example in a turn"
_BY_LENGTH = "takes as many turns as the batch is long"
_UNKNOWN = "may let examples see each other"
_ONE_BY_ONE = "goes through the examples one after the other"


def within(walk: BatchWalk, op: Op, other: Op, call: Call, given: Operands) -> list[Follows]:
    """How the outputs follow the whole's; what would have to be merged within is noted."""
    given.settle_extremes()
    values = [f for f, _ in given.values]
    if all(f == SAME for f in values) and op.body.text == other.body.text:
        return [walk.by_shape(v, SAME) for v in op.outputs]
    inside = _BodyWalk(walk, op, list(other.subprograms.values()), list(op.subprograms.values()))
    is_by_length = _turns_by_length(op.body, other.body)
    found = None if is_by_length else inside.found(call, given)
    if found is not None:
        found = [found[result_of(op.body, i)] for i in range(len(op.outputs))]
        if of(call.primitive).runs is Runs.RULE and walk.asks_rules and not walk.has_own_axis:
            why = seen_by_rule(walk, op, other, [f for f, _ in given.arrays], found)
            walk.result.rules += [(op, why)] if why else []
        return found
    given.settled()
    if is_by_length:
        walk.note(op, _BY_LENGTH)
    elif inside.mixing or _ends_within(op.body, other.body):
        walk.note(op, inside.mixing or _SEE)
    elif not inside.is_told and not _is_taken_on_trust(op.body):
        walk.note(op, _UNKNOWN)
    return [walk.by_shape(v, OWN) for v in op.outputs]


class _BodyWalk:
    """Walks over what one op runs.

    Attributes:
        mixing: how examples see each other in it, if they do.
        is_told: whether what is not known of it is known of what it reads.
    """

    def __init__(self, walk: BatchWalk, op: Op, wholes: list[Program], parts: list[Program]) -> None:
        self.walk, self.op, self.wholes, self.parts = walk, op, wholes, parts
        self.mixing, self.is_told = "", False

    def found(self, call: Call, given: Operands) -> list[Follows] | None:
        """How the outputs follow the whole's; None if it cannot be told."""
        row = of(call.primitive)
        if row.runs is Runs.BRANCH:
            given.settle(0)
            return self.cond([f for f, _ in given.values])
        values = [f for f, _ in given.values]
        if row.runs is Runs.SOLVE:
            return self.solve(given, call)
        if row.runs is Runs.SCAN and len(self.parts) == 1:
            return self.scan(given, call)
        if row.runs is Runs.WHILE:
            return self.loop(values, call.params["cond_nconsts"], call.params["body_nconsts"])
        is_run = row.calls_once or (is_opaque(call.primitive) and len(self.parts) == 1)
        if is_run and self.parts and len(self.parts[0].inputs) == len(values):
            return self.called(self.wholes[0], self.parts[0], values)
        return None

    def called(
        self, whole: Program, part: Program, values: Sequence[Follows], is_one: bool = False
    ) -> list[Follows] | None:
        """The results of one run; None if it needs what the parts would have to merge first.

        ``is_one`` says that all runs are alike, one for each example.
        """
        following = self.walk.inner(whole, part, values)
        near = following and following.reaching(part, part.outputs)
        self.walk.takes_groups(self.op, following.group if following else 1)
        self.walk.result.rules += [(self.op, why) for _, why in near.rules] if near else []
        if near is None or not _is_plain(near, part):
            mixing = near.mixing if near else ()
            told = [why for op, why in mixing if not is_opaque(next(op.body.calls).primitive)]
            told += [COUNTED] if near and near.counting(part) else []
            self.mixing = f"{told[0].removesuffix(_WITHIN)}{_WITHIN}" if told else self.mixing
            return None
        assert following is not None
        if following.counted:
            self.walk.result.counted.add(self.op)
        if is_one or (len(self.parts) == 1 and of(next(self.op.body.calls).primitive).calls_once):
            self.walk.result.within[self.op] = part, following
        return [following.found[v] for v in part.outputs]

    def cond(self, values: Sequence[Follows]) -> list[Follows] | None:
        """How the outputs follow the whole's if all branches agree on it; None if they do not."""
        self.is_told = values[0] != SAME
        pairs = zip(self.wholes, self.parts, strict=True)
        found = [f for whole, part in pairs if (f := self.called(whole, part, values[1:])) is not None]
        if self.is_told or len(found) < len(self.parts):
            return None
        joined = [_of_branches(fs) for fs in zip(*found, strict=True)]
        return None if None in joined else [f for f in joined if f is not None]

    def solve(self, given: Operands, call: Call) -> list[Follows] | None:
        """The solution of a linear system; None unless what it is differentiated by is known as well."""
        ends = list(accumulate(call.params["const_lengths"]))
        given.settled()
        values = [f for f, _ in given.values]
        self.is_told = any(f.kind is How.OWN for f in values)
        consts = [values[i:j] for i, j in pairwise([0, *ends])]
        there = [i for i, run in enumerate(call.params["jaxprs"]) if run is not None]
        pairs = zip(self.wholes, self.parts, there, strict=True)
        found = [self.called(whole, part, [*consts[i], *values[ends[-1] :]]) for whole, part, i in pairs]
        told = [results for results in found if results is not None]
        is_known = len(told) == len(found) and len({f.power for results in told for f in results}) == 1
        return found[there.index(_SOLVER)] if is_known else None

    def scan(self, given: Operands, call: Call) -> list[Follows] | None:
        """The carry at the end, and what each turn gives, stacked."""
        count, carries = carry_of(self.op.body)
        values = [f for f, _ in given.values]
        begin, along = values[count : count + carries], given.values[count + carries :]
        if any(v is not None and 0 in (self.walk.axes(v) or ()) for _, v in along):
            return self._along_examples(given, count, carries)
        turns = [_turn(f) for f, _ in along]
        may_add = [zero and f == SAME for f, zero in zip(begin, given.zeros()[count:], strict=False)]
        floats = [v.is_float for v in self.parts[0].inputs[count : count + carries]]
        for adding in ([False] * carries, list(map(and_, may_add, floats)), may_add):
            carry = [Follows(How.MEAN, 1) if adds else f for f, adds in zip(begin, adding, strict=True)]
            found = self._settled(values[:count], carry, turns)
            if found is not None:
                return [*found[:carries], *map(_stacked, found[carries:])]
        return None

    def loop(self, values: Sequence[Follows], asking: int, running: int) -> list[Follows] | None:
        """The values that a loop carries at its end; None unless it is known how often it turns.

        That is as often for all parts, or for each example as often as it would alone.
        """
        names = [*self.op.subprograms]
        turn, question = names.index("body_jaxpr"), names.index("cond_jaxpr")
        consts, carry = values[asking : asking + running], values[asking + running :]
        found = self._settled(consts, carry, [], turn)
        if found is None:
            return None
        asked = self.called(self.wholes[question], self.parts[question], [*values[:asking], *found])
        if asked is None:
            return None
        each_stops = asked[0].kind is How.ROWS and all(f.kind is How.ROWS for f in found)  # by vmap of a loop
        return found if asked[0] == SAME or each_stops else None

    def _along_examples(self, given: Operands, count: int, carries: int) -> list[Follows]:
        """The results of a loop over the examples: rows, and sums of what each turn adds to a carry.

        Unless a turn sees other examples than its own, by the carry or by what it reads.
        """
        given.settled()
        one, bodies = SAME, [_adding(body, count, carries) for body in (*self.wholes, *self.parts)]
        if None in bodies or not all(given.zeros()[count : count + carries]):
            self.walk.note(self.op, _ONE_BY_ONE)
            return [OWN for _ in self.parts[0].outputs]
        whole, part = (body for body in bodies if body is not None)
        fixed = [f for f, _ in given.values[:count]]
        along, rows = given.values[count + carries :], self.walk.rows
        turn = [replace(one, counts=f.counts) for f, _ in along]
        if any(f.counts and v is not None and v.shape[0] != rows for f, v in along):
            self.walk.note(self.op, COUNTS)
        found = self.called(whole, part, [*fixed, *[one] * carries, *turn], is_one=True)
        if found is None or any(f != one for f in found):
            self.walk.note(self.op, self.mixing or _SEE_OTHERS)
        lies = {(f.layout.blocks, f.layout.each) for f, v in given.values[count:] if v and f.layout}
        if len(lies) > 1:
            self.walk.note(self.op, ODD)
        each = Follows(How.ROWS, 0, ExampleLayout(0, *lies.pop()) if len(lies) == 1 else None)
        return [each if i >= carries else Follows(How.MEAN, 1) for i in range(len(part.outputs))]

    def _settled(
        self, consts: Sequence[Follows], carry: Sequence[Follows], turns: Sequence[Follows], place: int = 0
    ) -> list[Follows] | None:
        """The results of a turn for a carry that it leaves as it is."""
        for _ in range(3):
            found = self.called(self.wholes[place], self.parts[place], [*consts, *carry, *turns])
            joined = None if found is None else list(starmap(_joined, zip(carry, found, strict=False)))
            if found is None or joined is None or None in joined:
                return None
            if joined == list(carry):
                return [*carry, *found[len(carry) :]]
            carry = [f for f in joined if f is not None]
        return None


def _is_taken_on_trust(body: Body) -> bool:
    """Whether it runs what nothing is known of, as the code of a file, or has devices of its own."""
    calls = list(body.calls_within)
    return any(
        of(c.primitive).runs is Runs.DEVICES or (is_opaque(c.primitive) and not c.inner) for c in calls
    )


def _is_plain(following: Following, part: Program) -> bool:
    """Whether all that a run gives is known without anything that would have to be merged in it."""
    known = all(following.found[v].kind is not How.OWN for v in part.outputs)
    is_counting = following.numbers or following.constants
    return known and not (following.needs or is_counting or following.mixing or following.bent)


def _adding(body: Program, first: int, carries: int) -> Program | None:
    """The same that gives what a turn adds to each carry; None if it does something else with one."""
    pairs = zip(body.inputs[first : first + carries], body.outputs, strict=False)
    added = list(starmap(partial(_added, body), pairs))
    return None if None in added else replace(body, outputs=(*filter(None, added), *body.outputs[carries:]))


def _added(body: Program, carry: Variable, after: Variable) -> Variable | None:
    """The value that is added to a carry, for a number the sum; None if anything else reads the carry."""
    moved = descendants(body, [carry])
    moving = [op for op in body.ops if not moved.isdisjoint(op.outputs)]
    is_alone = [v for v in body.outputs if v in moved] == [after] and all(map(_hands_on, moving[:-1]))
    if not moving or not is_alone:
        return None
    last = moving[-1]
    row, operands = of(last.type), [last.inputs[i] for i in last.body.operands if isinstance(i, int)]
    others = [v for v in operands if v not in moved]
    is_taken_off = last.type == "sub" and operands[0] in moved and last.body.operands[0] == 0
    is_addition = (is_taken_off or (row.commutes and row.linear is Linear.TOGETHER)) and after in last.outputs
    return next(iter(others), after) if is_addition and len(operands) == len(others) + 1 else None


def _hands_on(op: Op) -> bool:
    """Whether it gives the numbers that it is given, as a conversion of a weak type does."""
    row = of(op.type)
    is_kept = row.moves is Moves.KEEPS and not row.stops_gradient
    is_same = [v.dtype for v in op.inputs] == [v.dtype for v in op.outputs]
    return is_kept or (is_same and op.type == "convert_element_type")


def _of_branches(found: Sequence[Follows]) -> Follows | None:
    """How a result follows the whole's whichever branch it comes from; None if they do not agree."""
    if len({(f.kind, f.power, f.counts) for f in found}) > 1:
        return None
    return found[0] if len({f.layout for f in found}) == 1 else None


def _turn(follows: Follows) -> Follows:
    """One turn's share of what a loop runs along."""
    if follows.layout is None:
        return follows
    return replace(follows, layout=replace(follows.layout, axis=follows.layout.axis - 1))


def _stacked(follows: Follows) -> Follows:
    """How a loop's result follows the whole's once every turn's share is stacked."""
    if follows.layout is None:
        return follows
    return replace(follows, layout=replace(follows.layout, axis=follows.layout.axis + 1))


def _joined(before: Follows, after: Follows) -> Follows | None:
    """How a carried value follows the whole's in all turns; one that is the same may begin a mean or rows."""
    if before == after or (after == SAME and before == Follows(How.MEAN)):
        return before
    if before == SAME and after.kind in (How.MEAN, How.ROWS) and not after.power:
        return after
    rows = before.kind is How.ROWS and after.kind is How.ROWS and before.power == after.power
    if not rows or (before.layout and after.layout and before.layout != after.layout):
        return None
    return replace(after, layout=after.layout if before.layout is None else None)


def _turns_by_length(mine: Body, theirs: Body) -> bool:
    """Whether a loop along no examples takes another number of turns for the whole."""
    call, other = next(mine.calls), next(theirs.calls)
    if of(call.primitive).runs is not Runs.SCAN or call.params["length"] == other.params["length"]:
        return False
    return len(call.operands) == sum(carry_of(mine))


def _ends_within(mine: Body, theirs: Body) -> bool:
    """Whether an equation somewhere in it reads what is longer in the whole, and gives what is not."""
    return any(
        a.operands != b.operands and a.results == b.results
        for a, b in zip(mine.calls_within, theirs.calls_within, strict=False)
    )
