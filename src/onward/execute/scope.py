"""Values kept by Variable: what Programs over the same Variables share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import RLock
from typing import Any

from onward.core.errors import ArgumentError, StateError, UnknownNameError, nearest
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.words import Kind
from onward.define.arguments import type_of
from onward.execute.initialize import initialized
from onward.execute.state import Layout, State, copied, is_deleted, stored


class Scope(Mapping[str, Any]):
    """State Variables by name, each with its value.

    A Variable of two Programs is the same one when name, shape and dtype agree; one of the same name and
    another type is refused. Reading gives a copy, because a run may reuse the buffer. Who runs holds
    ``lock``.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._variables: dict[str, Variable] = {}
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str | Variable) -> Any:
        """A copy of a value.

        Raises:
            UnknownNameError: nothing of this name has a value yet.
        """
        name = name.name if isinstance(name, Variable) else name
        if name not in self._values:
            raise UnknownNameError(f"The scope holds nothing named {name!r}. {nearest(name, self._values)}")
        with self.lock:
            return copied(self._values[name], self._values[name].dtype)

    def __setitem__(self, name: str, value: Any) -> None:
        """Give a Variable a value; of one that is known already the type stays."""
        self.update({name: value})

    def update(self, values: Mapping[str, Any]) -> None:
        """Give several Variables values, all or none; of those that are known already the types stay."""
        variables = {name: self._variables.get(name) or _variable(name, x) for name, x in values.items()}
        made = {name: stored(x, variables[name], f"The value of {name!r}") for name, x in values.items()}
        with self.lock:
            self._variables.update(variables)
            self._values.update(made)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def initialize(self, program: Program, seed: int) -> None:
        """Give every state Variable of a Program a value that has none yet; those that have one keep it.

        Raises:
            StateError: a Variable of another type bears the name, or nothing says how to begin.
        """
        whole = Layout.of(program).whole
        given = {v: self._values[v.name] for v in program.state if self._known(whole(v))}
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
        for v in program.state:
            self._variables[v.name], self._values[v.name] = whole(v), values[v]

    def _known(self, v: Variable) -> bool:
        known = self._variables.get(v.name)
        if known is not None and (known.shape, known.dtype) != (v.shape, v.dtype):
            raise StateError(
                f"{v.name!r} is {known.type} here, and the Program keeps {v.name!r} as {v.type}. The same "
                "name is the same Variable: give one of the two another name, or use another Session."
            )
        return known is not None

    def take(self, state: State) -> None:
        """Keep the values of a State."""
        for v, value in zip(state.layout.variables, state.values, strict=True):
            self._values[v.name] = value

    def values_of(self, variables: tuple[Variable, ...]) -> list[Any]:
        """The stored arrays themselves, not copies."""
        return [self._values[v.name] for v in variables]

    def values_by_name(self) -> dict[str, Any]:
        """The stored arrays themselves, by name."""
        return dict(self._values)

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
