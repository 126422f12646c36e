"""What an optimizer is: a frozen dataclass with an ``init`` and an ``update``; and ``minimize``.

Nothing else is needed to write a new one:

>>> import jax.numpy as jnp, onward as ow
>>> class SignSGD(ow.Optimizer):
...     learning_rate: ow.Hyperparameter = 1e-3
...
...     def update(self, parameter, gradient, slots, hyperparameters):
...         return parameter - hyperparameters.learning_rate * jnp.sign(gradient), slots
>>> program = SignSGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
>>> [target.op.type for target in program.updates]
['count', 'sign_sgd']

A field annotated ``Hyperparameter`` becomes a float32 state Variable, or follows a schedule; a field of
any other type, a plain ``float`` too, is fixed when the Program is derived.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast, dataclass_transform

import jax

from onward.core.errors import ArgumentError, HyperparameterError, nearest
from onward.core.program import Program, Variable
from onward.core.walk import Where, listed
from onward.core.words import UpdateType
from onward.define.deferred import Deferred
from onward.define.lazy import has_lazy
from onward.define.trace import trace
from onward.derive.backward import append_backward
from onward.derive.update import append_update

Schedule = Callable[[jax.Array], jax.Array]
Hyperparameter = float | Schedule
Slots = Mapping[str, jax.Array]


@dataclass_transform(frozen_default=True, kw_only_default=False)
@dataclass(frozen=True)
class Optimizer:
    """The base of every optimizer: it derives the backward and the update operators of a Program.

    A subclass is a frozen dataclass without being told so. ``type`` says how far its rule looks; with
    ``ACROSS`` the rule takes tuples over all parameters in place of single arrays. A rule that sets
    ``evaluates_loss`` is given one more argument: a function from parameters to the loss. The
    hyperparameters named in ``below_one`` must be less than 1. The gradient of a complex parameter comes as
    the direction of steepest ascent, the conjugate of what ``jax.grad`` returns.

    Raises:
        HyperparameterError: a hyperparameter is negative, infinite, not a number, or out of range.
    """

    type: ClassVar[UpdateType] = UpdateType.ELEMENTWISE
    evaluates_loss: ClassVar[bool] = False
    below_one: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
        if "step" in cls.__dataclass_fields__:
            raise HyperparameterError(
                f"{cls.__name__} has a field named 'step', but hyperparameters.step is the number of updates "
                "made before this one. Give the field another name."
            )
        if cls.evaluates_loss and cls.type is not UpdateType.ACROSS:
            raise HyperparameterError(
                f"{cls.__name__} evaluates the loss, which depends on all parameters: set type = "
                "UpdateType.ACROSS and take tuples of parameters, gradients and slots."
            )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse a hyperparameter that does not exist, and offer the nearest."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                names = cls.__dataclass_fields__
                raise HyperparameterError(
                    f"{cls.__name__} has no hyperparameter {name!r}. {nearest(name, names)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.hyperparameters.items():
            if not callable(value):
                self.check_hyperparameter(name, value)

    def init(self, parameter: jax.Array) -> Slots:
        """The slots of one parameter before the first step, by name; none unless overridden."""
        return {}

    def update(
        self, parameter: Any, gradient: Any, slots: Any, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Any]:
        """The next parameter and the next slots.

        ``hyperparameters`` has every hyperparameter by its name, and ``step``: the number of updates
        made before this one, int32.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to update a parameter")

    def evaluated(self, parameter: Any, slots: Any, hyperparameters: SimpleNamespace) -> Any:
        """The parameter to evaluate a model with, where it is not the one that is trained."""
        return parameter

    def route(self, parameter: Variable) -> Optimizer:
        """The optimizer of one parameter, where a rule is not fit for all of them; this one by default."""
        return self

    @property
    def name(self) -> str:
        """The type of its update ops: the class name in lower case."""
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", type(self).__name__)
        return "_".join(words).lower() or type(self).__name__

    @property
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """The fields that may change while training, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if _is_hyperparameter(f.type)}

    @classmethod
    def check_hyperparameter(cls, name: str, value: Any) -> None:
        """Raise ``HyperparameterError`` unless this is a finite number that is not negative."""
        try:
            number = math.nan if isinstance(value, bool) else float(value + 0)
        except (TypeError, ValueError):
            raise HyperparameterError(
                f"{cls.__name__}: {name} is {value!r}. Give a number, or a schedule: a function of the step."
            ) from None
        if not math.isfinite(number) or number < 0:
            raise HyperparameterError(
                f"{cls.__name__}: {name} is {number}. It must be a finite number of at least 0."
            )
        if name in cls.below_one and number >= 1:
            raise HyperparameterError(f"{cls.__name__}: {name} is {number}. It must be less than 1.")

    def create_backward_pass(
        self,
        program: Program,
        loss: str | Variable | None = None,
        parameter_list: Iterable[Where] | None = None,
        no_grad_set: Iterable[Where] = (),
    ) -> Program:
        """Add the gradient operators; see ``append_backward``."""
        return append_backward(program, loss, parameter_list, no_grad_set)

    def create_optimization_pass(self, program: Program) -> Program:
        """Add one update operator for each pair (parameter, gradient) of ``program.gradients``."""
        return append_update(program, self)

    def minimize(
        self,
        loss: Any,
        *args: Any,
        parameter_list: Iterable[Where] | None = None,
        no_grad_set: Iterable[Where] = (),
        **trace_options: Any,
    ) -> Program:
        """Derive the training Program: forward, backward and update.

        Args:
            loss: a pure function ``loss(parameters, *data)``, or a forward Program; or a Lazy cost that
                layers returned outside of a trace. Where such a cost leaves shapes open, a ``Deferred``
                comes back, which a Session completes at its first feed.
            args: for a function, the parameters and the data to trace it with, or their shapes.
            parameter_list: the parameters to train; all unless given.
            no_grad_set: Variables through which no gradient flows.
            trace_options: for a function, further arguments of ``trace``, such as ``has_aux``.

        Raises:
            TraceError, LossError, UnknownNameError: see ``trace`` and ``append_backward``.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> def loss(w, x):
            ...     return jnp.sum(w * x)
            >>> program = ow.SGD(0.1).minimize(loss, jnp.ones(3), jnp.ones(3))
            >>> program
            Program('loss', 7 ops)
        """
        chosen = None if parameter_list is None else tuple(listed(parameter_list))
        stopped = tuple(listed(no_grad_set))
        if isinstance(loss, Program):
            if args or trace_options:
                raise ArgumentError(
                    "minimize was given a Program and also arguments to trace with. A Program is traced "
                    "already: call minimize(program), or minimize(function, parameters, *data)."
                )
            program = loss
        elif callable(loss):
            program = trace(loss, *args, **trace_options)
        elif isinstance(loss, Deferred) or has_lazy(loss):
            later = loss if isinstance(loss, Deferred) else Deferred(loss, trace_options)
            whole = later.then(lambda p: self.minimize(p, parameter_list=chosen, no_grad_set=stopped))
            return whole.complete({}) if later.is_complete else cast("Program", whole)
        else:
            raise ArgumentError(
                f"minimize was given {type(loss).__name__!r} as the loss. Give the loss function itself and "
                "its arguments, minimize(loss, params, images, labels), not the number that it returned."
            )
        program = self.create_backward_pass(program, None, chosen, stopped)
        return self.create_optimization_pass(program)


def _is_hyperparameter(annotation: Any) -> bool:
    """Whether a field is annotated ``Hyperparameter``, be it as a string (as dataclasses do for ClassVar)."""
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] == "Hyperparameter"
    return bool(annotation == Hyperparameter)
