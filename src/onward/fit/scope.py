"""Values kept by Variable: what Programs over the same Variables share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

from onward.core.errors import ArgumentError, StateError, UnknownNameError, nearest
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.words import Kind
from onward.define.arguments import type_of
from onward.execute.initialize import initialized
from onward.execute.layout import Layout
from onward.execute.lying import beside
from onward.execute.state import State, copied, is_deleted, stored
from onward.fit.counts import UpdateCounts
from onward.fit.owners import Owner, Owners


class Scope(Mapping[str, Any]):
    """State Variables by name, each with its value.

    A Variable of two Programs is the same one when name, shape and dtype agree; one of the same name and
    another type is refused. What an optimizer keeps is its own: where two call something ``step``, that of
    the second one is named after its cost, ``cost_b/step``. A Variable finds what is its own,
    ``scope[program["step"]]``. Reading gives a copy, because a run may reuse the buffer. A run holds
    ``lock``.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.owners = Owners()
        self._counts: dict[str, UpdateCounts] = {}
        self._variables: dict[str, Variable] = {}
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str | Variable) -> Any:
        """A copy of a value.

        Raises:
            UnknownNameError: nothing of this name has a value yet.
        """
        name = self.owners.name_of(name) if isinstance(name, Variable) else name
        if name not in self._values:
            raise UnknownNameError(f"The scope holds nothing named {name!r}. {nearest(name, self._values)}")
        with self.lock:
            return copied(self._values[name], self._values[name].dtype)

    def __setitem__(self, name: str | Variable, value: Any) -> None:
        """Give a Variable a value; of one that is known already the type stays.

        Raises:
            ArgumentError: a name that several optimizers use.
        """
        if isinstance(name, Variable):
            name = self.owners.name_of(name)
        else:
            self.owners.expect_one(name)
        self.update({name: value})

    def update(self, values: Mapping[str, Any]) -> None:
        """Give several Variables values, all or none; of those that are known already the types stay."""
        variables = {name: self._variables.get(name) or _variable(name, x) for name, x in values.items()}
        made = {name: stored(x, variables[name], f"The value of {name!r}") for name, x in values.items()}
        with self.lock:
            self._variables.update(variables)
            self._values.update(made)
            for name in values:
                self._counts.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def initialize(self, program: Program, seed: int, owner: Owner | None = None) -> None:
        """Give every state Variable of a Program a value that has none yet; those that have one keep it.

        Args:
            program: what is about to run.
            seed: what declared parameters are initialized from.
            owner: the optimizer of the training Program that it is a part of.

        Raises:
            StateError: a Variable of another type has the name, or nothing says how to begin.
        """
        names = self.owners.names(program, owner)
        whole = Layout.of(program).whole
        given = {v: self._values[n] for v, n in names.items() if self._known(whole(v), n)}
        if len(given) == len(program.state):
            return
        made = {v for op in program.initializers for v in op.outputs}
        if lost := [v for v in program.state if v not in made and v not in given]:
            raise StateError(
                f"{program.name!r} keeps {', '.join(f'{v.name!r} ({v.type})' for v in lost[:5])}, which has "
                f"no first value: it came in as an argument. Set it, session[{lost[0].name!r}] = array, or "
                "declare it with onward.parameter."
            )
        values = initialized(program, given, seed)
        for v, name in names.items():
            self._variables[name], self._values[name] = replace(whole(v), name=name), values[v]

    def _known(self, v: Variable, name: str) -> bool:
        known = self._variables.get(name)
        if known is not None and (known.shape, known.dtype) != (v.shape, v.dtype):
            raise StateError(
                f"{name!r} is {known.type} here, and the Program keeps {v.name!r} as {v.type}. The same "
                "name is the same Variable: give one of the two another name, or use another Session."
            )
        return known is not None

    def names_of(self, program: Program, layout: Layout) -> list[str]:
        """The names here of the Variables of a layout, in its order, of a Program that is initialized."""
        names = {v.name: name for v, name in self.owners.names(program, None).items()}
        return [names[v.name] for v in layout.variables]

    def counts_of(self, counter: Variable | None) -> UpdateCounts:
        """The updates that a step counter has counted."""
        name = self.owners.name_of(counter) if counter is not None else ""
        return self._counts.setdefault(name, UpdateCounts()) if name else UpdateCounts()

    def values_of(self, names: Sequence[str], counter: Variable | None = None, shift: int = 0) -> list[Any]:
        """The stored arrays themselves, not copies; a shift is added to the step counter."""
        if counter is None or not shift:
            return [self._values[name] for name in names]
        shifted = self.owners.name_of(counter)
        return [self._values[name] + shift if name == shifted else self._values[name] for name in names]

    def take(
        self, state: State, names: Sequence[str], counter: Variable | None = None, shift: int = 0
    ) -> None:
        """Keep the values of a State under these names; a shift is added to the step counter."""
        self._values.update(zip(names, state.values, strict=True))
        if counter is not None and shift:
            name = self.owners.name_of(counter)
            self._values[name] = self._values[name] + shift

    def values_by_name(self) -> dict[str, Any]:
        """The stored arrays themselves, by name."""
        return dict(self._values)

    def record(self) -> dict[str, Any]:
        """Whose the values are, and how often each part was updated, as JSON data for a checkpoint."""
        counts = {name: dict(c.had) for name, c in self._counts.items() if len(set(c.had.values())) > 1}
        found = {"owners": self.owners.record(), "updates": counts}
        return {key: value for key, value in found.items() if value}

    def restore(self, values: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint, and what it says besides."""
        with self.lock:
            known = {name: x for name, x in self._values.items() if name in values}
            self.update(values)
            self._values.update((name, beside(x, self._values[name])) for name, x in known.items())
            self.owners.restore(record.get("owners", []))
            self._counts.update({name: UpdateCounts(had) for name, had in record.get("updates", {}).items()})

    @property
    def is_spent(self) -> bool:
        """Whether any array here was given away."""
        return any(map(is_deleted, self._values.values()))

    def __repr__(self) -> str:
        return f"Scope({len(self)} Variables)"


def _variable(name: str, value: Any) -> Variable:
    """A state Variable of the type of this value."""
    found = type_of(value)
    if found is None:
        raise ArgumentError(f"{name!r} was given {describe(value)}; expected an array.")
    return Variable(name, tuple(found.shape), found.dtype, Kind.STATE)
