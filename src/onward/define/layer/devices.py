"""What a layer computes over the batch, where several devices each hold a part of it.

Under ``onward.replicate`` a layer is traced at one device's part, and what is returned is averaged over the
devices: that makes a plain mean over examples right by itself. What is no such mean asks here for what the
other devices have. On one device both functions return what they are given.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from onward.core.jaxprs import current_axis


def mean_over_devices(x: Any) -> Any:
    """The mean of this array over all devices that share the batch."""
    axis = current_axis()
    return x if axis is None else lax.pmean(x, axis.name)


def gathered(arrays: Any) -> Any:
    """Arrays over examples, or a pytree of them, with the examples of all devices, in their order."""
    axis = current_axis()
    return arrays if axis is None else lax.all_gather(arrays, axis.name, tiled=True)
