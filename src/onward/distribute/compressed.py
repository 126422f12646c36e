"""Strategies that send less than the whole gradient, and keep what they left out for the next step.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(100), jnp.ones((8, 100)))
>>> program = ow.replicate(program, devices=2, merge=ow.merge.TopK(0.05))
>>> program["grad(w)/error"], program["grad(w)/error"].placement
(Variable('grad(w)/error', float32[100], state), <Placement.PER_REPLICA: 'per_replica'>)
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import ArgumentError, GraphError
from onward.core.structure import expect_count, is_number
from onward.distribute.merge import Devices, Kept, Merge


class LowPrecision(Merge):
    """Gradients are sent in a shorter dtype, and what rounding loses is kept for the next step.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014, section 3 (error feedback).
    """

    exact: ClassVar[bool] = False
    dtype: str = "bfloat16"
    feedback: bool = True

    def __post_init__(self) -> None:
        try:
            is_float = jnp.issubdtype(jnp.dtype(self.dtype), np.floating)
        except TypeError:
            is_float = False
        if not is_float:
            raise ArgumentError(
                f"LowPrecision: dtype is {self.dtype!r}; expected a dtype of real numbers, such as "
                "'bfloat16' or 'float16'."
            )
        if not isinstance(self.feedback, bool):
            raise ArgumentError(f"LowPrecision: feedback is {self.feedback!r}; expected True or False.")

    def init(self, gradient: Any) -> Kept:
        """The rounding error so far, zero at first; nothing without ``feedback``."""
        return {"error": jnp.zeros_like(gradient)} if self.feedback else {}

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The mean of the rounded gradients, itself rounded: each device adds up its part of them."""
        whole = gradient + kept["error"] if self.feedback else gradient
        sent = whole.astype(self.dtype)
        mean = devices.exchange(sent).astype(gradient.dtype).mean(0)
        again = mean.astype(self.dtype)
        merged = devices.join(again, gradient.shape).astype(gradient.dtype)
        if not self.feedback:
            return merged, {}
        lost = (mean - again.astype(gradient.dtype)) * devices.size
        return merged, {"error": whole - sent.astype(gradient.dtype) + devices.alone(lost, gradient.shape)}


class TopK(Merge):
    """Only the largest numbers of a gradient are sent; the others are kept and added next time.

    Source: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018, algorithm 1; Lin et al., Deep
    Gradient Compression, 2018.
    """

    exact: ClassVar[bool] = False
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ArgumentError(
                f"TopK: ratio is {self.ratio!r}; expected a share, more than 0 and at most 1."
            )

    def init(self, gradient: Any) -> Kept:
        """The part of the gradient not sent so far, zero at first."""
        return {"error": jnp.zeros_like(gradient)}

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The mean of what every device sends: places and numbers."""
        whole = (gradient + kept["error"]).ravel()
        if whole.size >= 2**31:
            raise GraphError(
                f"TopK sends places as int32, and a gradient of shape {list(gradient.shape)} has "
                f"{whole.size} numbers, 2**31 or more. Merge with Average(), Sharded() or LowPrecision()."
            )
        count = max(1, int(self.ratio * whole.size))
        _, places = lax.top_k(jnp.abs(whole), count)
        numbers = whole[places]
        rest = whole.at[places].set(0)
        everywhere = jnp.zeros_like(whole).at[devices.gather(places)].add(devices.gather(numbers))
        shape = gradient.shape
        return (everywhere / devices.size).reshape(shape), {"error": rest.reshape(shape)}


class PowerSGD(Merge):
    """A matrix is sent as two thin ones, found by one power iteration; vectors are sent whole.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019, algorithms 1 and 2.
    """

    exact: ClassVar[bool] = False
    rank: int = 2

    def __post_init__(self) -> None:
        expect_count(self.rank, "PowerSGD: rank")

    def init(self, gradient: Any) -> Kept:
        """The part not sent so far and the right factor of the last step; nothing if it is sent whole."""
        if not self._is_worth_it(gradient):
            return {}
        columns = gradient.size // gradient.shape[0]
        q = jax.random.normal(jax.random.key(0), (columns, self.rank), gradient.dtype)
        return {"error": jnp.zeros_like(gradient), "q": q}

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The product of the two averaged factors."""
        if not kept:
            return devices.mean(gradient), kept
        whole = gradient + kept["error"]
        matrix = whole.reshape(whole.shape[0], -1)
        p, _ = jnp.linalg.qr(devices.mean(matrix @ kept["q"]))
        q = devices.mean(matrix.T @ p)
        merged = (p @ q.T).reshape(gradient.shape)
        return merged, {"error": whole - merged, "q": q}

    def _is_worth_it(self, gradient: Any) -> bool:
        if len(gradient.shape) < 2:
            return False
        rows, columns = gradient.shape[0], gradient.size // gradient.shape[0]
        return bool(self.rank * (rows + columns) < rows * columns)
