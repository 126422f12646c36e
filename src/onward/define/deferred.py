"""A Program that waits for the first feed to show the shapes that its declarations leave open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.define.lazy import data_in, has_lazy
from onward.define.trace import takes_arguments, trace


@dataclass(frozen=True, eq=False)
class Deferred:
    """Lazy values, how they will be traced, and the transforms that will be applied to the Program.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> x = ow.data("x")
        >>> later = ow.SGD(0.1).minimize(ow.layer.mse(ow.layer.fc(x, 1), ow.data("y")))
        >>> later.complete({"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))})["x"]
        Variable('x', float32[8,4], data)
    """

    target: Any
    options: Mapping[str, Any]
    transforms: tuple[Callable[[Program], Program], ...] = ()

    def then(self, transform: Callable[[Program], Program]) -> Deferred:
        """The same, with one more transform to apply."""
        return replace(self, transforms=(*self.transforms, transform))

    @property
    def is_complete(self) -> bool:
        """Whether every shape is known already."""
        return all(v.declared_shape is not None for v in data_in(self.target))

    @property
    def advice(self) -> str:
        """How to make a Program of it, for calls that take one."""
        return str(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the data, in the order in which it was declared."""
        return tuple(v.name or "" for v in data_in(self.target))

    def complete(self, feed: Mapping[str, Any]) -> Program:
        """The Program for data like this.

        Raises:
            ArgumentError: data without a shape that is not fed.
        """
        return self.derived(self.forward(feed))

    def forward(self, feed: Mapping[str, Any]) -> Program:
        """The forward Program alone."""
        return trace(self.target, feed=feed, **self.options)

    def derived(self, program: Program) -> Program:
        """The forward Program with the transforms applied."""
        for transform in self.transforms:
            program = transform(program)
        return program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Program, name):
            raise AttributeError(name)
        raise ArgumentError(f"{self} Then it has {name!r}.")

    def __iter__(self) -> NoReturn:
        raise ArgumentError(f"{self} Then its updates are a list; a Session takes it as a target as it is.")

    def __len__(self) -> NoReturn:
        raise ArgumentError(f"{self} Then its updates are a list; a Session takes it as a target as it is.")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Deferred({self.target!r}, {len(self.transforms)} transforms)"

    def __str__(self) -> str:
        names = [v.name or "" for v in data_in(self.target) if v.declared_shape is None]
        example = ", ".join(f"{name!r}: array" for name in names)
        return (
            f"A Program to come: its first feed will show the shape of {', '.join(map(repr, names))}. To see "
            f"it before, show an example: deferred.complete({{{example}}})."
        )


def derived(
    network: Any, transform: Callable[[Program], Program], options: Mapping[str, Any] = MappingProxyType({})
) -> Program | Deferred | None:
    """A transform of what describes a network: a Program, a declared cost, a function that declares.

    Where the shapes of a declared cost are open, it waits for them. None for what describes no network by
    itself, such as a function that takes arguments.

    >>> import onward as ow
    >>> cost = ow.layer.mse(ow.layer.fc(ow.data("x", (None, 4)), 1), ow.data("y", (None, 1)))
    >>> derived(cost, lambda program: program)
    Program('mse', 7 ops)
    """
    if isinstance(network, Program):
        return transform(network)
    if callable(network):
        return None if takes_arguments(network) else transform(trace(network, **options))
    if not isinstance(network, Deferred) and not has_lazy(network):
        return None
    feed = options.get("feed", {})
    rest = {name: option for name, option in options.items() if name != "feed"}
    later = network if isinstance(network, Deferred) else Deferred(network, rest)
    whole = later.then(transform)
    return whole.complete(feed) if feed or later.is_complete else whole
