"""Where attention stands in a Program and in the loops within, and by which kernel each is computed best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax

from onward.core.program import Program
from onward.core.walk import producers
from onward.develop.attention.find import attentions
from onward.develop.attention.layout import Laid, laid_out, never
from onward.develop.attention.outside import Outside
from onward.develop.attention.parts import Attention, NoPartError, ScoreChange, ScoreStep
from onward.develop.attention.steps import never_seen
from onward.develop.rewrite.put import entered, inside

Kernel: TypeAlias = Literal["blocks", "cudnn"]

_GAIN = 0.8  # blocks pay where they compute less than this share of the scores
_SHORT = 64  # places below which they do not
_LOW = ("bfloat16", "float16")
_LEAST_BYTES = 2  # of a number of these
_MOST_FEATURES = 128  # of a head, for cuDNN


@dataclass(frozen=True)
class FoundPlace:
    """Attention where it stands: laid out, or in words why it cannot be."""

    name: str
    attention: Attention
    laid: Laid | str


def places(
    program: Program,
    within: str = "",
    missed: list[tuple[int, NoPartError]] | None = None,
    outside: Outside | None = None,
) -> Iterator[FoundPlace]:
    """The attention of a forward Program and of the loops within, in order."""
    found = {attention.ops[-1]: attention for attention in attentions(program, missed, outside)}
    makers = producers(program)
    loops = set(entered(program))
    for op in program.ops:
        if op in found:
            yield FoundPlace(within + found[op].result.name, found[op], laid_out(found[op]))
        elif op in loops:
            for inner in op.subprograms.values():
                around = Outside.of(program, makers, op, inner, outside)
                yield from places(inner, inside(op, within), missed, around)


def chosen(laid: Laid | str, kernel: Kernel | None, blocks: int) -> Kernel | None:
    """The kernel that was asked for, or gains most; None where none does, or it cannot be taken."""
    if isinstance(laid, str):
        return None
    if kernel is not None:
        return None if hindrance(laid, kernel) else kernel
    if not hindrance(laid, "cudnn"):
        return "cudnn"
    return None if no_gain(laid, blocks) else "blocks"


def no_gain(laid: Laid, blocks: int) -> str:
    """Why blocks compute it no faster; empty if they do."""
    if laid.length(laid.time) < _SHORT:
        return f"fewer than {_SHORT} places"
    if laid.ruled is None or laid.ruled.share(blocks) > _GAIN:
        return "no mask that is known rules out enough"
    return ""


def hindrance(laid: Laid, kernel: Kernel) -> str:
    """Why a kernel cannot compute it; empty if it can."""
    if kernel == "blocks":
        return ""
    found = laid.attention
    platform, dtype = jax.default_backend(), str(found.query.dtype)
    if platform != "gpu":
        return f"it runs on {platform}, and cuDNN on NVIDIA GPUs; leave kernel away here"
    if dtype not in _LOW or {found.key.dtype, found.value.dtype} != {found.query.dtype}:
        return f"it computes in {dtype}; expected bfloat16 or float16, as of ow.mixed_precision(program)"
    masks = never_seen(found.steps)
    changes = [s for s in found.weighings if not (_is_wide(s) or (s.fill is not None and s.rules <= masks))]
    if changes:
        op = changes[0].op
        return (
            f"its weights are changed behind softmax, as by dropout, by {op.type}{op.at}; leave kernel away"
        )
    fills = [step.fill for step in found.steps if step.fill is not None]
    if any(fill.number is None or fill.number > never(laid.dtype) for fill in fills):
        return f"where its mask is not true, scores are not {never(laid.dtype):g} or less"
    of_keys, of_values = (laid.length(laid.features(axes)) for axes in (found.key_axes, found.value_axes))
    if of_keys != of_values or of_keys > _MOST_FEATURES or of_keys % 8:
        return (
            f"its heads have {of_keys} features of keys and {of_values} of values; expected as many, a "
            f"multiple of 8 up to {_MOST_FEATURES}"
        )
    return ""


def _is_wide(step: ScoreStep) -> bool:
    """Whether a change is one of dtype, to one that holds as much as those that cuDNN computes in."""
    before, after = step.op.inputs[0].dtype, step.op.outputs[0].dtype
    return step.change is ScoreChange.ROUND and before != after and after.itemsize >= _LEAST_BYTES
