"""From a forward Program to forward + backward: one gradient op for each op on the path.

For a forward op F between a wanted Variable and the target, the gradient op reads what JAX's rule for
F really needs (inputs, outputs, residuals of F and the gradients of F's outputs) and computes the
gradients of those inputs of F that have one. Where F must save more than its inputs and outputs, F
becomes F with extra outputs. Where gradients meet, an explicit op adds them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, reduce
from operator import add
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.check import expect_program
from onward.core.errors import GraphError, LossError, UnreachedWarning
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.marks import ONES, SUM, gradient_type
from onward.core.names import Names
from onward.core.placement import expect_one_device
from onward.core.program import Op, Phase, Program, Variable
from onward.core.recipe import is_replay
from onward.core.source import user_level
from onward.core.transform import remembered, transform
from onward.core.walk import Where, ancestors, find, listed, producers, select
from onward.core.whole import expect_derivative, opened
from onward.core.words import Kind, Pass
from onward.derive.again import computed_again
from onward.derive.differentiate import DerivativeRule, flows, rule_for
from onward.derive.loss import check_targets, expect_floats, loss_of


@transform(phase=Phase.BACKWARD)
def append_backward(
    program: Program,
    loss: str | Variable | None = None,
    parameter_list: Iterable[Where] | None = None,
    no_grad_set: Iterable[Where] = (),
) -> Program:
    """Add the operators that compute the gradient of the loss for each parameter.

    The pairs (parameter, gradient) are in ``program.gradients``; the gradient of Variable ``h`` is
    named ``grad(h)``.

    Args:
        program: a forward Program.
        loss: the Variable to differentiate, a floating point scalar; the function's loss unless given.
        parameter_list: the parameters to train, by name, pattern, Variable or predicate; all unless
            given. The others cost nothing.
        no_grad_set: Variables through which no gradient flows.

    Raises:
        LossError: the loss is not a floating point scalar, is complex, or depends on none of the parameters.
        UnknownNameError: a name in ``parameter_list`` or ``no_grad_set`` that no Variable has.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> program = append_backward(program)
        >>> program.gradients
        ((Variable('w', float32[3], parameter), Variable('grad(w)', float32[3], gradient)),)
    """
    expect_one_device(program, "the backward pass")
    expect_derivative(program)
    program = opened(program)
    target = loss_of(program, loss)
    parameters = program.parameters
    if parameter_list is not None:
        parameter_list = tuple(listed(parameter_list))
        expect_floats(program, parameter_list)
        parameters = select(program.parameters, parameter_list, "parameter_list")
    elif not parameters:
        raise LossError(f"Program {program.name!r} has no parameters: its first argument holds no floats.")
    if not parameters:
        raise LossError(
            "parameter_list is empty: there is nothing to train. Leave it out to train everything."
        )
    stopped = select(tuple(program.variables.values()), no_grad_set, "no_grad_set")
    backward = _Backward(program, parameters, stopped)
    backward.seed(target, None)
    found = backward.run()
    pairs = tuple((p, g) for p in parameters if (g := found.get(p)) is not None)
    if not pairs:
        raise LossError(
            f"The loss {target.name!r} does not depend on any of "
            f"{', '.join(repr(p.name) for p in parameters[:5])}: there is nothing to train. Is the result "
            "computed from the parameters, and not cut off by jax.lax.stop_gradient?"
        )
    lost = [p.name for p in parameters if p not in found and p not in stopped]
    if lost and not is_replay():
        warnings.warn(
            f"The loss {target.name!r} does not reach {', '.join(map(repr, lost))}: no gradient, no update.",
            UnreachedWarning,
            stacklevel=user_level(),
        )
    return replace(backward.program(), gradients=pairs, loss=target)


def gradients(
    program: Program,
    targets: str | Variable | Sequence[str | Variable],
    inputs: str | Variable | Sequence[str | Variable],
    target_gradients: Sequence[str | Variable | None] | None = None,
) -> tuple[Program, tuple[Variable | None, ...]]:
    """Add the operators that compute the gradients of any Variables for any Variables.

    Applied to its own result it gives higher derivatives.

    Args:
        program: any Program.
        targets: the Variables to differentiate; several are summed.
        inputs: parameters, data or activations.
        target_gradients: for each target, the Variable that holds its gradient; ones unless given.

    Returns:
        The Program, and for each input its gradient, or None where no target depends on it.

    Raises:
        UnknownNameError: a name that no Variable has.
        LossError: a Variable that is not a floating point number; a complex target without a gradient.
        ArgumentError: target gradients whose number or types are not those of the targets.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda x: x ** 3, jnp.float32(2.0))
        >>> program, (first,) = gradients(program, "integer_pow", "x")
        >>> program, (second,) = gradients(program, first, "x")
        >>> step = ow.compile(program, fetch=[first, second])
        >>> _, out = step(step.init(jnp.float32(2.0)))
        >>> float(out[first]), float(out[second])
        (12.0, 12.0)
    """
    expect_program(program, "gradients")
    expect_one_device(program, "a gradient")
    expect_derivative(program)
    given, program = program, opened(program)
    chosen = [find(program, t) for t in listed(targets)]
    wanted = [find(program, v) for v in listed(inputs)]
    seeds = [
        None if g is None else find(program, g)
        for g in listed([None] * len(chosen) if target_gradients is None else target_gradients)
    ]
    check_targets(chosen, wanted, seeds)
    backward = _Backward(program, wanted, ())
    for target, seed in zip(chosen, seeds, strict=True):
        backward.seed(target, seed)
    found = backward.run()
    arguments = (chosen, wanted, seeds)
    result = remembered(given, backward.program(), _gradients_only, arguments, Phase.BACKWARD)
    return result, tuple(found.get(v) for v in wanted)


def _gradients_only(program: Program, *arguments: Any) -> Program:
    return gradients(program, *arguments)[0]


class _GradientOp:
    """An op of the backward pass whose outputs are named once it is known what else adds to them."""

    def __init__(
        self, kind: str, inputs: Sequence[Variable], body: Body, of: Op | None, scope: str = ""
    ) -> None:
        self.kind, self.inputs, self.body, self.of = kind, tuple(inputs), body, of
        self.scope = of.scope if of else scope
        self.outputs: list[Variable | None] = [None] * len(body.out_avals)

    def op(self) -> Op:
        return Op(
            type=self.kind,
            inputs=self.inputs,
            outputs=tuple(v for v in self.outputs if v is not None),
            body=self.body,
            made_by=Pass.BACKWARD,
            scope=self.scope,
            source=self.of.source if self.of else None,
            of=self.of.outputs[0] if self.of else None,
        )


class _Backward:
    """One walk over the ops in reverse: ``parts[v]`` holds the gradients of v found so far."""

    def __init__(self, program: Program, wanted: Sequence[Variable], stopped: Iterable[Variable]) -> None:
        self.source = program
        self.wanted = wanted
        self.names = Names(program.variables)
        self.stopped = set(stopped)
        self.active: set[Variable] = set()
        self.twice: set[Variable] = set()
        self.parts: dict[Variable, list[tuple[_GradientOp, int] | Variable]] = {}
        self.drafts: list[_GradientOp] = []
        self.saving: dict[Op, tuple[Op, ...]] = {}
        self.makers = producers(program)

    def seed(self, target: Variable, gradient: Variable | None) -> None:
        """Start from this gradient of a target; from ones where none is given."""
        if gradient is not None:
            self.parts.setdefault(target, []).append(gradient)
            return
        draft = _GradientOp(ONES, (), _ones(target.shape, target.dtype), None)
        self.drafts.append(draft)
        self.parts.setdefault(target, []).append((draft, 0))

    def run(self) -> dict[Variable, Variable]:
        """The gradients of the wanted Variables."""
        needed = ancestors(self.source, self.parts)
        self.twice = {op.of for op in self.source.ops if op.of and not needed.isdisjoint(op.outputs)}
        self.active = self.path(needed)
        total: dict[Variable, Variable] = {}
        for op in reversed(self.source.ops):
            given = [j for j, v in enumerate(op.outputs) if v in self.parts and v in self.active]
            chosen = [i for i, v in enumerate(op.inputs) if v in self.active]
            if given and chosen:
                for j in given:
                    if op.outputs[j] not in total:
                        total[op.outputs[j]] = self.total(op.outputs[j])
                self.differentiate(op, chosen, given, total)
        for v in self.wanted:
            if v in self.parts and v not in total:
                total[v] = self.total(v)
        return {v: total[v] for v in self.wanted if v in total}

    def path(self, needed: set[Variable]) -> set[Variable]:
        """The Variables through which a gradient flows from what is needed to what is wanted.

        An op that has no rule for all its outputs may have one for those whose gradient arrives, and none is
        asked of it if none arrives: which these are is known on the way back.
        """
        active = set(self.wanted) - self.stopped
        for op in self.source.ops:
            chosen = [i for i, v in enumerate(op.inputs) if v in active]
            flowing = [j for j, v in enumerate(op.outputs) if v in needed and self.lets_through(v)]
            if chosen and flowing:
                with suppress(*_HAS_NO_RULE):
                    flowing = flows(self.body(op), chosen, flowing)
                active.update(op.outputs[j] for j in flowing)
        return active

    def body(self, op: Op) -> Body:
        """The body to differentiate: without saved residuals, unless the gradient is differentiated too.

        A function with a rule of its own is differentiated by that rule the first time, and through what the
        rule computes the second time, as JAX does.
        """
        return op.body if op.primal is None or op.outputs[0] in self.twice else op.primal

    def lets_through(self, v: Variable) -> bool:
        """Whether a Variable can carry a gradient."""
        return v not in self.stopped and v.is_float

    def differentiate(
        self, op: Op, chosen: list[int], given: list[int], total: dict[Variable, Variable]
    ) -> None:
        """Append the gradient op of one forward op."""
        _expect_no_float8(op)
        body = self.body(op)
        rule = _rule_of(op, body, chosen, given)
        saved = self.residuals(op, rule, body)
        values = {"input": op.inputs, "output": op.outputs, "residual": saved}
        inputs = [
            total[op.outputs[r.position]] if r.source == "cotangent" else values[r.source][r.position]
            for r in rule.reads
        ]
        draft = _GradientOp(gradient_type(op.type), inputs, rule.backward, op)
        self.drafts.append(draft)
        for k, i in enumerate(rule.writes):
            self.parts.setdefault(op.inputs[i], []).append((draft, k))

    def residuals(self, op: Op, rule: DerivativeRule, body: Body) -> tuple[Variable, ...]:
        """The Variables that hold what the forward op saves for this rule."""
        count = len(body.out_avals)
        if rule.forward is None:
            return ()
        if op.body is rule.forward:
            return op.outputs[count:]
        base = op.outputs[0].name
        saved = tuple(
            Variable(self.names.new(f"saved({base})"), tuple(t.shape), t.dtype)
            for t in rule.forward.out_avals[count:]
        )
        if body is op.body:
            primal = op.primal or op.body
            self.saving[op] = (replace(op, outputs=op.outputs + saved, body=rule.forward, primal=primal),)
        elif saved:
            self.saving[op] = (op, self.again(op, rule.forward, saved))
        return saved

    def again(self, op: Op, forward: Body, saved: tuple[Variable, ...]) -> Op:
        """A second op beside one that already saves for another derivative; XLA merges what they share."""
        if op.body.has_effects:
            raise GraphError(
                f"{op!r} has an effect (a debug print, a callback) and is differentiated a second time; "
                "computing it again would repeat the effect. Ask for both derivatives in one call."
            )
        body, kept = forward.restricted(range(len(forward.out_avals) - len(saved), len(forward.out_avals)))
        return replace(op, inputs=tuple(op.inputs[i] for i in kept), outputs=saved, body=body, primal=None)

    def total(self, v: Variable) -> Variable:
        """The whole gradient of a Variable: its only part, or the sum of its parts."""
        parts = self.parts[v]
        name = self.names.new(f"grad({v.name})")
        whole = Variable(name, v.shape, v.dtype, Kind.GRADIENT)
        if len(parts) == 1:
            return self.named(parts[0], whole)
        terms = [
            self.named(part, Variable(self.names.new(name), v.shape, v.dtype, Kind.GRADIENT))
            for part in parts
        ]
        maker = self.makers.get(v)
        scope = maker.scope if maker is not None else ""
        draft = _GradientOp(SUM, terms, _sum(len(terms), v.shape, v.dtype), None, scope)
        self.drafts.append(draft)
        return self.named((draft, 0), whole)

    def named(self, part: tuple[_GradientOp, int] | Variable, v: Variable) -> Variable:
        """The Variable that holds this part of a gradient: ``v``, unless it has one already."""
        if isinstance(part, Variable):
            return part
        draft, k = part
        draft.outputs[k] = v
        return v

    def program(self) -> Program:
        """The Program with the backward pass at its end."""
        forward = [new for op in self.source.ops for new in self.saving.get(op, (op,))]
        backward = (draft.op() for draft in self.drafts if any(draft.outputs))
        return replace(self.source, ops=(*forward, *computed_again(forward, backward, self.names)))


_HAS_NO_RULE = (TypeError, ValueError, NotImplementedError)  # what JAX raises


def _rule_of(op: Op, body: Body, chosen: list[int], given: list[int]) -> DerivativeRule:
    """The rule of an op, or a LossError that names the op which JAX cannot differentiate."""
    try:
        return rule_for(body, chosen, given)
    except _HAS_NO_RULE as error:
        why = str(error).splitlines()[0].removesuffix(".")
        raise LossError(
            f"{op.type}{op.at} has no gradient: {why}. If none is wanted, name its inputs in no_grad_set or "
            "use jax.lax.stop_gradient."
        ) from error


@lru_cache(maxsize=1024)
def _ones(shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda: [jnp.ones(shape, dtype)])


@lru_cache(maxsize=1024)
def _sum(count: int, shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda *terms: [reduce(add, terms)], *[Type(shape, dtype)] * count)


def _expect_no_float8(op: Op) -> None:
    """Raise ``GraphError`` for a gradient op that reads float8: its derivative would be rounded as well."""
    low = [v for v in op.inputs if v.is_float and np.dtype(v.dtype).itemsize == 1]
    if low and op.made_by is Pass.BACKWARD:
        raise GraphError(
            f"{op.type}{op.at} computes a gradient from {low[0].name!r} ({low[0].type}), and is to be "
            "differentiated again: a second derivative through numbers of 8 bits would be wrong. Take it of "
            'the Program without mixed_precision, or in "bfloat16".'
        )
