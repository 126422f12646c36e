"""An optimizer is a frozen dataclass with an ``init`` and an ``update``; it inherits ``minimize``.

Nothing else is needed to write a new one:

>>> import jax.numpy as jnp, onward as ow
>>> class SignDescent(ow.Optimizer):
...     learning_rate: ow.Hyperparameter = 1e-3
...
...     def update(self, parameter, gradient, slots):
...         return parameter - self.learning_rate * jnp.sign(gradient), slots
>>> program = SignDescent(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
>>> [target.op.type for target in program.updates]
['count', 'sign_descent']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, LossError, known_as
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.walk import Where, listed, select
from onward.define.deferred import Deferred, derived
from onward.define.trace import trace
from onward.derive.backward import append_backward
from onward.derive.update.groups import OptimizerRule, Routing
from onward.derive.update.plan import UpdatePlan, plan_update
from onward.derive.update.replaced import expect_replaced
from onward.derive.update.update import append_update

_BACKWARD = "Here it is optimizer.create_backward_pass(cost, parameter_list=[...])."
_UPDATE = (
    "Here optimizer.create_optimization_pass(program) adds the update operators to what create_backward_pass "
    "returned."
)
_APPLY = "To apply gradients that were computed elsewhere: Trainer(model, optimizer).apply(gradients)."
_ELSEWHERE = {
    "_backward": _BACKWARD,
    "_update": _UPDATE,
    "append_backward": _BACKWARD,
    "apply_gradients": f"{_UPDATE} {_APPLY}",
    "backward": _BACKWARD,
    "compute_gradients": _BACKWARD,
    "state_dict": "What it keeps is in the State: ow.Checkpoints(folder).save(state, step_number).",
    "step": "Here a compiled Program takes the step: step = ow.compile(optimizer.minimize(loss, params, x)), "
    "then state, out = step(state, x). The number of updates, self.step, is for update and evaluated alone.",
    "zero_grad": "Each step computes new gradients, so there is nothing to set to zero.",
}  # what other libraries, and the early designs of Paddle, call its methods


class Optimizer(OptimizerRule):
    """The base of every optimizer: it derives the backward and the update operators of a Program.

    The gradient of a complex parameter comes as the direction of steepest ascent, the conjugate of what
    ``jax.grad`` returns.

    Args:
        rules: gradient rules and parameter rules (clipping, weight decay, averages...), in the order in which
            they act; gradient rules come before the optimizer, parameter rules after it.
        groups: parameters that are updated in a way of their own.
        slot_dtype: how slots as large as their parameter are kept: ``"bfloat16"`` or ``"float16"`` (rounded
            at random; the square of 2e-4 is the least that float16 holds), ``"int8"`` (in blocks of 256 that
            share a scale), or None for what the rule asks for, at least float32.
        low_precision: how parameters below float32 keep what their dtype cannot hold: ``"master"`` in a
            float32 slot ``rest`` (parameter + rest is the master weight), ``"stochastic"`` by rounding at
            random, ``"nearest"`` not at all.
        maximize: let the loss become larger by these parameters, as the discriminator of a GAN or the weights
            of an adversarial term do: the same as to minimize its negative, decay and clipping included.
            A group may do so alone: ``Group("critic/*", maximize=True)``.

    Raises:
        HyperparameterError: a hyperparameter is negative, infinite, not a number, or out of range.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)], groups=[ow.Group("b", frozen=True)])
        >>> params = {"w": jnp.ones(3), "b": jnp.ones(3)}
        >>> program = optimizer.minimize(lambda p: jnp.sum(p["w"] * p["b"]), params)
        >>> [target.op.type for target in program.updates]
        ['count', 'clip_by_global_norm', 'sgd']
    """

    if not TYPE_CHECKING:  # a type checker should know the methods that there are, and no other

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown attribute, and name the counterpart here of a method of other libraries."""
            advice = f" {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{advice}")

    def create_backward_pass(
        self,
        program: Any,
        loss: str | Variable | None = None,
        parameter_list: Iterable[Where] | None = None,
        no_grad_set: Iterable[Where] = (),
    ) -> Program:
        """Add the gradient operators, those of frozen parameters left out; see ``append_backward``.

        Args:
            program: a forward Program; or, as ``minimize`` takes it, a declared cost or a function that
                declares what it needs.
            loss: the Variable to differentiate; the function's loss unless given.
            parameter_list: the parameters to train; all unless given.
            no_grad_set: Variables through which no gradient flows.
        """
        if isinstance(loss, list | tuple):
            raise ArgumentError(
                f"create_backward_pass was given {describe(loss)} as the loss. To choose what is trained: "
                "create_backward_pass(cost, parameter_list=[...])."
            )
        chosen = None if parameter_list is None else tuple(listed(parameter_list))
        stopped = tuple(listed(no_grad_set))

        def derive(forward: Program) -> Program:
            return append_backward(forward, loss, self._trained(forward, chosen), stopped)

        return self._derived("create_backward_pass", program, derive)

    def create_optimization_pass(self, program: Any) -> Program:
        """Add the update operators for each pair (parameter, gradient) of ``program.gradients``.

        Args:
            program: what ``create_backward_pass`` returned, which holds the pairs.
        """
        if isinstance(program, list | tuple):
            raise ArgumentError(
                f"create_optimization_pass was given {describe(program)}; expected the Program that "
                "create_backward_pass returned: it holds the pairs of parameter and gradient, "
                "program.gradients, and the operators that make them."
            )
        if not isinstance(program, Deferred):
            return append_update(program, self)
        return self._derived("create_optimization_pass", program, lambda p: append_update(p, self))

    def minimize(
        self,
        loss: Any,
        *args: Any,
        parameter_list: Iterable[Where] | None = None,
        no_grad_set: Iterable[Where] = (),
        **trace_options: Any,
    ) -> Program:
        """Derive the training Program: forward, backward and update.

        The update of a complex parameter reads the conjugate of what ``jax.grad`` gives, which points uphill;
        ``grad(w)``, when fetched, is as ``jax.grad`` gives it.

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
            ArgumentError: randomness or statistics are carried, among the parameters or as ``state=``, that
                no step replaces: dropout would draw one mask forever, statistics would never move.

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
        _expect_trace_options(trace_options)

        def derive(forward: Program) -> Program:
            expect_replaced(forward)
            return self.create_optimization_pass(self.create_backward_pass(forward, None, chosen, stopped))

        if isinstance(loss, Program) and (args or trace_options):
            raise ArgumentError(
                "minimize was given a Program and also arguments to trace with. A Program is traced already: "
                "call minimize(program), or minimize(function, parameters, *data). To choose what is "
                "trained: minimize(program, parameter_list=[...])."
            )
        if callable(loss) and not isinstance(loss, Program):
            return derive(trace(loss, *args, **trace_options))
        if args:
            raise ArgumentError(
                f"minimize was given {describe(args[0])} beside the cost, which is not a function and takes "
                "no arguments. To choose what is trained: minimize(cost, parameter_list=[...])."
            )
        found = derived(loss, derive, trace_options)
        if found is None:
            raise ArgumentError(
                f"minimize was given {type(loss).__name__!r} as the loss. Give the loss function itself and "
                "its arguments, minimize(loss, params, images, labels), not the number that it returned."
            )
        return cast("Program", found)

    def plan(self, program: Program) -> UpdatePlan:
        """The plan of what this optimizer will do with each parameter of a Program, and in which order.

        Args:
            program: a Program with or without backward and update pass.

        Raises:
            UnknownNameError: the pattern of a group or rule that no parameter matches.
            HyperparameterError: two groups for one parameter.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> forward = ow.trace(lambda w: jnp.sum(w), jnp.ones(100))
            >>> plan = ow.Adam(1e-3, slot_dtype="bfloat16").plan(forward)
            >>> plan["w"].by, plan["w"].slot_bytes
            ('adam', 400)
        """
        return plan_update(program, self)

    def _derived(self, what: str, network: Any, derive: Callable[[Program], Program]) -> Program:
        """Apply a pass to a Program, a declared cost, or a function that declares what it needs."""
        found = derived(network, derive)
        if found is None:
            expect_program(network, f"{type(self).__name__}.{what}")
        return cast("Program", found)

    def _trained(self, program: Program, chosen: Iterable[Where] | None) -> Iterable[Where] | None:
        """The parameters to train without the frozen ones; ``chosen`` itself if none is frozen."""
        routing = Routing.of(self, program.parameters)
        if not any(route.frozen for route in routing):
            return chosen
        wanted = (
            program.parameters if chosen is None else select(program.parameters, chosen, "parameter_list")
        )
        trained = [p for p in wanted if not routing[p].frozen]
        if wanted and not trained:
            names = ", ".join(repr(p.name) for p in wanted[:5])
            raise LossError(
                f"{program.name!r}: the groups of the optimizer freeze all parameters that are to be trained "
                f"({names}), so that there is nothing to train. Let frozen=True meet fewer of them."
            )
        return trained


_OF_TRACE = tuple(p.name for p in inspect.signature(trace).parameters.values() if p.kind is p.KEYWORD_ONLY)


def _expect_trace_options(options: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for what neither ``minimize`` nor ``trace`` takes, where it is written."""
    known = ("parameter_list", "no_grad_set", *_OF_TRACE)
    for name in options:
        if name not in known:
            raise ArgumentError(
                f"minimize has no argument {name!r}. {known_as(name, known)} The loss itself is given its "
                "arguments by place: minimize(loss, params, x, y)."
            )
