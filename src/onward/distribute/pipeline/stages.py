"""Which stage each op of a micro-batch belongs to.

The forward ops that depend on data are cut where the stages cost about the same, and of such cuts where the
fewest bytes are sent on; or where scopes begin. Everything else follows: what depends on no data stands where
it is first read, a gradient op beside its forward op, a sum of gradients in the stage that goes last.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(ws, x):
...     for w in ws:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> program = ow.append_backward(ow.trace(loss, [jnp.eye(4)] * 2, jnp.ones((6, 4))))
>>> found = stages_of(program, frozenset(), 2)
>>> [(op.type, found[op]) for op in program.ops]  # doctest: +NORMALIZE_WHITESPACE
[('dot_general', 0), ('tanh', 0), ('dot_general', 1), ('tanh', 1), ('reduce_sum', 1), ('ones', 1),
 ('reduce_sum_grad', 1), ('tanh_grad', 1), ('dot_general_grad', 1), ('tanh_grad', 0), ('dot_general_grad', 0)]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

import numpy as np

from onward.core.cost import cost, size
from onward.core.errors import ArgumentError, GraphError, UnknownNameError, nearest
from onward.core.homes import scopes
from onward.core.marks import SUM
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants
from onward.core.words import Kind, Pass

Stages = Mapping[Op, int]
_UNEVEN = 1.1  # how much more than need be the dearest stage may cost, for fewer bytes to send


def stages_of(
    turn: Program, ahead: Collection[Op], stages: int, at: Sequence[str] = (), loops: Sequence[Op] = ()
) -> Stages:
    """The stage of each op of the Program of one micro-batch.

    Args:
        turn: forward and backward pass of a micro-batch.
        ahead: the ops that belong to no stage.
        stages: how many.
        at: the scopes with which all but the first begin; where it is best unless given.
        loops: the ops with which all but the first begin, in place of scopes.

    Raises:
        ArgumentError: more stages than there is something to cut, or other scopes than they need.
        UnknownNameError: no op stands in such a scope.
        GraphError: a stage has no parameters.
    """
    line = _ForwardLine(turn, ahead)
    if not loops and stages > (most := line.most_stages):
        raise ArgumentError(
            f"pipeline: the forward pass cannot be cut into {stages} stages: {most} of its ops read "
            f"parameters, so that it has at most {most}. Layers that are turns of a loop count as one, "
            "unless it is a lax.scan of its own, forwards, over stacks of parameters."
        )
    begins = [line.ops.index(op) for op in loops]
    begins = begins or (line.named(stages, at) if at else line.balanced(stages))
    found = dict(zip(line.ops, np.searchsorted(begins, range(len(line.ops)), "right").tolist(), strict=True))
    place_forward(turn, ahead, found)
    _place_backward(turn, ahead, found, stages)
    return found


def stages_by_name(turn: Program, ahead: Collection[Op], stages: int, homes: Mapping[str, int]) -> Stages:
    """The stage of each op, where those of the forward activations are known by their names.

    Args:
        turn: forward and backward pass of a micro-batch.
        ahead: the ops that belong to no stage.
        stages: how many.
        homes: of what a loop of the stage makes there may be none; it stands where it is first read, as does
            what a loop over random keys makes for all stages.
    """
    fed = descendants(turn, turn.inputs)
    forward = (op for op in turn.ops if op.made_by is Pass.FORWARD and op not in ahead)
    known = ((op, [homes[v.name] for v in op.outputs if v.name in homes]) for op in forward)
    found = {
        op: min(places)
        for op, places in known
        if len(places) == len(op.outputs) or (places and not fed.isdisjoint(op.outputs))
    }
    place_forward(turn, ahead, found)
    _place_backward(turn, ahead, found, stages)
    return found


class _ForwardLine:
    """The forward ops that depend on data, in order: what is cut.

    ``costs``, ``readers`` and ``sent`` are of each place between two of them: what those before it cost, how
    many of them read parameters, and the bytes that those behind it read of them.
    """

    def __init__(self, turn: Program, ahead: Collection[Op]) -> None:
        self.turn = turn
        fed = descendants(turn, turn.inputs)
        forward = [op for op in turn.ops if op.made_by is Pass.FORWARD and op not in ahead]
        self.ops = [op for op in forward if not fed.isdisjoint(op.outputs)]
        self.parameters = self._parameters_read(forward)
        beside = {op.outputs[0]: op for op in self.ops if op.outputs}
        each = dict.fromkeys(self.ops, 0)
        for op in turn.ops:
            if (home := op if op in each else beside.get(op.of) if op.of is not None else None) is not None:
                found = cost(op)
                each[home] += found.flops + found.bytes
        self.costs = np.array([0, *accumulate(each.values())], dtype=float)
        self.readers = np.array([0, *accumulate(bool(self.parameters[op]) for op in self.ops)])
        self.sent = self._sent()

    def _parameters_read(self, forward: Sequence[Op]) -> Mapping[Op, frozenset[Variable]]:
        """The parameters that each op reads, also through ops that depend on no data."""
        behind: dict[Variable, frozenset[Variable]] = {
            v: frozenset([v]) for v in self.turn.state if v.kind in (Kind.PARAMETER, Kind.FROZEN)
        }
        found = {}
        line = set(self.ops)
        for op in forward:
            found[op] = frozenset().union(*(behind.get(v, ()) for v in op.inputs))
            if op not in line:
                behind.update(dict.fromkeys(op.outputs, found[op]))
        return found

    def _sent(self) -> np.ndarray:
        """The bytes that pass each place."""
        made = dict.fromkeys(self.turn.inputs, -1)
        made |= {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        last: dict[Variable, int] = {}
        for i, op in enumerate(self.ops):
            last.update((v, i) for v in op.inputs if v in made)
        steps = np.zeros(len(self.ops) + 1)
        for v, end in last.items():
            steps[made[v] + 1] += size(v)
            steps[end + 1] -= size(v)
        return np.cumsum(steps)

    @property
    def most_stages(self) -> int:
        """How many stages there can be that each read a parameter."""
        return int(self.readers[-1])

    def named(self, stages: int, at: Sequence[str]) -> list[int]:
        """The places before the first op of each of these scopes."""
        if len(at) != stages - 1:
            raise ArgumentError(
                f"pipeline: at names {len(at)} scopes, and {stages} stages begin with {stages - 1} of them: "
                "the first stage begins with the first op."
            )
        found = scopes(self.turn)
        begins = [self._begin(scope, [found[op] for op in self.ops]) for scope in at]
        ends = [0, *begins, len(self.ops)]
        for i, (begin, end) in enumerate(pairwise(ends)):
            if begin >= end:
                raise ArgumentError(
                    f"pipeline: the scopes {', '.join(map(repr, at))} do not begin one after the other. Name "
                    "them in the order in which the forward pass comes to them."
                )
            if self.readers[begin] == self.readers[end]:
                raise GraphError(
                    f"pipeline: stage {i} reads no parameter: from {self.ops[begin]!r} on there is none "
                    f"before {at[i] if i < len(at) else 'the end'!r}. Begin the stages at other scopes."
                )
        return begins

    def _begin(self, scope: str, found: Sequence[str]) -> int:
        for i, name in enumerate(found):
            parts = name.split("/")
            if any(fnmatchcase("/".join(parts[: k + 1]), scope) for k in range(len(parts))):
                return i
        raise UnknownNameError(
            f"pipeline: no forward op stands in a scope {scope!r}. "
            f"{nearest(scope, dict.fromkeys(filter(None, found)))} jax.named_scope opens one."
        )

    def balanced(self, stages: int) -> list[int]:
        """The places that send the fewest bytes of those where no stage costs much more than need be."""
        low, high = self.costs[-1] / stages, float(self.costs[-1])
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (low, middle) if self._cut(stages, middle) is not None else (middle, high)
        found = self._cut(stages, _UNEVEN * high)
        assert found is not None  # the whole fits in any number of stages that each can have a parameter
        return found

    def _cut(self, stages: int, most: float) -> list[int] | None:
        """The places that send the fewest bytes where no stage costs more; None if there are none."""
        count = len(self.ops)
        sent = np.full(count + 1, np.inf)
        sent[0] = 0
        choices: list[np.ndarray] = []
        first = np.searchsorted(self.costs, self.costs - most * (1 + 1e-9))
        behind = np.searchsorted(self.readers, self.readers)
        for _ in range(stages):
            now, chosen = np.full(count + 1, np.inf), np.zeros(count + 1, int)
            for end in range(1, count + 1):
                if first[end] < behind[end]:
                    window = slice(first[end], behind[end])
                    share = (self.costs[end] - self.costs[window]) / self.costs[-1]
                    totals = sent[window] + share**2 / 2  # of cuts that send as much, the evenest
                    begin = int(first[end] + np.argmin(totals))
                    now[end], chosen[end] = np.min(totals) + self.sent[end], begin
            sent = now
            choices.append(chosen)
        if not np.isfinite(sent[-1]):
            return None
        places = [count]
        for chosen in reversed(choices):
            places.append(int(chosen[places[-1]]))
        return places[-2:0:-1]


def place_forward(turn: Program, ahead: Collection[Op], found: dict[Op, int]) -> None:
    """Put forward ops that depend on no data where they are first read.

    But what makes less of state, such as the sum of its squares, stands where the state lies: numbers are
    sent in place of arrays.
    """
    forward = [op for op in turn.ops if op.made_by is Pass.FORWARD and op not in ahead]
    beside = [op for op in forward if op not in found]
    first = _first_read(forward, found)
    places = {v: {first.get(v, 0)} for v in turn.state}
    for op in beside:
        behind = set().union(*(places.get(v, ()) for v in op.inputs))
        places.update(dict.fromkeys(op.outputs, behind))
        if len(behind) == 1 and sum(map(size, op.outputs)) < sum(map(size, op.inputs)):
            found[op] = min(*behind, *(first[v] for v in op.outputs if v in first))
    first = _first_read(forward, found)
    for op in beside:
        found.setdefault(op, min((first[v] for v in op.outputs if v in first), default=0))


def _first_read(forward: Sequence[Op], found: Mapping[Op, int]) -> Mapping[Variable, int]:
    """The first stage that reads each Variable; ops without a stage stand where they are first read."""
    first: dict[Variable, int] = {}
    for op in reversed(forward):
        read = [first[v] for v in op.outputs if v in first]
        stage = found[op] if op in found else min(read, default=0)
        for v in op.inputs:
            first[v] = min(stage, first.get(v, stage))
    return first


def _place_backward(turn: Program, ahead: Collection[Op], found: dict[Op, int], stages: int) -> None:
    """Put each backward op beside its forward op, else where the last of what it reads is made."""
    made = {v: found[op] for op in found for v in op.outputs}
    late: dict[Variable, int] = {}
    rest = [op for op in turn.ops if op not in found and op not in ahead]
    for op in rest:
        read = [late[v] for v in op.inputs if v in late]
        if op.of in made:
            found[op] = min([made[op.of], *read])  # gradients go from the last stage to the first
        elif read:
            found[op] = min(read)
        else:
            continue
        late.update(dict.fromkeys(op.outputs, found[op]))
    for op in _tails(rest):
        found[op] = max(late[v] for v in op.inputs)
        late.update(dict.fromkeys(op.outputs, found[op]))
    readers: dict[Variable, int] = {}
    for op in reversed(rest):  # such as the gradient that all begins with
        if op not in found:
            found[op] = max((readers[v] for v in op.outputs if v in readers), default=stages - 1)
        for v in op.inputs:
            readers[v] = max(found[op], readers.get(v, 0))


def _tails(ops: Sequence[Op]) -> list[Op]:
    """The gradient ops that hand one gradient on to where it is added up over all micro-batches.

    Such as the cast of one that a later stage made: it is done there, so that it can be added up there.
    """
    made = {v for op in ops for v in op.outputs}
    read: dict[Variable, list[Op]] = {}
    found: dict[Op, bool] = {}
    for op in reversed(ops):
        if all(reader in found for v in op.outputs for reader in read.get(v, ())):
            hands_on = len(set(op.inputs)) == 1 and made.issuperset(op.inputs)
            if hands_on or is_gradient_sum(op):
                found[op] = hands_on
        for v in op.inputs:
            read.setdefault(v, []).append(op)
    return [op for op, hands_on in reversed(found.items()) if hands_on]


def is_gradient_sum(op: Op) -> bool:
    """Whether an op adds up the gradients of what several ops read."""
    return op.type is SUM and op.made_by is Pass.BACKWARD
