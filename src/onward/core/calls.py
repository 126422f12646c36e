"""The scopes of ops that nobody named: the calls of the user's own functions that led to them.

JAX records the call stack of each equation: which functions were running, and how far each had come. It does
not record which call of a function it was, when a loop calls one again; two stacks that follow each other
tell. A function that has come further goes on. One that stands where it stood before, or before that, either
runs a loop of its own, which its code shows, or was called again by the nearest function that does.

>>> import jax.numpy as jnp, onward as ow
>>> def layer(w, x):
...     return jnp.tanh(x @ w)
>>> def loss(ws, x):
...     for w in ws:
...         x = layer(w, x)
...     return jnp.sum(x)
>>> program = ow.trace(loss, [jnp.ones((3, 3))] * 2, jnp.ones((2, 3)))
>>> list(called_scopes(program.ops).values())
['layer_0', 'layer_0', 'layer_1', 'layer_1', '']
"""

from __future__ import annotations

import dis
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import takewhile
from types import CodeType
from typing import NamedTuple

import jax

from onward.core.primitives.traits import Moves, Runs
from onward.core.program import Op, Variable
from onward.core.source import Source, StackFrame, is_of_user

_NEARLY_ALL = 0.75
_NAMELESS_LAYERS = os.path.join("-packages", "flax", "nnx", "nn", "")
_WRAPPERS = frozenset({"core_fn"})  # what nn.jit of flax.linen calls the function that it jits
_LAYS = (Moves.KEEPS, Moves.ROUNDS, Moves.RESHAPES, Moves.PERMUTES)


def called_scopes(ops: Iterable[Op]) -> Mapping[Op, str]:
    """For each op its scope; where nobody named one, the calls of the user's functions that led to it.

    A function called several times within another is numbered: ``block_0``, ``block_1``. The traced function,
    and what is called by it and runs nearly all of it, is not a scope of what it calls. What a library names
    within a function of the user stands below that, and so do layers of flax.nnx, which names nothing. What
    only casts or lays out what is given, as parameters in another dtype, stands where that is read first.

    Args:
        ops: the forward ops of a Program, all of them: numbers count the calls.
    """
    listed = list(ops)
    tree = _CallTree(s for op in listed if op.source is not None for s in _places(op.source))
    found = {op: _below(_scope(op, tree), op) for op in listed}
    return found | _where_read(listed, found)


def _where_read(ops: Sequence[Op], scopes: Mapping[Op, str]) -> dict[Op, str]:
    """For ops that nobody named and that only cast or lay out what is given: the scopes that read it."""
    made: set[Variable] = set()
    early = []
    for op in ops:
        is_laid = len(op.inputs) == 1 and op.primitive.moves in _LAYS and made.isdisjoint(op.inputs)
        if is_laid and op.source is not None and not op.source.marks:
            early.append(op)
        else:
            made.update(op.outputs)
    if not early:
        return {}
    readers: dict[Variable, Op] = {}
    for op in reversed(ops):
        readers.update(dict.fromkeys(op.inputs, op))
    found: dict[Op, str] = {}
    for op in reversed(early):
        if (reader := readers.get(op.outputs[0])) is not None:
            found[op] = found.get(reader, scopes[reader])
    return found


@dataclass(eq=False)
class UserCall:
    """A call of a function of the user, with the calls that it made.

    Attributes:
        name: that of the function, or of the class whose objects are called.
        calls: in order.
        own: how many places of ops it holds itself.
    """

    name: str
    calls: list[UserCall] = field(default_factory=list)
    own: int = 0

    @cached_property
    def total(self) -> int:
        """How many places of ops it holds, those of its calls included; asked for when all are known."""
        return self.own + sum(call.total for call in self.calls)

    def open(self, name: str) -> UserCall:
        """A call that it makes."""
        self.calls.append(UserCall(name))
        return self.calls[-1]


class _Level(NamedTuple):
    """A function of the stack, how far it has come, and the innermost call of the user up to it."""

    code: CodeType | str
    position: int
    call: UserCall


class _CallTree:
    """The calls that led to all of these places, in the order in which they were recorded."""

    def __init__(self, places: Iterable[Source]) -> None:
        self.root = UserCall("")
        self.stacks: dict[CodeType | str, list[_Level]] = {}
        self.at: dict[tuple[int, ...], UserCall] = {}
        for place in sorted(places, key=lambda place: place.order):
            if place.key not in self.at:
                self.at[place.key] = self.enter(place.stack)
                self.at[place.key].own += any(_is_of_user(code) for code, _ in place.stack)
        self.paths = dict(_paths(self.root))
        self.opened = {call.name for call in _calls_of(self.root) if not self.paths.get(call)}

    def path(self, place: Source) -> str:
        """The calls that led to a place, joined by ``/``."""
        return self.paths.get(self.at[place.key], "")

    def enter(self, stack: Sequence[StackFrame]) -> UserCall:
        """The innermost call of a stack, which follows the last one that began with its function.

        The body of a ``jax.checkpoint`` that was differentiated is recorded without what called it.
        """
        if not stack:
            return self.root
        levels = self.stacks.setdefault(stack[0][0], [])
        kept = _going_on(levels, stack, may_begin_again=len(self.stacks) > 1)
        for code, position in stack[len(kept) :]:
            call = kept[-1].call if kept else self.root
            name = scope_name(code)
            kept.append(_Level(code, position, call.open(name) if name else call))
        levels[:] = kept
        return kept[-1].call


def _going_on(levels: Sequence[_Level], stack: Sequence[StackFrame], may_begin_again: bool) -> list[_Level]:
    """The functions of the stack before that still run, each as far as it has come now."""
    pairs = zip(levels, stack, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0][:2] == pair[1], pairs))
    if same < min(len(stack), len(levels)) and stack[same][0] is levels[same].code:
        code, now = stack[same]
        before = levels[same].position
        is_first = same == 0 and not may_begin_again
        if now > before or is_first or _is_loop(code, now, before):
            return [*levels[:same], levels[same]._replace(position=now)]
    looping = (i for i in range(same - 1, -1, -1) if _is_loop(*stack[i], stack[i][1]))
    return [*levels[: next(looping, same - 1) + 1]]


def _is_loop(code: CodeType | str, begin: int, end: int) -> bool:
    """Whether a function has a loop around both positions."""
    return any(first <= begin and end <= last for first, last in _loops(code))


@lru_cache(maxsize=4096)
def _loops(code: CodeType | str) -> tuple[tuple[int, int], ...]:
    """The loops of a function: for each jump back, where it leads and where it stands."""
    if isinstance(code, str):
        return ()
    jumps = (i for i in dis.get_instructions(code) if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs)
    return tuple((i.argval, i.offset) for i in jumps if i.argval <= i.offset and "INTERRUPT" not in i.opname)


@lru_cache(maxsize=4096)
def scope_name(code: CodeType | str) -> str:
    """The name of a function of the user, or of the class whose objects are called; empty for any other.

    Layers of flax.nnx, which names none of them, have that of their class.
    """
    if isinstance(code, str):
        return code
    is_layer = _NAMELESS_LAYERS in code.co_filename and code.co_qualname.endswith(".__call__")
    if not _is_of_user(code) and not is_layer:
        return ""
    name = code.co_qualname.rpartition("<locals>.")[2].removesuffix(".__call__").rpartition(".")[2]
    return name if name.isidentifier() else ""


@lru_cache(maxsize=4096)
def _is_of_user(code: CodeType | str) -> bool:
    """Whether a function stands in a file of the user."""
    if isinstance(code, str):
        return True
    return is_of_user(code.co_filename)


def _paths(root: UserCall) -> Iterator[tuple[UserCall, str]]:
    """The names of calls within their callers, without those that run all, or nearly all."""
    while not root.own and len(root.calls) == 1:
        (root,) = root.calls
    yield root, ""
    shown = list(_opened(root, root.total))
    for name, (call, is_open) in zip(_numbered([call.name for call, _ in shown]), shown, strict=True):
        yield call, name
        yield from () if is_open else _within(call, name)


def _calls_of(outer: UserCall) -> Iterator[UserCall]:
    for call in outer.calls:
        yield call
        yield from _calls_of(call)


def _opened(outer: UserCall, whole: int) -> Iterator[tuple[UserCall, bool]]:
    """The calls of a function, and whether they are open: those that run nearly all by calls of their own."""
    for call in outer.calls:
        is_open = call.total > _NEARLY_ALL * whole and 2 * call.own < call.total
        if call.own or not is_open:
            yield call, is_open
        if is_open:
            yield from _opened(call, whole)


def _within(outer: UserCall, path: str) -> Iterator[tuple[UserCall, str]]:
    for name, call in zip(_numbered([call.name for call in outer.calls]), outer.calls, strict=True):
        yield call, f"{path}/{name}"
        yield from _within(call, f"{path}/{name}")


def _numbered(names: Sequence[str]) -> Iterator[str]:
    """The names, with numbers where one occurs again.

    >>> list(_numbered(["embed", "block", "block"]))
    ['embed', 'block_0', 'block_1']
    """
    every, seen = Counter(names), Counter[str]()
    for name in names:
        yield name if every[name] == 1 else f"{name}_{seen[name]}"
        seen[name] += 1


def _scope(op: Op, tree: _CallTree) -> str:
    """The scope of an op: what a person named, else the calls that led to it and what a library named."""
    source = op.source
    if source is None:
        return op.scope
    marks = source.marks.split("/") if source.marks else []
    if marks and len(marks) > _marked_below(source):
        return _without_wrappers(op.scope, marks, tree)
    if source.layers:
        return _shared([tree.path(place) for place in source.layers[0]]) or op.scope
    return "/".join(filter(None, (tree.path(source), *marks))) or op.scope


def _without_wrappers(scope: str, marks: Sequence[str], tree: _CallTree) -> str:
    """A scope without the jitted functions in it that run nearly all, or that a library wraps around."""
    names = scope.split("/")
    wrappers = (tree.opened | _WRAPPERS) - {*marks}
    return "/".join(name for name in names if name not in wrappers)


def _below(scope: str, op: Op) -> str:
    """The scope of what ``jax.checkpoint`` runs, if all of that has one: its own and that within."""
    if op.primitive.runs is not Runs.AGAIN:
        return scope
    inside = _shared([inner.scope for part in op.subprograms.values() for inner in part.ops])
    return "/".join(filter(None, (scope, inside))) if not scope.endswith(inside) else scope


def _places(source: Source) -> Iterator[Source]:
    """The places that one stands for."""
    if not source.layers:
        yield source
    for layer in source.layers:
        for place in layer:
            yield from _places(place)


def _marked_below(source: Source) -> int:
    """How many scopes were opened by libraries around functions of theirs, below those of the user."""
    count = 0
    for code, _ in reversed(source.stack):
        if scope_name(code):
            break
        count += code is _marker()
    return count


@cache
def _marker() -> CodeType | None:
    """The code by which a function runs that was decorated by ``jax.named_scope``."""
    return getattr(jax.named_scope("")(lambda: None), "__code__", None)


def _shared(paths: Sequence[str]) -> str:
    """The scopes that all paths begin with."""
    every = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(names[0] for names in takewhile(lambda names: len({*names}) == 1, every))
