"""The differences between paired ops, and between the values that two Programs take and return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.described import DescribedBody
from onward.core.program import Op, Program, Variable
from onward.core.show import short_type
from onward.core.words import Kind
from onward.explain.diff.match import Matching

_FEW = 4  # numbers that are shown one by one


@dataclass(frozen=True, eq=False)
class Pair:
    """One op before and after.

    Attributes:
        before: the op of the first Program.
        after: that of the second.
        replaced: the inputs that are others now, as (before, after); None where there was or is none.
        differences: what else is different, in words.
    """

    before: Op
    after: Op
    replaced: tuple[tuple[Variable | None, Variable | None], ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def is_resized(self) -> bool:
        """Whether nothing differs but the lengths of axes, as for another batch."""
        return self.differences == (SIZES,) and not self.replaced


@dataclass(frozen=True)
class Fact:
    """A difference in what a Program is given, keeps or hands out; ``mark`` is ``+``, ``-`` or ``~``."""

    what: str
    mark: str
    type: str
    text: str


def compared(old: Op, new: Op, twins: Mapping[Variable, Variable]) -> Pair:
    """Compare an op with its partner: the inputs that were replaced, and all other differences."""
    return Pair(old, new, _replaced(old, new, twins), tuple(_differences(old, new, twins)))


def _replaced(
    old: Op, new: Op, twins: Mapping[Variable, Variable]
) -> tuple[tuple[Variable | None, Variable | None], ...]:
    if len(old.inputs) == len(new.inputs):
        both = zip(old.inputs, new.inputs, strict=True)
        return tuple((x, y) for x, y in both if twins.get(y, y) is not x)
    stands = {twins.get(y, y) for y in new.inputs}
    gone: list[tuple[Variable | None, Variable | None]] = [(x, None) for x in old.inputs if x not in stands]
    return (*gone, *((None, y) for y in new.inputs if twins.get(y, y) not in old.inputs))


SIZES = "other sizes"
_OF_SIZES = ("axis_size", "limit_indices", "new_sizes", "shape", "slice_sizes")


def _differences(old: Op, new: Op, twins: Mapping[Variable, Variable]) -> Iterator[str]:
    if old is new:
        return
    types = list(dict.fromkeys(_other_types(old, new)))
    told = [*types, *_other_attributes(old, new, types)]
    told += () if types and types != [SIZES] else _other_numbers(old, new)
    yield from told
    if more := len(new.outputs) - len(old.outputs):
        noun = "result" if abs(more) == 1 else "results"
        yield f"{abs(more)} {noun} {'more' if more > 0 else 'fewer'}"
    for word in ("made_by", "type", "scope", "update"):
        x, y = getattr(old, word), getattr(new, word)
        if x != y:
            yield f"{word.replace('_', ' ')} {x or 'none'} -> {y or 'none'}"
    if (old.of is None) != (new.of is None) or (new.of is not None and twins.get(new.of) is not old.of):
        yield "differentiates another op"
    is_like = not told and len(old.outputs) == len(new.outputs)
    is_known = not isinstance(old.body, DescribedBody) and not isinstance(new.body, DescribedBody)
    if is_like and is_known and old.body is not new.body and old.body.signature is not new.body.signature:
        yield "computes otherwise"


def _other_types(old: Op, new: Op) -> Iterator[str]:
    """In what the types of results differ, else those of inputs."""
    for group, other in ((old.outputs, new.outputs), (old.inputs, new.inputs)):
        for x, y in zip(group, other, strict=False):
            if x.dtype != y.dtype:
                yield f"{x.dtype} -> {y.dtype}"
            if x.shape != y.shape:
                yield SIZES if x.ndim == y.ndim else f"{short_type(x)} -> {short_type(y)}"


def _other_attributes(old: Op, new: Op, types: list[str]) -> Iterator[str]:
    """Attributes that differ, but for those that follow from the types."""
    before, after = old.attributes, new.attributes
    keys = dict.fromkeys((*before, *after)) if before and after else ()
    for key in keys:
        words = f"{before.get(key)} -> {after.get(key)}"
        follows = words in types or (SIZES in types and key in _OF_SIZES)
        if before.get(key) != after.get(key) and not follows:
            yield f"{key}={words}"


def _other_numbers(old: Op, new: Op) -> Iterator[str]:
    """Numbers that are written into the op."""
    for x, y in zip(old.body.operands, new.body.operands, strict=False):
        if x != y and isinstance(x, str) and isinstance(y, str):
            yield f"{x} -> {y}"


def facts(a: Program, b: Program, matching: Matching) -> Iterator[Fact]:
    """List the differences outside of the ops, such as in feeds, state, constants, results and gradients."""
    twins = matching.variables
    if a.replicas != b.replicas:
        yield Fact("devices", "~", "", f"{_devices(a)} -> {_devices(b)}")
    for what, old, new in (
        ("feed", a.inputs, b.inputs),
        ("state", a.state, b.state),
        ("constant", tuple(a.constants), tuple(b.constants)),
    ):
        yield from _given(what, old, new, twins)
    yield from _constants(a, b, twins)
    yield from _begins(a, b, twins)
    yield from _handed_out("return", a.outputs, b.outputs, twins)
    old_loss, loss = ((p.loss,) if p.loss is not None else () for p in (a, b))
    yield from _handed_out("loss", old_loss, loss, twins)
    yield from _mapped("next step", a.next_state, b.next_state, twins)
    yield from _mapped("gradient", dict(a.gradients), dict(b.gradients), twins)
    yield from _limits(a, b, twins)


def _devices(program: Program) -> str:
    if program.replicas is None:
        return "1"
    r = program.replicas
    return f"{r.count} along {r.name!r}" + (f", exchanged every {r.every} steps" if r.every > 1 else "")


def _given(
    what: str, old: Iterable[Variable], new: Iterable[Variable], twins: Mapping[Variable, Variable]
) -> Iterator[Fact]:
    new = tuple(new)
    stands = {twins[v] for v in new if v in twins}
    for v in old:
        if v not in stands:
            yield Fact(_noun(what, v), "-", short_type(v), v.name)
    for v in new:
        before = twins.get(v)
        if before is None:
            yield Fact(_noun(what, v), "+", short_type(v), v.name)
        elif _told(before) != _told(v):
            words = " ".join(f"{x} -> {y}" for x, y in zip(_told(before), _told(v), strict=True) if x != y)
            yield Fact(_noun(what, v), "~", short_type(v), f"{v.name}: {words}")


def _noun(what: str, v: Variable) -> str:
    return "parameter" if v.kind is Kind.PARAMETER else what


def _told(v: Variable) -> tuple[str, str, str]:
    return short_type(v), str(v.kind), str(v.placement)


def _begins(a: Program, b: Program, twins: Mapping[Variable, Variable]) -> Iterator[Fact]:
    """State that has another first value now."""
    first = {v: op for op in a.initializers for v in op.outputs}
    second = {v: op for op in b.initializers for v in op.outputs}
    for v in b.state:
        old, new = first.get(twins[v]) if v in twins else None, second.get(v)
        is_same = old is new or (old and new and old.body.signature is new.body.signature)
        if v in twins and not is_same:
            yield Fact("begins", "~", short_type(v), f"{v.name}: {_beginning(old)} -> {_beginning(new)}")


def _beginning(op: Op | None) -> str:
    """The initial value of state as text: "given", a few numbers, or the type of the op that makes it."""
    if op is None:
        return "given"
    return op.type if op.inputs or len(op.outputs) > 1 else _few_numbers(op.body()[0]) or op.type


def _constants(a: Program, b: Program, twins: Mapping[Variable, Variable]) -> Iterator[Fact]:
    """Constants that hold other numbers now."""
    for v, new in b.constants.items():
        if v in twins and (old := a.constants[twins[v]]) is not new and not same_array(old, new):
            before, after = _few_numbers(old), _few_numbers(new)
            yield Fact(
                "constant", "~", short_type(v), f"{v.name}: {before or 'numbers'} -> {after or 'others'}"
            )


def same_array(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same numbers, NaN like NaN; random keys by their words.

    >>> same_array(np.array([1.0, np.nan]), np.array([1.0, np.nan])), same_array(np.zeros(2), np.ones(2))
    (True, False)
    """
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _few_numbers(array: Any) -> str:
    """The numbers of a small array in words; nothing of a large one, or of random keys."""
    if array.size > _FEW or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return ""
    return str(np.asarray(array).tolist()).replace("'", "")


def _handed_out(
    what: str, old: tuple[Variable, ...], new: tuple[Variable, ...], twins: Mapping[Variable, Variable]
) -> Iterator[Fact]:
    if len(old) == len(new):
        for x, y in zip(old, new, strict=True):
            if twins.get(y) is not x:
                yield Fact(what, "~", short_type(y), f"{x.name} -> {y.name}")
        return
    stands = {twins.get(y) for y in new}
    yield from (Fact(what, "-", short_type(x), x.name) for x in old if x not in stands)
    yield from (Fact(what, "+", short_type(y), y.name) for y in new if twins.get(y) not in old)


def _mapped(
    what: str,
    old: Mapping[Variable, Variable],
    new: Mapping[Variable, Variable],
    twins: Mapping[Variable, Variable],
) -> Iterator[Fact]:
    """Differences in what each of some Variables has."""
    owners = {twins[owner] for owner in new if owner in twins}
    for owner, value in old.items():
        if owner not in owners:
            yield Fact(what, "-", short_type(value), f"{owner.name} <- {value.name}")
    for owner, value in new.items():
        before = old.get(twins[owner]) if owner in twins else None
        if before is None:
            yield Fact(what, "+", short_type(value), f"{owner.name} <- {value.name}")
        elif twins.get(value) is not before:
            words = "made by another op" if value.name == before.name else f"it was {before.name}"
            yield Fact(what, "~", short_type(value), f"{owner.name} <- {value.name}, {words}")


def _limits(a: Program, b: Program, twins: Mapping[Variable, Variable]) -> Iterator[Fact]:
    for what, old, new in (("limit", a.limits, b.limits), ("bound", a.bounds, b.bounds)):
        after = {twins.get(v, v): value for v, value in new.items()}
        stay = set(twins.values())
        for v in dict.fromkeys(v for v in (*old, *after) if v in stay):
            if old.get(v) != after.get(v):
                yield Fact(what, "~", short_type(v), f"{v.name}: {old.get(v)} -> {after.get(v)}")
