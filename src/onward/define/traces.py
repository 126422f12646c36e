"""The forward Programs of one function, so that what builds a Program traces it once for each length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

import jax

from onward.core.program import Program

_MOST = 8  # lengths of a batch that one chain of transforms may take, and some more
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
)


class Traces:
    """The Programs that a function was traced to last. In another process it begins empty."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Program] = OrderedDict()
        self._lock = Lock()

    def found(self, key: tuple[Any, ...], trace: Callable[[], Program]) -> Program:
        """The Program that is known by this key, and under JAX's settings of now; else it is traced."""
        try:
            with self._lock:
                known = self._known.get(_now(key))
        except TypeError:  # data that cannot be compared
            return trace()
        if known is None:
            known = trace()
            self.keep(key, known)
        return known

    def keep(self, key: tuple[Any, ...], program: Program) -> None:
        """Let the Program be found by this key."""
        try:
            with self._lock:
                self._known[_now(key)] = program
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        except TypeError:
            return

    def __reduce__(self) -> tuple[Any, ...]:
        return Traces, ()


def _now(key: tuple[Any, ...]) -> tuple[Any, ...]:
    settings: Any = jax.config
    return (*key, *(getattr(settings, name) for name in _SETTINGS))
