"""The equations that XLA for CPU puts beside those of a Program, because its kernels need them.

* a convolution takes batches of images with their channels last and kernels with theirs last: an operand that
  is laid out otherwise, as those of the gradient of a kernel, is written once more;
* a product along the first axis of its left operand, as those of the gradient of weights, and a convolution
  compute in float32: operands of a lower precision are written once more;
* the gradient of a maximum over windows counts the places of all numbers along each axis, writes down for
  each window where its largest stands, and adds the gradients there;
* the inverse of the error function, of which normal random numbers are made, is cheap arithmetic on a
  logarithm and a root.

>>> import jax, jax.numpy as jnp, onward as ow
>>> from onward.core.steps import steps
>>> gradient = ow.trace(lambda x, g: jnp.einsum("bi,bo->io", x, g), *[jnp.ones((4, 2), "bfloat16")] * 2)
>>> [step.kind for step in expanded(steps(gradient))]
['convert_element_type', 'convert_element_type', 'dot_general']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onward.core.primitives.table import of
from onward.core.primitives.traits import Work
from onward.core.steps import Equation

# The kinds of the equations that are added.
_LAID = "transpose"
_WIDENED = "convert_element_type"
_COUNTED = "iota"
_PADDED = "pad"
_CHOSEN = ""
_JOINED = "concatenate"
_ZEROS = "broadcast_in_dim"
_ADDED = "scatter-add"
_CUT = "slice"
_FUNCTION = "log1p"
_PICKED = "select_n"

_PLACES = np.dtype("int32")


def expanded(steps: Iterable[Equation]) -> Iterator[Equation]:
    """The equations, and before each those that its kernel needs."""
    for step in steps:
        work = of(step.kind).work
        if work is Work.WINDOW_SPREAD and len(step.inputs) == 2:
            yield from _chosen(step)
        elif work is Work.CONVOLUTION:
            yield from _behind(step, _laid_otherwise(step), range(2))
        elif work is Work.PRODUCT:
            yield from _behind(step, (), range(2) if is_along_rows(step) else ())
        elif of(step.kind).functions and step.inputs:
            yield from _of_functions(step)
        else:
            yield step


def _of_functions(step: Equation) -> Iterator[Equation]:
    """A function as cheap arithmetic on dearer functions of the same operand."""
    (v,) = step.inputs
    made = tuple(replace(v) for _ in range(of(step.kind).functions))
    for x, y in zip((v, *made), made, strict=False):
        yield Equation(step.op, _FUNCTION, (x,), (y,))
    yield Equation(step.op, _PICKED, (v, *made), step.outputs)


def _params(step: Equation) -> Mapping[str, Any]:
    """The parameters of its primitive; none where it was read from a file, which has no code."""
    call = None if step.body is None else next(step.body.calls, None)
    return {} if call is None else call.params


def is_along_rows(step: Equation) -> bool:
    """Whether it is a product that adds up along another axis than the last of its left operand."""
    numbers = _params(step).get("dimension_numbers")
    if of(step.kind).work is not Work.PRODUCT or numbers is None:
        return False
    (left, _), _ = numbers
    return tuple(left) != (step.inputs[0].ndim - 1,)


def _laid_otherwise(step: Equation) -> Iterator[int]:
    """Which operands of a convolution have not their channels last."""
    numbers, count = _params(step).get("dimension_numbers"), step.outputs[0].ndim
    if numbers is None:
        return
    inner = tuple(range(1, count - 1))
    if tuple(numbers.lhs_spec) != (0, count - 1, *inner):
        yield 0
    if tuple(numbers.rhs_spec) != (count - 1, count - 2, *range(count - 2)):
        yield 1


def _behind(step: Equation, laid: Iterable[int], widened: Iterable[int]) -> Iterator[Equation]:
    """A step that reads some operands in another layout, and those of a low precision in float32.

    An array that stands for both operands is read once.
    """
    last = len(step.inputs) - 1
    laid, now = {min(i, last) for i in laid}, dict(enumerate(step.inputs))
    for i in dict.fromkeys(min(i, last) for i in widened):
        source, is_low = now[i], now[i].is_float and now[i].dtype.itemsize < 4
        if i in laid or is_low:
            now[i] = replace(source, dtype=np.dtype("float32") if is_low else source.dtype)
            yield Equation(step.op, _LAID if i in laid else _WIDENED, (source,), (now[i],))
    yield replace(step, inputs=tuple(now.values()))


def _chosen(step: Equation) -> Iterator[Equation]:
    """The gradient of a maximum over windows: places, those of the largest, and a sum of what comes there."""
    small, large = sorted(step.inputs, key=lambda v: v.size)
    padding = _params(step).get("padding", ((0, 0),) * large.ndim)
    shape = tuple(n + before + after for n, (before, after) in zip(large.shape, padding, strict=True))
    padded, zeros, added = (replace(large, shape=shape) for _ in range(3))
    counted = [replace(padded, dtype=_PLACES) for _ in shape]
    found = [replace(small, dtype=_PLACES) for _ in shape]
    places = replace(small, shape=(*small.shape, len(shape)), dtype=_PLACES)
    is_padded = shape != large.shape
    if is_padded:
        yield Equation(step.op, _PADDED, (large,), (padded,))
    for v in counted:
        yield Equation(step.op, _COUNTED, (), (v,))
    yield Equation(step.op, _CHOSEN, (padded if is_padded else large, *counted), (replace(small), *found))
    yield Equation(step.op, _JOINED, tuple(found), (places,))
    yield Equation(step.op, _ZEROS, (), (zeros,))
    yield Equation(step.op, _ADDED, (zeros, places, small), (added,) if is_padded else step.outputs)
    if is_padded:
        yield Equation(step.op, _CUT, (added,), step.outputs)
