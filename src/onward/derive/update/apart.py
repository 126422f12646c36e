"""An update that one pair of functions makes of all gradients, taken apart by parameter.

The functions are ``init(parameters)``, which returns a state, and ``update(gradients, state, parameters)``,
which returns what is added to the parameters and the next state, all of them containers of arrays. They are
traced once; what each result is computed of tells which part of the state belongs to which parameter, whether
parameters are updated each by itself, and whether number by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.layout import Shape, inlined, laid_out, read_by
from onward.core.names import Names
from onward.core.variable import Variable
from onward.core.words import UpdateType
from onward.derive.update.state_names import Place, places_of

Part = tuple[Body, tuple[int, ...]]
_TIMES = 4  # that an update is traced until its state keeps its dtypes


@dataclass(frozen=True)
class StateArray:
    """An array of the state.

    Attributes:
        number: its place in the state.
        name: what it is called, beside the name of its parameter.
        type: its shape and dtype.
        owner: the parameter that it belongs to; None: all share it.
        changeable: whether it is a hyperparameter: a number that no update replaces.
    """

    number: int
    name: str
    type: Type
    owner: int | None
    changeable: bool


@dataclass(frozen=True, eq=False)
class Apart:
    """An update, taken apart.

    ``begin`` makes the state of the parameters. ``run`` takes the gradients, the state and the parameters,
    and gives the next parameters and the next state; each parameter and each array of the state is one
    position.

    Attributes:
        parameters: their names.
        types: shape and dtype of each, and of its gradient.
        leaves: the arrays of the state.
        begin: the first state.
        run: one update.
        type: how far it looks.
    """

    parameters: tuple[str, ...]
    types: tuple[Type, ...]
    leaves: tuple[StateArray, ...]
    begin: Body
    run: Body
    type: UpdateType

    @property
    def shared(self) -> tuple[StateArray, ...]:
        """The state that belongs to no parameter."""
        return tuple(leaf for leaf in self.leaves if leaf.owner is None)

    @property
    def advancing(self) -> tuple[StateArray, ...]:
        """The shared state that an update replaces."""
        return tuple(leaf for leaf in self.shared if not leaf.changeable)

    def own(self, parameter: int) -> tuple[StateArray, ...]:
        """The state of one parameter."""
        return tuple(leaf for leaf in self.leaves if leaf.owner == parameter)

    def begins(self, parameter: int, shape: Shape) -> Part:
        """The first state of one parameter of this shape: its part of ``begin``, which may read it."""
        body, taken = self.begin.restricted([leaf.number for leaf in self.own(parameter)])
        old = self.types[parameter].shape
        if shape != old:
            body = _expect_laid_out(laid_out(body, range(len(taken)), old, shape))
        return body, taken

    def updates(self, parameter: int, shape: Shape) -> Part:
        """One parameter's update: of what it reads, the next value and the next of its state."""
        own = self.own(parameter)
        body, taken = self.parts[parameter]
        old = self.types[parameter].shape
        if shape == old:
            return body, taken
        mine = {parameter, self.at_parameter(parameter), *map(self.at_leaf, own)}
        arrays = [i for i, position in enumerate(taken) if position in mine]
        return _expect_laid_out(laid_out(body, arrays, old, shape)), taken

    @cached_property
    def parts(self) -> Sequence[Part]:
        """For each parameter its part of ``run``."""
        count = len(self.parameters)
        return [
            self.run.restricted([i, *(count + leaf.number for leaf in self.own(i))]) for i in range(count)
        ]

    def advances(self) -> Part:
        """The next values of the shared state that an update replaces."""
        return self.run.restricted([len(self.parameters) + leaf.number for leaf in self.advancing])

    def at_leaf(self, leaf: StateArray) -> int:
        """The position of an array of the state among the inputs of ``run``."""
        return len(self.parameters) + leaf.number

    def at_parameter(self, parameter: int) -> int:
        """The position of a parameter among the inputs of ``run``."""
        return len(self.parameters) + len(self.leaves) + parameter


def taken_apart(
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    names: Sequence[str],
    types: Sequence[Type],
    filled: Callable[[Sequence[Any]], Any],
    explained: Callable[..., Any],
) -> Apart:
    """Trace an update of these parameters, and take it apart.

    Args:
        init: from the containers of the parameters to the state.
        update: from gradients, state and parameters to what is added to the parameters, and the next state.
        names: the names of the parameters.
        types: shape and dtype of each.
        filled: the containers with arrays in the places of the parameters, in this order.
        explained: calls a function, and explains what goes wrong in it.
    """
    traced = _TracedPair(init, update, types, filled)
    begin, run = explained(traced.bodies)
    places = places_of(traced.state, jax.tree_util.tree_flatten_with_path(filled(list(names)))[0])
    found = _Reads(begin, run, len(types), len(places))
    owners = [found.owner(n, place.owner) for n, place in enumerate(places)]
    leaves = _leaves(places, owners, begin.out_types, found.kept)
    whole = Apart(tuple(names), tuple(types), leaves, begin, run, UpdateType.ACROSS)
    if not found.is_by_parameter(owners):
        return whole
    alone = replace(whole, type=UpdateType.PER_MATRIX)
    return replace(alone, type=UpdateType.ELEMENTWISE) if _is_by_number(alone) else alone


class _TracedPair:
    """The two functions as Bodies over flat arrays."""

    def __init__(self, init: Any, update: Any, types: Sequence[Type], filled: Any) -> None:
        self.init, self.update, self.types, self.filled = init, update, types, filled
        self.state: Any = None
        self.structure: Any = None

    def bodies(self) -> tuple[Body, Body]:
        """The first state and one update; the state has the dtypes that it keeps from step to step."""
        begin = body_of(self._begin, *self.types)
        kinds = [Type(t.shape, t.dtype) for t in begin.out_types]
        for _ in range(_TIMES):
            run = body_of(self._run, *self.types, *kinds, *self.types)
            made = run.out_types[len(self.types) :]
            if [t.dtype for t in made] == [t.dtype for t in kinds]:
                break
            kinds = [
                Type(t.shape, jnp.promote_types(t.dtype, m.dtype)) for t, m in zip(kinds, made, strict=True)
            ]
        begin = body_of(lambda *p: cast(begin(*p), kinds), *self.types)
        run = body_of(lambda *x: cast(run(*x), [*self.types, *kinds]), *run.in_types)
        return inlined(begin), inlined(run)

    def _begin(self, *parameters: Any) -> list[Any]:
        leaves, structure = jax.tree.flatten(self.init(self.filled(parameters)))
        self.structure = structure
        self.state = jax.tree.unflatten(self.structure, range(len(leaves)))
        return [jnp.asarray(x) for x in leaves]

    def _run(self, *values: Any) -> list[Any]:
        count = len(self.types)
        gradients, state, parameters = values[:count], values[count:-count], values[-count:]
        tree = self.filled(parameters)
        containers: Any = jax.tree.structure(tree)
        updates, following = self.update(
            self.filled(gradients), jax.tree.unflatten(self.structure, state), tree
        )
        leaves, structure = jax.tree.flatten(following)
        shapes = [jnp.shape(x) for x in leaves]
        if bool(structure != self.structure) or shapes != [jnp.shape(x) for x in state]:
            raise GraphError(
                "update returned a state that is not built as that of init: "
                f"{structure} of the shapes {shapes}, in place of {self.structure}. A state keeps its form."
            )
        added = containers.flatten_up_to(updates)
        moved = [_moved(p, u) for p, u in zip(parameters, added, strict=True)]
        return [*moved, *(jnp.asarray(x) for x in leaves)]


def _moved(parameter: Any, update: Any) -> Any:
    """The next parameter, in the dtype that it has."""
    moved = jnp.asarray(parameter + update)
    if moved.shape != parameter.shape:
        raise GraphError(
            f"update returned the shape {list(jnp.shape(update))}, and the parameter has "
            f"{list(parameter.shape)}. An update keeps the shape."
        )
    return moved.astype(parameter.dtype)


def cast(values: Sequence[Any], types: Sequence[Type | Variable]) -> list[Any]:
    """The values in these dtypes."""
    arrays = map(jnp.asarray, values)
    return [x if x.dtype == t.dtype else x.astype(t.dtype) for x, t in zip(arrays, types, strict=True)]


class _Reads:
    """The inputs that each result of an update is computed of, as the bits of numbers."""

    def __init__(self, begin: Body, run: Body, parameters: int, leaves: int) -> None:
        self.parameters, self.leaves = parameters, leaves
        self.first = read_by(begin)
        self.following = read_by(run)
        self.kept = [
            wire is not None and getattr(wire, "input", None) == parameters + n
            for n, wire in enumerate(run.wires[parameters:])
        ]

    def of_parameters(self, bits: int) -> int:
        """The parameters that inputs of an update belong to, or whose gradients they are."""
        return (bits | bits >> (self.parameters + self.leaves)) & ((1 << self.parameters) - 1)

    def of_leaves(self, bits: int) -> int:
        """The arrays of the state among inputs of an update."""
        return (bits >> self.parameters) & ((1 << self.leaves) - 1)

    def owner(self, leaf: int, named: int | None) -> int | None:
        """The parameter whose an array is: by its place in the state, or the one that it is computed of."""
        if named is not None:
            return named
        met = self.of_parameters(self.following[self.parameters + leaf]) | self.first[leaf]
        return met.bit_length() - 1 if met and not met & (met - 1) else None

    def is_by_parameter(self, owners: Sequence[int | None]) -> bool:
        """Whether each parameter and its state are computed of these and of shared state alone."""
        shared = sum(1 << n for n, owner in enumerate(owners) if owner is None)
        if any(self.first[n] for n, owner in enumerate(owners) if owner is None):
            return False
        wholes = [(i, i) for i in range(self.parameters)]
        wholes += [(self.parameters + n, owner) for n, owner in enumerate(owners)]  # type: ignore[misc]
        for output, owner in wholes:
            mine = sum(1 << n for n, other in enumerate(owners) if other == owner and owner is not None)
            bits = self.following[output]
            alone = 0 if owner is None else 1 << owner
            if self.of_parameters(bits) & ~alone or self.of_leaves(bits) & ~(mine | shared):
                return False
        return all(owner is None or not self.first[n] & ~(1 << owner) for n, owner in enumerate(owners))


def _leaves(
    places: Sequence[Place], owners: Sequence[int | None], types: Sequence[Type], kept: Sequence[bool]
) -> tuple[StateArray, ...]:
    """The arrays of the state, each with a name of its own beside the others of its owner."""
    names: dict[int | None, Names] = {}
    found = []
    for n, (place, owner, t) in enumerate(zip(places, owners, types, strict=True)):
        number = not t.shape and jnp.issubdtype(t.dtype, jnp.floating)
        changeable = owner is None and place.is_hyperparameter and number and kept[n]
        short = place.name if owner is not None or changeable else place.full_name
        name = names.setdefault(owner, Names()).new(short)
        found.append(StateArray(n, name, Type(t.shape, t.dtype), owner, changeable))
    return tuple(found)


def _is_by_number(alone: Apart) -> bool:
    """Whether all numbers are updated each by itself; equal parts are looked at once."""
    known: dict[Any, bool] = {}
    for i, t in enumerate(alone.types):
        own = alone.own(i)
        if any(leaf.type.shape != t.shape for leaf in own):
            return False
        body, taken = alone.parts[i]
        began = alone.begin.restricted([leaf.number for leaf in own])
        mine = {i, alone.at_parameter(i), *map(alone.at_leaf, own)}
        key = t.shape, body.signature, began[0].signature, tuple(x in mine for x in taken)
        if key not in known:
            known[key] = _all_laid_out(alone, i)
        if not known[key]:
            return False
    return True


def _all_laid_out(alone: Apart, parameter: int) -> bool:
    """Whether one parameter can be updated with its numbers in a row."""
    t = alone.types[parameter]
    row = (2 * t.size + 1,)
    try:
        alone.updates(parameter, row)
        alone.begins(parameter, row)
    except GraphError:
        return False
    return True


def _expect_laid_out(body: Body | None) -> Body:
    """The Body of numbers that are laid out otherwise, which there is where an update looks no further."""
    if body is None:
        raise GraphError("An update that looks at whole arrays has no part for some of their numbers.")
    return body
