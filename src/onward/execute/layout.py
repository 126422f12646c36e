"""Which state Variables a Step keeps and in which order, and what of them a compiled call takes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from onward.core.errors import StateError
from onward.core.placement import local_copies, whole_shape
from onward.core.program import Program, Replicas, Variable
from onward.core.structure import Signature
from onward.core.words import UpdateType

_MAKE_ONE = "Make one with this step's own init."
_RESTORE_IT = (
    "If it is of the same training, laid out otherwise (merge=ow.Sharded()), save a checkpoint of it, which "
    "is whole, and restore it here: step.restore(folder). One of another model does not fit."
)


@dataclass(frozen=True, eq=False)
class Layout:
    """Which state Variables a Step keeps and in which order: first what each step replaces.

    ``copies`` names, for a parameter, the state in which each device has its own of it; ``limits`` the
    numbers below which hyperparameters must stay.
    """

    changed: tuple[Variable, ...]
    kept: tuple[Variable, ...]
    hyperparameters: tuple[Variable, ...]
    scheduled: tuple[str, ...]
    signature: Signature | None
    replicas: Replicas | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> Layout:
        """The layout of a Program's state."""
        changed = tuple(v for v in program.state if v in program.next_state)
        kept = tuple(v for v in program.state if v not in program.next_state)
        bookkeeping = (op for op in program.ops if op.update is UpdateType.BOOKKEEPING)
        following = set(program.next_state.values())
        scheduled = tuple(v.name for op in bookkeeping for v in op.outputs if v not in following)
        return cls(
            changed,
            kept,
            program.hyperparameters,
            scheduled,
            program.signature,
            program.replicas,
            {p.name: own.name for p, own in local_copies(program).items()},
            {v.name: limit for v, limit in program.limits.items()},
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        trees = self.signature and (self.signature.parameters, self.signature.model_state)
        return (
            tuple(map(self.identity_of, self.changed)),
            tuple(map(self.identity_of, self.kept)),
            tuple(v.name for v in self.hyperparameters),
            tuple(tree.treedef for tree in trees or () if tree is not None),
        )

    def identity_of(self, v: Variable) -> tuple[str, tuple[int, ...], Any]:
        """The identity of a Variable across Programs: its name, its shape over all devices, and its dtype."""
        return v.name, whole_shape(v, self.replicas), v.dtype

    def expect_all(
        self,
        other: Layout,
        name: str,
        added: Iterable[Variable] = (),
        instead: str = "",
    ) -> None:
        """Raise ``StateError`` unless a State of another layout, and what is added, has all of this one."""
        known = {*map(other.identity_of, other.variables), *map(self.identity_of, added)}
        lacking = [v for v in self.variables if self.identity_of(v) not in known]
        if absent := [v for v in lacking if v.name not in other.position]:
            raise StateError(
                f"This State has no {', '.join(f'{v.name!r} ({v.type})' for v in absent[:5])}, which {name} "
                f"keeps. {instead or _MAKE_ONE}"
            )
        if lacking:
            pairs = [(other.variables[other.position[v.name]], v) for v in lacking[:5]]
            told = [f"{v.name!r} is {other.whole(x).type}, here {self.whole(v).type}" for x, v in pairs]
            raise StateError(
                f"This State is not kept as {name} keeps it: {'; '.join(told)}. {instead or _RESTORE_IT}"
            )
        for v in self.changed:
            if (copy := other.copies.get(v.name)) is not None and copy not in self.position:
                raise StateError(
                    f"This State has {copy!r}, in which each device has its own of {v.name!r}; {name} "
                    f"updates {v.name!r} alone. {instead or _RESTORE_IT}"
                )

    def whole(self, v: Variable) -> Variable:
        """A Variable as it is over all devices together, as people feed it and see it."""
        return replace(v, shape=whole_shape(v, self.replicas))

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """All state Variables in the order of storage."""
        return (*self.changed, *self.kept)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where the value of each name is stored."""
        return {v.name: i for i, v in enumerate(self.variables)}


class Lending:
    """Arrays in two groups: at ``reused`` of ``count`` places those that a call takes over, the others lent.

    >>> lending = Lending([1], 3)
    >>> lending.apart("abc")
    (('b',), ('a', 'c'))
    >>> lending.together("b", "ac")
    ['a', 'b', 'c']
    """

    def __init__(self, reused: Sequence[int], count: int) -> None:
        taken = set(reused)
        self.reused = list(reused)
        self.lent = [i for i in range(count) if i not in taken]
        self._are_first = self.reused == list(range(len(taken)))

    def apart(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The values that are taken over, and those that are lent."""
        if self._are_first:
            return tuple(values[: len(self.reused)]), tuple(values[len(self.reused) :])
        return tuple(values[i] for i in self.reused), tuple(values[i] for i in self.lent)

    def together(self, reused: Sequence[Any], lent: Sequence[Any]) -> list[Any]:
        """The values in their places again."""
        if self._are_first:
            return [*reused, *lent]
        at = dict(zip((*self.reused, *self.lent), (*reused, *lent), strict=True))
        return [at[i] for i in range(len(at))]
