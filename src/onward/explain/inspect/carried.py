"""The values that a step carries on to the next one: which results replace which arguments.

A result replaces an argument if it is built as that is, container for container and type for type, and is
computed from it otherwise than by differentiation: by the update, or in the forward pass as statistics are.
Where a result stands in the place of one argument and is computed from another, place and name count if a
person says that both are carried on, or if they lie in one container that comes back with the same keys.
What the forward pass makes may as well be a result, as a reconstruction of the batch is: where nothing shows
which it is, a person is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from onward.core.errors import ArgumentError
from onward.core.program import Variable
from onward.explain.inspect.flow import Provenance
from onward.explain.inspect.matching import Choice, Pair, beside, decided
from onward.explain.inspect.parts import TreePart
from onward.explain.inspect.seats import Seats
from onward.explain.inspect.settling import Settling


@dataclass(frozen=True, eq=False)
class Ends:
    """The arguments and the results of a step, and what shows which of these replace which of those.

    Attributes:
        arguments: every part of what it is given.
        results: every part of what it returns.
        flow: how the one is computed of the other.
        title: what the step is called in messages.
        names: those of its arguments.
        told: the Variables that a person says are carried on; None if nobody says.
        asks: whether a person is asked of a number that may as well be a result; who calls a decorated step
            has all results, and gives all arguments.
    """

    arguments: Sequence[TreePart]
    results: Sequence[TreePart]
    flow: Provenance
    title: str
    names: Sequence[str]
    told: frozenset[Variable] | None = None
    asks: bool = True

    def pairs(self) -> list[Pair]:
        """The pairs (result, argument) of parts where the result is the next value of the argument.

        Raises:
            ArgumentError: nothing shows whether a result is a next value, or one comes back in another dtype,
                or what a person says is carried on is not.
        """
        seats = Seats(self.arguments, self.results, self.names)
        search = Settling(
            seats, self.flow, self.told, self.asks, self.title, self._matched, self._may_replace
        )
        pairs = search.pairs()
        self._expect_same_types(pairs)
        if self.told is None:
            self._expect_sure(pairs)
        else:
            self._expect_told(pairs, self.told)
        return pairs

    def _may_replace(self, new: TreePart, old: TreePart) -> bool:
        """Whether what a result is computed from lets it be the next value of an argument."""
        return self._is_meant(old) and self.flow.share(new, old, self.told is not None) >= 0

    def _is_meant(self, old: TreePart) -> bool:
        """Whether nobody says otherwise than that an argument is carried on."""
        return self.told is None or self.told.issuperset(old.variables)

    def _matched(self, settled: Sequence[Pair] = ()) -> list[Pair]:
        """Pairs by dependence beside some that are settled; the largest parts are matched first.

        A number alone comes last, and counts only beside something else that is carried on: among metrics it
        is one of them.
        """
        by_form: dict[Any, list[TreePart]] = {}
        results, arguments = self._left(settled)
        for part in arguments:
            by_form.setdefault(part.form, []).append(part)
        choices: list[Choice] = []
        for new in results:
            if choices and new.within(choices[-1][0]):
                continue
            same = [old for old in by_form.get(new.form, ()) if old.is_built_as(new)]
            choices.append((new, [old for old in same if self._may_replace(new, old)]))
            if not choices[-1][1]:
                choices.pop()
        large = [choice for choice in choices if not choice[0].is_numbers]
        pairs = [*settled, *decided(large, self.flow)]
        numbers = [choice for choice in choices if choice[0].is_numbers]
        return pairs + decided(beside(numbers, pairs), self.flow)

    def _unsure(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs of which nothing shows whether the result is a next value, or made of a batch.

        What the loss does not look at, as the running statistics of a batch, is carried on. Anything else
        that the forward pass makes may be a result if it is as long as the batch, or if there is no other
        data.
        """
        doubtful = [pair for pair in pairs if self.flow.is_doubtful(*pair)]
        if not doubtful:
            return []
        state = [old for _, old in pairs]
        alone = [part for part in self.arguments if jax.tree_util.treedef_is_leaf(part.treedef)]
        data = [part for part in alone if not any(part.within(old) for old in state)]
        lengths = {v.shape[0] for part in data for v in part.variables if v.shape}

        def is_as_long(old: TreePart) -> bool:
            return not lengths or any(v.shape and v.shape[0] in lengths for v in old.variables)

        return [(new, old) for new, old in doubtful if is_as_long(old)]

    def _left(self, pairs: Sequence[Pair]) -> tuple[list[TreePart], list[TreePart]]:
        """The results and the arguments that lie in none of these, nor these in them."""
        groups = [self.results, self.arguments]
        taken = [[new for new, _ in pairs], [old for _, old in pairs]]
        results, arguments = (
            [part for part in parts if not any(part.overlaps(other) for other in others)]
            for parts, others in zip(groups, taken, strict=True)
        )
        return results, arguments

    def _counted_on(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs of numbers that are left of which one adds to the other what is made of the batch.

        As a running mean of the loss does, and a loss to which a number is added.
        """
        results, arguments = self._left(pairs)

        def is_counted(new: TreePart, old: TreePart) -> bool:
            return old.form == new.form and old.is_built_as(new) and self.flow.is_counted_on(new, old)

        numbers = [new for new in results if new.is_numbers and new.variables]
        counted = [(new, [old for old in arguments if is_counted(new, old)]) for new in numbers]
        return [(new, old) for new, (old, *_) in beside(counted, pairs)]

    def _expect_sure(self, pairs: Sequence[Pair]) -> None:
        unsure = self._unsure(pairs)
        counted = self._counted_on(pairs) if self.asks and self.flow.trains else []
        asked = {old.place for _, old in (*unsure, *counted)}
        for new, old in (*unsure, *counted):
            known = self._named(other for _, other in pairs if other.place not in asked)
            name = old.variables[0].name if len(old.variables) == 1 else self.names[old.place]
            others = [self.names[place] for place in sorted(asked - {old.place})]
            say = f"carried={[*known, name]} if it is the next value, carried={known} if it is a result."
            if others:
                say = (
                    f"carried={known} with those of {[name, *others]} that are next values, which nothing "
                    f"shows of any: carried={[*known, name, *others]} if all are."
                )
            raise ArgumentError(
                f"{self.title} returns {_types(new)} as its result number {new.place + 1}, which the forward "
                f"pass makes of its argument {name!r} and which is built as that is. Nothing shows whether "
                "it is the next value, as the hidden state of a recurrent network is, or a result, as a "
                f"reconstruction of the batch is. Say what is carried on from step to step: {say}"
            )

    def _expect_same_types(self, pairs: Sequence[Pair]) -> None:
        """Raise ``ArgumentError`` for a result that would replace an argument but for its dtype.

        One that stands where the argument stood, among others that are carried on, would whatever it is
        computed from: a sum of losses that begins with the number 0 as well.
        """
        news, olds = [new for new, _ in pairs], [old for _, old in pairs]
        results, arguments = self._left(pairs)
        for new, old in ((new, old) for new in results for old in arguments):
            if not (_is_retyped(new, old) and self._is_meant(old)):
                continue
            is_computed = self._may_replace(new, old)
            stands = _stands_beside(self._in_whole(new, old), old, news, olds)
            if (stands and (is_computed or self.asks)) or (is_computed and _moves_on(new, old, self.flow)):
                may_say = self.told is None and old.place not in {o.place for o in olds}
                or_else = f" If it is a result, say so: carried={self._named(olds)}." if may_say else ""
                raise ArgumentError(_retyped(new, old, self.title) + or_else)

    def _in_whole(self, new: TreePart, old: TreePart) -> TreePart:
        """The result, which lies in a container as the argument does if all results are built as that is."""
        whole, argument = self.results[0], next(part for part in self.arguments if part.place == old.place)
        if new.around is None and whole is not new and whole.treedef == argument.treedef:
            return replace(new, around=(whole.start, whole.start + len(whole.leaves)))
        return new

    def _expect_told(self, pairs: Sequence[Pair], told: frozenset[Variable]) -> None:
        """Raise ``ArgumentError`` for what a person says is carried on, and no result replaces."""
        replaced = {v for _, old in pairs for v in old.variables}
        if lost := [v for part in self.arguments for v in part.variables if v in told - replaced]:
            raise ArgumentError(
                f"{self.title} returns nothing that is built as {lost[0].name!r} ({lost[0].type}) and "
                "computed from it, or in its place, so it is not carried on. Leave it out of carried=, or "
                "return its next value in the place of that argument."
            )

    def _named(self, parts: Iterable[TreePart]) -> list[str]:
        """The names of the arguments in which these lie."""
        return [self.names[place] for place in sorted({part.place for part in parts})]


def _is_retyped(new: TreePart, old: TreePart) -> bool:
    """Whether a part has the containers and shapes of another, and other dtypes."""
    if new.treedef != old.treedef or len(new.variables) != len(old.variables) or new.form == old.form:
        return False
    return all(n.shape == o.shape for n, o in zip(new.variables, old.variables, strict=True))


def _moves_on(new: TreePart, old: TreePart, flow: Provenance) -> bool:
    """Whether a part is another one in a wider or narrower type, as running statistics are.

    Data that is masked, scaled or cast is not, which the loss looks at.
    """
    pairs = [(n, o) for n, o in zip(new.variables, old.variables, strict=True) if n.dtype != o.dtype]
    if not (flow.trains and all(n.is_float and o.is_float for n, o in pairs)):
        return False
    is_container = not jax.tree_util.treedef_is_leaf(new.treedef)
    return flow.updates(new, old) or (is_container and not flow.is_doubtful(new, old))


def _stands_beside(new: TreePart, old: TreePart, news: Sequence[TreePart], olds: Sequence[TreePart]) -> bool:
    """Whether both stand in the same place of containers of which other parts are carried on."""
    if new.around is None or old.around is None:
        return False
    (begin, end), (first, last) = new.around, old.around
    is_same = end - begin == last - first and new.start - begin == old.start - first
    return is_same and new.is_accompanied(news) and old.is_accompanied(olds)


def _retyped(new: TreePart, old: TreePart, title: str) -> str:
    pairs = zip(new.variables, old.variables, strict=True)
    n, o = next((n, o) for n, o in pairs if n.dtype != o.dtype)
    return (
        f"{title} is given {o.name!r} as {o.type}, and returns its next value as {n.type}, so that the next "
        f"step would be another function. Begin with jnp.asarray(..., {str(n.dtype)!r}), or return it as it "
        f"came: .astype({str(o.dtype)!r})."
    )


def _types(part: TreePart) -> str:
    first, *rest = part.variables
    return f"{first.type} and {len(rest)} more" if rest else str(first.type)
