"""The rows and the number of chunks of one loss head, and the Program with that head as one op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, gcd

from onward.core.errors import GraphError
from onward.core.jaxprs.products import reading_before
from onward.core.primitives.traits import Moves, Runs
from onward.core.program import Op, Program, Variable
from onward.core.show import human_bytes, nbytes
from onward.core.walk import consumers, descendants, needed_ops, producers
from onward.develop.chunk.loop import CannotShortenError, ChunkPlan
from onward.develop.chunk.region import Region, counted_apart, counted_together, read_behind, region_of
from onward.develop.chunk.rows import Mixes, Rows, rows_of
from onward.develop.rewrite.put import entered, inside, opened

_MIXED = (
    "chunk: {name}: the rows of {logits!r} ({type}){at} cannot be computed apart: {op}{line}, {types}, {why}."
    " Expected operations on one row each, from the product to a number for each row or a sum over all. Do "
    "what needs all rows on numbers that are there for each row, behind the head, or leave chunk away."
)
_LARGE = (
    "chunk: {name}: {results} {is_are} read outside of the loss head and about as large as the logits "
    "{logits!r} ({type}){at}, so that nothing is gained by chunks. Expected a few numbers for each row: "
    "return what is computed of them, such as jnp.argmax(logits, -1), or leave chunk away."
)
_FEW = (
    "chunk: {name}: {logits!r} ({type}){at} cannot be cut: no number divides the lengths that count its "
    "rows. Expected a batch, or a sequence, of several rows; leave chunk away for one."
)
_ANY = (
    "chunk: {name}: {logits!r} ({type}){at} has rows of any number, and a loop over chunks is made for one "
    "that is known."
)
_TOO_LARGE = (
    "chunk: {name}: {logits!r} ({type}){at} in {count} chunks takes {least} for each, and cannot be cut "
    "further; memory is {memory}. Write memory={bytes}, or flatten batch and time of the logits before the "
    "loss."
)
_NO_PRODUCT = (
    "chunk: {name}: {logits!r} ({type}) is {what}; expected the result of a product, such as hidden @ w. "
    "Leave where away to let it be found."
)


class FewRowsError(GraphError):
    """Logits whose rows cannot be cut."""


def in_chunks(
    program: Program, logits: Variable, chunks: int, memory: int | None
) -> tuple[Program, ChunkPlan]:
    """The forward Program with the head that begins with these logits as one op, and how it was cut.

    Raises:
        FewRowsError: there is only one row, or nothing divides them.
        GraphError: the rows cannot be computed apart, or are of any number, as in an export.
    """
    logits = _product(program, logits)
    if not all(isinstance(n, int) for n in logits.shape):
        told = {"name": program.name, "logits": logits.name, "type": logits.type}
        raise GraphError(_ANY.format(**told, at=producers(program)[logits].at))
    before = _opened(program, logits)
    program = _before_transposes(counted_apart(before), logits)
    region = region_of(program, logits)
    _expect_gain(program, region)
    plan = _plan(program, region, chunks if memory is None else ceil(nbytes(logits) / memory))
    if memory is not None and nbytes(logits) > memory * plan.count:
        raise _too_large(program, region, plan.count, memory)
    try:
        op = plan.op()
    except CannotShortenError as error:
        raise _mixed(program, region, Mixes(error.op, "cannot be computed for some of the rows")) from error
    return counted_together(_with_op(program, region, op), before, op), plan


def is_attention(program: Program, scores: Variable) -> bool:
    """Whether these scores end in products, but for what nothing reads, and are cut with gain."""
    program = replace(program, ops=tuple(needed_ops(program, read_behind(program))))
    if scores not in program.variables.values():
        return False
    program = counted_apart(_opened(program, scores))
    region = region_of(program, scores)
    axes = range(scores.ndim)
    return (
        region.is_between_products
        and region.saves
        and any(isinstance(rows_of(region.ops, scores, i), Rows) for i in axes)
    )


def _opened(program: Program, logits: Variable) -> Program:
    """The Program with the ops of each ``jax.checkpoint`` that reads what is computed of the logits.

    A chunk is computed again in the backward pass as it is.
    """
    while True:
        reached = descendants(program, [logits])
        again = (
            op
            for op in region_of(program, logits).ops
            if op.primitive.runs is Runs.AGAIN and not reached.isdisjoint(op.inputs)
            if "constant" not in op.body.operands
        )
        op = next(again, None)
        if op is None:
            return program
        program, _ = opened(program, op)


def lifted(program: Program, names: Iterable[str]) -> tuple[Program, Mapping[str, str]]:
    """The Program with heads out of each ``jax.checkpoint`` that something as large as their logits leaves.

    What the logits are computed of stays in one. The names are those from outside of it before, and become
    those of the logits as they stand there.
    """
    found: dict[str, str] = {}
    for op in tuple(entered(program)):
        own = [name for name in names if name.startswith(inside(op, ""))]
        if not own or op.primitive.runs is not Runs.AGAIN or "constant" in op.body.operands:
            continue
        tails = {name: name.removeprefix(inside(op, "")) for name in own}
        inner, deeper = lifted(next(iter(op.subprograms.values())), tails.values())
        logits = {name: inner.variables.get(deeper.get(tail, tail)) for name, tail in tails.items()}
        leave = {name: v for name, v in logits.items() if v is not None and _leaves(inner, v)}
        if leave:
            kept = _before(inner, [_product(inner, v) for v in leave.values()])
            program, made = opened(program, op, inner, kept, tuple(leave.values()))
            found |= {name: v.name for name, v in zip(leave, made, strict=True)}
    return program, found


def _leaves(inner: Program, logits: Variable) -> bool:
    """Whether a Program gives something as large as logits, computed of them."""
    try:
        region = region_of(inner, _product(inner, logits))
    except GraphError:
        return False
    return not region.saves and not {*region.results}.isdisjoint(inner.outputs)


def _before(program: Program, products: Sequence[Variable]) -> list[Op]:
    """The ops but for these products, what is computed of them, and what lays out inputs for them."""
    makers, behind = producers(program), descendants(program, products)
    ops = {op for op in program.ops if not behind.isdisjoint(op.outputs)}
    for v in (v for product in products for v in makers[product].inputs):
        row = []
        while v in makers and len(makers[v].inputs) == 1 and makers[v].primitive.moves is not None:
            row.append(makers[v])
            (v,) = row[-1].inputs
        ops.update(() if v in makers else row)
    return [op for op in program.ops if op not in ops]


def _with_op(program: Program, region: Region, op: Op) -> Program:
    """The Program with an op in place of a region, as soon as all that it reads is there."""
    rest = [other for other in program.ops if other not in region.gone]
    missing = {v for other in rest for v in other.outputs}.intersection(op.inputs)
    ops: list[Op] = []
    held: list[Op] = []  # what waits for the results
    late = set(op.outputs)
    for other in rest:
        if missing and not late.isdisjoint(other.inputs):
            held.append(other)
            late.update(other.outputs)
            continue
        if not missing and op not in ops:
            ops += [op, *held]
        ops.append(other)
        missing.difference_update(other.outputs)
    return replace(program, ops=tuple(ops if op in ops else [*ops, op, *held]))


def _plan(program: Program, region: Region, chunks: int) -> ChunkPlan:
    """The dimension of the logits that gives as many chunks and the fewest more, or else the most."""
    plans: list[ChunkPlan] = []
    mixes: list[Mixes] = []
    for axis in range(region.logits.ndim):
        rows = rows_of(region.ops, region.logits, axis)
        if isinstance(rows, Mixes):
            mixes.append(rows)
        elif (count := _count(rows, chunks)) > 1 or chunks == 1:
            plans.append(ChunkPlan(region, rows, count))
    if not plans:
        if len(mixes) == region.logits.ndim:
            longer = (i for i, n in enumerate(region.logits.shape) if n > 1)
            raise _mixed(program, region, mixes[next(longer, 0)])
        raise FewRowsError(_FEW.format(**_facts(program, region)))
    enough = [plan for plan in plans if plan.count >= chunks]
    return min(enough, key=_by_count) if enough else max(plans, key=_by_count)


def _before_transposes(program: Program, logits: Variable) -> Program:
    """The Program whose product reads its operands as they lie, where it reads the transpose of one.

    In a loop the transpose of an embedding would be an array as large as that, and so would its gradient.
    """
    makers, readers = producers(program), consumers(program)
    product = makers[logits]
    for place, v in enumerate(product.inputs):
        turned = makers.get(v)
        if turned is None or turned.primitive.moves is not Moves.PERMUTES:
            continue
        body = reading_before(product.body, place, turned.body)
        if body is not None:
            inputs = (*product.inputs[:place], *turned.inputs, *product.inputs[place + 1 :])
            new = replace(product, inputs=inputs, body=body)
            gone = turned if readers[v] == (product,) and v not in program.outputs else None
            ops = (new if op is product else op for op in program.ops if op is not gone)
            return _before_transposes(replace(program, ops=tuple(ops)), logits)
    return program


def _by_count(plan: ChunkPlan) -> int:
    return plan.count


def _count(rows: Rows, chunks: int) -> int:
    """The least number of chunks, at least so many, that divides all lengths; the largest if none is."""
    length = gcd(*(v.shape[axis] for v, axis in rows.axis.items()))
    return min((n for n in _divisors(length) if n >= chunks), default=length)


def _divisors(length: int) -> Iterator[int]:
    return (n for n in range(1, length + 1) if length % n == 0)


def _product(program: Program, logits: Variable) -> Variable:
    """The product of these logits, also where something is added to it or it is scaled."""
    makers = producers(program)
    maker = makers.get(logits)
    if maker is None:
        raise _no_product(program, logits, "not computed by any op")
    waiting = [maker]
    for op in waiting:
        if op.primitive.is_product:
            return op.outputs[0]
        if op.primitive.is_elementwise and op.primitive.linear is not None:
            waiting += [makers[v] for v in op.inputs if v.size == logits.size and v in makers]
    raise _no_product(program, logits, f"made by {maker.type}{maker.at}")


def _no_product(program: Program, logits: Variable, what: str) -> GraphError:
    return GraphError(_NO_PRODUCT.format(name=program.name, logits=logits.name, type=logits.type, what=what))


def _expect_gain(program: Program, region: Region) -> None:
    """Raise ``GraphError`` if what leaves the head is about as large as the logits."""
    if not region.saves:
        large = sorted(region.results, key=lambda v: -v.size)
        names = ", ".join(repr(v.name) for v in large[:3])
        verb = "is" if len(large) == 1 else "are"
        raise GraphError(_LARGE.format(**_facts(program, region), results=names, is_are=verb))


def _too_large(program: Program, region: Region, count: int, memory: int) -> GraphError:
    least = nbytes(region.logits) // count
    told = {
        "least": human_bytes(least),
        "memory": human_bytes(memory),
        "bytes": str(least),
        "count": str(count),
    }
    return GraphError(_TOO_LARGE.format(**_facts(program, region), **told))


def _mixed(program: Program, region: Region, mixes: Mixes) -> GraphError:
    op = mixes.op
    types = f"({', '.join(v.type for v in op.inputs)}) -> {', '.join(v.type for v in op.outputs)}"
    told = {"op": op.type, "line": op.at, "types": types, "why": mixes.why}
    return GraphError(_MIXED.format(**_facts(program, region), **told))


def _facts(program: Program, region: Region) -> dict[str, str]:
    logits = region.logits
    return {"name": program.name, "logits": logits.name, "type": logits.type, "at": region.product.at}
