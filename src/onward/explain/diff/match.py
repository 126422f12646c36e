"""Which op of one Program is which op of another.

Transforms share the ops they leave alone, so most are found as objects. What was built again is found by what
it computes from what is found already; where both Programs come from one trace also by name, since names are
unique within a Program and tracing again gives the same ones; else by its place in the sequence of ops.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from onward.core.program import Op, Program, Variable


@dataclass(frozen=True, eq=False)
class Matching:
    """The pairs of ops, and for Variables of the second Program those of the first that they stand for."""

    ops: Mapping[Op, Op]
    variables: Mapping[Variable, Variable]

    def mirrored(self) -> Matching:
        """The same seen from the other side."""
        ops = {new: old for old, new in self.ops.items()}
        return Matching(ops, {old: new for new, old in self.variables.items()})


def match(a: Program, b: Program, known: Mapping[Variable, Variable] | None = None) -> Matching:
    """Pair the ops of two Programs; the other way round the same pairs are found.

    Args:
        a: a Program; its ops are the keys of what is returned.
        b: another.
        known: Variables of b with those of a that they stand for, whatever they are called.
    """
    known = known or {}
    if _order(b) < _order(a):
        return match(b, a, {old: new for new, old in known.items()}).mirrored()
    pairs = _Pairs(a, b, known)
    pairs.take_objects()
    pairs.take_computations()
    pairs.take_gradients()
    if _of_one_trace(a, b):
        pairs.take_unique(lambda op: (op.made_by, op.type, tuple(v.name for v in op.outputs[:1])))
    else:
        pairs.take_runs(lambda op: (op.made_by, op.type, op.scope, op.body.signature))
        pairs.take_computations()
        pairs.take_runs(lambda op: (op.made_by, op.type, op.scope))
    pairs.take_computations()
    pairs.take_gradients()
    return Matching(pairs.ops, pairs.twins)


def _order(program: Program) -> tuple[int, list[tuple[str, list[str]]]]:
    """By what it is told which of two Programs is looked at first."""
    return len(program.ops), [(op.type, [v.name for v in op.outputs]) for op in program.ops]


def _of_one_trace(a: Program, b: Program) -> bool:
    if a.recipe is not None and b.recipe is not None and a.recipe.origin is b.recipe.origin:
        return True
    return not {v for op in a.ops for v in op.outputs}.isdisjoint(v for op in b.ops for v in op.outputs)


class _Pairs:
    """Pairs, found one way after the other; ``twins`` leads from Variables of b to those of a."""

    def __init__(self, a: Program, b: Program, known: Mapping[Variable, Variable]) -> None:
        self.a, self.b = a, b
        self.ops: dict[Op, Op] = {}
        self.found: set[Op] = set()  # of b
        self.twins: dict[Variable, Variable] = {}
        self.taken: set[Variable] = set()  # of a
        for new, old in known.items():
            self._pair_variables(old, new)
        of_a = {v for op in a.ops for v in op.outputs}
        for v in (v for op in b.ops for v in op.outputs if v in of_a):
            self._pair_variables(v, v)
        for first, second in ((a.inputs, b.inputs), (a.state, b.state), (a.constants, b.constants)):
            self._pair_given(first, second)

    def _pair_given(self, first: Iterable[Variable], second: Iterable[Variable]) -> None:
        """Pair the Variables given to both Programs that are one object or have the same name."""
        known = {v.name: v for v in first}
        for v in second:
            if v.name in known:
                self._pair_variables(known[v.name], v)

    def _pair_variables(self, old: Variable, new: Variable) -> None:
        if new not in self.twins and old not in self.taken:
            self.twins[new] = old
            self.taken.add(old)

    def _pair(self, old: Op, new: Op) -> None:
        self.ops[old] = new
        self.found.add(new)
        for x, y in zip(old.outputs, new.outputs, strict=False):
            self._pair_variables(x, y)

    @property
    def _left(self) -> tuple[list[Op], list[Op]]:
        """The ops of both that have no partner yet."""
        of_a = [op for op in self.a.ops if op not in self.ops]
        return of_a, [op for op in self.b.ops if op not in self.found]

    def take_objects(self) -> None:
        """Ops that are one object, then ops that give the same Variables their values."""
        of_a = set(self.a.ops)
        for op in self.b.ops:
            if op in of_a:
                self._pair(op, op)
        old, new = self._left
        makers = {op.outputs[0]: op for op in old if op.outputs}
        for op in new:
            maker = makers.get(op.outputs[0]) if op.outputs else None
            if maker and (maker.outputs == op.outputs or _family(maker) == _family(op)):
                self._pair(maker, op)

    def take_computations(self) -> None:
        """Ops that compute the same from what is paired already, in the order of the second Program."""
        left, others = self._left
        known: dict[Hashable, list[Op]] = {}
        for op in left:
            known.setdefault(_computation(op, op.inputs), []).append(op)
        for op in others:
            inputs = [self.twins.get(v) for v in op.inputs]
            candidates = known.get(_computation(op, inputs), []) if None not in inputs else []
            if candidates:
                names = [v.name for v in op.outputs[:1]]
                alike = (c for c in candidates if [v.name for v in c.outputs[:1]] == names)
                chosen = next(alike, candidates[0])
                candidates.remove(chosen)
                self._pair(chosen, op)

    def take_gradients(self) -> None:
        """Gradient ops of ops that are paired."""
        self.take_unique(
            lambda op: op.of and (op.type, op.made_by, op.of),
            lambda op: op.of and (op.type, op.made_by, self.twins.get(op.of)),
        )

    def take_unique(
        self, key: Callable[[Op], Hashable], key_of_b: Callable[[Op], Hashable] | None = None
    ) -> None:
        """Ops that alone have this key, in both Programs; None is not a key."""
        left, others = self._left
        old, new = _alone(left, key), _alone(others, key_of_b or key)
        for same, op in new.items():
            if same in old and same is not None:
                self._pair(old[same], op)

    def take_runs(self, key: Callable[[Op], Hashable]) -> None:
        """Runs of ops with the same keys in the same order, the longest first."""
        old, new = self._left
        runs = SequenceMatcher(None, list(map(key, old)), list(map(key, new)), autojunk=False)
        for i, j, size in runs.get_matching_blocks():
            for one, other in zip(old[i : i + size], new[j : j + size], strict=True):
                self._pair(one, other)


def _computation(op: Op, inputs: Sequence[Variable | None]) -> Hashable:
    return op.made_by, op.type, op.scope, op.body.signature, tuple(inputs)


def _family(op: Op) -> Hashable:
    return op.made_by, op.type


def _alone(ops: Sequence[Op], key: Callable[[Op], Hashable]) -> dict[Hashable, Op]:
    """The ops by their keys, without the keys that several have."""
    found: dict[Hashable, Op] = {}
    several = set()
    for op in ops:
        if found.setdefault(key(op), op) is not op:
            several.add(key(op))
    return {same: op for same, op in found.items() if same not in several}
