"""Devices in a jaxpr: the collectives, the values equal on all devices, and the computation on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from jax.extend import core as jex

from onward.core.jaxprs.equations import (
    carry_of_scan,
    close,
    closed_of,
    equations_within,
    has_rule_of_its_own,
    is_inlined,
    jaxprs_in,
)
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.variable import Replicas
from onward.core.words import Placement


@dataclass(frozen=True)
class Collective:
    """A primitive in which devices exchange numbers, and the bytes that each one puts in.

    ``always``: at every step, not only where a ``cond`` chooses so.
    """

    kind: str
    bytes: int
    always: bool = True


def collectives_within(eqn: Any, always: bool = True, times: int = 1) -> Iterator[Collective]:
    """The exchanges in an equation, however deep; in a loop that runs ``times`` so often."""
    kind = eqn.primitive.name
    row = of(kind)
    if row.exchanges is not None and _is_between_devices(eqn):
        count = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        yield Collective(kind, times * int(count), always)
    for e in equations_within(eqn):
        length = eqn.params["length"] if row.runs is Runs.SCAN else 1
        yield from collectives_within(e, always and row.runs is not Runs.BRANCH, times * length)


def _is_between_devices(eqn: Any) -> bool:
    """Whether a collective runs along an axis with a name; ``vmap`` leaves sums over axes of arrays."""
    return any(not isinstance(axis, int) for axis in eqn.params.get("axes", ("named",)))


def _is_within_groups(eqn: Any) -> bool:
    """Whether devices exchange among some of them only, so that each group has its own result."""
    return eqn.params.get("axis_index_groups") is not None


def same_everywhere(closed: Any, inputs: Iterable[int]) -> frozenset[int]:
    """The outputs of a jaxpr that are equal on all devices if these inputs are, and the others are not."""
    jaxpr = closed.jaxpr
    same = {jaxpr.invars[i] for i in inputs} | set(jaxpr.constvars)
    for eqn in jaxpr.eqns:
        told = [isinstance(v, jex.Literal) or v in same for v in eqn.invars]
        same.update(eqn.outvars[j] for j in _same_results(eqn, told))
    return frozenset(j for j, v in enumerate(jaxpr.outvars) if isinstance(v, jex.Literal) or v in same)


def _same_results(eqn: Any, told: Sequence[bool]) -> Iterable[int]:
    """The results of an equation that are equal on all devices; ``told``: which operands are."""
    row = of(eqn.primitive.name)
    if row.equalizes and _is_between_devices(eqn) and not _is_within_groups(eqn):
        return range(len(eqn.outvars))
    if row.runs is Runs.BRANCH and told[0]:
        same = (same_everywhere(closed, _true(told[1:])) for closed in jaxprs_in(eqn.params["branches"]))
        return frozenset.intersection(*same)
    if row.runs is Runs.SCAN and eqn.params["length"]:
        return _same_of_scan(eqn, told)
    if row.runs is Runs.WHILE:
        return _same_of_while(eqn, told)
    if is_inlined(eqn) or has_rule_of_its_own(eqn):
        return same_everywhere(jaxprs_in(tuple(eqn.params.values()))[0], _true(told))
    return range(len(eqn.outvars)) if all(told) and not _tells_devices_apart(eqn) else ()


def _same_of_scan(eqn: Any, told: Sequence[bool]) -> frozenset[int]:
    """The results of a scan that are equal on all devices; a carried value must stay so at every turn."""
    (turn,) = jaxprs_in(eqn.params["jaxpr"])
    begin, count = carry_of_scan(eqn)
    carried = range(begin, begin + count)
    equal = set(_true(told))
    while True:
        after = same_everywhere(turn, equal)
        if lost := {i for i in carried if i in equal and i - begin not in after}:
            equal -= lost
        else:
            return after


def _same_of_while(eqn: Any, told: Sequence[bool]) -> set[int]:
    """The results of a while loop that are equal on all devices; none unless all leave it at one turn."""
    condition, turn = (jaxprs_in(eqn.params[name])[0] for name in ("cond_jaxpr", "body_jaxpr"))
    asked, begin = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed, known = told[:asked], [*told[asked:]]
    while True:
        after = same_everywhere(turn, _true(known))
        if lost := {i for i in range(len(known) - begin) if known[begin + i] and i not in after}:
            known = [same and i - begin not in lost for i, same in enumerate(known)]
        elif same_everywhere(condition, _true([*fixed, *known[begin:]])):
            return set(_true(known[begin:]))
        else:
            return set()


def _true(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


def _tells_devices_apart(eqn: Any) -> bool:
    """Whether an equation may give another result on each device though its inputs are the same."""
    if of(eqn.primitive.name).tells_devices_apart or _is_within_groups(eqn):
        return True
    return any(map(_tells_devices_apart, equations_within(eqn)))


@dataclass(frozen=True)
class OnDevices:
    """The computation that ``shard_map`` or ``pmap`` runs on each device, and the placement of arrays."""

    closed: Any
    replicas: Replicas
    given: tuple[Placement, ...]
    made: tuple[Placement, ...]


def on_devices(closed: Any) -> OnDevices | None:
    """The computation on each device; None unless all is spread, over one axis, whole or by first axes."""
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) != 1 or jaxpr.constvars:
        return None
    (eqn,) = jaxpr.eqns
    inner, outer = (*eqn.invars, *eqn.outvars), (*jaxpr.invars, *jaxpr.outvars)
    if len(inner) != len(outer) or not all(map(is_, inner, outer)):
        return None
    if is_inlined(eqn):
        return on_devices(jaxprs_in(tuple(eqn.params.values()))[0])
    if of(eqn.primitive.name).runs is not Runs.DEVICES or len(eqn.params["mesh"].axis_names) != 1:
        return None
    mesh = eqn.params["mesh"]
    (name,) = mesh.axis_names
    specs = {(): Placement.REPLICATED, (name,): Placement.SHARDED, ((name,),): Placement.SHARDED}
    places = [tuple(spec) for key in ("in_specs", "out_specs") for spec in eqn.params[key]]
    if not all(place in specs for place in places):
        return None
    placements = [specs[place] for place in places]
    count = len(eqn.invars)
    part, replicas = closed_of(eqn.params["jaxpr"]), Replicas(mesh.size, str(name))
    return _unstacked(OnDevices(part, replicas, tuple(placements[:count]), tuple(placements[count:])))


def _unstacked(found: OnDevices) -> OnDevices:
    """The same without the axis of length 1 that ``pmap`` removes from inputs and adds to outputs."""
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
    return OnDevices(close(inner, found.closed.consts), found.replicas, given, made)


def _stacks(eqn: Any) -> bool:
    """Whether a ``broadcast_in_dim`` adds a first axis of length 1, no more."""
    operand = eqn.invars[0]
    return not isinstance(operand, jex.Literal) and eqn.params["shape"] == (1, *operand.aval.shape)


def only_exchange(eqns: Iterable[Any]) -> bool:
    """Whether all that equations do beside computing is to exchange numbers among devices.

    >>> import jax
    >>> def printing(x):
    ...     jax.debug.print("{}", x)
    >>> [only_exchange(jax.make_jaxpr(f)(1.0).jaxpr.eqns) for f in (jax.numpy.sin, printing)]
    [True, False]
    """
    effects = {type(effect).__name__ for eqn in eqns for effect in eqn.effects}
    return effects <= {"NamedAxisEffect"}
