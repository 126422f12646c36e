"""A Program at one set of data shapes: as a pure function, and as one compiled XLA computation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from onward.core.errors import StateError
from onward.core.lower import lower
from onward.core.placement import whole_shape
from onward.core.program import Program, Variable
from onward.execute.out import Results
from onward.execute.spread import Spread
from onward.execute.state import SPENT, Layout, is_deleted


class Executable:
    """What runs: ``function`` under a trace, ``compiled`` on arrays."""

    def __init__(self, program: Program, fetch: Sequence[str], donate: Collection[str]) -> None:
        self.program = program
        self.layout = Layout.of(program)
        wanted = dict.fromkeys((*program.outputs, *(program[name] for name in fetch)))
        self.results = Results(tuple(wanted), program.loss, program.signature)
        following = [program.next_state[v] for v in self.layout.changed]
        self._spread = None if program.replicas is None else Spread(program, following, [*wanted])
        run = lower(program, [*following, *wanted])
        self._run = run if self._spread is None else self._spread.over_devices(run)
        self._order = [self.layout.position[v.name] for v in program.state]
        self._reused = [i for i, v in enumerate(self.layout.changed) if v.name in donate]
        self._lent = [i for i, v in enumerate(self.layout.variables) if v.name not in donate]
        # Host devices share one pool of threads: a second step in flight can starve the collectives.
        self._waits = self._spread is not None and jax.default_backend() == "cpu"
        self._first = list(range(len(self._reused)))
        self._compiled: Callable[..., Any] | None = None

    def function(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The state that changed, and the results, from the whole state and the data."""
        found = self._run([own[i] for i in self._order], values)
        count = len(self.layout.changed)
        return found[:count], found[count:]

    @property
    def is_compiled(self) -> bool:
        """Whether it can be called on arrays."""
        return self._compiled is not None

    def compile(self) -> None:
        """Compile ahead of time, with the buffers of the changing state donated."""

        def split(reused: Any, lent: Any, values: Any) -> tuple[list[Any], list[Any]]:
            own = dict(zip((*self._reused, *self._lent), (*reused, *lent), strict=True))
            return self.function([own[i] for i in range(len(own))], values)

        name = self.program.name
        split.__name__ = split.__qualname__ = name if name.isidentifier() else "step"
        variables = self.layout.variables
        reused, lent = [variables[i] for i in self._reused], [variables[i] for i in self._lent]
        groups = (reused, lent, self.program.inputs)
        shardings = {} if self._spread is None else self._spread.shardings(*groups)
        jitted = jax.jit(split, donate_argnums=(0,), **shardings)
        types = (tuple(map(self._type, group)) for group in groups)
        self._compiled = jitted.lower(*types).compile()

    def _type(self, v: Variable) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(whole_shape(v, self.program.replicas), v.dtype)

    def place(self, v: Variable, value: Any) -> Any:
        """The value of a state Variable where the compiled step takes it from."""
        return value if self._spread is None else jax.device_put(value, self._spread.sharding(v))

    def _split(self, own: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The values whose buffers the step reuses, and those it only reads."""
        count = len(self._reused)
        if self._reused == self._first:
            return tuple(own[:count]), tuple(own[count:])
        return tuple(own[i] for i in self._reused), tuple(own[i] for i in self._lent)

    def __call__(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run on arrays.

        Raises:
            StateError: some of the state was given to a step before.
        """
        assert self._compiled is not None, "compile comes first"
        try:
            changed, results = self._compiled(*self._split(own), tuple(values))
            if self._waits:
                jax.block_until_ready(results)
            return changed, results
        except (RuntimeError, ValueError) as error:
            if any(map(is_deleted, own)):
                raise StateError(SPENT) from error
            raise
