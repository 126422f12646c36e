"""Transform a Program before it is compiled: the same results with less work.

``compile`` applies this, and whatever foretells or measures a compiled step does so too: repeated layers are
a loop where this gains something, products leave a loop that need not be computed turn by turn, bodies are
others where the device is slow at these, and fences stand where a compiler would compute a value again and
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from onward.core.errors import GraphError, RecipeError
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program
from onward.core.words import Kind, Pass
from onward.develop.fence import fence, worth_fencing
from onward.develop.fission.fission import fission, fissions
from onward.develop.recompute.lean import lean
from onward.develop.recompute.loops import is_recomputed
from onward.develop.rewrite.formulations import reformulated
from onward.develop.roll.roll import roll as rolled
from onward.develop.roll.roll import roll_where_worth, rolls_of
from onward.develop.stored import stored_values

_IN_ORDER = (
    "compile: roll=True, and {name!r} merges several gradients as one vector, in the order in which its "
    "backward pass makes them; rolled it makes them in another. Roll first: replicate(roll(program), n)."
)


_MUCH = 16 * 2**20
"""Bytes that a loop of the user's has to keep less, so that it is not left as it is. With two cores (2 MiB of
cache each, medians of 9 rounds) loops that keep 16 MiB less or more took 0.77 to 0.88 of their time over
layers, 0.86 to 1.02 in state-space models, 0.95 to 1.08 in LSTMs and GRUs; with less to spare up to 1.4."""

_NOT_IN_ORDER = "not rolled: several gradients are merged as one vector, in the order in which they are made"


@dataclass(frozen=True)
class Tuned:
    """A Program as it is compiled, and what was done to it, in words."""

    program: Program
    notes: tuple[str, ...]


def tuned(
    program: Program,
    fetch: Sequence[str] = (),
    tune: bool = True,
    roll: bool | None = None,
    may_split: bool = True,
) -> Tuned:
    """The Program that ``compile`` makes of one, for the devices that JAX shows.

    Args:
        program: as people gave it.
        fetch: names of what has to be there.
        tune: whether anything may be done that is not asked for.
        roll: whether repeated layers become a loop; None: where it gains something.
        may_split: whether products leave loops that need not be computed turn by turn.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.sum(jax.lax.reduce_window(w * x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID"))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones(4), jnp.ones(4))
        >>> print(*tuned(program).notes, sep="; ")
        not rolled: no layer repeats; rewritten for cpu: reduce_window_max 1, reduce_window_max_grad 1
    """
    if program.code is not None:
        return Tuned(program, ("loaded from a file: compiled as it was saved",))
    looped = in_loops(program, fetch, tune, roll)
    if not tune:
        return looped
    found = reformed(looped.program, may_split and not is_recomputed(program))
    return Tuned(found.program, (*looped.notes, *found.notes))


def in_loops(
    program: Program, fetch: Sequence[str] = (), tune: bool = True, roll: bool | None = None
) -> Tuned:
    """The first part of ``tuned``: repeated layers as one loop, which keeps what is dear to compute again."""
    program, note = _rolled(program, fetch, tune, roll)
    leaner = _lean(program, fetch) if tune else program
    if leaner is program:
        return Tuned(program, (note,))
    return Tuned(leaner, (note, "lean: the backward pass computes again what is cheaper than to keep"))


def reformed(program: Program, may_split: bool | None = None) -> Tuned:
    """The last part of ``tuned``, behind which all that is kept for the backward pass still is.

    ``may_split``: whether products leave loops, which then stack up more; None: unless some of the forward
    pass is computed again to save memory.
    """
    platform, notes = jax.default_backend(), []
    if program.code is not None:
        return Tuned(program, ())
    may_split = not is_recomputed(program) if may_split is None else may_split
    may_split = may_split and not stored_values(program)  # whose loops move what they save
    if may_split and (loops := fissions(program)):
        program = fission(program)
        notes.append(f"fission: {'; '.join(loops)}")
    before, program = program, reformulated(program, platform)
    pairs = zip(before.ops, program.ops, strict=True)
    if found := Counter(old.type for old, new in pairs if old is not new):
        notes.append(f"rewritten for {platform}: {_counted(found)}")
    if (is_worth := worth_fencing(program, platform))[0]:
        program = fence(program, platform)
        notes.append(f"fenced: {is_worth[1]}")
    return Tuned(program, tuple(notes))


def _lean(program: Program, fetch: Sequence[str]) -> Program:
    """The Program whose loops keep less: rolled layers, and a loop of the user's that keeps much less."""
    if jax.default_backend() != "cpu" or is_recomputed(program) or stored_values(program):
        return program
    loops = (op for op in program.ops if op.primitive.runs is Runs.SCAN)
    if {v.name for op in loops for v in op.outputs if v.name.startswith("saved(")} & {*fetch}:
        return program  # whose saved values would be others
    return lean(program, _MUCH)


def _rolled(program: Program, fetch: Sequence[str], tune: bool, roll: bool | None) -> tuple[Program, str]:
    if is_recomputed(program):
        loops = "" if rolls_of(program) else "; a budget in place of scopes would roll repeated layers"
        return program, f"recomputed: print(recomputed(program)) tells what{loops}"
    if rolls_of(program):
        return program, _words(program)
    in_order = any(map(_is_in_order, program.ops))
    if roll:
        if in_order or _keeps_else(result := rolled(program, keep=fetch), program):
            raise GraphError(_IN_ORDER.format(name=program.name))
        return result, _words(result)
    if stored_values(program):
        return program, "not rolled: activations lie in host memory; offload(roll(program), where) rolls it"
    if roll is not None or not tune:
        return program, "not rolled: switched off"
    if in_order:
        return program, _NOT_IN_ORDER
    try:
        result, verdict = roll_where_worth(program, keep=fetch)
    except (GraphError, RecipeError) as error:
        return program, f"not rolled: {error}"
    if _keeps_else(result, program):
        return program, _NOT_IN_ORDER
    return result, _words(result) if verdict else f"not rolled: {verdict.reason}"


def _is_in_order(op: Op) -> bool:
    """Whether devices merge several gradients as one vector, laid out as the backward pass makes them.

    Rolled, it makes them in another order; so does what is kept of them.
    """
    gradients = sum(v.kind is Kind.GRADIENT for v in op.inputs)
    return op.made_by is Pass.COLLECTIVE and op.body.collected is None and gradients > 1


def _keeps_else(result: Program, program: Program) -> bool:
    """Whether the one keeps something else from step to step than the other."""
    one, other = ({(v.name, v.type) for v in p.state} for p in (result, program))
    return one != other


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in found.items())


def _words(program: Program) -> str:
    return "rolled: " + "; ".join(map(str, rolls_of(program)))
