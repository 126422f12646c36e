"""The costs of a Program by scope and pass: the numbers of a summary, before they are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import jax

from onward.core.cost import Cost, cost, size
from onward.core.homes import Homes, homes, scopes
from onward.core.liveness import lifetimes
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.core.show import short_type, turns_within
from onward.core.structure import path_keys
from onward.core.words import Kind, Pass


@dataclass(frozen=True)
class SummaryRow:
    """The total cost of the ops of one scope and one pass.

    Attributes:
        scope: where the ops belong; empty for those outside of any scope. ``"total"`` in totals.
        made_by: the pass; None for all of them together.
        ops: how many.
        parameters: numbers that are trained and first read here.
        output: the type of what the scope gives in this pass, as the listing shows it.
        flops: operations on numbers.
        read: bytes read.
        written: bytes written.
        saved: bytes that the forward pass keeps for the backward pass.
        live: the most bytes in memory while one of these ops runs, those of the whole step, were all ops run
            as they are written; ``memory`` tells the bytes of what ``compile`` makes of them.
        exchanged: bytes that each device puts into collectives.
        times: how many scopes in a row are just like this one; 1 for one alone.
    """

    scope: str
    made_by: Pass | None
    ops: int
    parameters: int
    output: str
    flops: int
    read: int
    written: int
    saved: int
    live: int
    exchanged: int
    times: int = 1


@dataclass(frozen=True, eq=False)
class CountedOp:
    """An op of a Program, or of a turn of a loop in it, with its cost in all turns together.

    Attributes:
        op: the op; a loop that is looked into stands behind its ops, with what it costs beside them.
        scope: where it belongs.
        spent: its cost.
        parameters: the numbers of the parameters that nothing before it reads.
        saved: the bytes that it keeps for the backward pass.
        live: the bytes in memory while it runs.
    """

    op: Op
    scope: str
    spent: Cost
    parameters: int
    saved: int
    live: int


class Count:
    """Counts the ops of a Program, those in loops over steps or micro-batches as often as they run.

    ``around``: the count of the Program in which this one is a turn.

    Attributes:
        seen: the parameters that are read already, by name, with the scope that they are read in first.
        containers: where parameters stand among those that the step is given, by name.
    """

    def __init__(self, program: Program, around: Count | None = None) -> None:
        self.program = program
        self.seen: dict[str, str] = {} if around is None else around.seen
        self.containers: Mapping[str, str] = containers_of(program) if around is None else around.containers
        self.scopes: Mapping[Op, str] = scopes(program)
        self.before = {new: old for old, new in program.next_state.items()}

    @cached_property
    def ops(self) -> tuple[CountedOp, ...]:
        """All ops in their order."""
        return tuple(one for i, op in enumerate(self.program.ops) for one in self._counted(i, op))

    @cached_property
    def looped(self) -> bool:
        """Whether a loop is looked into."""
        return any(turns_within(op) and _turns(op) > 1 for op in self.program.ops)

    def _counted(self, place: int, op: Op) -> Iterator[CountedOp]:
        left, times, live = cost(op), _turns(op), self._live.get(place, 0)
        for turn in _that_run(op):
            inner = Count(turn, self)
            most = max(inner._live.values(), default=0)
            for one in inner.ops:
                left = _less(left, one.spent * times)
                yield replace(one, spent=one.spent * times, live=max(live - most + one.live, 0))
        if replace(left, endless=False) != Cost() or not turns_within(op):
            scope = self._scope(op)
            saved = sum(size(v) for v in op.outputs if v in self._saved)
            yield CountedOp(op, scope, left, self._first_read(op, scope), saved, live)

    def _scope(self, op: Op) -> str:
        """The scope of an op; of an update that stands nowhere that which first reads its parameter.

        Where nobody named one and no function was called, it is where the parameters lie that the op reads.
        """
        updated = (self.seen.get(self.before[v].name) for v in op.outputs if v in self.before)
        return self.scopes[op] or next(filter(None, updated), "") or self._containers(op)

    def _containers(self, op: Op) -> str:
        """The containers of all parameters that an op, or the forward op it belongs to, reads."""
        home = self.homes.get(op) or op
        found = {self.containers.get(v.name, "") for v in home.inputs if v.kind is Kind.PARAMETER}
        return found.pop() if len(found) == 1 else ""

    @cached_property
    def homes(self) -> Homes:
        """For each op the forward op it belongs to; not asked for where parameters lie in no containers."""
        return homes(self.program) if any(self.containers.values()) else {}

    def _first_read(self, op: Op, scope: str) -> int:
        """How many numbers of parameters an op is the first to read."""
        read = (v for v in dict.fromkeys(op.inputs) if v.kind is Kind.PARAMETER)
        new = [v for v in read if v.name not in self.seen]
        self.seen.update((v.name, scope) for v in new)
        return sum(v.size for v in new)

    @cached_property
    def _saved(self) -> frozenset[Variable]:
        """The Variables that the forward pass computes and the backward pass reads."""
        late = (op for op in self.program.ops if op.made_by is Pass.BACKWARD)
        made = {v for op in self.program.ops if op.made_by is Pass.FORWARD for v in op.outputs}
        return frozenset(v for op in late for v in op.inputs if v in made)

    @cached_property
    def _live(self) -> Mapping[int, int]:
        """The bytes in memory while each op runs, by its number."""
        lives = lifetimes(self.program)
        most: dict[int, int] = {}
        for step, taken in zip(lives.steps, lives.bytes, strict=False):
            most[step.op] = max(most.get(step.op, 0), taken)
        return most


def containers_of(program: Program) -> Mapping[str, str]:
    """For each parameter, by name, the containers in which it lies, below those that hold all of them.

    >>> import jax.numpy as jnp, onward as ow
    >>> params = {"block_0": {"attn": {"wq": jnp.ones(3)}}, "out": jnp.ones(3)}
    >>> def loss(p, x):
    ...     return jnp.sum(p["block_0"]["attn"]["wq"] * x @ p["out"])
    >>> program = ow.trace(loss, params, jnp.ones(3))
    >>> containers_of(program)
    {'block_0/attn/wq': 'block_0/attn', 'out': ''}
    """
    if program.signature is None:
        return {}
    structure = program.signature.parameters
    places, _ = jax.tree_util.tree_flatten_with_path(structure.unflatten(structure.variables))
    variables = ((path, v) for path, v in places if isinstance(v, Variable))
    paths = {v.name: path_keys(path)[:-1] for path, v in variables if v.kind is Kind.PARAMETER}
    side_by_side = zip(*paths.values(), strict=False)
    shared = sum(1 for _ in takewhile(lambda keys: len(set(keys)) == 1, side_by_side))
    return {name: "/".join(keys[shared:]) for name, keys in paths.items()}


def _less(whole: Cost, part: Cost) -> Cost:
    """The rest of a cost; a loop that writes less than its ops would one by one costs nothing beside."""
    return Cost(
        max(whole.flops - part.flops, 0),
        max(whole.read - part.read, 0),
        max(whole.written - part.written, 0),
        max(whole.exchanged - part.exchanged, 0),
        max(whole.transcendentals - part.transcendentals, 0),
        whole.endless,
    )


def _that_run(op: Op) -> list[Program]:
    """The turns within an op; of branches, of which one runs, that which takes the most, as in ``cost``."""
    turns = turns_within(op)
    is_one = op.primitive.runs is Runs.BRANCH and len(turns) > 1
    return [max(turns, key=lambda turn: cost(turn).flops)] if is_one else turns


def _turns(op: Op) -> int:
    """How often a loop runs; one turn where nobody knows."""
    told = op.attributes
    return int(told.get("length") or told.get("steps") or 1)


def _output(ops: Iterable[Op]) -> str:
    """The type of what the last of these ops with a result gives first."""
    given = [op.outputs[0] for op in ops if op.outputs]
    return short_type(given[-1]) if given else ""


def _row(scope: str, made_by: Pass | None, ops: Iterable[CountedOp]) -> SummaryRow:
    """The total cost of these ops as a row."""
    chosen = list(ops)
    spent = sum((one.spent for one in chosen), Cost())
    return SummaryRow(
        scope=scope,
        made_by=made_by,
        ops=len(chosen),
        parameters=sum(one.parameters for one in chosen),
        output=_output(one.op for one in chosen) if made_by is not None else "",
        flops=spent.flops,
        read=spent.read,
        written=spent.written,
        saved=sum(one.saved for one in chosen),
        live=max((one.live for one in chosen), default=0),
        exchanged=spent.exchanged,
    )


def rows_of(count: Count, depth: int) -> list[SummaryRow]:
    """A row for each scope and pass, scopes in the order of their first op."""
    groups: dict[str, dict[Pass, list[CountedOp]]] = {}
    for one in count.ops:
        scope = "/".join(one.scope.split("/")[:depth])
        groups.setdefault(scope, {}).setdefault(one.op.made_by, []).append(one)
    return [
        _row(scope, made_by, passes[made_by])
        for scope, passes in groups.items()
        for made_by in Pass
        if made_by in passes
    ]


def totals_of(count: Count) -> list[SummaryRow]:
    """A row for each pass, and one for the whole step."""
    by_pass = [(p, [one for one in count.ops if one.op.made_by is p]) for p in Pass]
    rows = [_row("total", made_by, mine) for made_by, mine in by_pass if mine]
    every = sum(p.size for p in count.program.parameters)
    return [*rows, replace(_row("total", None, count.ops), parameters=every)]
