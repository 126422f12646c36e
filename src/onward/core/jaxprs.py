"""The one place that touches JAX's jaxpr types.

A ``Body`` is what an Op computes: a small closed jaxpr over positions, without names. ``read_jaxpr``
turns a traced jaxpr into Ops, one per equation, with nested ``jit`` calls inlined. The rest of the
house sees Bodies, types (``ShapeDtypeStruct``) and positions only.

>>> import jax.numpy as jnp
>>> body = body_of(lambda x, y: (x * y, x), jnp.ones(3), jnp.ones(3))
>>> body.wires                                   # the second output is the first input
(None, Wire(input=0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import is_
from threading import Lock
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util

from onward.core.errors import ArgumentError, TraceError, not_pickled
from onward.core.keys import Same, key_of
from onward.core.names import Names
from onward.core.program import Op, Program, Replicas, Variable
from onward.core.source import Source, is_library
from onward.core.words import Kind, Pass, Placement

Type = jax.ShapeDtypeStruct
_JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)  # type: ignore[attr-defined, unused-ignore]
_INLINED = ("jit", "pjit", "closed_call", "core_call")
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
_TOO_LONG = 60


@dataclass(frozen=True)
class Wire:
    """Where an output of a Body comes from when nothing computes it: an input, or a fixed value."""

    input: int | None = None
    value: Any = None

    def __repr__(self) -> str:
        return f"Wire(input={self.input})" if self.input is not None else f"Wire(value={self.value})"


@dataclass(frozen=True)
class Collective:
    """A primitive in which devices exchange numbers, and the bytes that each one puts in.

    ``always``: at every step, not only where a ``cond`` chooses so.
    """

    kind: str
    bytes: int
    always: bool = True


@dataclass(frozen=True)
class RowLookup:
    """Whole rows of a table, by number: the first of the numbers along the last axis.

    ``fill`` is what a row outside of the table reads as; None: as the nearest row.
    """

    fill: Any = None


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

    ``params`` are those of the primitive. A number that stands in the equation is among the operands.
    """

    primitive: str
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    params: Mapping[str, Any]
    inner: Mapping[str, tuple[Body, ...]]


class Body:
    """What an Op computes: a closed jaxpr from positions to positions."""

    collected: Collected | None = None

    def __init__(self, closed: Any) -> None:
        self._closed = closed

    @property
    def closed(self) -> Any:
        """The jaxpr itself, for this file and for the curious."""
        return self._closed

    def __reduce__(self) -> NoReturn:
        raise not_pickled(
            "A Program", "Make it again where it is needed, or onward.save(model, path) and load."
        )

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
        return [v.aval for v in self.closed.jaxpr.invars]

    @cached_property
    def out_avals(self) -> Sequence[Any]:
        """For every output something with its shape and dtype."""
        return [v.aval for v in self.closed.jaxpr.outvars]

    @property
    def in_types(self) -> tuple[Type, ...]:
        """Shape and dtype of every input, to trace another function with."""
        return tuple(map(_type, self.in_avals))

    @property
    def out_types(self) -> tuple[Type, ...]:
        """Shape and dtype of every output."""
        return tuple(map(_type, self.out_avals))

    @cached_property
    def signature(self) -> Signature:
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
        return _signature(self.closed)

    @property
    def holds_functions(self) -> bool:
        """Whether it calls functions or jaxprs, or has several equations: it keeps more alive than others."""
        if len(self.equations) != 1:
            return True
        return any(callable(value) or _jaxprs_in(value) for value in self.equations[0].params.values())

    @property
    def has_effects(self) -> bool:
        """Whether it prints, calls back, or otherwise does more than compute."""
        return bool(self.closed.jaxpr.effects)

    @cached_property
    def primitives(self) -> frozenset[str]:
        """The names of the primitives in it, however deep."""
        return frozenset(name for eqn in self.equations for name in _primitives_in(eqn))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collective primitives in it, however deep."""
        return tuple(found for eqn in self.equations for found in _collectives_in(eqn))

    @property
    def has_own_mesh(self) -> bool:
        """Whether it says itself over which devices something is laid out."""
        return not _ON_A_MESH.isdisjoint(self.primitives)

    @property
    def has_custom_rule(self) -> bool:
        """Whether a ``custom_jvp`` or ``custom_vjp`` function is called in it, however deep."""
        return any(map(_calls_custom_rule, self.equations))

    @property
    def row_lookup(self) -> RowLookup | None:
        """How it picks whole rows of its first input by the numbers in its second; None if it does not."""
        if len(self.equations) != 1 or self.equations[0].primitive.name != "gather":
            return None
        (eqn,) = self.equations
        params, n = eqn.params, eqn.params["dimension_numbers"]
        table, places = self.in_avals[:2]
        row = tuple(range(places.shape[-1]))
        batch = places.ndim - 1
        whole = (
            tuple(params["slice_sizes"]) == (1, *table.shape[1:])
            and tuple(n.start_index_map) == row
            and tuple(n.collapsed_slice_dims) in ((), (0,))
            and not n.operand_batching_dims
            and tuple(n.offset_dims) == tuple(range(batch, self.out_avals[0].ndim))
        )
        fills = params["mode"] is jax.lax.GatherScatterMode.FILL_OR_DROP
        if not whole or (fills and row != (0,)):
            return None
        other = np.nan if params["fill_value"] is None else params["fill_value"]
        return RowLookup(other if fills else None)

    @property
    def equations(self) -> Sequence[Any]:
        """Its equations."""
        return tuple(self.closed.jaxpr.eqns)

    @property
    def calls(self) -> Iterator[Call]:
        """Its equations in order, as what they read and give: what costs are counted from."""
        for eqn in self.equations:
            operands, results = (tuple(_type(v.aval) for v in group) for group in (eqn.invars, eqn.outvars))
            found = ((key, tuple(map(Body, _jaxprs_in(value)))) for key, value in eqn.params.items())
            inner = {key: bodies for key, bodies in found if bodies}
            yield Call(eqn.primitive.name, operands, results, eqn.params, inner)

    def at(self, dtype: Any) -> Body | None:
        """The same equation with every float32 in it of another floating dtype, literal numbers as well.

        None if it calls functions, if a number in it is none in that dtype or becomes 0, or if the primitive
        does not take it or gives results of other types. What it accumulates in it chooses itself.
        """
        if len(self.equations) != 1 or self.has_effects or self.holds_functions:
            return None
        eqn = _retyped(self.closed.jaxpr.eqns[0], np.dtype(dtype))
        if eqn is None:
            return None
        types, wanted = ([_in_place_of_float32(t, dtype) for t in g] for g in (self.in_types, self.out_types))
        old = _close(self.closed.jaxpr.replace(eqns=[eqn]), self.closed.consts)
        try:
            closed = traced(jex.jaxpr_as_fun(old), *types)
        except (TypeError, ValueError, NotImplementedError):
            return None
        jaxpr = closed.jaxpr
        found = [(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
        if found != [(t.shape, t.dtype) for t in wanted]:
            return None
        if len(jaxpr.eqns) != 1:  # a conversion that is none now
            return Body(closed)
        return _EquationBody(
            jaxpr.eqns[0], jaxpr.invars, jaxpr.outvars, jaxpr.debug_info.with_unknown_names()
        )

    @property
    def _parts(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The variables of constants, these, the inputs, the equations and the outputs."""
        jaxpr = self.closed.jaxpr
        return jaxpr.constvars, self.closed.consts, jaxpr.invars, jaxpr.eqns, jaxpr.outvars

    def anonymous(self) -> Body:
        """The same computation without the place it came from, fit for sharing between ops."""
        jaxpr = self.closed.jaxpr
        eqns = [e.replace(source_info=_nowhere()) for e in jaxpr.eqns]
        return Body(_close(jaxpr.replace(eqns=eqns), self.closed.consts))

    @cached_property
    def wires(self) -> tuple[Wire | int | None, ...]:
        """For each output: the Wire it is, the earlier output it repeats (an int), or None if new."""
        jaxpr = self.closed.jaxpr
        inputs = {id(v): i for i, v in enumerate(jaxpr.invars)}
        values = {id(v): c for v, c in zip(jaxpr.constvars, self.closed.consts, strict=True)}
        seen: dict[int, int] = {}
        wires: list[Wire | int | None] = []
        for j, v in enumerate(jaxpr.outvars):
            if isinstance(v, jex.Literal):
                wires.append(Wire(value=_literal_value(v)))
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
        jaxpr = self.closed.jaxpr
        reached = {jaxpr.invars[i] for i in inputs}
        for eqn in jaxpr.eqns:
            if any(not isinstance(v, jex.Literal) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return {j for j, v in enumerate(jaxpr.outvars) if not isinstance(v, jex.Literal) and v in reached}

    def same_everywhere(self, inputs: Iterable[int]) -> set[int]:
        """The outputs that are equal on all devices if these inputs are, and the others are not."""
        jaxpr = self.closed.jaxpr
        same = {jaxpr.invars[i] for i in inputs} | set(jaxpr.constvars)
        for eqn in jaxpr.eqns:
            told = [isinstance(v, jex.Literal) or v in same for v in eqn.invars]
            same.update(eqn.outvars[j] for j in _same_results(eqn, told))
        return {j for j, v in enumerate(jaxpr.outvars) if isinstance(v, jex.Literal) or v in same}

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
        return Body(_close(part, [c for _, c in consts])), kept

    @property
    def attributes(self) -> Mapping[str, str]:
        """The parameters of the primitive in words; empty for a body of several equations."""
        if len(self.equations) != 1 or self.equations[0].primitive.name in _INLINED:
            return {}
        shown = {}
        for key, value in self.equations[0].params.items():
            if not callable(value) and not _jaxprs_in(value) and value is not None:
                text = str(_plain(value))
                shown[key] = text if len(text) <= _TOO_LONG else text[: _TOO_LONG - 3] + "..."
        return shown

    @property
    def operands(self) -> tuple[int | str, ...]:
        """What the equation is called with: positions of inputs, and literal numbers as text."""
        if len(self.equations) != 1:
            return tuple(range(len(self.in_avals)))
        at = {id(v): i for i, v in enumerate(self.closed.jaxpr.invars)}
        return tuple(
            str(np.asarray(v.val)) if isinstance(v, jex.Literal) else at.get(id(v), "constant")
            for v in self.equations[0].invars
        )

    @property
    def numbers(self) -> tuple[Any, ...]:
        """For each operand the literal number that stands there; None for what is read."""
        if len(self.equations) != 1:
            return (None,) * len(self.in_avals)
        return tuple(v.val if isinstance(v, jex.Literal) else None for v in self.equations[0].invars)

    def with_numbers_of(self, other: Body) -> Body:
        """The same equation with the literal numbers of another one."""
        (eqn,), (theirs,) = self.equations, other.equations
        pairs = zip(eqn.invars, theirs.invars, strict=True)
        invars = [
            v if isinstance(mine, jex.Literal) and isinstance(v, jex.Literal) else mine for mine, v in pairs
        ]
        jaxpr = self.closed.jaxpr
        return _EquationBody(eqn.replace(invars=invars), jaxpr.invars, jaxpr.outvars, jaxpr.debug_info)

    @cached_property
    def subprograms(self) -> Mapping[str, Program]:
        """The Programs inside a control flow primitive, by the name of the parameter."""
        found: dict[str, Program] = {}
        for eqn in self.equations if len(self.equations) == 1 else ():
            for key, value in eqn.params.items():
                inner = _jaxprs_in(value)
                for i, closed in enumerate(inner):
                    name = key if len(inner) == 1 else f"{key}[{i}]"
                    found[name] = program_of(closed, name)
        return found


class _EquationBody(Body):
    """The Body of one traced equation; its jaxpr is built when first needed."""

    def __init__(self, eqn: Any, invars: list[Any], outvars: list[Any], debug_info: Any) -> None:
        self._eqn, self._invars, self._outvars, self._debug_info = eqn, invars, outvars, debug_info

    @cached_property
    def closed(self) -> Any:
        place = self._eqn.source_info.replace(name_stack=_nowhere().name_stack)
        eqn = self._eqn.replace(source_info=place)
        jaxpr = jex.Jaxpr([], self._invars, self._outvars, [eqn], eqn.effects, self._debug_info)
        return _close(jaxpr, [])

    @cached_property
    def in_avals(self) -> Sequence[Any]:
        return [v.aval for v in self._invars]

    @cached_property
    def out_avals(self) -> Sequence[Any]:
        return [v.aval for v in self._outvars]

    @property
    def has_effects(self) -> bool:
        return bool(self._eqn.effects)

    @property
    def equations(self) -> Sequence[Any]:
        return (self._eqn,)

    @cached_property
    def signature(self) -> Signature:
        return interned(_key([], [], self._invars, [self._eqn], self._outvars))

    @property
    def _parts(self) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        place = self._eqn.source_info.replace(name_stack=_nowhere().name_stack)
        return (), (), self._invars, (self._eqn.replace(source_info=place),), self._outvars


class Signature:
    """What a computation is, one object for all that are equal while anything holds it."""

    __slots__ = ("__weakref__",)


_signatures: WeakValueDictionary[Any, Signature] = WeakValueDictionary()
_RULES_WITHIN_RULES = 2  # the rule of a function is traced, and of those that its rule calls, to this depth
_of_jaxprs = tuple(WeakKeyDictionary[Any, Signature]() for _ in range(_RULES_WITHIN_RULES + 1))
_within: ContextVar[int] = ContextVar("within", default=0)
_interning = Lock()


def interned(key: Any) -> Signature:
    """The one Signature of everything that has this key."""
    with _interning:
        return _signatures.setdefault(key, Signature())


def _signature(jaxpr: Any) -> Signature:
    """The signature of a jaxpr, closed or not; looked at once, as ``jit`` calls one jaxpr in many places."""
    met = _of_jaxprs[_within.get()]
    known = met.get(jaxpr)
    if known is None:
        closed = _closed(jaxpr)
        inner = closed.jaxpr
        key = _key(inner.constvars, closed.consts, inner.invars, inner.eqns, inner.outvars)
        known = met[jaxpr] = interned(key)
    return known


def _key(constvars: Any, consts: Any, invars: Any, eqns: Any, outvars: Any) -> Any:
    """A jaxpr with its variables replaced by the number of the place where each gets its value."""
    numbers: dict[Any, int] = {}

    def read(v: Any) -> Any:
        return _literal_key(v) if isinstance(v, jex.Literal) else numbers[v]

    def write(v: Any) -> Any:
        if isinstance(v, jex.DropVar):
            return v.aval
        numbers[v] = len(numbers)
        return v.aval

    given = tuple(map(write, invars)), tuple(map(write, constvars)), tuple(map(_value_key, consts))
    steps = tuple(
        (
            eqn.primitive,
            _params_key(eqn),
            tuple(map(read, eqn.invars)),
            tuple(map(write, eqn.outvars)),
            eqn.ctx,
            frozenset(map(Same, eqn.effects)) if eqn.effects else None,
        )
        for eqn in eqns
    )
    return given, steps, tuple(map(read, outvars))


def _params_key(eqn: Any) -> Any:
    if eqn.primitive.name in _WITH_RULES:
        return _rule_key(eqn)
    return tuple((name, _value_key(value)) for name, value in eqn.params.items())


def _rule_key(eqn: Any) -> Any:
    """A call of a function with a rule of its own: what it computes, and what its rule traces to.

    Nothing else tells two rules apart: a rule may read whatever Python can reach. One that cannot be traced
    in reverse, or asks which inputs have a tangent, is only equal to itself.
    """
    forward, depth = _signature(eqn.params["call_jaxpr"]), _within.get()
    if depth == _RULES_WITHIN_RULES:
        return forward
    if eqn.params["symbolic_zeros"]:
        return Same(object())
    token = _within.set(depth + 1)
    try:
        return forward, _signature(_gradient_of(eqn))
    except Exception:
        return Same(object())
    finally:
        _within.reset(token)


def _gradient_of(eqn: Any) -> Any:
    """The jaxpr of a call together with the gradients of its inputs."""
    types = [_type(v.aval) for v in eqn.invars]
    given = [jex.Var(v.aval) for v in eqn.invars]
    made = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=given, outvars=made, source_info=_nowhere())
    call = jex.jaxpr_as_fun(
        _close(jex.Jaxpr([], given, made, [alone], eqn.effects, _nothing().jaxpr.debug_info), [])
    )
    chosen, counted = ([i for i, v in enumerate(g) if _is_real(v.aval)] for g in (given, made))

    def gradient(inputs: Any, cotangents: Any) -> Any:
        def of(*values: Any) -> Any:
            found = dict(zip(chosen, values, strict=True))
            outputs = call(*(found.get(i, x) for i, x in enumerate(inputs)))
            return [outputs[j] for j in counted]

        return jax.vjp(of, *(inputs[i] for i in chosen))[1](cotangents)

    return traced(gradient, types, [_type(made[j].aval) for j in counted])


def _is_real(aval: Any) -> bool:
    """Whether numbers of this type have a gradient."""
    return bool(jax.numpy.issubdtype(aval.dtype, np.inexact))


def _value_key(value: Any) -> Any:
    return key_of(value, _jaxpr_key)


def _jaxpr_key(value: Any) -> Signature | None:
    return _signature(value) if _is_jaxpr(value) else None


_replicas: ContextVar[Replicas | None] = ContextVar("replicas", default=None)


@contextmanager
def along(replicas: Replicas | None) -> Iterator[None]:
    """Whatever is traced meanwhile may use collectives along this axis; None: along none."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


def current_axis() -> Replicas | None:
    """The devices that what is traced now will run on, or None for one alone."""
    return _replicas.get()


def traced(function: Callable[..., Any], *types: Any) -> Any:
    """The closed jaxpr of a function of flat arrays."""
    axis = _replicas.get()
    return jax.make_jaxpr(function, axis_env=[(axis.name, axis.count)] if axis else None)(*types)


def body_of(function: Callable[..., Any], *types: Any) -> Body:
    """What an Op computes: the Body of a function of arrays that returns a sequence of arrays.

    Args:
        function: Pure; takes the op's inputs, returns a value for each of its outputs.
        types: For each input an array, or a ``jax.ShapeDtypeStruct`` with its shape and dtype.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> body = ow.body_of(lambda x: [jnp.round(x)], jax.ShapeDtypeStruct((3,), jnp.float32))
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


def joined(ops: Iterable[Op], given: Sequence[Variable], wanted: Sequence[Variable]) -> Body:
    """The equations of all these ops in a row, as one Body from given Variables to wanted ones.

    Nothing is traced for it: a Program of thousands of ops takes milliseconds. The equations stand in the
    scopes of their ops, below the pass that made them.
    """
    row = _Row(given)
    for op in ops:
        row.append(op)
    return row.body([row.env[v] for v in wanted])


class _Row:
    """A jaxpr that grows by the equations of one op after the other."""

    def __init__(self, given: Sequence[Variable]) -> None:
        self.invars = [jex.Var(jax.core.ShapedArray(v.shape, v.dtype)) for v in given]
        self.env: dict[Variable, Any] = dict(zip(given, self.invars, strict=True))
        self.consts: dict[int, tuple[Any, Any]] = {}
        self.eqns: list[Any] = []
        self.stacks: dict[str, Any] = {}

    def append(self, op: Op) -> None:
        constvars, consts, invars, eqns, outvars = op.body._parts
        atoms = dict(zip(invars, map(self.env.__getitem__, op.inputs), strict=True))
        atoms.update(zip(constvars, map(self.constant, constvars, consts), strict=True))
        stack = self.stack(f"{op.made_by}/{op.scope}" if op.scope else str(op.made_by))

        def read(v: Any) -> Any:
            return v if isinstance(v, jex.Literal) else atoms[v]

        for eqn in eqns:
            made = [v if isinstance(v, jex.DropVar) else jex.Var(v.aval) for v in eqn.outvars]
            place = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
            used = [read(v) for v in eqn.invars]
            self.eqns.append(eqn.replace(invars=used, outvars=made, source_info=place))
            atoms.update(zip(eqn.outvars, made, strict=True))
        self.env.update(zip(op.outputs, map(read, outvars), strict=True))

    def constant(self, v: Any, value: Any) -> Any:
        """The variable of a constant; one for each array object."""
        return self.consts.setdefault(id(value), (jex.Var(v.aval), value))[0]

    def stack(self, scope: str) -> Any:
        """JAX's own form of the scope of an op."""
        if scope not in self.stacks:
            with outermost_scope(), jax.named_scope(scope):
                self.stacks[scope] = source_info_util.current_name_stack()
        return self.stacks[scope]

    def body(self, outvars: list[Any]) -> Body:
        effects = frozenset[Any]().union(*(eqn.effects for eqn in self.eqns))
        constvars = [v for v, _ in self.consts.values()]
        jaxpr = jex.Jaxpr(constvars, self.invars, outvars, self.eqns, effects, _nothing().jaxpr.debug_info)
        return Body(_close(jaxpr, [value for _, value in self.consts.values()]))


def as_one_call(body: Body, name: str) -> Callable[..., list[Any]]:
    """A function that calls a Body as ``jax.jit`` does: whatever traces it does not look inside.

    Tracing a Program op by op costs JAX about as much as tracing the function behind it; one call costs
    nothing, and compiles to the same.
    """
    count = len(body.out_avals)
    pattern = jax.make_jaxpr(jax.jit(lambda *_: [np.float32(i) for i in range(count)]))(
        *[np.float32(0)] * len(body.in_avals)
    )
    (eqn,) = pattern.jaxpr.eqns
    jaxpr = body.closed.jaxpr
    invars, outvars = ([jex.Var(v.aval) for v in group] for group in (jaxpr.invars, jaxpr.outvars))
    call = eqn.replace(
        invars=[*invars],
        outvars=outvars,
        params={**eqn.params, "jaxpr": body.closed, "name": name},
        effects=jaxpr.effects,
        source_info=_nowhere(),
    )
    whole = jex.Jaxpr([], invars, outvars, [call], call.effects, _nothing().jaxpr.debug_info)
    function: Callable[..., list[Any]] = jex.jaxpr_as_fun(_close(whole, []))
    return function


def body_over(function: Callable[..., Any], collection: Sequence[Type], *others: Type) -> Body:
    """The Body of ``function(arrays, *others)``, which does not ask how numbers are laid out in arrays.

    >>> row, number = Type((3,), np.float32), Type((), np.float32)
    >>> body = body_over(lambda xs, y: [x * y for x in xs], [row, row], number)
    >>> [t.shape for t in body.collected.remade([Type((2, 3), np.float32)]).out_types]
    [(2, 3)]
    """
    count = len(collection)
    body = body_of(lambda *xs: function(xs[:count], *xs[count:]), *collection, *others)
    body.collected = Collected(count, lambda types: body_over(function, types, *others))
    return body


def program_of(closed: Any, name: str) -> Program:
    """A jaxpr (such as the body of a scan) as a Program of its own, with the backward passes within."""
    names = Names()
    inputs = tuple(
        Variable(names.new(f"input_{i}"), *_shape(v.aval), Kind.DATA)
        for i, v in enumerate(closed.jaxpr.invars)
    )
    read = read_jaxpr(closed, inputs, names, apart=True)
    ops = (
        replace(op, made_by=Pass.BACKWARD) if "transpose" in marks else op
        for op, marks in zip(read.ops, read.under, strict=True)
    )
    return Program(name, inputs, constants=read.constants, ops=tuple(ops), outputs=read.outputs)


@dataclass(frozen=True)
class Reading:
    """What ``read_jaxpr`` found; with ``apart``, for each op the transforms around its equation."""

    ops: tuple[Op, ...]
    outputs: tuple[Variable, ...]
    constants: Mapping[Variable, Any]
    under: tuple[frozenset[str], ...]


_declare = jex.Primitive("declare")
_declare.def_abstract_eval(lambda *, name, type: jax.core.ShapedArray(type.shape, type.dtype))  # noqa: A006


def declared(name: str, kind: Type) -> Any:
    """Inside a trace, the value of the Variable that ``read_jaxpr`` is given under this name."""
    return _declare.bind(name=name, type=kind)


def trace_in_progress() -> Any:
    """Equal for two moments of one trace; another inside the body of a ``jit``, ``scan`` or ``vmap``."""
    return jex.get_opaque_trace_state(convention="onward")


def current_scope() -> str:
    """The scopes that ``jax.named_scope`` has opened here, joined by ``/``, without those of ``vmap``."""
    return _entries(source_info_util.current_name_stack(), "Scope")


def _entries(stack: Any, kind: str) -> str:
    """The names of a person's scopes (``Scope``) or of JAX's wrappers (``Transform``), joined by ``/``."""
    return "/".join(entry.name for entry in stack.stack if type(entry).__name__ == kind)


def _transforms(eqn: Any) -> frozenset[str]:
    """What JAX has wrapped around an equation, such as ``jvp`` and ``transpose``."""
    return frozenset(_entries(eqn.source_info.name_stack, "Transform").split("/")) - {""}


def transforms_within(body: Body) -> frozenset[str]:
    """The transforms that the equations inside of a loop, branch or call stand under, however deep.

    >>> import jax, jax.numpy as jnp
    >>> def twice(x):
    ...     return [jax.lax.fori_loop(0, 2, lambda i, x: jax.grad(lambda x: x**3)(x), x)]
    >>> sorted(transforms_within(body_of(twice, jnp.float32(1.0))))
    ['jvp', 'transpose']
    """
    inner = (e for eqn in body.equations for v in eqn.params.values() for j in _jaxprs_in(v) for e in j.eqns)
    return frozenset[str]().union(*map(_transforms_in, inner))


def _transforms_in(eqn: Any) -> frozenset[str]:
    inner = (e for v in eqn.params.values() for j in _jaxprs_in(v) for e in j.eqns)
    return _transforms(eqn).union(*map(_transforms_in, inner))


def outermost_scope() -> Any:
    """A context in which no ``jax.named_scope`` is open."""
    return source_info_util.reset_name_stack()


def read_jaxpr(
    closed: Any,
    inputs: Sequence[Variable],
    names: Names,
    declarations: Mapping[str, Variable] | None = None,
    labels: Mapping[int, str] | None = None,
    apart: bool = False,
) -> Reading:
    """The Ops of a traced jaxpr, one per equation, nested ``jit`` inlined and kept as a scope.

    ``declarations`` holds the Variables that stand for ``declared`` values, ``labels`` the names that some
    of the outputs shall bear, by position. With ``apart`` a scope is what a person wrote, without what JAX
    wrapped around it: transforms, calls of its own functions, a ``jit`` around everything.
    """
    reader = _Reader(names, declarations or {}, apart)
    reader.env.update(zip(closed.jaxpr.invars, inputs, strict=True))
    reader.labels = {
        closed.jaxpr.outvars[i]: name
        for i, name in (labels or {}).items()
        if not isinstance(closed.jaxpr.outvars[i], jex.Literal)
    }
    reader.read(closed, scope="", caller=None)
    outputs = tuple(reader.value(v) for v in closed.jaxpr.outvars)
    return Reading(tuple(reader.ops), outputs, reader.constants, tuple(reader.under))


class _Reader:
    def __init__(self, names: Names, declarations: Mapping[str, Variable], apart: bool) -> None:
        self.names, self.declarations, self.apart = names, declarations, apart
        self.within: frozenset[str] = frozenset()
        self.under: list[frozenset[str]] = []
        self.env: dict[Any, Any] = {}
        self.labels: dict[Any, str] = {}
        self.ops: list[Op] = []
        self.constants: dict[Variable, Any] = {}
        self.stacks: dict[int, tuple[Any, str]] = {}
        self._by_identity: dict[int, Variable] = {}

    def read(self, closed: Any, scope: str, caller: Any) -> None:
        """Read every equation of this jaxpr; ``caller`` is the equation of the ``jit`` around it."""
        jaxpr = closed.jaxpr
        for v, const in zip(jaxpr.constvars, closed.consts, strict=True):
            self.env[v] = self.constant(const)
        in_library = is_library(jaxpr.debug_info.func_filename or "<frozen ")
        unnamed = jaxpr.debug_info.with_unknown_names()
        for eqn in jaxpr.eqns:
            place = caller if caller is not None and in_library else eqn
            stack = self.shown(eqn.source_info.name_stack)
            here = _below(scope, stack)
            if eqn.primitive is _declare:
                self.env[eqn.outvars[0]] = self.declarations[eqn.params["name"]]
            elif eqn.primitive.name in _INLINED and not _draws(eqn):
                if self.apart and not here and len(jaxpr.eqns) == 1:
                    self.inline(eqn, "", None)
                else:
                    self.inline(eqn, _below(here, self.named(eqn)), place)
            else:
                self.append(eqn, here, place, unnamed)

    def named(self, eqn: Any) -> str:
        """The scope that a call of a jitted function opens: its name; with ``apart`` only a person's."""
        (inner,) = _jaxprs_in(tuple(eqn.params.values()))
        if self.apart and is_library(inner.jaxpr.debug_info.func_filename or "<frozen "):
            return ""
        return str(eqn.params.get("name", "call"))

    def shown(self, stack: Any) -> str:
        """The scopes of an equation in one text; many equations share one stack."""
        known = self.stacks.get(id(stack))
        if known is None:
            text = _entries(stack, "Scope") if self.apart else str(stack)
            known = self.stacks[id(stack)] = stack, text
        return known[1]

    def inline(self, eqn: Any, scope: str, place: Any) -> None:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        for v, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True):
            self.env[v] = self.resolve(outer)
        outputs = list(zip(inner.jaxpr.outvars, eqn.outvars, strict=True))
        outside, within = self.labels, self.within
        self.within = within | _transforms(eqn)
        self.labels = {v: outside[o] for v, o in outputs if o in outside and not isinstance(v, jex.Literal)}
        self.read(inner, scope, place)
        self.labels, self.within = outside, within
        for v, outer in outputs:
            self.env[outer] = self.resolve(v)

    def append(self, eqn: Any, scope: str, place: Any, debug_info: Any) -> None:
        eqn = self.with_literals(eqn)
        read = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex.Literal)))
        written = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
        kind = _kind(eqn)
        source = Source(place.source_info.traceback)
        _refuse_references(eqn, source)
        given = eqn.params.get("name") if kind == "name" else None
        label = given or (f"{scope}/{kind}" if scope else kind)
        outputs = []
        for v in written:
            outputs.append(Variable(self.names.new(self.labels.get(v, label)), *_shape(v.aval)))
            self.env[v] = outputs[-1]
        self.ops.append(
            Op(
                type=kind,
                inputs=tuple(self.env[v] for v in read),
                outputs=tuple(outputs),
                body=_EquationBody(eqn, read, written, debug_info),
                scope=scope,
                source=source,
            )
        )
        if self.apart:
            self.under.append(self.within | _transforms(eqn))

    def resolve(self, v: Any) -> Any:
        """The Variable of a jaxpr's variable, or the literal it stands for."""
        return v if isinstance(v, jex.Literal) else self.env[v]

    def with_literals(self, eqn: Any) -> Any:
        """The equation with the literals that reached it through the call of an inlined function."""
        known = [v if isinstance(v, jex.Literal) else self.env[v] for v in eqn.invars]
        invars = [k if isinstance(k, jex.Literal) else v for k, v in zip(known, eqn.invars, strict=True)]
        return eqn if all(map(is_, invars, eqn.invars)) else eqn.replace(invars=invars)

    def value(self, v: Any) -> Variable:
        """The Variable of a jaxpr's variable; a literal becomes a constant."""
        known = self.resolve(v)
        if isinstance(known, jex.Literal):
            return self.constant(_literal_value(known))
        found: Variable = known
        return found

    def constant(self, value: Any) -> Variable:
        """The constant Variable that holds this array; one for each array object."""
        if isinstance(value, jax.core.Tracer):
            raise TraceError(
                f"The function uses {value.aval}, a value of another trace, which no step can know. Some "
                "function stored it outside itself, or trace was called inside jax.jit or jax.grad on what "
                "these pass: give it to the function as an argument."
            )
        found = self._by_identity.get(id(value))
        if found is None or self.constants[found] is not value:
            found = Variable(self.names.new("constant"), *_shape(jax.typeof(value)), Kind.CONSTANT)
            self._by_identity[id(value)] = found
            self.constants[found] = value
        return found


@dataclass(frozen=True)
class OnDevices:
    """What every device computes of what ``shard_map`` or ``pmap`` spreads, and where arrays lie."""

    closed: Any
    replicas: Replicas
    given: tuple[Placement, ...]
    made: tuple[Placement, ...]


def on_devices(closed: Any) -> OnDevices | None:
    """What every device computes; None unless all of it is spread, over one axis, whole or by first axes."""
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) != 1 or jaxpr.constvars:
        return None
    (eqn,) = jaxpr.eqns
    inner, outer = (*eqn.invars, *eqn.outvars), (*jaxpr.invars, *jaxpr.outvars)
    if len(inner) != len(outer) or not all(map(is_, inner, outer)):
        return None
    if eqn.primitive.name in _INLINED:
        return on_devices(_jaxprs_in(tuple(eqn.params.values()))[0])
    if eqn.primitive.name != "shard_map" or len(eqn.params["mesh"].axis_names) != 1:
        return None
    mesh = eqn.params["mesh"]
    (name,) = mesh.axis_names
    specs = {(): Placement.REPLICATED, (name,): Placement.SHARDED, ((name,),): Placement.SHARDED}
    places = [tuple(spec) for key in ("in_specs", "out_specs") for spec in eqn.params[key]]
    if not all(place in specs for place in places):
        return None
    placements = [specs[place] for place in places]
    count = len(eqn.invars)
    part, replicas = _closed(eqn.params["jaxpr"]), Replicas(mesh.size, str(name))
    return _unstacked(OnDevices(part, replicas, tuple(placements[:count]), tuple(placements[count:])))


def _unstacked(found: OnDevices) -> OnDevices:
    """Without the axis of length 1 that ``pmap`` takes off what each device is given, and puts on again."""
    jaxpr = found.closed.jaxpr
    readers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, jex.Literal):
                readers.setdefault(v, []).append(eqn)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    taken, put = {}, {}
    for v, place in zip(jaxpr.invars, found.given, strict=True):
        first = readers.get(v, [])
        if place is Placement.SHARDED and [e.primitive.name for e in first] == ["squeeze"]:
            taken.update({v: first[0]} if first[0].params["dimensions"] == (0,) else {})
    for v, place in zip(jaxpr.outvars, found.made, strict=True):
        last = makers.get(v) if place is Placement.SHARDED and v not in readers else None
        if last is not None and last.primitive.name == "broadcast_in_dim" and _stacks(last):
            put[v] = last
    gone = {id(eqn) for eqn in (*taken.values(), *put.values())}
    inner = jaxpr.replace(
        invars=[taken[v].outvars[0] if v in taken else v for v in jaxpr.invars],
        outvars=[put[v].invars[0] if v in put else v for v in jaxpr.outvars],
        eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in gone],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    given, made = (
        tuple(Placement.PER_REPLICA if v in own else p for v, p in zip(group, places, strict=True))
        for group, places, own in (
            (jaxpr.invars, found.given, taken),
            (jaxpr.outvars, found.made, put),
        )
    )
    return OnDevices(_close(inner, found.closed.consts), found.replicas, given, made)


def _stacks(eqn: Any) -> bool:
    """Whether a ``broadcast_in_dim`` adds a first axis of length 1, no more."""
    operand = eqn.invars[0]
    return not isinstance(operand, jex.Literal) and eqn.params["shape"] == (1, *operand.aval.shape)


def carries_of(body: Body) -> list[tuple[int, int]]:
    """For a loop the positions (input, output) of what one turn hands to the next.

    >>> import jax, jax.numpy as jnp
    >>> def loop(a, x):
    ...     return jax.lax.scan(lambda x, _: (a * x, x), x, length=3)
    >>> carries_of(body_of(loop, jnp.float32(1.0), jnp.float32(2.0)))
    [(1, 0)]
    """
    if len(body.equations) != 1 or body.equations[0].primitive.name not in ("scan", "while"):
        return []
    (eqn,) = body.equations
    if eqn.primitive.name == "while":
        begin, count = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.outvars)
    else:
        begin, count = _carry_of_scan(eqn, Body(_jaxprs_in(eqn.params["jaxpr"])[0]))
    given, made = list(body.closed.jaxpr.invars), list(body.closed.jaxpr.outvars)
    pairs = zip(eqn.invars[begin : begin + count], eqn.outvars[:count], strict=True)
    return [(given.index(old), made.index(new)) for old, new in pairs if old in given and new in made]


def carry_of(body: Body) -> tuple[int, int]:
    """For a ``scan`` at which operand begins what one turn hands to the next, and how much it is.

    >>> import jax, jax.numpy as jnp
    >>> def loop(a, x):
    ...     return jax.lax.scan(lambda x, _: (a * x, x), x, length=3)
    >>> carry_of(body_of(loop, jnp.float32(1.0), jnp.float32(2.0)))
    (1, 1)
    """
    (eqn,) = body.equations
    return _carry_of_scan(eqn, Body(_jaxprs_in(eqn.params["jaxpr"])[0]))


def _below(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope and name else scope or name


def _draws(eqn: Any) -> bool:
    """Whether this is a call of ``jax.random`` that draws numbers from a key: one op, not its many."""
    if not eqn.invars or not eqn.params.get("name", "").startswith("_"):
        return False
    return bool(jax.numpy.issubdtype(eqn.invars[0].aval.dtype, jax.dtypes.prng_key))


def _kind(eqn: Any) -> str:
    """The type of the op: the primitive's name, or that of the function with a rule of its own."""
    if eqn.primitive.name in _INLINED:
        return str(eqn.params["name"]).strip("_")
    call = eqn.params.get("call_jaxpr") if eqn.primitive.name.startswith("custom_") else None
    name = call.jaxpr.debug_info.func_name if call is not None else ""
    return name if name.isidentifier() else eqn.primitive.name


def _calls_custom_rule(eqn: Any) -> bool:
    if eqn.primitive.name in _WITH_RULES:
        return True
    inner = (jaxpr for value in eqn.params.values() for jaxpr in _jaxprs_in(value))
    return any(_calls_custom_rule(e) for jaxpr in inner for e in jaxpr.jaxpr.eqns)


def _primitives_in(eqn: Any) -> Iterator[str]:
    yield eqn.primitive.name
    for value in eqn.params.values():
        for jaxpr in _jaxprs_in(value):
            for inner in jaxpr.jaxpr.eqns:
                yield from _primitives_in(inner)


_ON_A_MESH = frozenset({"shard_map", "sharding_constraint", "reshard", "xla_pmap"})
_MERGING = ("psum", "psum_invariant", "pmax", "pmin", "all_gather")
_APART = ("axis_index", "reduce_scatter", "all_to_all", "ppermute")
_COLLECTIVES = (*_MERGING, "reduce_scatter", "all_to_all", "ppermute")


def _collectives_in(eqn: Any, always: bool = True, times: int = 1) -> Iterator[Collective]:
    kind = eqn.primitive.name
    if kind in _COLLECTIVES and _is_between_devices(eqn):
        count = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        yield Collective(kind, times * int(count), always)
    inner = (e for value in eqn.params.values() for jaxpr in _jaxprs_in(value) for e in jaxpr.jaxpr.eqns)
    for e in inner:
        length = eqn.params["length"] if kind == "scan" else 1
        yield from _collectives_in(e, always and kind != "cond", times * length)


def _is_between_devices(eqn: Any) -> bool:
    """Whether a collective runs along an axis with a name; ``vmap`` leaves sums over axes of arrays."""
    return any(not isinstance(axis, int) for axis in eqn.params.get("axes", ("named",)))


def _same_results(eqn: Any, told: Sequence[bool]) -> Iterable[int]:
    """The results of an equation that are equal on all devices; ``told``: which operands are."""
    if eqn.primitive.name in _MERGING and _is_between_devices(eqn):
        return range(len(eqn.outvars))
    if eqn.primitive.name == "cond" and told[0]:
        same = (Body(branch).same_everywhere(_true(told[1:])) for branch in eqn.params["branches"])
        return set.intersection(*same)
    if eqn.primitive.name == "scan" and eqn.params["length"]:
        return _same_of_scan(eqn, told)
    if eqn.primitive.name == "while":
        return _same_of_while(eqn, told)
    if eqn.primitive.name in (*_INLINED, *_WITH_RULES):
        return Body(_jaxprs_in(tuple(eqn.params.values()))[0]).same_everywhere(_true(told))
    return range(len(eqn.outvars)) if all(told) and not _tells_devices_apart(eqn) else ()


def _same_of_scan(eqn: Any, told: Sequence[bool]) -> set[int]:
    """What is equal of a loop's results: what is carried must be so from one turn to the next."""
    body = Body(_jaxprs_in(eqn.params["jaxpr"])[0])
    begin, count = _carry_of_scan(eqn, body)
    carried = range(begin, begin + count)
    equal = set(_true(told))
    while True:
        after = body.same_everywhere(equal)
        if lost := {i for i in carried if i in equal and i - begin not in after}:
            equal -= lost
        else:
            return after


def _carry_of_scan(eqn: Any, body: Body) -> tuple[int, int]:
    """At which operand begins what a loop carries, and how much it is."""
    count = _of_equal_rank(eqn.outvars, body.out_avals)  # what is stacked has one axis more outside
    return _of_equal_rank(eqn.invars, body.in_avals) - count, count


def _same_of_while(eqn: Any, told: Sequence[bool]) -> set[int]:
    """What is equal of a loop's results, if all devices leave it at the same turn."""
    condition, body = (Body(_jaxprs_in(eqn.params[name])[0]) for name in ("cond_jaxpr", "body_jaxpr"))
    asked, begin = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed, known = told[:asked], [*told[asked:]]
    while True:
        after = body.same_everywhere(_true(known))
        if lost := {i for i in range(len(known) - begin) if known[begin + i] and i not in after}:
            known = [same and i - begin not in lost for i, same in enumerate(known)]
        elif condition.same_everywhere(_true([*fixed, *known[begin:]])):
            return set(_true(known[begin:]))
        else:
            return set()


def _of_equal_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(v.aval.ndim == aval.ndim for v, aval in zip(outside, inside, strict=True))


def _true(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


def _tells_devices_apart(eqn: Any) -> bool:
    """Whether an equation may give another result on each device though its inputs are the same."""
    if eqn.primitive.name in _APART:
        return True
    inner = (jaxpr for value in eqn.params.values() for jaxpr in _jaxprs_in(value))
    return any(_tells_devices_apart(e) for jaxpr in inner for e in jaxpr.jaxpr.eqns)


_DRAWING = ("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform")

Deciding = frozenset[Any] | None  # what alone decides a value; None where data or what is replaced does too


def draws(body: Body) -> bool:
    """Whether random numbers are drawn in it, however deep.

    >>> import jax, jax.numpy as jnp
    >>> draws(body_of(lambda key: [jax.random.normal(key)], jax.random.key(0)))
    True
    """
    return not body.primitives.isdisjoint(_DRAWING)


class DrawsAlike:
    """One walk over bodies that follows what alone decides each value, and notes what decides a draw.

    >>> import jax, jax.numpy as jnp
    >>> body = body_of(lambda key, x: [x * jax.random.normal(key)], jax.random.key(0), jnp.float32(1.0))
    >>> walk = DrawsAlike()
    >>> walk.run(body, [frozenset({"key"}), None]), walk.decided
    ([None], {'key'})
    """

    def __init__(self) -> None:
        self.decided: set[Any] = set()

    def run(self, body: Body, given: Sequence[Deciding]) -> list[Deciding]:
        """What decides the outputs, where this decides the inputs."""
        jaxpr = body.closed.jaxpr
        env: dict[Any, Deciding] = dict.fromkeys(jaxpr.constvars, frozenset())
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> Deciding:
            return frozenset() if isinstance(v, jex.Literal) else env[v]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._results(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    def _results(self, eqn: Any, given: list[Deciding]) -> Sequence[Deciding]:
        kind = eqn.primitive.name
        if kind == "scan":
            body = Body(_jaxprs_in(eqn.params["jaxpr"])[0])
            return self._loop(body, given, *_carry_of_scan(eqn, body))
        if kind == "while":
            asked, begin = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            condition, body = (Body(_jaxprs_in(eqn.params[name])[0]) for name in ("cond_jaxpr", "body_jaxpr"))
            after = self._loop(body, given[asked:], begin, len(eqn.outvars))
            [turns] = DrawsAlike().run(condition, [*given[:asked], *after])
            return [_both([turns, decided]) for decided in after]
        if kind == "cond":
            branches = [self.run(Body(branch), given[1:]) for branch in eqn.params["branches"]]
            return [_both([given[0], *results]) for results in zip(*branches, strict=True)]
        called = _called(eqn)
        if len(called) == 1 and len(called[0].jaxpr.invars) == len(given):
            return self.run(Body(called[0]), given)
        together = _both(given)
        if kind in _DRAWING:
            self.decided |= together or set()
        return [together] * len(eqn.outvars)

    def _loop(self, body: Body, given: list[Deciding], begin: int, count: int) -> Sequence[Deciding]:
        """The results of a loop: what is carried is decided by what decides it after any turn."""
        while True:
            turn = DrawsAlike()
            after = turn.run(body, given)
            carried = [_both(pair) for pair in zip(given[begin : begin + count], after, strict=False)]
            if carried == given[begin : begin + count]:
                self.decided |= turn.decided
                return after
            given = [*given[:begin], *carried, *given[begin + count :]]


def _both(deciding: Sequence[Deciding]) -> Deciding:
    """What decides a value that is computed from these."""
    known = [d for d in deciding if d is not None]
    return frozenset[Any]().union(*known) if len(known) == len(deciding) else None


def _refuse_references(eqn: Any, source: Source) -> None:
    for v in (*eqn.invars, *eqn.outvars):
        if hasattr(v.aval, "inner_aval"):
            raise TraceError(
                f"{eqn.primitive.name} at {source.file}:{source.line} uses a mutable array (jax.new_ref). A "
                "Program gives every Variable its value once: return new arrays instead of changing old ones."
            )


def _retyped(eqn: Any, dtype: np.dtype[Any]) -> Any:
    """The equation with its float32 literals and parameters of that dtype; None if a number does not fit."""
    invars = [_retyped_literal(v, dtype) if isinstance(v, jex.Literal) else v for v in eqn.invars]
    if any(v is None for v in invars):
        return None
    params = {k: dtype if _is_float32(value) else value for k, value in eqn.params.items()}
    return eqn.replace(invars=invars, params=params)


def _retyped_literal(literal: Any, dtype: np.dtype[Any]) -> Any:
    """The literal in another floating dtype; None if it is too large or too small for that."""
    if literal.aval.dtype != np.float32:
        return literal
    value = _literal_value(literal)
    with np.errstate(over="ignore", under="ignore"):
        cast = value.astype(dtype)
    same = np.isfinite(cast) == np.isfinite(value) and (cast == 0) == (value == 0)
    return jex.Literal(cast, jax.typeof(cast)) if same else None


def _is_float32(value: Any) -> bool:
    """Whether a parameter of a primitive is that dtype, be it given as a NumPy class."""
    return isinstance(value, np.dtype | type) and value == np.float32


def _in_place_of_float32(t: Type, dtype: Any) -> Type:
    return Type(t.shape, dtype) if t.dtype == np.float32 else t


def _close(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A closed jaxpr; since jax 0.11 that is a Jaxpr with its constants inside."""
    return jex.ClosedJaxpr(jaxpr, list(consts))  # type: ignore[attr-defined, unused-ignore]


@cache
def _nothing() -> Any:
    """A trace of next to nothing, to take from it what bears no names."""
    closed = jax.make_jaxpr(jax.lax.neg)(Type((), np.float32))
    return _close(closed.jaxpr.replace(debug_info=closed.jaxpr.debug_info.with_unknown_names()), [])


def _nowhere() -> Any:
    """A source_info without scope."""
    return _nothing().jaxpr.eqns[0].source_info


def _type(aval: Any) -> Type:
    return Type(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _shape(aval: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(aval.shape), aval.dtype


def _plain(value: Any) -> Any:
    """A parameter without NumPy's way of writing integers."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, np.integer) else value


def _literal_value(literal: Any) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)


def _literal_key(literal: Any) -> Any:
    value = np.asarray(literal.val)
    return (value.dtype, value.tobytes(), literal.aval)


def _jaxprs_in(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [_closed(v) for v in values if _is_jaxpr(v)]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, _JAXPRS)


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else _close(jaxpr, [])


def primitives_in(body: Body) -> Iterator[str]:
    """The primitives of a Body, those of the functions it calls among them.

    A division by a number that the jaxpr holds counts as ``mul``, which compilers make of it.

    >>> import jax, jax.numpy as jnp
    >>> list(primitives_in(body_of(lambda x: [jax.nn.relu(x) / 2], jnp.ones(3))))
    ['max', 'mul']
    """
    return _primitives_of(body.equations)


def _primitives_of(equations: Iterable[Any]) -> Iterator[str]:
    for eqn in equations:
        name = eqn.primitive.name
        if name in (*_INLINED, *_WITH_RULES):
            yield from _primitives_of(e for inner in _called(eqn) for e in inner.jaxpr.eqns)
        else:
            yield "mul" if name == "div" and isinstance(eqn.invars[1], jex.Literal) else str(name)


def _called(eqn: Any) -> list[Any]:
    """The jaxpr that a call runs when nothing is differentiated."""
    return _jaxprs_in(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


@dataclass(frozen=True)
class Windows:
    """The largest number in each window of an array, or with ``backward`` the gradient of that.

    The windows touch, and none reaches over the edge: ``sizes`` are their lengths, one for each axis, and
    what no window covers lies at the end. A gradient reads the results' gradients at ``gradient`` among the
    inputs and the array at the other place.
    """

    sizes: tuple[int, ...]
    backward: bool = False
    gradient: int = 0


_LARGEST = ("reduce_window_max", "select_and_scatter_add")


def windows_of(body: Body) -> Windows | None:
    """The windows in which a Body looks for the largest number; None if it does anything else.

    >>> import jax, jax.numpy as jnp
    >>> def pool(x):
    ...     return [jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")]
    >>> windows_of(body_of(pool, jnp.ones(6)))
    Windows(sizes=(2,), backward=False, gradient=0)
    """
    if len(body.equations) != 1 or body.equations[0].primitive.name not in _LARGEST:
        return None
    (eqn,) = body.equations
    params, backward = eqn.params, eqn.primitive.name == "select_and_scatter_add"
    sizes = tuple(params["window_dimensions"])
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    touching = (
        tuple(params["window_strides"]) == sizes
        and all(tuple(side) == (0, 0) for side in params["padding"])
        and all(n == 1 for n in dilations)
        and params.get("select_prim", jax.lax.ge_p) is jax.lax.ge_p
    )
    if not touching or len(body.in_avals) != 1 + backward:
        return None
    return Windows(sizes, backward, body.closed.jaxpr.invars.index(eqn.invars[0]))


def result_of(body: Body, output: int) -> int:
    """Which result of its one equation an output of a Body is.

    >>> import jax, jax.numpy as jnp
    >>> swapped = body_of(lambda x: jax.lax.scan(lambda c, _: (c + x, c), x, None, 2)[::-1], jnp.ones(3))
    >>> result_of(swapped, 0), result_of(swapped, 1)
    (1, 0)
    """
    (eqn,) = body.equations
    return list(map(id, eqn.outvars)).index(id(body.closed.jaxpr.outvars[output]))
