"""Whether a Program that was traced with symbols for lengths does what it does with numbers.

A function may ask how long its batch is, and a symbol answers some questions wrongly in silence: it is equal
to no number. So the ops of both traces are compared, for the lengths for which the answer is another one,
and where they differ, the numbers that both compute: those of the few ops that differ, and if these are not
equal, those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, OnwardError
from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.serve.export.executable import loaded, reads_of
from onward.serve.export.facts import PairedPrograms, paired
from onward.serve.export.questions import Question, heard
from onward.serve.export.replay import Replay
from onward.serve.export.writing import Writing

_MOST_ASKED = 16
_MOST_NUMBERS = 2**26


def expect_same(
    known: Program,
    writing: Writing,
    replay: Replay,
    symbols: Mapping[str, Any],
    values: Mapping[str, Any],
    questions: Sequence[Question],
) -> None:
    """Raise ``ArgumentError`` unless it agrees with traces for the lengths that may be treated otherwise.

    These are the length that it had, the next one, 1, and those for which it asks. For the first the whole
    is compared. For others the forward pass and, where an op in it differs, the derivative of that: the rest
    is derived of these ops, if by nothing that asks for lengths.

    Args:
        known: the Program for the length that it had.
        writing: the Program with symbols, and its executable.
        replay: gives the Program for lengths by the names of their symbols.
        symbols: what stands for the lengths.
        values: the state by name, which numbers are computed from.
        questions: what the function asked of the symbols.
    """
    traced = dict(writing.sizes)
    _expect_same(known, writing, traced, values)
    longer, alone = {n: size + 1 for n, size in traced.items()}, dict.fromkeys(traced, 1)
    free = replay.forward(symbols) if replay.is_told_by_forward else None
    make, other = (replay.whole, writing.program) if free is None else (replay.forward, free)
    agreed = [traced]
    tried = chain([(longer, ""), (alone, "")], _asked(replay, symbols, traced, questions))
    for sizes, line in ((sizes, line) for sizes, line in tried if sizes not in agreed):
        agreed.append(sizes)
        again = _replayed(make, sizes, sizes is longer)
        if again is None:
            continue
        if line:
            _expect_comparable(again, other, sizes, line)
        if free is not None:
            if _agree_by_parts(again, free, sizes, derived=True):
                continue
            again = _replayed(replay.whole, sizes, sizes is longer)
        if again is not None:
            _expect_same(again, writing, sizes, values, line)


def _asked(
    replay: Replay, symbols: Mapping[str, Any], traced: Mapping[str, int], questions: Sequence[Question]
) -> Iterator[tuple[dict[str, int], str]]:
    """Sizes for which a question of the function is answered otherwise than by symbols, and its line.

    Where that leaves lengths free, the function is traced once more: what it asks then, it asks only there.
    """
    left: list[tuple[dict[str, int], Question]] = [({}, question) for question in questions]
    seen = list[dict[str, int]]()
    while left:
        fixed, question = left.pop(0)
        yes = question.yes({**traced, **fixed})
        if yes is None or (fixed := {**fixed, **yes}) in seen:
            continue
        if len(seen) == _MOST_ASKED:
            raise ArgumentError(
                f"it asks whether its batch has one of more than {_MOST_ASKED} lengths ({question.line})"
            )
        seen.append(fixed)
        yield {**traced, **fixed}, question.line
        rest = {n: symbol for n, symbol in symbols.items() if n not in fixed}
        if rest:
            with heard(rest.values()) as further:
                _replayed(replay.forward, {**symbols, **fixed}, must=False)
            left += [(fixed, q) for q in further]


def _replayed(
    make: Callable[[Mapping[str, int]], Program], sizes: Mapping[str, int], must: bool
) -> Program | None:
    """The Program for these sizes; None for a network that takes no batch of 1."""
    try:
        return make(sizes)
    except OnwardError:
        if must:
            raise
        return None


def _expect_same(
    program: Program, writing: Writing, sizes: Mapping[str, int], values: Mapping[str, Any], line: str = ""
) -> None:
    """Raise ``ArgumentError`` unless it agrees with the Program for these sizes, which a line asks for."""
    if not _agree_by_parts(program, writing.program, sizes):
        _compare(program, writing, values, sizes, line)


def _expect_comparable(program: Program, free: Program, sizes: Mapping[str, int], line: str) -> None:
    """Raise ``ArgumentError`` for Programs that are not alike, and too large to be compared by numbers."""
    largest = max((v.size for op in program.ops for v in op.outputs), default=0)
    if largest > _MOST_NUMBERS and paired(program, free, sizes).apart:
        raise ArgumentError(_difference(sizes, "has other ops", line))


def are_alike(program: Program, other: Program) -> bool:
    """Whether two Programs compute the same, of the same state."""
    if [v.name for v in program.state] != [v.name for v in other.state]:
        return False
    try:
        found = paired(program, other, {})
    except ValueError:
        return False
    return not found.apart and not any(found.rest)


def _agree_by_parts(program: Program, free: Program, sizes: Mapping[str, int], derived: bool = False) -> bool:
    """Whether both are told alike for these sizes; where not, whether only those parts compute the same.

    What the parts read is taken at random. False where that cannot be told, or is not so of such numbers.

    Args:
        program: traced for these sizes.
        free: traced with symbols.
        sizes: theirs.
        derived: the gradients of the parts must be the same as well.
    """
    try:
        found = paired(program, free, sizes)
        return not found.apart or _parts_agree(program, free, found, derived)
    except Exception:  # symbols are not taken everywhere: the whole is compared then
        return False


def _parts_agree(program: Program, free: Program, found: PairedPrograms, derived: bool) -> bool:
    """Whether the parts of two Programs that are in no pair compute the same."""
    mine, theirs = (
        _part(p, {*found.rest[i], *found.numbers[i]}, [pair[i] for pair in found.apart])
        for i, p in enumerate((program, free))
    )
    like = {y: x for x, y in found.twins.items()}
    their_reads = [like.get(y, y) for y in theirs.inputs]
    reads = [*dict.fromkeys((*mine.inputs, *their_reads))]
    known = {**program.constants, **free.constants}
    values = [known.get(v, _some(v, program, i)) for i, v in enumerate(reads)]
    real = [i for i, v in enumerate(reads) if jnp.issubdtype(v.dtype, np.inexact)] if derived else []
    run, their_run = (
        _with_gradients(_of_reads(p, reads, wanted), real)
        for p, wanted in ((mine, mine.inputs), (theirs, their_reads))
    )
    call = export.export(jax.jit(their_run))(*(found.twins.get(v, v).aval for v in reads)).call
    pairs = zip(compiled_alone(run)(*values), compiled_alone(call)(*values), strict=True)
    return all(x.shape == y.shape and _is_telling(x) and _close(x, y) for x, y in pairs)


def _of_reads(
    part: Program, reads: Sequence[Variable], wanted: Sequence[Variable]
) -> Callable[..., Sequence[Any]]:
    """A part as a function of all that both parts read, of which it takes what it wants."""
    places = [reads.index(v) for v in wanted]
    run = lower(part, part.outputs, at_once=True)
    return lambda *values: run((), [values[i] for i in places])


def _with_gradients(run: Callable[..., Sequence[Any]], chosen: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """A function that gives, beside its results, gradients of these inputs; cotangents are of the results."""
    if not chosen:
        return run

    def function(*values: Any) -> list[Any]:
        def of(*some: Any) -> tuple[list[Any], Sequence[Any]]:
            found = dict(zip(chosen, some, strict=True))
            outputs = run(*(found.get(i, x) for i, x in enumerate(values)))
            return [x for x in outputs if jnp.issubdtype(x.dtype, np.inexact)], outputs

        results, pull, outputs = jax.vjp(of, *(values[i] for i in chosen), has_aux=True)
        return [*outputs, *pull([jnp.cos(x) for x in results])]

    return function


def _is_telling(x: Any) -> bool:
    """Whether numbers are such that others would differ from them: NaN may come of anything."""
    is_real = jnp.issubdtype(x.dtype, np.inexact)
    return not is_real or bool(np.isfinite(np.asarray(x)).all())


def _part(program: Program, among: Collection[Op], wanted: Sequence[Variable]) -> Program:
    """The Program of those of some ops that compute what is wanted; it takes what they read."""
    needed, ops = dict.fromkeys(wanted), list[Op]()
    for op in reversed(program.ops):
        if op in among and not needed.keys().isdisjoint(op.outputs):
            ops.append(op)
            needed |= dict.fromkeys(op.inputs)
    made = {v for op in ops for v in op.outputs}
    return Program(
        program.name, tuple(v for v in needed if v not in made), ops=tuple(ops[::-1]), outputs=tuple(wanted)
    )


def _compare(
    program: Program, writing: Writing, values: Mapping[str, Any], sizes: Mapping[str, int], line: str
) -> None:
    """Raise ``ArgumentError`` unless both compute the same from the state and some data."""
    wanted, others = ((*p.outputs, *p.next_state.values()) for p in (program, writing.program))
    names = [v.name for v in wanted]
    state = [values[v.name] for v in program.state]
    data = [_some(v, program, i) for i, v in enumerate(program.inputs)]
    expected = compiled_alone(lower(program, wanted, at_once=True))(state, data)
    found = _computed(writing, [*state, *writing.program.constants.values(), *data], [v.name for v in others])
    for name, x, y in zip(names, expected, found, strict=True):
        if x.shape != y.shape or not _close(x, y):
            raise ArgumentError(_difference(sizes, f"gives another {name!r}", line))


def _difference(sizes: Mapping[str, int], does: str, line: str) -> str:
    """How the function is another one for these sizes, and the line that asks for them, if one does."""
    words = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
    return (
        f"for {words} the function {does} than where it does not know the length: it asks how long its batch "
        f"is{f' ({line})' if line else ''}"
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
    tolerance = 1e-2 if x.dtype.itemsize < 4 else 1e-4
    is_real = jnp.issubdtype(x.dtype, np.inexact)
    x, y = np.asarray(x), np.asarray(y)
    if not is_real:
        return np.array_equal(x, y)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    with np.errstate(all="ignore"):
        most = tolerance * np.max(np.abs(x), initial=1)
        return np.allclose(x, y, rtol=tolerance, atol=most, equal_nan=True)
