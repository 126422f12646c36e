"""Options that XLA is given with whatever Onward compiles: cures for known faults of a version.

On a CPU, jaxlib 0.10.2 gives fused products, sums and convolutions to a library, YNNPACK. Some come back
wrong in silence (jax-ml/jax#39103: one row of a vmapped matrix-vector product, squared and summed), and up to
0.11.0 some of high rank crash (jax-ml/jax#39257). Given single products only, the library does neither, and
convolutions use all cores again.

A step inside somebody's own ``jax.jit`` is compiled with the options of that. For the whole process:

    XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import jax
from jaxlib import version as jaxlib

from onward.core.jaxprs.tracing import records

__all__ = [
    "AFFECTED",
    "AT_HAND",
    "CURE",
    "OPTION",
    "calling",
    "compiled_alone",
    "compiler_options",
    "is_cured_by",
    "options_to_look",
]

OPTION = "xla_cpu_experimental_ynn_fusion_type"
_SINGLE = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
CURE = f"--{OPTION}={_SINGLE}"
"""The same for a whole process, in the environment variable ``XLA_FLAGS``."""

AT_HAND = tuple(int(n) for n in re.findall(r"\d+", jaxlib.__version__)[:3])
"""The version of jaxlib."""

AFFECTED = (0, 10, 2) <= AT_HAND <= (0, 11, 0)


def compiler_options() -> dict[str, str | bool]:
    """The options for an executable on this backend with this version of jaxlib; mostly none.

    Example:
        >>> compiler_options() == {} or AFFECTED
        True
    """
    is_needed = AFFECTED and jax.default_backend() == "cpu" and not is_cured_by(os.environ)
    return {OPTION: _SINGLE} if is_needed else {}


def options_to_look() -> dict[str, str | bool]:
    """The options for what is run a few times, to look at its numbers: it is sooner compiled than fast."""
    if jax.default_backend() != "cpu":
        return compiler_options()
    quick: dict[str, str | bool] = {
        "xla_llvm_disable_expensive_passes": True,
        "xla_backend_optimization_level": "0",
    }
    return compiler_options() | quick


def is_cured_by(environment: Mapping[str, str]) -> bool:
    """Whether the option is set for the whole process, by the user, whose choice then holds."""
    return f"--{OPTION}=" in environment.get("XLA_FLAGS", "")


def calling() -> AbstractContextManager[Any]:
    """The context to call what was compiled in: under ``jax.disable_jit`` JAX refuses to."""
    settings: Any = jax.config  # the types of JAX 0.10 lack some
    return jax.disable_jit(False) if settings.jax_disable_jit else nullcontext()


def compiled_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``jax.jit`` with the options; inside a trace, where JAX takes none, without them.

    Asked when it is called: to ask for the backend begins it, and until then people may say what it has.

    Example:
        >>> double = compiled_alone(lambda x: 2 * x)
        >>> int(double(21)), int(jax.jit(double)(21))
        (42, 42)
    """
    within = jax.jit(function, **options)
    if not AFFECTED:
        return within

    @cache
    def alone() -> Callable[..., Any]:
        return jax.jit(function, compiler_options=compiler_options() or None, **options)

    @wraps(function)
    def compiled(*arguments: Any, **named: Any) -> Any:
        return (within if records() else alone())(*arguments, **named)

    return compiled
