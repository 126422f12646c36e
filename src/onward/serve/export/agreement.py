"""Whether a Program that was traced with symbols for lengths does what it does with numbers.

A function may ask how long its batch is, and a symbol answers some questions wrongly in silence: it is equal
to no number. So the ops of both traces are compared, and where they differ, the numbers that both compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.serve.export.dimensions import evaluated, written
from onward.serve.export.executable import loaded, reads_of
from onward.serve.export.writing import Writing

Replay = Callable[[Mapping[str, int]], Program]
_LENGTH = "dim_as_value"  # the op that makes a number of a symbol


def expect_same(writing: Writing, replay: Replay, values: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` unless it agrees with traces for two lengths.

    Args:
        writing: the Program with symbols, and its executable.
        replay: gives the Program for lengths by the names of their symbols.
        values: the state by name, which numbers are computed from.
    """
    sizes = {n: max(size, 2) for n, size in writing.sizes.items()}  # JAX treats axes of length 1 apart
    program, longer = replay(sizes), replay({n: size + 1 for n, size in sizes.items()})
    for op, other in zip(program.ops, longer.ops, strict=False):
        if op.type != other.type:
            raise ArgumentError(
                f"the function does something else for batches of other lengths: {op.type!r} at {op.source} "
                f"for {_words(sizes)}, and then {other.type!r}"
            )
    if len(program.ops) != len(longer.ops):
        raise ArgumentError("the function does more for batches of some lengths than for others")
    if _shown(program, sizes) != _shown(writing.program, sizes):
        _compare(program, writing, values)


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _shown(program: Program, sizes: Mapping[str, int]) -> list[Any]:
    """What its ops are, and the types of their results where symbols have these sizes."""
    return [
        (op.type, [(tuple(evaluated(written(n), sizes) for n in v.shape), v.dtype) for v in op.outputs])
        for op in _without_lengths(program)
    ]


def _without_lengths(program: Program) -> Iterator[Op]:
    """The ops but those that only compute with the length of the batch."""
    lengths: set[Variable] = set()
    for op in program.ops:
        if op.type == _LENGTH or (op.inputs and lengths.issuperset(op.inputs)):
            lengths.update(op.outputs)
        else:
            yield op


def _compare(program: Program, writing: Writing, values: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` unless both compute the same from the state and some data."""
    wanted, others = ((*p.outputs, *p.next_state.values()) for p in (program, writing.program))
    names = [v.name for v in wanted]
    state = [values[v.name] for v in program.state]
    data = [_some(v, program, i) for i, v in enumerate(program.inputs)]
    expected = jax.jit(lower(program, wanted))(state, data)
    found = _computed(writing, [*state, *writing.program.constants.values(), *data], [v.name for v in others])
    for name, x, y in zip(names, expected, found, strict=True):
        if x.shape != y.shape or not _close(x, y):
            raise ArgumentError(f"{name!r} is another one where the function does not know the length")


def _computed(writing: Writing, given: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The values of some Variables, by the executable that is to be written."""
    call = loaded(writing.executable.data, "what is to be saved").call
    reads = {v.name: x for v, x in zip(reads_of(writing.program), given, strict=True)}
    gives = [v.name for op in writing.program.ops for v in op.outputs]
    made = {name: gives.index(name) for name in names if name not in reads}
    results = jax.jit(lambda *xs: [call(*xs)[i] for i in made.values()])(*given)
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
    tolerance = 1e-2 if x.dtype.itemsize < 4 else 1e-4
    return bool(
        jnp.allclose(x, y, rtol=tolerance, atol=tolerance * jnp.max(jnp.abs(x), initial=1), equal_nan=True)
    )
