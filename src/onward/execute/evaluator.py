"""Evaluator = {Model, activations}: computes outputs, and remembers what any layer gave on the way.

evaluator = Evaluator(model)                # costs nothing: the parameters are the model's
evaluator.forward(images=images)
evaluator.activation("fc_1")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, StateError
from onward.core.program import Variable
from onward.core.structure import path_name
from onward.core.walk import find, name_of
from onward.execute.feeds import data_names
from onward.execute.model import Model, Request
from onward.execute.out import Out
from onward.execute.reader import Reading
from onward.execute.state import State
from onward.execute.step import Step


class Evaluator:
    """Runs the test-time Program of a Model; made for each request, thread or purpose, for it is light.

    Args:
        model: whose parameters are read as they are at each ``forward``.
        activations: names that every ``forward`` shall compute at once. Any other activation is computed when
            it is asked for, from the same data and the same parameters.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     hidden = ow.layer.fc(ow.data("x", (None, 4)), 3, act="relu")
        ...     return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))
        >>> evaluator = ow.Evaluator(ow.Model(network))
        >>> out = evaluator.forward(x=np.ones((5, 4)))      # no y, so the loss is not computed
        >>> evaluator.activation("fc_1").shape
        (5, 1)
    """

    def __init__(self, model: Model, activations: Iterable[str | Variable] = ()) -> None:
        self.model = model
        self._fetch = tuple(find(model.test_program, name).name for name in activations)
        self._names = data_names(model.test_program)
        self._out: Out | None = None
        self._seen: tuple[State, dict[str, Any]] | None = None

    def forward(self, *data: Any, **feed: Any) -> Out:
        """Run forward on some data.

        Args:
            data: in the order in which the network takes or declares it; what is left out at the end, and
                what depends on it, is not computed.
            feed: data by name.

        Returns:
            ``out.value`` is what the network returned, ``out[name]`` one Variable.

        Raises:
            ArgumentError: data of the wrong name, shape or dtype.
        """
        fed = {**dict(zip(self._names, data, strict=False)), **feed}
        state = self.model.state
        step = self._step(fed, self._fetch, len(data), only=False)
        _, self._out = step(state, **{name: fed[name] for name in _reads(step)})
        self._seen = state, fed
        return self._out

    def activation(self, layer: Any) -> Any:
        """What a layer gave in the last ``forward``.

        Args:
            layer: its name, the Variable, or what the layer returned outside of a trace.

        Raises:
            StateError: nothing was run forward yet.
            UnknownNameError: no Variable bears this name.
            ArgumentError: it needs data that was not given.
        """
        if self._seen is None or self._out is None:
            raise StateError("There are no activations yet: call forward(...) first.")
        name = find(self.model.test_program, layer).name
        if name in self._out.results.position:
            return self._out[name]
        state, fed = self._seen
        step = self._step(fed, (name,), len(fed), only=True)
        return step(state, **{n: fed[n] for n in _reads(step)})[1][name]

    def test(self, reader: Any) -> dict[str, float]:
        """The mean of the loss and of every other number that the network returns, over a reader.

        A batch counts by its number of examples.

        Args:
            reader: any iterable of batches, or a callable that returns one; a batch is a tuple of arrays in
                the order of the declarations, or a dict by name.

        Raises:
            ArgumentError: an empty reader, or one of the wrong structure.
        """
        total: dict[str, Any] = {}
        count = 0
        for batch, _ in Reading(reader).epoch(0):
            fed = as_feed(batch, self._names)
            out = self.forward(**fed)
            size = batch_size(fed)
            count += size
            for name, value in metrics_of(out).items():
                total[name] = total.get(name, 0.0) + value * size
        return {name: float(value) / count for name, value in total.items()}

    def _step(self, fed: Mapping[str, Any], fetch: tuple[str, ...], count: int, only: bool) -> Step:
        """The model's Step for what is fed."""
        given = None if len(fed) == len(self._names) else frozenset(fed)
        if count > len(self._names) or not fed.keys() <= set(self._names):
            _refuse(self.model.test_program.name, self._names, fed, count)
        request = Request(fetch, given, only)
        return self.model.step(
            request, lambda: Step(request.program(self.model.test_program), (), donate=False, ahead=False)
        )

    def __repr__(self) -> str:
        return f"Evaluator({self.model!r})"


def as_feed(batch: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A batch of a reader as data by name.

    Raises:
        ArgumentError: another number of arrays than the network takes.
    """
    if isinstance(batch, Mapping):
        return {str(name_of(key)): value for key, value in batch.items()}
    values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(values) != len(names):
        raise ArgumentError(
            f"The reader yielded a batch of {len(values)} arrays; the network takes {len(names)}: "
            f"{', '.join(names)}. Yield tuples of arrays in this order, or dicts by name."
        )
    return dict(zip(names, values, strict=True))


def batch_size(fed: Mapping[str, Any]) -> int:
    """How many examples a batch has: the length of its first array that has one."""
    shapes = (np.shape(x) for x in jax.tree.leaves(list(fed.values())))
    return next((shape[0] for shape in shapes if shape), 1)


def metrics_of(out: Out) -> dict[str, Any]:
    """The loss and every other single number that the traced function returned, by name."""
    signature = out.results.signature
    found: dict[str, Any] = {}
    if out.results.loss is not None:
        found["loss"] = out.loss
    if signature is not None and signature.has_aux:
        for path, v in _aux(signature):
            if v.shape == () and v.name in out.results.position:
                found[path or "aux"] = out[v]
    return found


def _aux(signature: Any) -> list[tuple[str, Variable]]:
    numbered = jax.tree.unflatten(signature.result.treedef, list(range(len(signature.result.leaves))))
    paths = jax.tree_util.tree_flatten_with_path(numbered[1])[0]
    pairs = [(path_name(path), signature.result.leaves[i]) for path, i in paths]
    return [(path, v) for path, v in pairs if isinstance(v, Variable)]


def _reads(step: Step) -> list[str]:
    return [name for _, name in step.feeds.taken]


def _refuse(program: str, names: tuple[str, ...], fed: Mapping[str, Any], count: int) -> None:
    if count > len(names):
        raise ArgumentError(f"{program} takes {len(names)} data ({', '.join(names)}); {count} were given.")
    unknown = next(name for name in fed if name not in names)
    raise ArgumentError(f"{program} takes no data named {unknown!r}. Its data: {', '.join(names)}.")
