"""The computation of an Op: a small closed jaxpr over positions, without names.

>>> import jax.numpy as jnp
>>> body = body_of(lambda x, y: (x * y, x), jnp.ones(3), jnp.ones(3))
>>> body.wires                                   # the second output is the first input
(None, Wire(input=0))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex

from onward.core.errors import ArgumentError, NotPickled
from onward.core.jaxprs.attributes import attributes_of
from onward.core.jaxprs.devices import Collective, collectives_within, same_everywhere
from onward.core.jaxprs.equations import (
    Type,
    calls_custom_rule,
    close,
    is_inlined,
    jaxprs_in,
    literal_value,
    names_within,
    nowhere,
    numbers_of,
    size_of,
    type_of,
)
from onward.core.jaxprs.signature import (
    BodySignature,
    calls_rule_of_users,
    interned,
    key_of_parts,
    signature_of,
)
from onward.core.jaxprs.tracing import traced
from onward.core.primitives.table import of


@dataclass(frozen=True)
class Wire:
    """Where an output of a Body comes from when nothing computes it: an input, or a fixed value."""

    input: int | None = None
    value: Any = None

    def __repr__(self) -> str:
        return f"Wire(input={self.input})" if self.input is not None else f"Wire(value={self.value})"


@dataclass(frozen=True)
class Collected:
    """The first ``count`` inputs of a Body are one collection of numbers, whatever arrays they come in.

    ``remade`` gives the Body for the same numbers in arrays of other types. The outputs are one number, or
    as many arrays of the same types as the collection has.
    """

    count: int
    remade: Callable[[Sequence[Type]], Body]


@dataclass(frozen=True)
class Call:
    """One equation of a Body: a primitive, what it reads and gives, and the Bodies it runs within.

    ``params`` are those of the primitive. ``numbers`` has those that stand in the equation, among the
    operands, and None for what is read.
    """

    primitive: str
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    params: Mapping[str, Any]
    inner: Mapping[str, tuple[Body, ...]]
    numbers: tuple[Any, ...]


class JaxprParts(NamedTuple):
    """The variables of constants, these, the inputs, the equations and the outputs of a jaxpr."""

    constvars: Sequence[Any]
    consts: Sequence[Any]
    invars: Sequence[Any]
    eqns: tuple[Any, ...]
    outvars: Sequence[Any]


class Body(NotPickled):
    """The computation of an Op: a closed jaxpr from positions to positions."""

    unpickled = ("A Program", "Make it again where it is needed, or onward.save(model, path) and load.")

    collected: Collected | None = None

    def __init__(self, closed: Any) -> None:
        self._closed = closed

    @property
    def closed(self) -> Any:
        """The jaxpr itself, for this package and for inspection."""
        return self._closed

    def __deepcopy__(self, memo: Any) -> Body:
        return self

    def __call__(self, *values: Any) -> list[Any]:
        """The outputs for these inputs; under a trace, their tracers."""
        outputs: list[Any] = jex.jaxpr_as_fun(self.closed)(*values)
        return outputs

    @property
    def text(self) -> str:
        """The jaxpr as JAX prints it, without colours whatever the terminal."""
        shown: str = self.closed.pretty_print(use_color=False)
        return shown

    @cached_property
    def in_avals(self) -> Sequence[Any]:
        """For every input something with its shape and dtype."""
        return [v.aval for v in self.parts.invars]

    @cached_property
    def out_avals(self) -> Sequence[Any]:
        """For every output something with its shape and dtype."""
        return [v.aval for v in self.parts.outvars]

    @property
    def in_types(self) -> tuple[Type, ...]:
        """Shape and dtype of every input, to trace another function with."""
        return tuple(map(type_of, self.in_avals))

    @property
    def out_types(self) -> tuple[Type, ...]:
        """Shape and dtype of every output."""
        return tuple(map(type_of, self.out_avals))

    @cached_property
    def signature(self) -> BodySignature:
        """Equal for bodies that compute the same; what derived rules are remembered by.

        Primitives, parameters, wiring, types, numbers and, however deep, the jaxprs inside are compared; not
        names, scopes and places in the code. A function with a rule of its own (``custom_jvp``,
        ``custom_vjp``) is compared by what it computes and by what its rule traces to, as it is now. Two that
        differ never have one signature; two that are equal may have two, where something in them is only
        equal to itself.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> first, second = (body_of(lambda x: [jax.nn.relu(x)], jnp.ones(3)) for _ in range(2))
            >>> first.signature == second.signature
            True
            >>> first.signature == body_of(lambda x: [jax.nn.relu(x)], jnp.ones(4)).signature
            False
        """
        return signature_of(self.closed)

    @property
    def holds_functions(self) -> bool:
        """Whether it calls functions or jaxprs, or has several equations: it keeps more alive than others."""
        if len(self.equations) != 1:
            return True
        return any(callable(value) or jaxprs_in(value) for value in self.equations[0].params.values())

    @property
    def has_effects(self) -> bool:
        """Whether it prints, calls back, or otherwise does more than compute."""
        return any(eqn.effects for eqn in self.parts.eqns)

    @cached_property
    def primitives(self) -> frozenset[str]:
        """The names of the primitives in it, however deep."""
        return frozenset(name for eqn in self.equations for name in names_within(eqn))

    def computes(self, primitive: str) -> bool:
        """Whether one of its equations is of this primitive; those of functions that it calls are not its."""
        return any(eqn.primitive.name == primitive for eqn in self.equations)

    @cached_property
    def size(self) -> int:
        """How many equations it has, however deep, that run no others."""
        return sum(map(size_of, self.equations))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collective primitives in it, however deep."""
        return tuple(found for eqn in self.equations for found in collectives_within(eqn))

    @property
    def has_own_mesh(self) -> bool:
        """Whether it says itself over which devices something is laid out."""
        return any(of(name).on_mesh for name in self.primitives)

    @property
    def has_custom_rule(self) -> bool:
        """Whether a ``custom_jvp`` or ``custom_vjp`` function is called in it, however deep."""
        return any(map(calls_custom_rule, self.equations))

    @property
    def has_rule_of_users(self) -> bool:
        """Whether such a function is called in it that is not one of JAX itself."""
        return any(map(calls_rule_of_users, self.equations))

    @property
    def equations(self) -> Sequence[Any]:
        """Its equations."""
        return self.parts.eqns

    @property
    def calls(self) -> Iterator[Call]:
        """Its equations in order, as what they read and give: what costs are counted from."""
        for eqn in self.equations:
            operands, results = (tuple(type_of(v.aval) for v in group) for group in (eqn.invars, eqn.outvars))
            found = ((key, tuple(map(Body, jaxprs_in(value)))) for key, value in eqn.params.items())
            inner = {key: bodies for key, bodies in found if bodies}
            yield Call(eqn.primitive.name, operands, results, eqn.params, inner, numbers_of(eqn))

    @property
    def calls_within(self) -> Iterator[Call]:
        """The same, each followed by those that it runs, however deep."""
        for call in self.calls:
            yield call
            for body in itertools.chain(*call.inner.values()):
                yield from body.calls_within

    @cached_property
    def parts(self) -> JaxprParts:
        """The parts of its jaxpr."""
        jaxpr = self.closed.jaxpr
        return JaxprParts(jaxpr.constvars, self.closed.consts, jaxpr.invars, tuple(jaxpr.eqns), jaxpr.outvars)

    @property
    def unscoped(self) -> JaxprParts:
        """The same without the scope that an Op knows."""
        return self.parts

    def over_mesh(self, how: Any) -> Body:
        """The same computation where arrays are split over a mesh; ``how`` is a Partition."""
        return self

    def anonymous(self) -> Body:
        """The same computation without the place it came from, fit for sharing between ops."""
        jaxpr = self.closed.jaxpr
        eqns = [e.replace(source_info=nowhere()) for e in jaxpr.eqns]
        return Body(close(jaxpr.replace(eqns=eqns), self.closed.consts))

    @cached_property
    def wires(self) -> tuple[Wire | int | None, ...]:
        """For each output: the Wire it is, the earlier output it repeats (an int), or None if new."""
        inputs = {id(v): i for i, v in enumerate(self.parts.invars)}
        values = dict(zip(map(id, self.parts.constvars), self.parts.consts, strict=True))
        seen: dict[int, int] = {}
        wires: list[Wire | int | None] = []
        for j, v in enumerate(self.parts.outvars):
            if isinstance(v, jex.Literal):
                wires.append(Wire(value=literal_value(v)))
            elif id(v) in inputs:
                wires.append(Wire(input=inputs[id(v)]))
            elif id(v) in values:
                wires.append(Wire(value=values[id(v)]))
            else:
                wires.append(seen.get(id(v)))
                seen.setdefault(id(v), j)
        return tuple(wires)

    def depending_on(self, inputs: Iterable[int]) -> set[int]:
        """The outputs that depend on any of these inputs."""
        reached = {self.parts.invars[i] for i in inputs}
        for eqn in self.equations:
            if any(not isinstance(v, jex.Literal) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        outvars = enumerate(self.parts.outvars)
        return {j for j, v in outvars if not isinstance(v, jex.Literal) and v in reached}

    @cached_property
    def same_everywhere(self) -> Callable[[frozenset[int]], frozenset[int]]:
        """The outputs that are equal on all devices if these inputs are, and the others are not.

        An answer is kept: every check of a Program asks again, and transforms share its ops.
        """
        return cache(partial(same_everywhere, self.closed))

    def restricted(self, outputs: Sequence[int], keep_inputs: bool = False) -> tuple[Body, tuple[int, ...]]:
        """The part that computes these outputs, and the positions of the inputs it still takes."""
        jaxpr = self.closed.jaxpr
        outvars = [jaxpr.outvars[j] for j in outputs]
        needed = {v for v in outvars if not isinstance(v, jex.Literal)}
        eqns = []
        for eqn in reversed(jaxpr.eqns):
            if eqn.effects or any(v in needed for v in eqn.outvars):
                eqns.append(eqn)
                needed.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
        kept = tuple(i for i, v in enumerate(jaxpr.invars) if keep_inputs or v in needed)
        consts = [(v, c) for v, c in zip(jaxpr.constvars, self.closed.consts, strict=True) if v in needed]
        part = jex.Jaxpr(
            [v for v, _ in consts],
            [jaxpr.invars[i] for i in kept],
            outvars,
            eqns[::-1],
            frozenset().union(*(eqn.effects for eqn in eqns)),
            jaxpr.debug_info.with_unknown_names(),
        )
        return Body(close(part, [c for _, c in consts])), kept

    @property
    def attributes(self) -> Mapping[str, str]:
        """The parameters of the primitive in words; empty for a body of several equations."""
        if len(self.equations) != 1 or is_inlined(self.equations[0]):
            return {}
        return attributes_of(self.equations[0])

    @property
    def operands(self) -> tuple[int | str, ...]:
        """The operands of the equation: positions of inputs, and literal numbers as text."""
        if len(self.equations) != 1:
            return tuple(range(len(self.in_avals)))
        at = {id(v): i for i, v in enumerate(self.parts.invars)}
        return tuple(
            str(np.asarray(v.val)) if isinstance(v, jex.Literal) else at.get(id(v), "constant")
            for v in self.equations[0].invars
        )

    @property
    def numbers(self) -> tuple[Any, ...]:
        """For each operand the literal number that stands there; None for what is read."""
        if len(self.equations) != 1:
            return (None,) * len(self.in_avals)
        return numbers_of(self.equations[0])

    def with_numbers_of(self, other: Body) -> Body:
        """The same equation with the literal numbers of another one."""
        (eqn,), (theirs,) = self.equations, other.equations
        pairs = zip(eqn.invars, theirs.invars, strict=True)
        invars = [
            v if isinstance(mine, jex.Literal) and isinstance(v, jex.Literal) else mine for mine, v in pairs
        ]
        jaxpr = self.closed.jaxpr
        return EquationBody(eqn.replace(invars=invars), jaxpr.invars, jaxpr.outvars, jaxpr.debug_info)


class EquationBody(Body):
    """The Body of one traced equation; its jaxpr is built when first needed."""

    def __init__(self, eqn: Any, invars: list[Any], outvars: list[Any], debug_info: Any) -> None:
        self.parts, self._debug_info = JaxprParts((), (), invars, (eqn,), outvars), debug_info

    @cached_property
    def closed(self) -> Any:
        """The jaxpr of the equation alone."""
        _, _, invars, (eqn,), outvars = self.unscoped
        return close(jex.Jaxpr([], invars, outvars, [eqn], eqn.effects, self._debug_info), [])

    @cached_property
    def signature(self) -> BodySignature:
        """Equal for equations that compute the same."""
        return interned(key_of_parts(*self.parts))

    @property
    def unscoped(self) -> JaxprParts:
        """No constants; what it reads, the equation without its scope, what it gives."""
        (eqn,) = self.parts.eqns
        place = eqn.source_info.replace(name_stack=nowhere().name_stack)
        return self.parts._replace(eqns=(eqn.replace(source_info=place),))


def body_of(function: Callable[..., Any], *types: Any) -> Body:
    """Make the Body of an Op from a function of arrays that returns a sequence of arrays.

    Args:
        function: Pure; takes the op's inputs, returns a value for each of its outputs.
        types: For each input an array, or a ``jax.ShapeDtypeStruct`` with its shape and dtype.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> body = ow.graph.body_of(lambda x: [jnp.round(x)], jax.ShapeDtypeStruct((3,), jnp.float32))
        >>> [(t.shape, str(t.dtype)) for t in body.out_types]
        [((3,), 'float32')]
    """
    if not callable(function) or not all(map(_has_type, types)):
        kinds = ", ".join(type(x).__name__ for x in (function, *types))
        raise ArgumentError(
            f"body_of was given {kinds}; expected a function, and an array of numbers or a "
            "jax.ShapeDtypeStruct((3, 4), jnp.float32) for each of its inputs."
        )
    return Body(traced(function, *types))


def _has_type(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OSUVmM"
    return isinstance(value, jax.Array | Type)
