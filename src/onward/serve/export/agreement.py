"""Whether a Program that was traced with symbols for lengths does what it does with numbers.

A function may ask how long its batch is, and a symbol answers some questions wrongly in silence: it is equal
to no number. So the ops of both traces are compared, and where they differ, the numbers that both compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, OnwardError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.serve.export.dimensions import evaluated, written
from onward.serve.export.executable import loaded, reads_of
from onward.serve.export.writing import Writing

Replay = Callable[[Mapping[str, int]], Program]
_FOLLOWS = {"new_sizes", "shape"}  # attributes that the types of the results tell as well


def expect_same(writing: Writing, replay: Replay, values: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` unless it agrees with traces for the length that it had, the next one, and 1.

    Args:
        writing: the Program with symbols, and its executable.
        replay: gives the Program for lengths by the names of their symbols.
        values: the state by name, which numbers are computed from.
    """
    traced = dict(writing.sizes)
    longer = {n: size + 1 for n, size in traced.items()}
    for sizes in (traced, longer, dict.fromkeys(traced, 1)):
        try:
            program = replay(sizes)
        except OnwardError:
            if sizes is traced or sizes is longer:
                raise
            continue  # a network that takes no batch of 1
        if _facts(program, sizes) != _facts(writing.program, sizes):
            _compare(program, writing, values, sizes)


def are_alike(program: Program, other: Program) -> bool:
    """Whether two Programs compute the same, of the same state."""
    names = ([v.name for v in p.state] for p in (program, other))
    return next(names) == next(names) and _facts(program, {}) == _facts(other, {})


def _facts(program: Program, sizes: Mapping[str, int]) -> list[Any]:
    """List the ops and their operands, for these sizes of the symbols; ops that give lengths are left out."""
    lengths = _lengths(program)
    given = (*program.inputs, *program.state, *program.constants)
    place = {v: i for i, v in enumerate(given)}
    facts = []
    for op in program.ops:
        if not lengths.isdisjoint(op.outputs):
            continue
        reads = [
            place.get(op.inputs[x]) if isinstance(x, int) else x for x in (op.primal or op.body).operands
        ]
        shapes = [(tuple(evaluated(written(n), sizes) for n in v.shape), v.dtype) for v in op.outputs]
        told = {key: value for key, value in op.attributes.items() if key not in _FOLLOWS}
        within = [_facts(part, sizes) for part in op.subprograms.values()]
        facts.append((op.type, reads, shapes, told, within))
        place |= {v: len(place) + i for i, v in enumerate(op.outputs)}
    return [*facts, [place.get(v) for v in program.outputs]]


def _lengths(program: Program) -> set[Variable]:
    """The Variables that are computed from the lengths of the batch alone."""
    lengths: set[Variable] = set()
    for op in program.ops:
        if op.primitive.tells_length or (op.inputs and lengths.issuperset(op.inputs)):
            lengths.update(op.outputs)
    return lengths


def _compare(program: Program, writing: Writing, values: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise ``ArgumentError`` unless both compute the same from the state and some data."""
    wanted, others = ((*p.outputs, *p.next_state.values()) for p in (program, writing.program))
    names = [v.name for v in wanted]
    state = [values[v.name] for v in program.state]
    data = [_some(v, program, i) for i, v in enumerate(program.inputs)]
    expected = compiled_alone(lower(program, wanted))(state, data)
    found = _computed(writing, [*state, *writing.program.constants.values(), *data], [v.name for v in others])
    for name, x, y in zip(names, expected, found, strict=True):
        if x.shape != y.shape or not _close(x, y):
            words = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            raise ArgumentError(
                f"for {words} the function gives another {name!r} than where it does not know the length: it "
                "asks how long its batch is"
            )


def _computed(writing: Writing, given: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The values of some Variables, by the executable that is to be written."""
    call = loaded(writing.executable.data, "what is to be saved").call
    reads = {v.name: x for v, x in zip(reads_of(writing.program), given, strict=True)}
    gives = [v.name for op in writing.program.ops for v in op.outputs]
    made = {name: gives.index(name) for name in names if name not in reads}
    results = compiled_alone(lambda *xs: [call(*xs)[i] for i in made.values()])(*given)
    return [reads[name] if name in reads else results[[*made].index(name)] for name in names]


def _some(v: Variable, program: Program, seed: int) -> Any:
    """Some data for a Variable; integers within their bounds."""
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(v.dtype, jax.dtypes.prng_key):
        return jnp.empty(v.shape, v.dtype)
    if jnp.issubdtype(v.dtype, np.inexact):
        return jnp.asarray(generator.normal(size=v.shape), v.dtype)
    bound, _ = program.bounds.get(v, (2, ""))
    return jnp.asarray(generator.integers(0, bound, v.shape), v.dtype)


def _close(x: Any, y: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    if not jnp.issubdtype(x.dtype, np.inexact):
        return bool(jnp.array_equal(x, y))
    tolerance = 1e-2 if x.dtype.itemsize < 4 else 1e-4
    return bool(
        jnp.allclose(x, y, rtol=tolerance, atol=tolerance * jnp.max(jnp.abs(x), initial=1), equal_nan=True)
    )
