"""``fuse_attention``: attention as one op, computed by a better kernel than its ops are.

    fuse_attention(optimizer.minimize(loss, params, tokens))

No spelling is looked for: ``find`` proves what is there, op by op.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.tracing import traced
from onward.core.marks import ATTENTION
from onward.core.program import Applied, Op, Phase, Program, Recipe
from onward.core.recipe import build, recipe_of, resumed, whole_types
from onward.core.structure import expect_count
from onward.core.transform import transform
from onward.core.walk import Where, meant, producers, select
from onward.develop.attention.find import attentions
from onward.develop.attention.kernels import by_cudnn, in_blocks
from onward.develop.attention.layout import Laid, laid_out
from onward.develop.attention.outside import Outside
from onward.develop.attention.parts import NoPartError
from onward.develop.attention.places import FoundPlace, Kernel, chosen, hindrance, places
from onward.develop.chunk.chunk import chunked, chunks_of
from onward.develop.rewrite.put import changed_within, inside
from onward.develop.roll.forward import separable, unrolled

_NONE = (
    "fuse_attention: nothing in {name!r} is computed as softmax(scale * q @ k.T + mask) @ v.{closest} "
    "Leave fuse_attention away where there is no attention."
)
_CLOSEST = " Closest comes that of which {op}{at} {why}."
_IN_CHUNKS = (
    " Attention from the scores {logits!r} on is in chunks already, by chunk or fit_memory: call "
    "fuse_attention before."
)
_TWICE = (
    "fuse_attention: attention of {name!r} is fused already. Call it once, with all that is meant: "
    "where=[...]."
)
_NO_KERNEL = "fuse_attention: {name}{at} cannot be computed by {kernel}: {why}."


def fuse_attention(
    program: Program,
    kernel: Kernel | None = None,
    *,
    blocks: int = 4,
    where: Where | Iterable[Where] | None = None,
) -> Program:
    """The Program in which attention is one op, computed by a better kernel than its ops are.

    Attention is found by what it computes, ``softmax(scale * q @ k.T + mask) @ v``, in any spelling: einsum,
    matmul, the layers of flax, equinox and haiku, ``jax.nn.dot_product_attention``; causal, with padding, a
    bias or a window, by ``jax.nn.softmax(s, where=mask)`` as well, with fewer heads of keys than of queries;
    with weights that are dropped or multiplied by a gate; in loops over layers and ``jax.checkpoint`` too.
    Where weights are read by something else, it stays as it is written.

    ``"blocks"`` computes a block of queries at a time over the keys that its mask, where that is known while
    the Program is built, lets some of them see: with a causal mask in 4 blocks 5/8 of the scores, forward and
    backward. Values and gradients are the same up to rounding, for places that see no key as well.
    ``"cudnn"`` takes the fused kernels of NVIDIA GPUs, for bfloat16 and float16, which never hold the scores.
    Unless told which, cuDNN where it can be taken, else blocks where they leave something out of attention
    over at least 64 places, else the ops as they are; for less memory there, see ``chunk``.

    Args:
        program: a Program that was traced, at any stage.
        kernel: ``"blocks"`` or ``"cudnn"``; the best that can be taken unless given.
        blocks: how many blocks of queries.
        where: the results to compute so, by name (``attentions_of`` tells it), pattern or predicate.

    Raises:
        ArgumentError: another kernel, or cuDNN where it cannot be taken: another device or dtype, more than
            128 features a head, values of other features than keys, weights that are dropped; an empty
            ``where``.
        GraphError: there is no attention: it names what came closest.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: ``where`` names nothing that was found.

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2; Dao et al., FlashAttention, 2022,
    section 3.3, for blocks that a mask rules out.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     q, k, v = jnp.split((x @ w)[None, :, None], 3, axis=-1)
        ...     return jnp.mean(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 12)), jnp.ones((64, 4)))
        >>> fused = ow.fuse_attention(program, "blocks")
        >>> [(found.kernel, found.share) for found in ow.graph.attentions_of(fused)]
        [('blocks', 0.625)]
    """
    expect_program(program, "fuse_attention")
    _expect_kernel(kernel)
    expect_count(blocks, "fuse_attention: blocks", of="how many blocks")
    recipe = recipe_of(program, "with its attention fused", "Call jax.nn.dot_product_attention yourself")
    if recipe.of(fused_attention):
        raise GraphError(_TWICE.format(name=program.name))
    forward = unrolled(program, recipe)
    missed: list[tuple[int, NoPartError]] = []
    found = not_in_chunks(tuple(places(forward, missed=missed)), recipe, program)
    if not found:
        raise _nothing(program, missed)
    wanted = _meant(found, meant(where, "fuse_attention", "to compute all attention so"))
    if kernel is not None:
        for place in wanted:
            _expect_possible(place, kernel)
    names = tuple(place.name for place in wanted)
    step = Applied(fused_attention, (kernel, blocks, names), {}, Phase.FORWARD)
    grown = recipe.including(step)
    return resumed(step(forward), grown, len(grown.until(Phase.ROLL).steps), whole_types(program))


@separable
@transform(phase=Phase.FORWARD)
def fused_attention(program: Program, kernel: Kernel | None, blocks: int, names: Sequence[str]) -> Program:
    """A forward Program in which this attention is one op; what is not found, or gains nothing, stays."""
    return _fused(program, frozenset(names), kernel, blocks)


class FusedAttention(Body):
    """The body of an ``attention`` op."""

    def __init__(self, closed: Any, kernel: Kernel, blocks: int) -> None:
        super().__init__(closed)
        self.kernel, self.blocks = kernel, blocks

    @property
    def attributes(self) -> Mapping[str, str]:
        """By what it is computed."""
        return {"kernel": self.kernel} | ({"blocks": str(self.blocks)} if self.kernel == "blocks" else {})


def _fused(
    program: Program,
    names: frozenset[str],
    kernel: Kernel | None,
    blocks: int,
    within: str = "",
    outside: Outside | None = None,
) -> Program:
    """A forward Program with the attention of these names as one op each, by this kernel or the best."""
    at: dict[Op, Op] = {}
    gone: set[Op] = set()
    for attention in attentions(program, outside=outside):
        laid = laid_out(attention)
        best = chosen(laid, kernel, blocks) if within + attention.result.name in names else None
        if isinstance(laid, Laid) and best is not None:
            at[attention.ops[-1]] = _op(laid, best, blocks)
            gone.update(attention.ops)
    stay = (op for op in program.ops if op in at or op not in gone)

    makers = producers(program)

    def changed(inner: Program, op: Op) -> Program:
        around = Outside.of(program, makers, op, inner, outside)
        return _fused(inner, names, kernel, blocks, inside(op, within), around)

    ops = tuple(at.get(op) or changed_within(op, changed) for op in stay)
    if ops == program.ops:
        return program
    return replace(program, ops=_without_unread(program, ops, gone))


def _without_unread(program: Program, ops: Sequence[Op], gone: set[Op]) -> tuple[Op, ...]:
    """The ops without those that made only what the ops which are gone read."""
    made_for = {v for op in gone for v in op.inputs}
    needed = {*program.outputs, *program.next_state.values(), *program.losses}
    needed |= set() if program.loss is None else {program.loss}
    kept: list[Op] = []
    for op in reversed(ops):
        if made_for.issuperset(op.outputs) and needed.isdisjoint(op.outputs) and not op.body.has_effects:
            made_for.update(op.inputs)
            continue
        needed.update(op.inputs)
        kept.append(op)
    return tuple(reversed(kept))


def _op(laid: Laid, kernel: Kernel, blocks: int) -> Op:
    """Attention as one op."""
    found = laid.attention
    ruled = laid.ruled if kernel == "blocks" else laid.causal
    steps = found.steps if ruled is None else ruled.steps
    read = [
        found.query,
        found.key,
        found.value,
        *(v for step in (*steps, *found.weighings) for v in step.reads),
    ]
    if ruled is not None and ruled is not laid.causal:
        read += [v for mask in ruled.masks for v in mask.by.reads]
    inputs = tuple(dict.fromkeys(read))

    def run(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        return [by_cudnn(laid, env) if kernel == "cudnn" else in_blocks(laid, blocks, env)]

    body = FusedAttention(traced(run, *(v.aval for v in inputs)), kernel, blocks)
    return Op(ATTENTION, inputs, (found.result,), body, scope=found.scores.scope, source=found.scores.source)


def not_in_chunks(found: Sequence[FoundPlace], recipe: Recipe, program: Program) -> tuple[FoundPlace, ...]:
    """The attention of a forward Program, but for what ``chunk`` computes some queries of at a time.

    Within a loop that shows as attention of fewer queries, of which no mask is known.
    """
    if not (cut := {head.logits for head in chunks_of(program) if head.is_attention}):
        return tuple(found)
    own = recipe.of(chunked)
    steps = tuple(_of_others(step, cut) if step in own else step for step in recipe.steps)
    whole = build(replace(recipe, steps=steps).until(Phase.ROLL), whole_types(program))
    names = {place.name for place in places(whole)}
    return tuple(place for place in found if place.name in names)


def _of_others(step: Applied, names: Container[str]) -> Applied:
    """A call of ``chunk`` for what else it is given."""
    *how, logits = step.arguments
    return replace(step, arguments=(*how, tuple(name for name in logits if name not in names)))


def _meant(found: Sequence[FoundPlace], where: list[Where] | None) -> tuple[FoundPlace, ...]:
    """The attention that is meant."""
    named = {replace(place.attention.result, name=place.name): place for place in found}
    wanted = tuple(named) if where is None else select(tuple(named), where, "fuse_attention, where")
    return tuple(named[v] for v in wanted)


def _nothing(program: Program, missed: Sequence[tuple[int, NoPartError]]) -> GraphError:
    before = [_IN_CHUNKS.format(logits=head.logits) for head in chunks_of(program) if head.is_attention]
    return GraphError(_NONE.format(name=program.name, closest="".join((_closest(missed), *before[:1]))))


def _closest(missed: Sequence[tuple[int, NoPartError]]) -> str:
    if not missed:
        return ""
    _, why = max(missed, key=lambda pair: pair[0])
    return _CLOSEST.format(op=why.op.type, at=why.op.at, why=why.why)


def _expect_possible(place: FoundPlace, kernel: Kernel) -> None:
    """Raise where a kernel that was asked for cannot compute what is meant."""
    why = place.laid if isinstance(place.laid, str) else hindrance(place.laid, kernel)
    if why:
        at = place.attention.scores.at
        raise ArgumentError(_NO_KERNEL.format(name=place.name, at=at, kernel=kernel, why=why))


def _expect_kernel(kernel: Any) -> None:
    if kernel not in (None, "blocks", "cudnn"):
        raise ArgumentError(f"fuse_attention: kernel is {kernel!r}; expected 'blocks', 'cudnn' or None.")
