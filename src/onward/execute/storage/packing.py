"""Make the Program over buffers, which runs, from the Program over Variables, which users see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

import jax
from jax import lax

from onward.core.jaxprs.body import Body, Collected, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.tracing import along
from onward.core.marks import STACK
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass, UpdateType
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.storage.families import Family, components, families_of, is_rows, is_stack
from onward.execute.storage.storage import Buffer, BufferForm, Storage, end_to_end, stacked

Unit = Op | Family


@uninterrupted
def packed(program: Program, storage: Storage, outputs: Sequence[Variable]) -> Program:
    """The Program whose state is the buffers of this storage, and which returns these Variables.

    One op updates a whole stack where the ops of its members do the same; a ``stack`` of what is stored on
    top of each other is the buffer itself. The results are the same numbers.

    Args:
        program: over the Variables that the storage holds, or some of them.
        storage: the buffers; those that hold nothing of the Program are left out.
        outputs: Variables of the Program.
    """
    packing = _Packing(program, storage)
    with along(program.replicas):
        for unit in _ordered(program, packing.chosen()):
            packing.append(unit)
    changed = [b for b in packing.buffers if any(v in program.next_state for v in packing.members[b])]
    following = {b.variable: packing.following(b) for b in changed}
    found = tuple(map(packing.value, outputs))
    return replace(
        program,
        state=tuple(b.variable for b in packing.buffers),
        constants=program.constants,
        ops=tuple(packing.ops),
        outputs=found,
        next_state=following,
        gradients=(),
        initializers=(),
        hyperparameters=(),
        limits={},
        recipe=None,
    )


class _Packing:
    """The packed Program as it grows.

    ``rows`` says in which buffer or stack, and where, a value lies; ``held`` what holds it by itself;
    ``stacks`` knows the stack of several values.
    """

    def __init__(self, program: Program, storage: Storage) -> None:
        self.program = program
        mine = {v.name: v for v in program.state}
        self.names = Names(program.variables)
        self.ops: list[Op] = []
        self.buffers = [b for b in storage.buffers if any(v.name in mine for v in b.members)]
        self.members = {b: tuple(mine.get(v.name, v) for v in b.members) for b in self.buffers}
        self.held: dict[Variable, Variable] = {}
        self.columns: list[tuple[Variable, ...]] = []
        self.made_by = Pass.FORWARD
        self.rows: dict[Variable, tuple[Variable, Buffer | None, int]] = {}
        self.stacks: dict[tuple[Variable, ...], Variable] = {}
        for buffer in self.buffers:
            for k, v in enumerate(self.members[buffer]):
                if buffer.form is BufferForm.ALONE:
                    self.held[v] = buffer.variable
                else:
                    self.rows[v] = (buffer.variable, buffer, k)
            if buffer.form is BufferForm.STACKED:
                self.stacks[self.members[buffer]] = buffer.variable

    def chosen(self) -> list[Family]:
        """The families to run as one op: those that, or whose neighbours, are stored or made as stacks."""
        made = (op.outputs for op in self.program.ops if is_rows(op))
        known = {frozenset(column) for column in (*self.stacks, *made)}
        found = [
            self.in_order(family)
            for together in components(families_of(self.program))
            if any(frozenset(column) in known for f in together for column in f.columns)
            for family in together
            if _runs_over_rows(family)
        ]
        self.columns = [column for family in found for column in family.columns]
        return found

    def append(self, unit: Unit) -> None:
        """One more op, over stacks if there are several."""
        self.made_by = _members(unit)[0].made_by
        if isinstance(unit, Family):
            self.merge(self.in_order(unit))
        elif is_stack(unit) and unit.inputs in self.stacks:
            self.held[unit.outputs[0]] = self.stacks[unit.inputs]
        elif is_rows(unit):
            self.lay(unit.outputs, self.value(unit.inputs[0]))
        elif unit.body.collected is not None:
            self.collect(unit, unit.body.collected)
        else:
            inputs = tuple(map(self.value, unit.inputs))
            self.ops.append(unit if inputs == unit.inputs else replace(unit, inputs=inputs))

    def collect(self, op: Op, collected: Collected) -> None:
        """An op over a collection of numbers, with whole stacks in place of their rows."""
        members, others = op.inputs[: collected.count], op.inputs[collected.count :]
        made = op.outputs if len(op.outputs) == collected.count else ()
        groups = self.grouped(members, dict(zip(members, made, strict=True)) if made else {})
        if all(len(group) == 1 for group in groups):
            self.ops.append(replace(op, inputs=tuple(map(self.value, op.inputs))))
            return
        whole = [self.stack_of(group) if len(group) > 1 else self.value(group[0]) for group in groups]
        result = dict(zip(members, made, strict=False))
        outputs = [self.laid(tuple(result[v] for v in group)) for group in groups] if made else op.outputs
        body = collected.remade([v.aval for v in whole])
        inputs = (*whole, *map(self.value, others))
        self.ops.append(replace(op, inputs=inputs, outputs=tuple(outputs), body=body))

    def grouped(
        self, members: Sequence[Variable], made: Mapping[Variable, Variable]
    ) -> list[tuple[Variable, ...]]:
        """The members, those together that are rows of one stack, or that become rows of one."""
        columns = {v: column for column in self.columns for v in column}
        of_stack = {v: rows for rows in self.stacks for v in rows}
        of_result = {v: columns[made[v]] for v in members if made and made[v] in columns}
        back = {w: v for v, w in made.items()}
        left = dict.fromkeys(members)
        groups: list[tuple[Variable, ...]] = []
        for v in members:
            if v not in left:
                continue
            group = of_stack.get(v, (v,))
            if len(group) == 1 and v in of_result:
                group = tuple(back.get(w, v) for w in of_result[v])
            if len(set(group)) < len(group) or any(w not in left for w in group):
                group = (v,)
            for w in group:
                del left[w]
            groups.append(group)
        return groups

    def lay(self, members: tuple[Variable, ...], stack: Variable) -> None:
        """Remember that these values are the rows of a stack."""
        self.stacks[members] = stack
        self.rows.update((v, (stack, None, k)) for k, v in enumerate(members))

    def laid(self, members: tuple[Variable, ...]) -> Variable:
        """A new stack whose rows these values are; one alone stays what it is."""
        if len(members) == 1:
            return members[0]
        name = self.names.new(pattern_of([v.name for v in members]))
        stack = replace(members[0], name=name, shape=(len(members), *members[0].shape))
        self.lay(members, stack)
        return stack

    def in_order(self, family: Family) -> Family:
        """The family in the order of a stack that it reads."""
        for column in family.columns:
            place = {v: self.rows[v][2] for v in column if v in self.rows}
            whole = {self.rows[v][0] for v in column if v in self.rows}
            if len(place) == len(column) and len(whole) == 1:
                return family.reordered(sorted(range(len(column)), key=lambda i: place[column[i]]))
        return family

    def merge(self, family: Family) -> None:
        """The op over stacks that stands for the members of a family."""
        first, count = family.ops[0], len(family.ops)
        inputs = tuple(
            self.stack_of(family.column(i)) if varies else self.value(v)
            for i, (v, varies) in enumerate(zip(first.inputs, family.varies, strict=True))
        )
        outputs = tuple(map(self.laid, family.results))
        body = _over_rows(first.body, family.varies, count)  # as _runs_over_rows has made it
        self.ops.append(replace(first, inputs=inputs, outputs=outputs, body=body, of=None, primal=None))

    def stack_of(self, members: tuple[Variable, ...]) -> Variable:
        """The Variable that holds these values on top of each other."""
        if members not in self.stacks:
            one = members[0]
            name = self.names.new(f"stack({pattern_of([v.name for v in members])})")
            stack = replace(one, name=name, shape=(len(members), *one.shape))
            body = _stack(len(members), one.shape, one.dtype)
            self.move(STACK, tuple(map(self.value, members)), stack, body)
            self.stacks[members] = stack
        return self.stacks[members]

    def value(self, v: Variable) -> Variable:
        """The Variable that holds this value by itself."""
        if v in self.held:
            return self.held[v]
        if v not in self.rows:
            return v
        whole, buffer, k = self.rows[v]
        if buffer is not None and buffer.form is BufferForm.FLAT:
            body = _piece(whole.shape, buffer.offsets[k], v.shape, v.dtype)
        else:
            body = _row(whole.shape, k, v.dtype)
        self.move("row", (whole,), v, body)
        self.held[v] = v
        return v

    def move(self, kind: str, inputs: tuple[Variable, ...], output: Variable, body: Body) -> None:
        """An op that only moves numbers, for the pass at hand."""
        self.ops.append(Op(kind, inputs, (output,), body, self.made_by, update=UpdateType.BOOKKEEPING))

    def following(self, buffer: Buffer) -> Variable:
        """The Variable that replaces a buffer: the buffer's own, if nothing in it changes."""
        members = self.members[buffer]
        after = tuple(self.program.next_state.get(v, v) for v in members)
        if after == members:
            return buffer.variable
        if buffer.form is BufferForm.ALONE:
            return self.value(after[0])
        if buffer.form is BufferForm.STACKED:
            return self.stack_of(after)
        values = tuple(map(self.value, after))
        whole = replace(buffer.variable, name=self.names.new(f"next({buffer.variable.name})"))
        body = _end_to_end(tuple(v.shape for v in values), whole.dtype)
        self.move("pack", values, whole, body)
        return whole


def _ordered(program: Program, families: Sequence[Family]) -> list[Unit]:
    """The ops in an order in which each comes after what it reads, families as one.

    Families that would have to wait for themselves are dissolved.
    """
    unit_of: dict[Op, Unit] = {op: family for family in families for op in family.ops}
    units: dict[Unit, int] = {}
    for i, op in enumerate(program.ops):
        units[unit_of.setdefault(op, op)] = i  # the place of its last member
    maker = {v: unit_of[op] for op in program.ops for v in op.outputs}
    needs = {unit: {maker[v] for op in _members(unit) for v in op.inputs if v in maker} for unit in units}
    after: dict[Unit, list[Unit]] = {unit: [] for unit in units}
    for unit, needed in needs.items():
        for other in needed:
            after[other].append(unit)
    waiting = {unit: len(needed) for unit, needed in needs.items()}
    order = list(units)
    place = {unit: units[unit] for unit in order}
    ready = [(place[unit], k) for k, unit in enumerate(order) if not waiting[unit]]
    number = {unit: k for k, unit in enumerate(order)}
    heapify(ready)
    found: list[Unit] = []
    while ready:
        _, k = heappop(ready)
        found.append(order[k])
        for unit in after[order[k]]:
            waiting[unit] -= 1
            if not waiting[unit]:
                heappush(ready, (place[unit], number[unit]))
    if len(found) < len(units):
        stuck = {unit for unit in units if waiting[unit]}
        return _ordered(program, [family for family in families if family not in stuck])
    return found


def _runs_over_rows(family: Family) -> bool:
    """Whether what its members do can be done to the rows of a stack at once; not a callback, as a rule."""
    try:
        _over_rows(family.ops[0].body, family.varies, len(family.ops))
    except (NotImplementedError, ValueError):
        return False
    return True


def _members(unit: Unit) -> tuple[Op, ...]:
    return unit.ops if isinstance(unit, Family) else (unit,)


def pattern_of(names: Sequence[str]) -> str:
    """The common parts of several names, with ``*`` where they differ.

    >>> pattern_of(["layers/0/w", "layers/1/w"])
    'layers/*/w'
    """
    first, last = min(names), max(names)
    begin = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    shortest = min(map(len, names))
    end = 0
    while end < shortest - begin and len({name[-1 - end] for name in names}) == 1:
        end += 1
    return first if first == last else f"{first[:begin]}*{first[len(first) - end :]}"


@lru_cache(maxsize=1024)
def _over_rows(body: Body, varies: tuple[bool, ...], count: int) -> Body:
    """The body for all rows of stacks at once."""
    axes = [0 if v else None for v in varies]
    types = [Type((count, *t.shape), t.dtype) if v else t for t, v in zip(body.in_types, varies, strict=True)]
    return body_of(jax.vmap(body, axes), *types)


@lru_cache(maxsize=1024)
def _stack(count: int, shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda *xs: [stacked(xs)], *[Type(shape, dtype)] * count)


@lru_cache(maxsize=4096)
def _row(shape: tuple[int, ...], k: int, dtype: Any) -> Body:
    return body_of(lambda x: [lax.index_in_dim(x, k, keepdims=False)], Type(shape, dtype))


@lru_cache(maxsize=4096)
def _piece(whole: tuple[int, ...], begin: int, shape: tuple[int, ...], dtype: Any) -> Body:
    size = 1
    for n in shape:
        size *= n
    return body_of(lambda x: [lax.slice_in_dim(x, begin, begin + size).reshape(shape)], Type(whole, dtype))


@lru_cache(maxsize=256)
def _end_to_end(shapes: tuple[tuple[int, ...], ...], dtype: Any) -> Body:
    return body_of(lambda *xs: [end_to_end(xs)], *(Type(shape, dtype) for shape in shapes))
