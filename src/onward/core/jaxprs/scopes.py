"""Where an equation comes from: the scopes that a person named, and what JAX wrapped around it."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex
from jax.extend import source_info_util


def trace_in_progress() -> Any:
    """Equal for two moments of one trace; another inside the body of a ``jit``, ``scan`` or ``vmap``."""
    return jex.get_opaque_trace_state(convention="onward")


def current_scope() -> str:
    """The scopes that ``jax.named_scope`` has opened here, joined by ``/``, without those of ``vmap``."""
    return entries(source_info_util.current_name_stack(), "Scope")


def outermost_scope() -> Any:
    """A context in which no ``jax.named_scope`` is open."""
    return source_info_util.reset_name_stack()


def entries(stack: Any, kind: str) -> str:
    """The names of a person's scopes (``Scope``) or of JAX's wrappers (``Transform``), joined by ``/``."""
    return "/".join(entry.name for entry in stack.stack if type(entry).__name__ == kind)


def transforms_around(eqn: Any) -> frozenset[str]:
    """The transforms that JAX has wrapped around an equation, such as ``jvp`` and ``transpose``."""
    return frozenset(entries(eqn.source_info.name_stack, "Transform").split("/")) - {""}
