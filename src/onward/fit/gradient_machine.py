"""GradientMachine = {Model, gradients}: runs forward and backward, and holds the gradients.

machine = GradientMachine(model)            # one for each thread that trains
machine.backward(images=images, labels=labels)
machine.gradient("fc_0/w")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from onward.core.errors import NotPickled, StateError, UnknownNameError, nearest
from onward.core.program import Variable
from onward.core.walk import Where, find, listed, select
from onward.derive.backward import append_backward
from onward.execute.out import Out
from onward.execute.state import State
from onward.execute.step import Step
from onward.fit.model import Model, expect_model


class GradientMachine(NotPickled):
    """Computes the gradients of a Model's parameters; changes none of them.

    Statistics that the network itself carries (batch normalization) go on, as in any training step.

    Args:
        model: whose parameters are read as they are at each ``backward``.
        parameter_list: the parameters to differentiate, by name, pattern or predicate; all unless given.
        activations: names of further Variables that ``backward`` should return.
        number: machines of other numbers draw other random keys from the same model.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
        >>> machine = ow.GradientMachine(ow.Model(network))
        >>> out = machine.backward(x=np.ones((4, 3)), y=np.zeros((4, 1)))
        >>> machine.gradient("fc_0/w").shape
        (3, 1)
    """

    unpickled = ("A GradientMachine", "It holds nothing of its own: GradientMachine(model) is another one.")

    def __init__(
        self,
        model: Model,
        parameter_list: Iterable[Where] | None = None,
        activations: Iterable[str | Variable] = (),
        number: int = 0,
    ) -> None:
        expect_model(model, "GradientMachine")
        self.model, self.number = model, number
        self._keys: dict[str, Any] = {}
        self._out: Out | None = None
        chosen = None
        if parameter_list is not None:
            chosen = tuple(
                v.name for v in select(model.topology.parameters, listed(parameter_list), "parameter_list")
            )
        fetch = tuple(find(model.topology, name).name for name in activations)
        self._step = model.once(("backward", chosen, fetch), lambda: _backward_step(model, chosen, fetch))
        self.names = {p.name: g.name for p, g in self._step.program.gradients}

    def backward(self, *data: Any, **feed: Any) -> Out:
        """Run forward and backward on a batch; ``out.loss`` is the loss.

        Raises:
            ArgumentError: data of the wrong name, number, shape or dtype.
        """
        state, self._out = self._step(self._with_own_keys(self.model.together), *data, **feed)
        if self._step.layout.changed:
            self._keep(state)
        return self._out

    def gradient(self, parameter: Any) -> Any:
        """The gradient of a parameter in the last ``backward``.

        Raises:
            StateError: nothing was run backward yet.
            UnknownNameError: no such parameter is differentiated.
        """
        name = getattr(parameter, "name", parameter)
        if name not in self.names:
            raise UnknownNameError(
                f"There is no gradient of a parameter {name!r}. {nearest(str(name), self.names)}"
            )
        return self._last()[self.names[name]]

    @property
    def gradients(self) -> Mapping[str, Any]:
        """The gradients of the last ``backward``, by the name of their parameter."""
        out = self._last()
        return {name: out[gradient] for name, gradient in self.names.items()}

    def activation(self, name: str | Variable) -> Any:
        """One of the activations that the machine was made to return, as the last ``backward`` had it."""
        return self._last()[name]

    def _last(self) -> Out:
        if self._out is None:
            raise StateError("There are no gradients yet: call backward(...) first.")
        return self._out

    def _with_own_keys(self, state: State) -> State:
        """The model's State; for a machine with a number, its own random keys in it."""
        if not self.number:
            return state
        names = [v.name for v in state.layout.variables if v.is_key]
        own = {n: self._keys.get(n, jax.random.fold_in(state[n], self.number)) for n in names}
        return state.replace(own) if own else state

    def _keep(self, state: State) -> None:
        """Publish what the network itself carries to the next step; numbered machines keep their keys."""
        changed = {v.name: state[v] for v in self._step.layout.changed}
        if self.number:
            self._keys = {v.name: changed.pop(v.name) for v in self._step.layout.changed if v.is_key}
        with self.model.lock:
            current = self.model.state
            values = [
                changed.get(v.name, x) for v, x in zip(current.layout.variables, current.values, strict=True)
            ]
            self.model.publish(State(current.layout, values))

    def __repr__(self) -> str:
        return f"GradientMachine({self.model!r})"


def _backward_step(model: Model, chosen: tuple[str, ...] | None, fetch: tuple[str, ...]) -> Step:
    program = append_backward(model.topology, None, chosen)
    return Step(program, [*(g for _, g in program.gradients), *fetch], donate=False, ahead=False)
