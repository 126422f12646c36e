"""How many operations on numbers a primitive takes: one rule each, counted as XLA counts.

What has no rule is elementwise: one operation for each number of its result. Exponentials, roots and their
like are one as well; what only moves numbers is free. Factorizations are their leading terms.

Source: Golub and Van Loan, Matrix Computations, 4th edition, 2013, chapters 4, 5 and 8 (factorizations);
Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011, section 4 (Threefry).

>>> from onward.core.jaxprs.body import body_of
>>> import jax.numpy as jnp
>>> [flops(call) for call in body_of(lambda x: [jnp.exp(x) @ x], jnp.ones((3, 3))).calls]
[9, 54]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, log2, prod

import numpy as np
from jax import lax

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Work

_THREEFRY = 117  # 20 rounds of an addition, a rotation and an exclusive or; 5 times the key is mixed in


def has_rule(call: Call) -> bool:
    """Whether a primitive has a rule of its own, whatever Body it is given to reduce or to combine with."""
    return of(call.primitive).work in RULES


def flops(call: Call) -> int:
    """The operations that one equation takes, without those of the Bodies it runs."""
    return int(RULES.get(of(call.primitive).work, _results)(call))


def _results(call: Call) -> int:
    return sum(prod(t.shape) for t in call.results[:1])


def _first(call: Call) -> int:
    return prod(call.operands[0].shape)


def _dot(call: Call) -> int:
    (contracted, _), _ = call.params["dimension_numbers"]
    return 2 * _results(call) * prod(int(call.operands[0].shape[axis]) for axis in contracted)


def _convolution(call: Call) -> int:
    """Two for each pair of a number of the image and one of the kernel that meet."""
    (image, kernel), (result,), params = call.operands, call.results, call.params
    numbers = params["dimension_numbers"]
    met = prod(
        _meetings(image.shape[i], kernel.shape[k], result.shape[o], *window)
        for i, k, o, *window in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    )
    batch, features = (result.shape[axis] for axis in numbers.out_spec[:2])
    return int(2 * batch * features * kernel.shape[numbers.rhs_spec[1]] * met)


def _meetings(
    image: int,
    kernel: int,
    result: int,
    stride: int,
    padding: tuple[int, int],
    image_dilation: int,
    kernel_dilation: int,
) -> int:
    """Along one axis, how many pairs of a place of the window and one within it lie on a number."""
    begins = np.arange(result) * stride - padding[0]

    def met(k: int) -> int:
        places = begins + k * kernel_dilation
        inside = (places >= 0) & (places <= (image - 1) * image_dilation)
        return int(np.sum(inside & (places % image_dilation == 0)))

    return sum(map(met, range(kernel)))


def _power(call: Call) -> int:
    """The multiplications that repeated squaring takes."""
    y = abs(call.params["y"])
    steps = max(y.bit_length() - 1 + y.bit_count() - 1, 0) + (call.params["y"] < 0)
    return _results(call) * int(steps)


def _reduction(call: Call) -> int:
    """One less than there are numbers, for each result; nothing for a result of no numbers."""
    return max(_first(call) - _results(call), 0)


def _windows(call: Call) -> int:
    return _results(call) * (int(prod(call.params["window_dimensions"])) - 1)


def _sort(call: Call) -> int:
    along = call.operands[0].shape[call.params["dimension"]]
    return _first(call) * ceil(log2(max(int(along), 1)))


def _gathered(call: Call) -> int:
    """Nothing, unless it looks whether the places lie inside, to fill in what lies outside."""
    fills = call.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    return _results(call) + 3 * prod(call.operands[1].shape) if fills else 0


def _updated(call: Call) -> int:
    return prod(call.operands[of(call.primitive).update].shape)


def _random(call: Call) -> int:
    return _THREEFRY * _results(call)


def _cube(call: Call) -> int:
    """A share of the cube of the side of square matrices."""
    return int(of(call.primitive).share * _first(call) * call.operands[0].shape[-1])


def _triangular(call: Call) -> int:
    return int(_first(call) * prod(call.operands[1].shape[-2:]) // max(call.operands[0].shape[-1], 1))


def _fourier(call: Call) -> int:
    length = int(prod(call.params["fft_lengths"]))
    return 5 * max(_first(call), _results(call)) * ceil(log2(max(length, 2)))


RULES: Mapping[Work, Callable[[Call], int]] = {
    Work.NOTHING: lambda call: 0,
    Work.POWER: _power,
    Work.REDUCTION: _reduction,
    Work.WINDOW: _windows,
    Work.WINDOW_SPREAD: lambda call: 2 * _results(call),
    Work.WINDOW_CHOICE: lambda call: 2 * _windows(call),
    Work.PRODUCT: _dot,
    Work.RAGGED_PRODUCT: lambda call: 2 * _first(call) * call.operands[1].shape[-1],
    Work.CONVOLUTION: _convolution,
    Work.SORT: _sort,
    Work.LOOKUP: _gathered,
    Work.UPDATE: _updated,
    Work.OPERAND: _first,
    Work.RANDOM: _random,
    Work.CUBE: _cube,
    Work.TRIANGULAR: _triangular,
    Work.FOURIER: _fourier,
}  # for each other: one operation for each number of the result
