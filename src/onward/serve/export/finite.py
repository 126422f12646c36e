"""Whether the parameters of a model are numbers: with one NaN among them every answer is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.program import Variable
from onward.core.words import Kind


def nonfinite(values: Mapping[Variable, Any]) -> str:
    """A sentence on the first parameter that holds NaN or infinity, or other state that holds NaN.

    Constants are left alone, and so is infinity in state: masks hold it on purpose.

    Returns:
        the sentence; empty if there is none.
    """
    for v, x in values.items():
        if jnp.issubdtype(v.dtype, jax.dtypes.extended) or not jnp.issubdtype(v.dtype, np.inexact):
            continue
        host = np.asarray(x)
        wrong = ~np.isfinite(host) if v.kind is Kind.PARAMETER else np.isnan(host)
        if wrong.any():
            place = np.argwhere(wrong)[0]
            what = "parameter" if v.kind is Kind.PARAMETER else "state"
            count = f"{wrong.sum():,} of {wrong.size:,}"
            return f"The {what} {v.name!r} holds {host[tuple(place)]} at {place.tolist()} ({count} numbers)."
    return ""
