"""The loss head in chunks of rows: the logits of a large vocabulary never exist as a whole.

    chunk(optimizer.minimize(loss, params, tokens, labels), 8)

No spelling is looked for. What is computed of the logits is followed until it is small, and if that computes
each row by itself, it becomes one op: a loop over chunks of rows, whose turns the backward pass runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from warnings import warn

from onward.core.amounts import bytes_of
from onward.core.check import check, expect_program
from onward.core.errors import GraphError
from onward.core.program import Applied, Phase, Program, Variable
from onward.core.recipe import build, recipe_of, resumed, whole_types
from onward.core.show import human_bytes, nbytes
from onward.core.source import user_level
from onward.core.structure import expect_count
from onward.core.transform import transform
from onward.core.walk import Where, meant, select
from onward.develop.chunk.head import FewRowsError
from onward.develop.chunk.loop import ChunkPlan, Chunks
from onward.develop.chunk.within import ChunkCut, Enclosed
from onward.develop.roll.forward import separable, unrolled

_NO_HEAD = (
    "chunk: {name!r} multiplies nothing with a parameter on the way to its loss, so it has no logits to cut. "
    "Expected a product such as hidden @ w, outside of a loop such as scan, in jax.checkpoint or not; "
    "leave chunk away, or name the logits: where='name'."
)

_TWICE = (
    "chunk: the loss head of {name!r} is in {count} chunks already, {logits!r} among them. Call chunk once, "
    "with the number that is meant; another head is named: where='name'."
)

_MANY = (
    "chunk: {name}: {logits!r} is in {count} chunks, where {chunks} were asked for: no number between "
    "divides its rows, and such a loop is slow. Take a batch, or a length, of more divisors."
)


@dataclass(frozen=True)
class Chunked:
    """A loss head in chunks.

    Attributes:
        logits: the name of what the product makes.
        type: its dtype and shape.
        source: the user's line of the product; empty if unknown.
        count: how many chunks.
        ops: how many ops became one.
        before: the bytes of the logits.
        is_attention: whether the logits are scores of attention, between two products.
    """

    logits: str
    type: str
    source: str
    count: int
    ops: int
    before: int
    is_attention: bool = False

    @property
    def after(self) -> int:
        """The bytes of the logits of one chunk."""
        return self.before // self.count

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return (
            f"{self.logits}{at}, {self.type}, and what follows it, {self.ops} ops, in {self.count} chunks: "
            f"{human_bytes(self.after)} at a time in place of {human_bytes(self.before)}"
        )


def chunk(
    program: Program,
    chunks: int = 8,
    *,
    memory: int | str | None = None,
    where: Where | Iterable[Where] | None = None,
) -> Program:
    """The Program whose loss head is computed in chunks of rows, so that its logits never exist as a whole.

    The head is found by what it computes, in any spelling: from the last product with a parameter to what is
    left of each row. It becomes one op, a loop over chunks, which the backward pass runs again chunk by
    chunk: that costs the product once more, and takes the memory of the logits of one chunk. Values and
    gradients are the same, up to the order of sums. What is computed of single rows may leave the head, such
    as the loss or the prediction of each; what mixes rows before that is refused. Rows are cut along the
    dimension of the logits that divides into as many chunks or few more, such as the batch or the time.

    It pays with a large vocabulary. With a small one the chunks cost time and save little, so that no other
    transform and no option of ``compile`` does it.

    Args:
        program: a Program that was traced, at any stage, replicated or not.
        chunks: how many at least; as few more as divide the rows of some dimension, or one for each row.
        memory: in place of that the bytes that the logits of one chunk may take, such as ``"64MB"``.
        where: the logits, by name, pattern or Variable, if they are not those of the last product.

    Raises:
        ArgumentError: a number of chunks or bytes that is none; an empty ``where``.
        GraphError: there is no such product, its head is in chunks already, or the rows of its result cannot
            be computed apart: it names the op that mixes them.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: ``where`` names nothing.

    Warns:
        UserWarning: the rows divide only into more than four times as many chunks.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, for the recomputation.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x, labels):
        ...     log_p = jax.nn.log_softmax(x @ w)
        ...     return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))
        >>> program = ow.trace(loss, jnp.ones((4, 90)), jnp.ones((16, 4)), jnp.zeros(16, int))
        >>> [op.type for op in chunk(program, 4).ops][-4:]
        ['chunk', 'reduce_sum', 'div', 'neg']
    """
    expect_program(program, "chunk")
    expect_count(chunks, "chunk: chunks", of="how many chunks")
    limit = None if memory is None else bytes_of(memory, "chunk: memory")
    recipe = recipe_of(program, "with its loss head in chunks", "Write the loop yourself, with jax.lax.map")
    forward = unrolled(program, recipe)
    names = tuple(v.name for v in _logits(forward, meant(where, "chunk", "to cut the loss head")))
    cut = ChunkCut(chunks, limit, names)
    result = check(cut.of(forward))
    if limit is None:
        _warn_of_many(program.name, _told(cut), chunks)
    grown = recipe.including(Applied(chunked, (chunks, limit, names), {}, Phase.FORWARD))
    return resumed(result, grown, len(grown.until(Phase.ROLL).steps), whole_types(program))


def chunks_of(program: Program) -> tuple[Chunked, ...]:
    """List the loss heads of a Program that are computed in chunks; see ``chunk``.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.logsumexp(x @ w, axis=1))
        >>> program = ow.trace(loss, jnp.ones((4, 1024)), jnp.ones((16, 4)))
        >>> head = ow.graph.chunks_of(ow.chunk(program, 4))[0]
        >>> head.count, head.before, head.after
        (4, 65536, 16384)
    """
    expect_program(program, "chunks_of")
    found = tuple(_in_sight(program))
    recipe = program.recipe
    steps = () if recipe is None or program.ops is not recipe.ops else recipe.of(chunked)
    if recipe is None or len(found) >= sum(len(step.arguments[-1]) for step in steps):
        return found
    # Loops within, and those that layers became, do not show what stands in them.
    before = replace(recipe, steps=recipe.steps[: recipe.steps.index(steps[0])])
    forward = build(before, whole_types(program))
    told: list[Chunked] = []
    for step in steps:
        chunks, memory, names = step.arguments
        cut = ChunkCut(chunks, memory, names, (GraphError,))
        forward = cut.of(forward)
        told += _told(cut)
    return tuple(told)


def _in_sight(program: Program) -> Iterator[Chunked]:
    """The loss heads in chunks among the ops of a Program, and in what these show of themselves."""
    for op in program.ops:
        body = op.primal or op.body
        if isinstance(body, Chunks):
            yield _told_of(body.plan.region.logits.name, body.plan)
        for inner in op.subprograms.values():
            yield from _in_sight(inner)


def attention_scores(program: Program) -> tuple[Variable, ...]:
    """The scores of attention in the forward pass, whatever its spelling, for ``chunk(program, where=...)``.

    They are products of two values that depend on data, larger than both, of which each row (a query) is
    computed by itself until a product makes it small again. In chunks of queries the scores of all never
    exist at once, so that memory grows with the length and no longer with its square. Those in a loop over
    layers, in ``jax.checkpoint`` or a branch come with the name of that before their own.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     q, k, v = jnp.split((x @ w)[None, :, None], 3, axis=-1)
        ...     return jnp.mean(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 12)), jnp.ones((64, 4)))
        >>> chunked = ow.chunk(program, 8, where=ow.graph.attention_scores(program))
        >>> [head.count for head in ow.graph.chunks_of(chunked)]
        [8]
    """
    expect_program(program, "attention_scores")
    return tuple(v for v, _ in scores_kept(program))


def scores_kept(program: Program) -> Iterator[tuple[Variable, int]]:
    """The scores of attention, and how many times the backward pass keeps each: once a turn of a loop."""
    forward = program
    if program.recipe is not None:
        forward = unrolled(program, recipe_of(program, "to find attention", "Trace the function"))
    for place in Enclosed.whole(forward).everywhere:
        yield from ((place.named(v), place.kept) for v in place.scores)


@separable
@transform(phase=Phase.FORWARD)
def chunked(program: Program, chunks: int, memory: int | None, names: Sequence[str]) -> Program:
    """A forward Program with these heads in chunks; what is not there, or has one row, stays as it is.

    A test Program may do without.
    """
    is_test = program.recipe is not None and not program.recipe.origin.training
    return ChunkCut(chunks, memory, names, (GraphError if is_test else FewRowsError,)).of(program)


def _warn_of_many(name: str, heads: Iterable[Chunked], chunks: int) -> None:
    """Warn of a head in many more chunks than were asked for."""
    for head in heads:
        if head.count > 4 * chunks:
            told = _MANY.format(name=name, logits=head.logits, count=head.count, chunks=chunks)
            warn(told, stacklevel=user_level())


def _logits(program: Program, where: list[Where] | None) -> tuple[Variable, ...]:
    """The logits of the heads that are meant."""
    whole = Enclosed.whole(program)
    if where is not None:
        places = whole.everywhere
        named = tuple(place.named(v) for place in places for op in place.program.ops for v in op.outputs)
        return select(named, where, "chunk, where")
    for head in chunks_of(program):
        if not head.is_attention:
            raise GraphError(_TWICE.format(name=program.name, logits=head.logits, count=head.count))
    found = whole.heads
    if not found:
        raise GraphError(_NO_HEAD.format(name=program.name))
    return (found[-1],)


def _told(cut: ChunkCut) -> list[Chunked]:
    return [_told_of(name, plan) for name, plan in cut.plans.items()]


def _told_of(name: str, plan: ChunkPlan) -> Chunked:
    """A plan for people."""
    region = plan.region
    logits, source = region.logits, region.product.source
    at = str(source) if source is not None and source.file else ""
    told = logits.type, at, plan.count, len(region.ops), nbytes(logits)
    return Chunked(name, *told, region.is_between_products)
