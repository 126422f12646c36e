"""Every value of one step of a Program; on several devices one row for each.

On one device a Program runs in pieces, and what both Programs of a comparison compute alike is compiled
once. On several devices, and where a file holds its code, it is compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.check import check
from onward.core.compiler import options_to_look
from onward.core.errors import ArgumentError, StateError
from onward.core.jaxprs.body import body_of
from onward.core.lower import lower
from onward.core.names import Names
from onward.core.placement import whole_shape
from onward.core.program import Op, Program, Variable
from onward.core.recipe import rebuilt
from onward.core.structure import describe
from onward.core.variable import holds_keys
from onward.core.words import Pass, Placement
from onward.execute.executable import Executable
from onward.execute.feeds import Feeds, key_of
from onward.execute.filler import filled
from onward.execute.initialize import by_structure, initialized
from onward.execute.layout import Layout
from onward.execute.pieces import Compiled, PiecewiseRun
from onward.execute.state import SPENT, State

Values = Mapping[Variable, Any]
"""For each Variable its array; of a replicated Program with one axis more in front, a row for each device."""


def count_of(program: Program) -> int:
    """How many devices a Program runs on."""
    return 1 if program.replicas is None else program.replicas.count


class AllValues:
    """A Program that gives every value; it changes no state.

    ``compiled`` is what was compiled for other Programs, and is used again.
    """

    def __init__(self, program: Program, data: Sequence[Any], compiled: Compiled | None = None) -> None:
        feeds = Feeds(program)
        values = filled(program, feeds.convert(feeds.read(tuple(data))))
        whole = [Layout.of(program).whole(v) for v in program.inputs]
        is_other = key_of(values) != key_of(whole)
        self.program = rebuilt(program, feeds.types(values)) if is_other else program
        self.wanted = tuple(v for op in self.program.ops for v in op.outputs)
        is_whole = self.program.replicas is not None or self.program.code is not None
        self._whole = (
            Executable(_giving(self.program, self.wanted), (), (), keep_memory=False) if is_whole else None
        )
        if self._whole is None:
            self._pieces = PiecewiseRun(self.program, compiled, _to_look)
        else:
            self._whole.compile(options_to_look())

    def __call__(self, state: Mapping[str, Any], data: Sequence[Any]) -> Values:
        """Every value of one step."""
        feeds = Feeds(self.program)
        fed = filled(self.program, feeds.convert(feeds.read(tuple(data))))
        given = dict(zip(self.program.inputs, fed, strict=True))
        given |= {v: state[v.name] for v in self.program.state} | dict(self.program.constants)
        computed = self._of_pieces(given) if self._whole is None else self._of_whole(self._whole, state, fed)
        return {**{v: self._rows(v, x) for v, x in given.items()}, **computed}

    def _of_pieces(self, given: Mapping[Variable, Any]) -> Values:
        run = self._pieces(given, lambda v: True)
        return {v: on_host(x) for values in run for v, x in values.items()}

    def _of_whole(self, executable: Executable, state: Mapping[str, Any], fed: Sequence[Any]) -> Values:
        own = [state[v.name] for v in executable.layout.variables]
        _, _, results = executable(own, executable.feed(fed))
        found = list(executable.of_all(results))[: len(self.wanted)]
        return {v: self._each(v, x) for v, x in zip(self.wanted, found, strict=True)}

    def following(self, values: Values) -> dict[str, Any]:
        """The state after the step, by name."""
        following = {v: self.program.next_state.get(v, v) for v in self.program.state}
        return {v.name: self._of_rows(v, values[new]) for v, new in following.items()}

    def _each(self, v: Variable, value: Any) -> Any:
        """A result with a row for each device; what is the same on all comes as one."""
        if self.program.replicas is None:
            return on_host(value)
        value = on_host(value)
        return _of(value).broadcast_to(value.reshape(-1, *v.shape), (count_of(self.program), *v.shape))

    def _rows(self, v: Variable, value: Any) -> Any:
        """A given value with a row for each device."""
        count, value = count_of(self.program), on_host(value)
        if self.program.replicas is None:
            return value
        if v.placement is Placement.REPLICATED or v in self.program.constants:
            return _of(value).broadcast_to(value, (count, *v.shape))
        return value.reshape(count, *v.shape)

    def _of_rows(self, v: Variable, rows: Any) -> Any:
        if self.program.replicas is None:
            return rows
        if v.placement is Placement.REPLICATED:
            return rows[0]
        return rows.reshape(whole_shape(v, self.program.replicas))


def _to_look(part: Program) -> Callable[..., list[Any]]:
    """A piece, sooner compiled than fast."""
    run = lower(part, part.outputs, at_once=True)
    return jax.jit(partial(run, ()), compiler_options=options_to_look())


def _of(value: Any) -> Any:
    """The library whose functions take an array."""
    return np if isinstance(value, np.ndarray) else jnp


def on_host(value: Any) -> Any:
    """An array as NumPy has it; random keys stay what they are."""
    return value if holds_keys(getattr(value, "dtype", float)) else np.asarray(value)


def _giving(program: Program, wanted: tuple[Variable, ...]) -> Program:
    """The Program that returns these Variables and changes nothing."""
    added: list[Op] = []
    if program.replicas is not None:
        names = Names(program.variables)
        rows = [Variable(names.new(f"row({v.name})"), (1, *v.shape), v.dtype) for v in wanted]
        bodies = {aval: body_of(lambda x: [x[None]], aval) for aval in {v.aval for v in wanted}}
        for v, row in zip(wanted, rows, strict=True):
            added.append(Op("row", (v,), (row,), bodies[v.aval], Pass.UPDATE))
        wanted = tuple(rows)
    return check(
        replace(
            program,
            ops=(*program.ops, *added),
            outputs=wanted,
            next_state={},
            gradients=(),
            loss=None,
            signature=None,
            recipe=None,
        )
    )


def begun_alike(a: Program, b: Program, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the state of one Program that which another begins by the same numbers, without running it again."""
    first = {v.name: op for op in a.initializers for v in op.outputs if not op.inputs}
    second = ((v, op) for op in b.initializers for v in op.outputs if not op.inputs)
    alike = (v for v, op in second if v.name in first and first[v.name].body.signature is op.body.signature)
    return {v.name: values[v.name] for v in alike if v.name in values and _fits(b, v, values[v.name])}


def state_of(
    program: Program, given: Any, name: str, begun: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """The values of all state of a Program: of a State, by name, or in the containers that ``init`` takes.

    ``begun`` holds first values of state that is not given.

    Raises:
        StateError: a State that was given to a step, or state that nothing gives.
    """
    if isinstance(given, State):
        if given.is_spent:
            raise StateError(SPENT)
        given = dict(zip((v.name for v in given.layout.variables), given.values, strict=True))
    state = {v.name: v for v in program.state}
    if is_by_name(program, given):
        known = {state[n]: x for n, x in given.items() if n in state and _fits(program, state[n], x)}
    elif program.signature is not None:
        structure = program.signature.parameters
        known = dict(by_structure(structure, given, f"compare: {name}")) if structure.variables else {}
    elif not state:
        known = {}
    else:
        raise ArgumentError(
            f"compare: the state of {name} is {describe(given)}; expected the State before the step, or a "
            "dict of its values by name."
        )
    known = {state[n]: x for n, x in (begun or {}).items()} | known
    return {v.name: x for v, x in initialized(program, known, 0).items()}


def is_by_name(program: Program, given: Any) -> bool:
    """Whether values are given by the names of state, and not in the containers that ``init`` takes."""
    if not isinstance(given, Mapping) or set(given).isdisjoint(v.name for v in program.state):
        return False
    structure = None if program.signature is None else program.signature.parameters
    as_given = jax.tree.structure(given)
    return structure is None or bool(structure.treedef != as_given)


def _fits(program: Program, v: Variable, value: Any) -> bool:
    return tuple(np.shape(value)) == whole_shape(v, program.replicas)
