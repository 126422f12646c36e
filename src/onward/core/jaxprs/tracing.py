"""Trace functions, along an axis of devices if one is given, and under JAX's settings of now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from onward.core.source import user_level
from onward.core.variable import Replicas

_nothing = jax.jit(lambda: ())
_replicas: ContextVar[Replicas | None] = ContextVar("replicas", default=None)
_fresh: ContextVar[int] = ContextVar("fresh", default=0)
_measured = count(1)


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


@contextmanager
def fresh() -> Iterator[None]:
    """Trace and derive within as if nothing had been traced before, to see how long it takes."""
    token = _fresh.set(next(_measured))
    try:
        yield
    finally:
        _fresh.reset(token)


def since() -> int:
    """Equal for two moments if the one may take what was traced at the other."""
    return _fresh.get()


def traced(function: Callable[..., Any], *types: Any, apart: Hashable = None, of: str = "") -> Any:
    """The closed jaxpr of a function of flat arrays.

    JAX traces a function that is jitted within once, and takes that wherever it is called. ``apart`` keeps
    what is traced here from all that is traced without it, and the other way round. ``jax.disable_jit``,
    which would unroll loops, has no effect; ``of`` names a function of the user's for a word about it.
    """
    settings: Any = jax.config  # the types of JAX 0.10 lack some
    if of and settings.jax_disable_jit:
        warnings.warn(_NOT_STEPPED.format(name=of), stacklevel=user_level())
    axis = _replicas.get()
    axes: list[tuple[Any, int]] = [(axis.name, axis.count)] if axis else []
    for mark in (apart, ("fresh", since()) if since() else None):
        if mark is not None:
            axes.append((mark, 1))  # nobody exchanges along it; JAX takes what it knows only under equal axes
    with jax.disable_jit(False):
        return jax.make_jaxpr(function, axis_env=axes or None)(*types)


_NOT_STEPPED = (
    "jax.disable_jit has no effect here: {name} is traced once, and what it computes runs compiled. To step "
    "through it, call it by itself, as in loss(params, x); to see numbers of what runs, take jax.debug.print."
)


def records() -> bool:
    """Whether what is computed now becomes part of a trace.

    >>> seen = []
    >>> _ = jax.jit(lambda x: seen.append(records()))(1.0)
    >>> seen, records()
    ([True], False)
    """
    if jex.find_top_trace(()) is _eager():  # no array is made to ask: that costs as much as a small step
        return False
    return isinstance(jnp.zeros(()), jax.core.Tracer)  # within jax.vmap or jax.grad alone nothing is recorded


@cache
def _eager() -> Any:
    """The trace in which JAX computes at once; a thread begins with it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(jex.find_top_trace, ()).result()


def settings_now() -> Hashable:
    """Something equal for as long as JAX's settings are, those that change what a function is traced to.

    JAX knows them: it takes a function that it has traced before as known only under the settings of then. It
    does not ask what kind of random keys there are by default.
    """
    settings: Any = jax.config
    return _nothing.trace().jaxpr, settings.jax_default_prng_impl, settings.jax_enable_custom_prng, since()
