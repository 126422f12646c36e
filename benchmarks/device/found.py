"""What the machine is that the numbers come from."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import jax

from benchmarks.report import environment


def found() -> dict[str, Any]:
    """The environment of every benchmark, and what matters on an accelerator."""
    return {
        **environment(),
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "memory": memory_limit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def is_cpu() -> bool:
    """Whether JAX computes on the host."""
    return jax.default_backend() == "cpu"


def memory_limit() -> int | None:
    """The bytes of the first device that JAX may take; None where they are not counted."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def memory_peak() -> int | None:
    """The most bytes of the first device that this process has taken so far; None where not counted."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
