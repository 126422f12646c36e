"""The results of many steps: an Out with one more axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from onward.core.errors import ByName
from onward.core.program import Variable
from onward.core.variable import holds_keys
from onward.develop.watch.reading import Watched
from onward.execute.out import Out


class OutsPart(NamedTuple):
    """The results of ``steps`` steps in a row, or of one alone."""

    out: Out
    steps: int | None


class Outs(ByName):
    """The results of the steps of a run, with a new first axis: ``outs.loss`` has one loss for each step.

    Reading a value waits for it and gives NumPy arrays. A result that has another shape in some of the steps,
    because it follows the length of the batch, is a list of one array for each step.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> one = jnp.float32(1.0)
        >>> program = ow.SGD(0.5).minimize(lambda w, x: w * x, one, one)
        >>> step = ow.compile(program, fetch=["grad(w)"])
        >>> state, outs = step.run(step.init(one), [1.0, 2.0, 3.0], steps=2)
        >>> len(outs), outs.loss.tolist(), outs["grad(w)"].tolist(), float(outs[2].loss)
        (3, [1.0, 1.0, -1.5], [1.0, 2.0, 3.0], -1.5)
    """

    def __init__(self, parts: Sequence[OutsPart]) -> None:
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return sum(1 if part.steps is None else part.steps for part in self._parts)

    @overload
    def __getitem__(self, name: int) -> Out: ...

    @overload
    def __getitem__(self, name: str | Variable) -> Any: ...

    def __getitem__(self, name: str | Variable | int) -> Any:
        """The values of an output or a fetched Variable, one for each step; by number, one step's Out."""
        if isinstance(name, int | np.integer):
            return self._step(range(len(self))[name])
        return self._over(lambda out: out[name])

    def __contains__(self, name: object) -> bool:
        """Whether there is a result of this name, or a step of this number; no value is read."""
        if isinstance(name, int | np.integer):
            return -len(self) <= int(name) < len(self)
        return name in self._parts[0].out

    def __iter__(self) -> Iterator[Out]:
        """The Out of each step."""
        return map(self._step, range(len(self)))

    def _step(self, number: int) -> Out:
        for part in self._parts:
            count = part.steps or 1
            if number < count:
                return part.out if part.steps is None else jax.tree.map(itemgetter(number), part.out)
            number -= count
        raise IndexError(number)

    @cached_property
    def loss(self) -> NDArray[Any]:
        """The losses."""
        losses: NDArray[Any] = self._over(lambda out: out.loss)
        return losses

    @cached_property
    def value(self) -> Any:
        """Everything the traced function returned, in its containers."""
        return self._over(lambda out: out.value)

    @property
    def aux(self) -> Any:
        """The auxiliary outputs that the traced function returned beside the loss (``has_aux=True``)."""
        return self._over(lambda out: out.aux)

    @property
    def watched(self) -> list[Watched]:
        """Statistics of what ``watch`` was told to look at, of the steps in which it did."""
        each = (
            watched
            for part in self._parts
            for watched in ([part.out.watched] if part.steps is None else part.out.watched.apart(part.steps))
        )
        return [watched for watched in each if watched.step is not None]

    def _over(self, pick: Callable[[Out], Any]) -> Any:
        alone = [part.steps is None for part in self._parts]
        return jax.tree.map(partial(_joined, alone), *(pick(part.out) for part in self._parts))

    def __repr__(self) -> str:
        return f"Outs({len(self)} steps of {self._parts[0].out})"


def _joined(alone: Sequence[bool], *parts: Any) -> Any:
    """One array over all steps; a list of arrays if these are of different shapes."""
    over = jnp if holds_keys(parts[0].dtype) else np
    rows = [
        over.asarray(x)[None] if single else over.asarray(x) for x, single in zip(parts, alone, strict=True)
    ]
    if len({row.shape[1:] for row in rows}) > 1:
        return [x for row in rows for x in row]
    return over.concatenate(rows)
