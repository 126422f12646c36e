"""Run a step once more, with an eye on every value, and find the op that made the first bad one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from onward.core.marks import KEEP
from onward.core.program import Program, Variable
from onward.core.recipe import rebuilt
from onward.develop.check_finite import check_of, may_be_infinite
from onward.develop.guard import watched_by_update
from onward.execute.executable import Executable
from onward.execute.feeds import Feeds, key_of
from onward.execute.filler import filled
from onward.execute.layout import Layout
from onward.execute.nonfinite.finding import NonFinite, forward_of, source_of
from onward.execute.nonfinite.flags import (
    Bad,
    Flags,
    FlagsOnDemand,
    bad_in,
    flagged,
    flagging,
    floats,
    is_float,
    lifted,
    unpacked,
)
from onward.execute.nonfinite.inside import inside
from onward.execute.nonfinite.numbers import Numbers
from onward.execute.nonfinite.walk_back import BadValue, FaultOrigin, walk_back
from onward.execute.pieces import PiecewiseRun
from onward.execute.processes import gathered, on_this_process, reading_whole


def find(program: Program, state: Mapping[str, Any], data: tuple[Any, ...]) -> NonFinite | None:
    """The first value that is not finite and spoils what is looked at; None if that is all finite.

    Args:
        program: of one step.
        state: its values by name, which stay as they are.
        data: in the order in which the step takes it.
    """
    run = _ObservedStep(program, state, data)
    flags = run.flags()
    devices = run.devices
    watched = looked_at(run.program, flags)
    where = [(v, device) for v in watched for device in range(devices)]
    starts = [BadValue(v, device, bad) for v, device in where for bad in sorted(bad_in(flags, v, device))]
    # gradients and the next state are computed after the loss, and spoilt by what spoilt it
    of_loss = [place for place in starts if place.variable is run.program.loss]
    walk = walk_back(run.program, flags, of_loss or starts, devices)
    origin = walk.first(run.program)
    if origin is None:
        return None
    shown = {op.inputs[1]: op.outputs[0] for op in run.program.ops if op.type is KEEP}
    spoilt = tuple(dict.fromkeys(shown.get(p.variable, p.variable).name for p in starts))
    return _told(run, origin, spoilt, devices)


def looked_at(program: Program, flags: Flags) -> list[Variable]:
    """The Variables that must be finite: loss, gradients, next state not infinite before; or the outputs."""
    check = check_of(program)
    before = {new: old for old, new in program.next_state.items()}
    if check is None:
        watched = [*watched_by_update(program), *before]
    else:
        before |= {op.inputs[1]: op.inputs[2] for op in program.ops if op.type is KEEP}
        watched = [v for v in check.watched if v not in program.state or v in program.hyperparameters]
    if program.loss is None and not program.next_state:
        watched = list(program.outputs)

    def may_stay(v: Variable) -> bool:
        old = before.get(v)
        is_wrong = flags[v].any() and old is not None and may_be_infinite(old)
        return old is not None and bool(is_wrong and flags[old].any())

    return [v for v in dict.fromkeys(watched) if is_float(v) and not may_stay(v)]


def _told(run: _ObservedStep, origin: FaultOrigin, reaches: tuple[str, ...], devices: int) -> NonFinite:
    """The whole story of an origin."""
    place, op = origin.place, origin.op
    v, device = place.variable, place.device
    read = op.inputs if op is not None else ()
    *values, value = run.values([*read, v], device)
    forward = None if op is None else forward_of(run.program, op)
    saved = op is not None and op.primal is not None and op.outputs.index(v) >= len(op.primal.out_avals)
    if op is not None and op.primal is not None and not saved:
        op = replace(op, outputs=op.outputs[: len(op.primal.out_avals)], body=op.primal, primal=None)
    parts = () if op is None else inside(op, values, [(op.outputs.index(v), place.bad)])
    return NonFinite(
        variable=v,
        numbers=Numbers.of(v.name, value),
        op=op,
        forward=forward,
        inside=parts,
        reads=tuple(Numbers.of(x.name, value) for x, value in zip(read, values, strict=True)),
        device=device if devices > 1 else None,
        reaches=reaches,
        of_derivative=saved,
        is_written=parts[-1].is_written if parts else origin.is_written,
        source=None if op is None else source_of(op, forward, parts),
    )


class _ObservedStep:
    """One step on its values, of which any can be asked for.

    On one device it runs in pieces. On several, and where a file holds its code, it is compiled as a whole:
    once to return what is not finite among all values, once to return what the culprit read.
    """

    def __init__(self, program: Program, state: Mapping[str, Any], data: tuple[Any, ...]) -> None:
        self.state = state
        feeds = Feeds(program)
        values = feeds.convert(feeds.read(data))
        values = filled(program, values)
        if program.replicas is not None or program.partition is not None:
            values = list(Executable(program, (), ()).feed(values))
        layout = Layout.of(program)
        shapes = key_of(values) != key_of([layout.whole(v) for v in program.inputs])
        self.program = rebuilt(program, feeds.types(values)) if shapes else program
        self.data = values
        self.devices = 1 if self.program.replicas is None else self.program.replicas.count
        is_whole = self.program.replicas is not None or self.program.code is not None
        self.pieces = None if is_whole else PiecewiseRun(self.program)

    @cached_property
    def given(self) -> Mapping[Variable, Any]:
        """The values of data, state and constants."""
        given = (*self.program.inputs, *self.program.state)
        values = on_this_process([*self.data, *(self.state[v.name] for v in self.program.state)])
        return {**dict(zip(given, values, strict=True)), **self.program.constants}

    def flags(self) -> Flags:
        """Compute the flags of all floats: which are NaN or infinite."""
        if self.pieces is not None:
            return FlagsOnDemand(self._flags_of_pieces(self.pieces), self.given)
        watched = floats(self.program)
        if not watched:
            return {}
        (codes,) = self._results(flagged(self.program))
        rows = np.moveaxis(unpacked(codes).reshape(-1, len(watched), len(Bad)), 1, 0)
        return dict(zip(watched, rows, strict=True))

    def _flags_of_pieces(self, pieces: PiecewiseRun) -> Flags:
        found: dict[Variable, Any] = {}
        for values in pieces(self.given, is_float):
            found |= {v: flagging(x) for v, x in values.items()}
        codes = jax.device_get([*found.values()])
        return {v: unpacked(code)[None] for v, code in zip(found, codes, strict=True)}

    def values(self, variables: Sequence[Variable], device: int) -> list[Any]:
        """Compute the values of these Variables on a device."""
        distinct = list(dict.fromkeys(variables))
        if self.pieces is not None:
            at = self._values_of_pieces(self.pieces, distinct)
        else:
            found = self._results(lifted(self.program, distinct))
            each = [x.reshape(-1, *v.shape) for x, v in zip(found, distinct, strict=True)]
            at = {v: x[device if len(x) > 1 else 0] for v, x in zip(distinct, each, strict=True)}
        found = [at[v] for v in variables]
        return reading_whole("the search for the origin", found, lambda: list(map(gathered, found)))

    def _values_of_pieces(self, pieces: PiecewiseRun, wanted: Sequence[Variable]) -> Mapping[Variable, Any]:
        known = {v: self.given[v] for v in wanted if v in self.given}
        run = pieces(self.given, set(wanted).__contains__)
        while len(known) < len(wanted):
            known |= next(run)
        return known

    def _results(self, program: Program) -> list[Any]:
        executable = Executable(program, (), (), keep_memory=False)
        executable.compile()
        own = [self.state[v.name] for v in executable.layout.variables]
        _, _, results = executable(own, executable.feed(self.data))
        return list(executable.of_all(results))[: len(program.outputs)]
