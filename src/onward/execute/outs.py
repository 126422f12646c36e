"""What many steps returned for the person: an Out with one more axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.program import Variable
from onward.execute.out import Out


class Part(NamedTuple):
    """The results of ``steps`` steps in a row, or of one alone."""

    out: Out
    steps: int | None


class Outs:
    """What the steps of a run returned, one more axis in front: ``outs.loss`` has one loss for each step.

    Reading a value waits for it and gives NumPy arrays. A result that has another shape in some of the steps,
    because it follows the length of the batch, is a list of one array for each step.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0)), fetch=["grad(w)"])
        >>> _, first = step(step.init(jnp.float32(1.0)))
        >>> _, second = step(step.init(jnp.float32(2.0)))
        >>> outs = Outs([Part(first, None), Part(second, None)])
        >>> len(outs), outs.loss.tolist(), outs["grad(w)"].tolist()
        (2, [1.0, 4.0], [2.0, 4.0])
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return sum(1 if part.steps is None else part.steps for part in self._parts)

    def __getitem__(self, name: str | Variable) -> Any:
        """The values of an output or a fetched Variable, one for each step."""
        return self._over(lambda out: out[name])

    @cached_property
    def loss(self) -> Any:
        """The losses."""
        return self._over(lambda out: out.loss)

    @cached_property
    def value(self) -> Any:
        """Everything the traced function returned, in its containers."""
        return self._over(lambda out: out.value)

    @property
    def aux(self) -> Any:
        """What the traced function returned beside the loss (``has_aux=True``)."""
        return self._over(lambda out: out.aux)

    def _over(self, pick: Callable[[Out], Any]) -> Any:
        alone = [part.steps is None for part in self._parts]
        return jax.tree.map(partial(_joined, alone), *(pick(part.out) for part in self._parts))

    def __repr__(self) -> str:
        return f"Outs({len(self)} steps of {self._parts[0].out})"


def _joined(alone: Sequence[bool], *parts: Any) -> Any:
    """One array over all steps; a list of arrays if these are of different shapes."""
    keys = jnp.issubdtype(parts[0].dtype, jax.dtypes.extended)
    over = jnp if keys else np
    rows = [
        over.asarray(x)[None] if single else over.asarray(x) for x, single in zip(parts, alone, strict=True)
    ]
    if len({row.shape[1:] for row in rows}) > 1:
        return [x for row in rows for x in row]
    return over.concatenate(rows)
