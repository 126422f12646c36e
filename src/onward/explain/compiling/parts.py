"""The scopes of a step compiled each by itself: how long each takes to lower and to compile.

XLA compiles a step as a whole and does not say what it spends on which part. Taken apart, each scope is a
computation of its own: what it reads goes in, what others read comes out. Of scopes that are alike, such as
the layers of a network, one is compiled: they have the same ops but for a tenth of them at most, as those
first and last in a row of layers do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax

from onward.core.compiler import compiler_options
from onward.core.described import DescribedBody
from onward.core.homes import scopes
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.joining import as_one_call, joined
from onward.core.program import Op, Program, Variable
from onward.explain.compiling.measured import fresh_name, timed, timed_compile

_ALIKE = 0.1
Kinds = Counter[tuple[str, tuple[str, ...]]]


@dataclass(frozen=True)
class CompiledScope:
    """A scope, or several that are alike.

    Attributes:
        scopes: their names, in order.
        ops: how many ops the first has.
        lower: seconds to lower one by itself; None where it was not measured.
        xla: seconds that XLA takes for one by itself.
    """

    scopes: tuple[str, ...]
    ops: int
    lower: float | None = None
    xla: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds of all of them, each by itself."""
        return len(self.scopes) * ((self.lower or 0.0) + (self.xla or 0.0))

    @property
    def name(self) -> str:
        """The scope, or the first and the last of several."""
        first, last = (self.scopes[i] or "(no scope)" for i in (0, -1))
        return first if len(self.scopes) == 1 else f"{first} ... {last}"


def compiled_scopes(program: Program, depth: int, most: float) -> tuple[CompiledScope, ...]:
    """Compile the scopes of a Program by themselves, those of most ops first.

    Args:
        program: the ops that are lowered.
        depth: how many levels of scopes are told apart; more in a scope of most ops.
        most: after so many seconds the rest is not measured.
    """
    readers = _readers(program)
    begin, found = perf_counter(), []
    for names, ops in sorted(_alike(program, depth), key=lambda part: -len(part[1]) * len(part[0])):
        is_time = perf_counter() - begin < most
        body = _body(ops, readers) if is_time else None
        times = None if body is None else _times(body, program.name)
        found.append(CompiledScope(tuple(names), len(ops), *(times or (None, None))))
    return tuple(sorted(found, key=lambda row: (-row.seconds, -row.ops)))


def _alike(program: Program, depth: int) -> list[tuple[list[str], list[Op]]]:
    """The names of scopes that are alike, with the ops of the first."""
    groups = _groups(program, depth)
    found: list[tuple[Kinds, list[str], list[Op]]] = []
    for name, ops in groups.items():
        kinds = Counter((op.type, tuple(v.type for v in op.outputs)) for op in ops)
        known = next((names for other, names, _ in found if _are_alike(kinds, other)), None)
        if known is None:
            found.append((kinds, [name], ops))
        else:
            known.append(name)
    return [(names, ops) for _, names, ops in found]


def _groups(program: Program, depth: int) -> dict[str, list[Op]]:
    """The ops by scope; a scope of most ops is taken apart further, as far as there are scopes in it."""
    paths = {op: tuple(scope.split("/")) for op, scope in scopes(program).items()}
    cut = {op: path[:depth] for op, path in paths.items()}
    while True:
        (most, count), *_ = Counter(cut.values()).most_common(1) or [((), 0)]
        deeper = {op: paths[op][: len(most) + 1] for op, path in cut.items() if path == most}
        if 2 * count <= len(cut) or len({*deeper.values()}) < 2:
            break
        cut |= deeper
    groups: dict[str, list[Op]] = {}
    for op in program.ops:
        groups.setdefault("/".join(cut[op]), []).append(op)
    return groups


def _are_alike(one: Kinds, other: Kinds) -> bool:
    different = (one - other).total() + (other - one).total()
    return different <= _ALIKE * max(one.total(), other.total())


def _times(body: Body, name: str) -> tuple[float, float] | None:
    """The seconds to lower a body and to compile it; None where it needs the devices around it."""
    call = as_one_call(body, name)

    def alone(*values: Any) -> Any:
        return call(*values)

    alone.__name__ = fresh_name(name)
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in body.in_types]
    try:
        lowered, lower = timed(lambda: jax.jit(alone).lower(*types))
    except NameError:  # JAX: an axis of devices that is not there
        return None
    _, xla = timed_compile(lowered, compiler_options())
    return lower, xla


def _readers(program: Program) -> Mapping[Variable, Sequence[Op | None]]:
    """The ops that read each Variable; None stands for the caller of the Program."""
    readers: dict[Variable, list[Op | None]] = {}
    for op in program.ops:
        for v in op.inputs:
            readers.setdefault(v, []).append(op)
    for v in (*program.outputs, *program.next_state.values()):
        readers.setdefault(v, []).append(None)
    return readers


def _body(ops: Iterable[Op], readers: Mapping[Variable, Sequence[Op | None]]) -> Body | None:
    """The ops of a scope as one computation, but for exchanges between devices; None if none is left."""
    chosen = [op for op in ops if not isinstance(op.body, DescribedBody) and not op.body.collectives]
    if not chosen:
        return None
    own = set(chosen)
    made = {v for op in chosen for v in op.outputs}
    given = list(dict.fromkeys(v for op in chosen for v in op.inputs if v not in made))
    wanted = [v for v in made if any(reader not in own for reader in readers.get(v, ()))]
    order = {v: i for i, v in enumerate(v for op in chosen for v in op.outputs)}
    return joined(chosen, given, sorted(wanted, key=order.__getitem__))
