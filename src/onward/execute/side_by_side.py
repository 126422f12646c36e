"""Executables that are compiled side by side: XLA computes without Python's lock while it compiles."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from jax.stages import Lowered

from onward.execute.cores import process_cores


class CompiledBeside:
    """The call of an executable that a thread compiles."""

    def __init__(self, compiled: Future[Any]) -> None:
        self._compiled = compiled

    def __call__(self, *given: Any) -> Any:
        """Run the executable on these arrays."""
        return self._compiled.result()(*given)


class CompilerPool:
    """Compile, while it is entered, all that it is given; it is left when all of it is compiled.

    What is given is lowered already: the settings of JAX in which a person traces are those of a thread.

    Example:
        >>> import jax
        >>> with CompilerPool({}) as beside:
        ...     double = beside.compiled(jax.jit(lambda x: 2 * x).lower(1.0))
        >>> float(double(3.0))
        6.0
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._pool = ThreadPoolExecutor(process_cores(), "onward-compile")
        self._compiling: list[Future[Any]] = []

    def compiled(self, lowered: Lowered) -> CompiledBeside:
        """The call of what this is compiled to."""
        self._compiling.append(self._pool.submit(lowered.compile, self._options))
        return CompiledBeside(self._compiling[-1])

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all; raise what the first raised that could not be compiled."""
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for compiling in self._compiling:
                compiling.result()
