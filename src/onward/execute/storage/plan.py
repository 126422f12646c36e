"""Which state Variables share a buffer: chosen by what passing and copying arrays costs.

A compiled call takes about 1.2 microseconds on a CPU for each array that goes in and comes out. A parameter
of 1,000 numbers with the slots of Adam is three such arrays; laying its gradient on a stack costs a copy of
4,000 bytes, a good microsecond. So small Variables share buffers, large ones have their own, and what a
rolled network reads as a stack is stored as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from onward.core.meshes import specs_of
from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.core.words import Placement, UpdateType
from onward.develop.offload import offloaded
from onward.execute.storage.families import components, families_of, is_stack
from onward.execute.storage.packing import pattern_of
from onward.execute.storage.storage import Buffer, BufferForm, Storage

SMALL = 16 * 1024  # bytes of a Variable whose copy costs less than passing it
LEAST = 64  # arrays that must be saved before anything is packed
_FEW, _MANY = 8, 32  # members of a stack that one op updates, and of other buffers

_ROLLED, _UPDATED, _LIKE = "a rolled run reads them as one", "updated by one op", "small, of one type"
_SMALL = "small, of one dtype"


def plan(program: Program, apart: Collection[str] = ()) -> Storage | None:
    """The storage of a Program's state; None where every Variable is best kept in a buffer of its own.

    Args:
        program: a Program with its update pass.
        apart: names of Variables that share buffers among themselves only, such as those of a Model.
    """
    planning = _Planning(program, apart)
    planning.stack_rolled()
    if planning.saved or planning.small_arrays() >= LEAST:
        planning.stack_families()
        planning.stack_alike()
        planning.lay_end_to_end()
    return planning.storage() if planning.saved else None


class _Planning:
    """The buffers so far."""

    def __init__(self, program: Program, apart: Collection[str]) -> None:
        self.program, self.apart = program, apart
        self.names = Names(program.variables)
        self.split = specs_of(program)
        fixed = {v for op in program.ops if op.update is UpdateType.BOOKKEEPING for v in op.inputs}
        fixed |= {*offloaded(program)}  # one buffer lies in one memory, and is moved as a whole
        self.free = {
            v: None
            for v in program.state
            if v not in fixed and v not in program.hyperparameters and _can_share(v)
        }
        self.groups: dict[Variable, Buffer] = {}

    @property
    def saved(self) -> int:
        """How many arrays fewer there are."""
        return len(self.groups) - len({id(b) for b in self.groups.values()})

    def small_arrays(self) -> int:
        """How many Variables could share a buffer."""
        return sum(map(_is_small, self.free))

    def share(self, members: Sequence[Variable], form: BufferForm, why: str) -> None:
        """Let these Variables share a buffer, unless some of them do so already."""
        if len(members) < 2 or any(v not in self.free for v in members) or len(set(members)) < len(members):
            return
        specs = {self.split.get(v.name) for v in members}
        if len({v.name in self.apart for v in members}) > 1 or len(specs) > 1:
            return
        if form is BufferForm.FLAT and specs != {None}:
            return
        one = members[0]
        shape = (len(members), *one.shape) if form is BufferForm.STACKED else (sum(v.size for v in members),)
        name = self.names.new(pattern_of([v.name for v in members]))
        whole = Variable(name, shape, one.dtype, one.kind, one.placement)
        buffer = Buffer(whole, tuple(members), form, why)
        for v in members:
            del self.free[v]
            self.groups[v] = buffer

    def stack_rolled(self) -> None:
        """Stack the Variables that a stack in the Program is made of, and those updated along with them."""
        stacks = [op.inputs for op in self.program.ops if is_stack(op)]
        for members in stacks:
            self.share(members, BufferForm.STACKED, _ROLLED)
        for together in components(families_of(self.program)):
            if any(column[0] in self.groups for f in together for column in f.columns):
                self._stack(together, _ROLLED)

    def stack_families(self) -> None:
        """Stack the small Variables that one op can update."""
        for together in components(families_of(self.program)):
            columns = [column for f in together for column in f.columns]
            if len(columns[0]) >= _FEW and all(_is_small(column[0]) for column in columns):
                self._stack(together, _UPDATED)

    def _stack(self, together: Iterable[Any], why: str) -> None:
        for family in together:
            place = {v: i for i, b in self._numbered() for i, v in enumerate(b.members)}
            known = next((c for c in family.columns if all(v in place for v in c)), None)
            if known is not None:
                family = family.reordered(sorted(range(len(known)), key=lambda i: place[known[i]]))
            for column in family.columns:
                self.share(column, BufferForm.STACKED, why)

    def _numbered(self) -> list[tuple[int, Buffer]]:
        return list(enumerate({id(b): b for b in self.groups.values()}.values()))

    def stack_alike(self) -> None:
        """Stack the small Variables of one type and kind that either all change or all stay."""
        self._by(lambda v: (v.shape, v.dtype, v.kind, self.split.get(v.name)), BufferForm.STACKED, _LIKE)

    def lay_end_to_end(self) -> None:
        """Lay the small Variables that are left over end to end, by dtype."""
        self._by(lambda v: (v.dtype, v.name in self.split), BufferForm.FLAT, _SMALL)

    def _by(self, key: Any, form: BufferForm, why: str) -> None:
        found: dict[Any, list[Variable]] = defaultdict(list)
        for v in self.free:
            if _is_small(v):
                found[v in self.program.next_state, v.name in self.apart, key(v)].append(v)
        for members in found.values():
            if len(members) >= _MANY:
                self.share(members, form, why)

    def storage(self) -> Storage:
        """The buffers in the order of the state: those that change first."""
        made: dict[int, Buffer] = {}
        for v in self.program.state:
            buffer = self.groups.get(v) or Buffer(v, (v,), BufferForm.ALONE)
            made.setdefault(id(buffer), buffer)
        changes = {b: any(v in self.program.next_state for v in b.members) for b in made.values()}
        return Storage(sorted(made.values(), key=lambda b: not changes[b]))


def _can_share(v: Variable) -> bool:
    """Whether a Variable may lie in one buffer with others."""
    return v.placement is Placement.REPLICATED and not v.is_key


def _is_small(v: Variable) -> bool:
    return bool(v.size * v.dtype.itemsize <= SMALL)
