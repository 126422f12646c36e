"""The text of a diff: a headline, and one line for each kind of change.

Equal changes in many places are one line, which tells how many they are and one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from onward.core.program import Op, Program, Variable
from onward.core.recipe import called
from onward.core.show import sentence, short_type
from onward.core.words import Pass
from onward.explain.diff.changes import Changes
from onward.explain.diff.compare import Fact, Pair

_FEW = 4
_KINDS = 10
_FIRST = ("devices", "feed", "parameter", "state", "constant", "begins")


@dataclass(frozen=True)
class ChangeLine:
    """One kind of change: the pass or what it is about, its mark, how often, the types, and words."""

    margin: str
    mark: str
    count: int
    type: str
    text: str

    @property
    def times(self) -> str:
        """The mark, and how often if that is not once."""
        return f"{self.mark} {self.count:,} x" if self.count > 1 else self.mark


def headline(found: Changes) -> str:
    """All changes in one line."""
    resized = sum(pair.is_resized for pair in found.changed)
    parts = [
        *_census("+", found.added),
        *_census("-", found.removed),
        *_counts(
            (len(found.changed) - resized, "changed"),
            (len(found.rewired), "re-wired"),
            (resized, "of other sizes"),
            (found.moved, "moved"),
        ),
    ]
    around = [*_gradients(found), *_facts_in_words(found.facts)]
    if not parts and not around:
        return f"{_title(found)}: {'no op differs, see below' if found.facts else 'nothing differs'}"
    told = [", ".join(parts)] if parts else ["no op differs"]
    return f"{_title(found)}: {'; '.join([*told, *around])}"


def _title(found: Changes) -> str:
    """The transforms that the second has beyond the first, or the names of both."""
    a, b = found.before.recipe, found.after.recipe
    if a is not None and b is not None and a.origin is b.origin:
        old, new = (Counter(map(called, recipe.steps)) for recipe in (a, b))
        if new > old:
            return ", ".join(new - old)
    return f"{found.before.name} -> {found.after.name}"


def _census(mark: str, ops: Sequence[Op]) -> Iterator[str]:
    if ops:
        types = f"{ops[0].type} {len(ops):,}" if len({op.type for op in ops}) == 1 else _kinds(ops)
        yield f"{mark} {len(ops):,} {'op' if len(ops) == 1 else 'ops'} ({types})"


def _counts(*pairs: tuple[int, str]) -> Iterator[str]:
    return (f"{n:,} {word}" for n, word in pairs if n)


def _gradients(found: Changes) -> Iterator[str]:
    """Say which type of added op makes every gradient now, if it is one type for all."""
    twins, before = found.matching.variables, dict(found.before.gradients)
    pairs = [(before.get(twins[p]), g) for p, g in found.after.gradients if p in twins]
    both = [(old, new) for old, new in pairs if old is not None]
    makers = {v: op for op in found.added for v in op.outputs}
    ends = {makers[new].type if new in makers else "" for old, new in both if twins.get(new) is not old}
    others = [new for old, new in both if twins.get(new) is old]
    if both and not others and len(ends) == 1 and "" not in ends:
        through = all(any(twins.get(v) is old for v in makers[new].inputs) for old, new in both)
        yield f"every gradient now {'passes through' if through else 'comes from'} {ends.pop()}"


def _facts_in_words(found: Sequence[Fact]) -> Iterator[str]:
    for what, mark in (("feed", "+-~"), ("parameter", "+-~"), ("state", "+-~"), ("constant", "+-~")):
        counted = Counter(fact.mark for fact in found if fact.what == what and fact.mark in mark)
        if counted:
            yield f"{what} {' '.join(f'{mark} {n:,}' for mark, n in counted.items())}"
    if begins := [fact for fact in found if fact.what == "begins"]:
        yield begins[0].text if len(begins) == 1 else f"{len(begins):,} first values differ"


def lines(found: Changes) -> Iterator[list[ChangeLine]]:
    """The lines in blocks: what is given, the ops by pass, what is handed out."""
    around = list(_folded_facts(found.facts))
    yield [line for line in around if line.margin in _FIRST]
    yield sorted(_ops(found), key=lambda line: list(Pass).index(Pass(line.margin)))
    yield [line for line in around if line.margin not in _FIRST]


def _folded_facts(found: Iterable[Fact]) -> Iterator[ChangeLine]:
    for (what, mark), run in groupby(found, key=lambda fact: (fact.what, fact.mark)):
        alike = list(run)
        if len(alike) <= _FEW:
            yield from (ChangeLine(what, mark, 1, fact.type, fact.text) for fact in alike)
        else:
            yield ChangeLine(
                what, mark, len(alike), _one_of({f.type for f in alike}), f"such as {alike[0].text}"
            )


def _ops(found: Changes) -> Iterator[ChangeLine]:
    for mark, ops in (("-", found.removed), ("+", found.added)):
        for of_pass in _groups(ops, lambda op: op.made_by):
            kinds = _groups(of_pass, lambda op: op.type)
            if len(kinds) > _KINDS:
                yield ChangeLine(str(of_pass[0].made_by), mark, len(of_pass), "", _kinds(of_pass, 2 * _KINDS))
            else:
                yield from (_line_of_ops(mark, group) for group in kinds)
    makers, new = _makers(found.after), {v for op in found.added for v in op.outputs}
    for pairs in (found.changed, found.rewired):
        for group in _groups(pairs, lambda pair: _kind(pair, makers, new)):
            yield _line_of_pairs(group, makers)


def _kinds(ops: Sequence[Op], most: int = _FEW) -> str:
    """How many of each type."""
    common = Counter(op.type for op in ops).most_common()
    if len(common) == 1:
        return common[0][0]
    return ", ".join(f"{kind} {n:,}" for kind, n in common[:most]) + (", ..." if len(common) > most else "")


def _groups(members: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """The members with equal keys together, in the order of their first."""
    found: dict[Hashable, list[Any]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return list(found.values())


def _line_of_ops(mark: str, ops: Sequence[Op]) -> ChangeLine:
    first = ops[0]
    words = _words(first) if len(ops) == 1 else f"{first.type}, such as {_words(first)}"
    scopes = dict.fromkeys(op.scope for op in ops if op.scope)
    if len(scopes) > 1:
        words += f"  (in {len(scopes):,} scopes)"
    types = {", ".join(dict.fromkeys(map(short_type, op.outputs))) for op in ops}
    return ChangeLine(str(first.made_by), mark, len(ops), _one_of(types), words)


def _words(op: Op) -> str:
    """An op as an assignment; one of many results by its first."""
    if len(op.outputs) <= _FEW:
        return sentence(op)
    return f"{op.outputs[0].name}, ... ({len(op.outputs) - 1} more) = {op.type}(...)"


def _makers(program: Program) -> dict[Variable, str]:
    """For each Variable what makes it."""
    given = {v: str(v.kind) for v in (*program.inputs, *program.state, *program.constants)}
    return given | {v: op.type for op in program.ops for v in op.outputs}


def _kind(pair: Pair, makers: Mapping[Variable, str], new: Collection[Variable]) -> Hashable:
    """Equal for pairs that one line tells; what is new is one thing to read."""
    reads = frozenset(makers[y] if y not in new else "" for _, y in pair.replaced if y is not None)
    return pair.after.made_by, pair.differences, reads


def _line_of_pairs(pairs: Sequence[Pair], makers: Mapping[Variable, str]) -> ChangeLine:
    first = pairs[0]
    words = [", ".join(first.differences)] if first.differences else []
    if first.replaced:
        words.append(_reads(pairs, makers))
    op = first.after
    alone = len(pairs) == 1 and op.outputs
    name = f"{op.outputs[0].name} = {op.type}" if alone else _kinds([pair.after for pair in pairs])
    types = {", ".join(dict.fromkeys(map(short_type, pair.after.outputs))) for pair in pairs}
    return ChangeLine(str(op.made_by), "~", len(pairs), _one_of(types), f"{name}: {'; '.join(words)}")


def _reads(pairs: Sequence[Pair], makers: Mapping[Variable, str]) -> str:
    """Which inputs were replaced by which."""
    replaced = pairs[0].replaced
    shown = [_replacement(x, y) for x, y in replaced[:_FEW]]
    if more := len(replaced) - len(shown):
        shown.append(f"{more:,} more")
    kinds = Counter(makers[y] for pair in pairs for _, y in pair.replaced if y is not None)
    told = ", ".join(kind for kind, _ in kinds.most_common(_FEW)) + (", ..." if len(kinds) > _FEW else "")
    return f"reads {told}, such as {shown[0]}" if len(pairs) > 1 and kinds else f"reads {', '.join(shown)}"


def _replacement(old: Variable | None, new: Variable | None) -> str:
    if old is None or new is None:
        return f"{new.name} as well" if new is not None else f"{old.name} no more" if old is not None else ""
    return f"{new.name} for {old.name}"


def _one_of(types: Collection[str]) -> str:
    return next(iter(types)) if len(types) == 1 else f"{len(types)} types"
