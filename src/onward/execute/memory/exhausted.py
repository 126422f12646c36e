"""Whether memory was not enough for a step; ``out_of_memory`` tells what the step holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from onward.core.errors import OutOfMemoryError
from onward.core.first_use import at_first_call

EXHAUSTED = "RESOURCE_EXHAUSTED"

out_of_memory: Callable[..., OutOfMemoryError] = at_first_call(
    "onward.execute.memory.out_of_memory", "out_of_memory"
)


def is_exhausted(error: BaseException) -> bool:
    """Whether JAX says by this error that memory is not enough."""
    return (
        isinstance(error, RuntimeError)
        and EXHAUSTED in str(error)
        and not isinstance(error, OutOfMemoryError)
    )


def wait_for(results: Any) -> None:
    """Wait until results are computed; where they could not be, let them go before the error is raised."""
    try:
        jax.block_until_ready(results)
    except RuntimeError:
        for x in jax.tree.leaves(results):
            if isinstance(x, jax.Array):
                x.delete()
        raise
