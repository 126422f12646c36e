"""Trace functions, along an axis of devices if one is given, and under JAX's settings of now."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from onward.core.variable import Replicas

_nothing = jax.jit(lambda: ())
_replicas: ContextVar[Replicas | None] = ContextVar("replicas", default=None)


@contextmanager
def along(replicas: Replicas | None) -> Iterator[None]:
    """Let functions traced within use collectives along this axis; None: along none."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


def current_axis() -> Replicas | None:
    """The devices on which the function that is traced now will run; None for one alone."""
    return _replicas.get()


def traced(function: Callable[..., Any], *types: Any) -> Any:
    """The closed jaxpr of a function of flat arrays."""
    axis = _replicas.get()
    return jax.make_jaxpr(function, axis_env=[(axis.name, axis.count)] if axis else None)(*types)


def settings_now() -> Hashable:
    """Something equal for as long as JAX's settings are, those that change what a function is traced to.

    JAX knows them: it takes a function that it has traced before as known only under the settings of then. It
    does not ask what kind of random keys there are by default.
    """
    settings: Any = jax.config
    return _nothing.trace().jaxpr, settings.jax_default_prng_impl, settings.jax_enable_custom_prng
