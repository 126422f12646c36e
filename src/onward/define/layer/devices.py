"""Computation of layers over the batch when several devices each hold a part of it.

Under ``onward.replicate`` a layer is traced at one device's part; sums and means over examples, and what is
computed from them, become those of the whole batch by themselves. What has to see all examples at once asks
here for them.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from onward.core.jaxprs.tracing import current_axis


def gathered(arrays: Any) -> Any:
    """Arrays over examples, or a pytree of them, with the examples of all devices, in their order."""
    axis = current_axis()
    return arrays if axis is None else lax.all_gather(arrays, axis.name, tiled=True)
