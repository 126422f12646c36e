"""From a traced step to its Program: passes, state, gradients, names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import jax

from onward.core.errors import ArgumentError, nearest
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.devices import on_devices
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.reading import Reading, read_jaxpr
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.structure import Signature, Static, Structure
from onward.core.words import Kind, Placement
from onward.define.arguments import Leaf, Specification
from onward.explain.inspect.call import CalledStep
from onward.explain.inspect.carried import Ends
from onward.explain.inspect.flow import Provenance
from onward.explain.inspect.loops import differentiated, ops_of, roles_of
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.naming import named
from onward.explain.inspect.parts import TreePart, parts_of
from onward.explain.inspect.passes import with_passes
from onward.explain.inspect.replaced import carried_places, next_values, without
from onward.explain.inspect.tracing import TracedStep


class SpreadStep(StrEnum):
    """How a step that ``shard_map`` or ``pmap`` spreads over devices is looked at, the most telling first.

    ``COPIES``: what one device does, the state that pmap gives each device being the same on all.
    ``APART``: what one device does, with state of its own. ``WHOLE``: the spread part is one op.
    """

    COPIES = "copies"
    APART = "apart"
    WHOLE = "whole"


_COPIES = {Placement.PER_REPLICA: Placement.REPLICATED}


def assemble(
    call: CalledStep, found: TracedStep, devices: SpreadStep, told: Sequence[str] | None = None
) -> Program:
    """The Program of a traced step.

    Args:
        call: how it is called.
        found: its trace.
        devices: how it is looked at, where it is spread over several.
        told: the arguments that a person says are carried on from step to step.
    """
    names = Names()
    spread = None if devices is SpreadStep.WHOLE else on_devices(found.closed)
    closed = found.closed if spread is None else spread.closed
    types = Body(closed).in_types
    given = Given.of(call, names, types, None if spread is None else spread.given)
    reading = read_jaxpr(closed, given.variables, names, apart=True)
    ops = ops_of(reading)
    returned = Structure(found.treedef, leaves_of(found, reading.outputs))
    flow = _provenance(ops, reading, given)
    pairs = _ends(call, given, returned, flow, told).pairs()
    following = {**next_values(pairs), **in_place(given.modules, found, reading.outputs)}
    result = without(returned, pairs)
    outputs = tuple(dict.fromkeys(result.variables))
    places = carried_places(pairs, call, found.treedef)
    roles = roles_of(ops, reading, following, outputs)
    program = roles.program(
        name=call.title,
        inputs=given.data(places),
        state=given.state(places),
        constants=reading.constants,
        outputs=outputs,
        next_state=following,
        signature=signature_of(call, given, places, result),
        replicas=None if spread is None else spread.replicas,
    )
    return named(program, names, roles.kinds(program.state), _COPIES if devices is SpreadStep.COPIES else {})


def _provenance(ops: Sequence[Op], reading: Reading, given: Given) -> Provenance:
    return Provenance(ops, given.variables, differentiated(reading))


def carried_on(call: CalledStep, found: TracedStep, told: Sequence[str] | None, asks: bool) -> list[Pair]:
    """The results of a step that no devices share, with the arguments that they replace; see Ends."""
    names = Names()
    given = Given.of(call, names, Body(found.closed).in_types)
    reading = read_jaxpr(found.closed, given.variables, names, apart=True)
    ops = with_passes(reading.ops, reading.under)
    returned = Structure(found.treedef, leaves_of(found, reading.outputs))
    flow = _provenance(ops, reading, given)
    return replace(_ends(call, given, returned, flow, told), asks=asks).pairs()


def _ends(
    call: CalledStep, given: Given, returned: Structure, flow: Provenance, told: Sequence[str] | None
) -> Ends:
    parts = [*given.parts()], [*parts_of(returned, None)]
    return Ends(*parts, flow, call.title, call.names, given.named(told, call))


@dataclass(frozen=True, eq=False)
class Given:
    """The Variables that go in: those of plain arguments by their place, and those of modules."""

    plain: Mapping[int, Structure]
    modules: tuple[Variable, ...]

    @classmethod
    def of(
        cls,
        call: CalledStep,
        names: Names,
        types: Sequence[Type],
        placements: Sequence[Placement] | None = None,
    ) -> Given:
        """The Variables of a call, named after its arguments and the places in them."""
        placements = placements or [Placement.REPLICATED] * len(types)
        variables = [
            Variable(names.new(name), tuple(t.shape), t.dtype, Kind.DATA, placement)
            for (name, _), t, placement in zip(call.leaves, types, placements, strict=True)
        ]
        supply = iter(variables)
        plain = {i: _structure(s, [next(supply) for _ in s.arrays]) for i, s in call.plain.items()}
        return cls(plain, tuple(supply))

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All of them, in the order in which they go in."""
        return (*(v for s in self.plain.values() for v in s.variables), *self.modules)

    def state(self, places: Collection[int]) -> tuple[Variable, ...]:
        """Those of the plain arguments in these places, and all of modules."""
        return (*(v for i, s in self.plain.items() if i in places for v in s.variables), *self.modules)

    def data(self, places: Collection[int]) -> tuple[Variable, ...]:
        """Those of the other plain arguments."""
        return tuple(v for i, s in self.plain.items() if i not in places for v in s.variables)

    def named(self, told: Sequence[str] | None, call: CalledStep) -> frozenset[Variable] | None:
        """The Variables of the arguments of these names, or below these places in them."""
        if told is None:
            return None
        found: set[Variable] = set()
        for name in told:
            below = [
                v for s in self.plain.values() for v in s.variables if f"{v.name}/".startswith(f"{name}/")
            ]
            if not below and not any(call.names[i] == name and not s.arrays for i, s in call.plain.items()):
                raise ArgumentError(
                    f"carried= names {name!r}, and {call.title} takes no such argument of arrays. "
                    f"{nearest(name, [call.names[i] for i in self.plain])}"
                )
            found.update(below)
        return frozenset(found)

    def parts(self) -> Iterator[TreePart]:
        """Every part of every plain argument."""
        start = 0
        for i, structure in self.plain.items():
            yield from parts_of(structure, i, start)
            start += len(structure.leaves)


def _structure(specification: Specification, variables: Sequence[Variable]) -> Structure:
    supply = iter(variables)
    leaves = tuple(next(supply) if isinstance(leaf, Leaf) else leaf for leaf in specification.leaves)
    return Structure(specification.treedef, leaves)


def leaves_of(found: TracedStep, outputs: Sequence[Variable]) -> tuple[Variable | Static, ...]:
    """The leaves of the step's result: a Variable for every array, and the static values of the others."""
    supply = iter(outputs)
    return tuple(next(supply) if static is None else static for static in found.statics)


def in_place(
    modules: Sequence[Variable], found: TracedStep, outputs: Sequence[Variable]
) -> dict[Variable, Variable]:
    """Map each array of a module that a step changes in place to the Variable that replaces it."""
    supply = iter(outputs[sum(static is None for static in found.statics) :])
    pairs = [(v, next(supply)) for v, is_there in zip(modules, found.in_place, strict=True) if is_there]
    return {
        old: new for old, new in pairs if new is not old and (new.shape, new.dtype) == (old.shape, old.dtype)
    }


def signature_of(
    call: CalledStep, given: Given, state_places: Collection[int], result: Structure
) -> Signature:
    """How a compiled Program is begun, with the arguments that are state, and fed, with the others."""
    state = [(call.names[i], given.plain[i]) for i in sorted(state_places)]
    if call.graph is not None:
        name = ", ".join(call.names[i] for i in call.graph.places)
        state.append((f"nnx.state(({name}))", _structure(call.graph.state, given.modules)))
    data = {call.names[i]: s for i, s in given.plain.items() if i not in state_places}
    return Signature(
        parameters=_together([s for _, s in state]),
        model_state=None,
        data=tuple(data.values()),
        names=(", ".join(name for name, _ in state) or "state", *data),
        result=result,
        has_aux=False,
    )


def _together(structures: Sequence[Structure]) -> Structure:
    """One structure alone, or a tuple of several."""
    if len(structures) == 1:
        return structures[0]
    treedef = jax.tree_util.treedef_tuple([s.treedef for s in structures])
    return Structure(treedef, tuple(leaf for s in structures for leaf in s.leaves))
