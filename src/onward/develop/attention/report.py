"""``attentions_of``: the attention of a Program, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onward.core.check import expect_program
from onward.core.program import Phase, Program
from onward.core.recipe import build, recipe_of, whole_types
from onward.develop.attention.fuse import fused_attention, not_in_chunks
from onward.develop.attention.layout import MASKS
from onward.develop.attention.places import FoundPlace, Kernel, chosen, no_gain, places
from onward.develop.roll.forward import unrolled


@dataclass(frozen=True)
class FoundAttention:
    """Attention in a Program.

    Attributes:
        name: the name of its result; before it that of each loop in which it stands.
        source: the user's line of the product of queries and keys; empty if unknown.
        dtype: of the queries.
        heads: of queries, and ``shared``: of keys and values.
        places: how many queries and keys.
        features: of each head.
        causal: whether each place looks at itself and at what is before it.
        masked: whether something else is added to scores, or chooses among them.
        kernel: what computes it: ``"blocks"``, ``"cudnn"``, or None for the ops as they are written.
        share: the share of the scores that is computed.
        why: why no kernel would compute it unless told to, or cannot.
    """

    name: str
    source: str
    dtype: str
    heads: int = 1
    shared: int = 1
    places: tuple[int, int] = (1, 1)
    features: int = 1
    causal: bool = False
    masked: bool = False
    kernel: Kernel | None = None
    share: float = 1.0
    why: str = ""

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        groups = f" over {self.shared}" if self.shared != self.heads else ""
        kinds = " and ".join(w for w, is_so in (("causal", self.causal), ("masked", self.masked)) if is_so)
        queries, keys = self.places
        by = {"blocks": f"in blocks, {self.share:.0%} of the scores", "cudnn": "by cuDNN"}.get(
            str(self.kernel), f"as written{': ' if self.why else ''}{self.why}"
        )
        return (
            f"{self.name}{at}: {self.heads}{groups} heads of {self.features} in {self.dtype}, "
            f"{queries} places over {keys}{', ' if kinds else ''}{kinds}; computed {by}"
        )


def attentions_of(program: Program) -> tuple[FoundAttention, ...]:
    """List the attention in the forward pass of a Program, and what computes it; see ``fuse_attention``.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w @ x.T) @ x)
        >>> program = ow.trace(loss, jnp.ones((3, 3)), jnp.ones((9, 3)))
        >>> found, = ow.graph.attentions_of(program)
        >>> found.places, found.features, found.causal
        ((9, 9), 3, False)
    """
    expect_program(program, "attentions_of")
    if program.recipe is None:
        return tuple(_told(place) for place in places(program))
    recipe = recipe_of(program, "to find attention", "Trace the function")
    fused = [step.arguments for step in recipe.of(fused_attention)]
    before = recipe.without(fused_attention).until(Phase.ROLL)
    forward = build(before, whole_types(program)) if fused else unrolled(program, recipe)
    found = not_in_chunks(tuple(places(forward)), before, program)
    return tuple(_told(place, *fused) for place in found)


def _told(place: FoundPlace, *fused: tuple[Kernel | None, int, Sequence[str]]) -> FoundAttention:
    """A place for people, with the kernel that these fusions give it."""
    found, laid = place.attention, place.laid
    source = found.scores.source
    told = FoundAttention(
        place.name,
        str(source) if source is not None and source.file else "",
        str(found.query.dtype),
        why=laid if isinstance(laid, str) else "",
    )
    if isinstance(laid, str):
        return told
    ruled = laid.ruled
    steps = found.steps if laid.causal is None else laid.causal.steps
    told = replace(
        told,
        heads=laid.length((*laid.heads, *laid.groups)),
        shared=laid.length(laid.heads),
        places=(laid.length(laid.time), laid.source),
        features=laid.length(laid.features(found.key_axes)),
        causal=laid.causal is not None,
        masked=any(step.change in MASKS for step in steps),
    )
    for kernel, blocks, names in fused:
        if place.name in names:
            best = chosen(laid, kernel, blocks)
            share = ruled.share(blocks) if ruled is not None and best == "blocks" else 1.0
            told = replace(told, kernel=best, share=share, why="" if best else no_gain(laid, blocks))
    return told
