"""The results of a step, as users read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from onward.core.errors import ByName, UnknownNameError, nearest
from onward.core.pointing import Pointing
from onward.core.program import Variable
from onward.core.structure import Signature
from onward.develop.watch.reading import Watched, Watching


@dataclass(frozen=True, eq=False)
class Results:
    """Which Variables a step returns, and how the function's result is made of them."""

    variables: tuple[Variable, ...]
    loss: Variable | None
    signature: Signature | None
    watching: tuple[tuple[Watching, Variable, Variable], ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Results) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        tree = self.signature.result.treedef if self.signature is not None else None
        cells = tuple(cell.identity for watching, *_ in self.watching for cell in watching.cells)
        return tuple(self.position), self.loss and self.loss.name, tree, cells

    @cached_property
    def places(self) -> tuple[int, ...] | None:
        """The places of the function's results among the values; None if some are not computed."""
        if self.signature is None:
            return None
        found = [self.position.get(v.name) for v in self.signature.result.variables]
        return None if None in found else tuple(i for i in found if i is not None)

    @cached_property
    def is_one_array(self) -> bool:
        """Whether the function returned an array alone."""
        result = self.signature.result if self.signature is not None else None
        return result is not None and jax.tree_util.treedef_is_leaf(result.treedef) and bool(self.places)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where each name stands among the values."""
        return {v.name: i for i, v in enumerate(self.variables)}


@jax.tree_util.register_pytree_node_class
class Out(ByName, Pointing):
    """The results of a step: the loss, auxiliary outputs, fetched Variables.

    Values are JAX arrays that may still be computing; reading one waits for it.
    """

    __slots__ = ("results", "values")

    def __init__(self, results: Results, values: Sequence[Any]) -> None:
        self.results, self.values = results, tuple(values)

    def __getitem__(self, name: str | Variable) -> jax.Array:
        """The value of an output or a fetched Variable."""
        name = name.name if isinstance(name, Variable) else name
        if name == "loss" and name not in self.results.position:
            return self.loss
        try:
            return self.values[self.results.position[name]]
        except KeyError:
            raise UnknownNameError(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        signature = self.results.signature
        aux = self.aux if signature is not None and signature.has_aux and self.results.places else None
        if isinstance(aux, Mapping) and name in aux:
            return f"{name!r} is among what the loss returned beside its value: out.aux[{name!r}]."
        return (
            f"The step does not return {name!r}. {nearest(name, self.results.position)} "
            f"Ask for it when compiling: compile(program, fetch=[{name!r}])."
        )

    @property
    def loss(self) -> jax.Array:
        """The loss, a scalar."""
        if self.results.loss is None:
            raise UnknownNameError("The traced function returns several arrays, none of them named the loss.")
        return self[self.results.loss]

    @property
    def value(self) -> Any:
        """Everything the traced function returned, in its containers; without the next model state."""
        results, places = self.results, self.results.places
        if results.signature is None:
            return self.values
        if places is None:
            raise UnknownNameError(_lost(results))
        if results.is_one_array:
            return self.values[places[0]]
        return results.signature.result.unflatten(map(self.values.__getitem__, places))

    @property
    def aux(self) -> Any:
        """The auxiliary outputs that the traced function returned beside the loss (``has_aux=True``)."""
        signature = self.results.signature
        if signature is None or not signature.has_aux:
            raise UnknownNameError(
                "The Program has no auxiliary outputs; out.value is all that was returned. To have some, let "
                "the loss return (loss, aux) and trace it with has_aux=True."
            )
        return self.value[1]

    @property
    def watched(self) -> Watched:
        """Statistics of what ``watch`` was told to look at, by name; empty in steps that it leaves out."""
        return Watched([(w.cells, self[at], self[numbers]) for w, at, numbers in self.results.watching])

    def __repr__(self) -> str:
        return f"Out({', '.join(self.results.position)})"

    def tree_flatten(self) -> tuple[tuple[Any, ...], Results]:
        """The values, for ``jax.tree``."""
        return self.values, self.results

    @classmethod
    def tree_unflatten(cls, results: Results, values: Sequence[Any]) -> Out:
        """An Out from its values, for ``jax.tree``."""
        return cls(results, values)


def _lost(results: Results) -> str:
    """The error message when some results of the traced function are not computed."""
    assert results.signature is not None
    lost = [v.name for v in results.signature.result.variables if v.name not in results.position]
    there = ", ".join(map(repr, results.position)) or "nothing: ask for activations"
    return (
        f"This Program computes no {', '.join(map(repr, lost))}, which the traced function returned. What it "
        f"returns: out[name] with {there}."
    )
