"""``low_rank``: train two thin factors beside each weight in place of the weight."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from onward.core.builder import Builder
from onward.core.errors import ArgumentError, GraphError, RecipeError, known_as
from onward.core.marks import DEQUANTIZE
from onward.core.program import Applied, Op, Phase, Program, Variable
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.transform import transform
from onward.core.walk import Where, listed, substitute
from onward.core.words import Kind
from onward.define import initializer
from onward.define.assembly import initialization
from onward.define.trace import takes_arguments, trace
from onward.derive.low_rank.adapters import Adapter, LowRank, adapters_of, picked
from onward.derive.low_rank.base import held
from onward.derive.low_rank.within import woven
from onward.derive.update.foreign import append_foreign_update


def low_rank(
    loss: Any,
    *args: Any,
    rank: int = 8,
    where: Where | Iterable[Where] | None = None,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    base: str | None = None,
    train: Where | Iterable[Where] = (),
    **trace_options: Any,
) -> Program:
    """Train two thin factors beside each weight in place of the weight; all else is frozen.

    Each product that reads a weight ``w`` gets ``(alpha / rank) (x a) b`` beside it, whatever library wrote
    it, also where the weight is cast, reshaped or transposed before, and in a ``jax.lax.scan``, whose stacked
    weights get stacked factors. The factors are the parameters now:
    ``w/low_rank_a``, the inputs of the weight by the rank, begins with normal numbers of variance one over
    the inputs; ``w/low_rank_b``, the rank by the outputs, with 0. So nothing is changed at first, and
    ``step.init(params)`` takes the parameters as before. What is frozen has no gradient and no slots. Factors
    of 16-bit weights are float32.

    ``merge_low_rank`` multiplies out, and gives plain weights in your containers.

    Args:
        loss: a pure function ``loss(parameters, *data)``, or a Program that was traced, minimized or not.
        args: for a function, the parameters and the data to trace it with, or their shapes.
        rank: of the factors, at most the fewer of a weight's inputs and outputs.
        where: the weights: names, patterns (``"*attention*/w*"``), Variables or predicates; unless given
            all that products read and nothing else, but for those with fewer inputs or outputs than ``rank``.
        alpha: the scale times the rank; the rank unless given, for a scale of 1.
        rank_stabilized: scale by ``alpha / sqrt(rank)``.
        base: how the adapted weights are kept: ``"bfloat16"``, or ``"int8"`` with a scale for each output,
            the largest of its numbers over 127. They are rounded once, by ``init``, and computed with as they
            were given; None leaves them as they are.
        train: parameters to train as a whole, such as those of norms or a new head.
        trace_options: for a function, further arguments of ``trace``, such as ``has_aux``.

    Raises:
        GraphError: a weight that something else than a product reads; nothing to adapt; adapted already; an
            adopted step.
        UnknownNameError: a name or pattern that no parameter has.
        HyperparameterError: a rank or alpha out of range.
        ArgumentError: another base, a parameter in both ``where`` and ``train``, or wrong arguments to trace.
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1; with
    ``rank_stabilized`` Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023. A
    frozen base of few bits: Dettmers et al., QLoRA, 2023, with int8 in place of NF4.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params["w"] + params["b"]) ** 2)
        >>> params = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
        >>> program = ow.SGD(0.1).minimize(ow.low_rank(loss, params, jnp.ones((8, 6)), rank=2))
        >>> [(v.name, v.type) for v, _ in program.gradients]
        [('w/low_rank_a', 'float32[6,2]'), ('w/low_rank_b', 'float32[2,4]')]
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(params), jnp.ones((8, 6)))
        >>> jnp.array_equal(state["w"], params["w"]).item()
        True
    """
    chosen = None if where is None else tuple(listed(where))
    given = LowRank(chosen, rank, alpha, rank_stabilized, base, tuple(listed(train)))
    program = _program(loss, args, trace_options)
    recipe = recipe_of(program, "with factors", "Write them yourself")
    if recipe.of(adapted):
        raise GraphError(
            f"low_rank: {program.name!r} is adapted already. Name all weights in one call: where=[...]."
        )
    if recipe.of(append_foreign_update):
        raise GraphError(
            f"low_rank: the update of {program.name!r} was adopted as it is, for the parameters that it has "
            "now, and factors would take their place. Adapt the loss and minimize that: "
            "onward.from_optax(optimizer).minimize(onward.low_rank(loss, params, x, rank=8))."
        )
    return build(recipe.including(Applied(adapted, (given,), {}, Phase.ADAPT)), whole_types(program))


def _program(loss: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Program:
    """The Program to adapt: traced, if a function was given."""
    if isinstance(loss, Program):
        if args or options:
            raise ArgumentError(
                "low_rank was given a Program and also arguments to trace with. A Program is traced already: "
                "low_rank(program, rank=8, where=...)."
            )
        return loss
    if callable(loss) and not args and takes_arguments(loss):
        raise ArgumentError(
            "low_rank was given a function and nothing to trace it with; expected its parameters and data, "
            "or their shapes: low_rank(loss, params, x, y, rank=8, where=...)."
        )
    for name in options:
        if name not in _OF_TRACE:
            found = known_as(name, (*_OWN, *_OF_TRACE))
            raise ArgumentError(
                f"low_rank has no argument {name!r}. {found} The loss itself is given its "
                "arguments by place: low_rank(loss, params, x, y)."
            )
    return trace(loss, *args, **options)


def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


_OWN, _OF_TRACE = _keywords(low_rank), _keywords(trace)


@transform(phase=Phase.ADAPT)
def adapted(program: Program, given: LowRank) -> Program:
    """The forward pass with factors beside the products that read the chosen weights; see ``low_rank``."""
    if program.code is not None:
        raise GraphError(
            f"low_rank: {program.name!r} was loaded from {program.code.file}, which holds no products to "
            "adapt. Adapt the function that was saved: low_rank(loss, params, *data)."
        )
    adapters = adapters_of(program, given)
    whole = picked(program, given.train, "low_rank, train")
    if both := [a.weight.name for a in adapters if a.weight in whole]:
        raise ArgumentError(
            f"low_rank: {both[0]!r} is in where= and in train=; expected either, factors beside it or the "
            "whole of it."
        )
    grown = _woven(program, adapters, given)
    frozen = {v: replace(v, kind=Kind.FROZEN) for v in program.parameters if v not in whole}
    return substitute(grown, frozen)


def _woven(program: Program, adapters: list[Adapter], given: LowRank) -> Program:
    """The Program with the ops and the state of these factors."""
    builder = Builder(program)
    pairs = [(reader, adapter) for adapter in adapters for reader in adapter.readers]
    for adapter in adapters:
        for factor in (adapter.a, adapter.b):
            builder.names.new(factor.name)
    made = _held(builder, adapters, given.base)
    for op in woven(program.ops, pairs, given.scale, builder.names):
        for v in op.inputs:
            if v in made:
                builder.append(made.pop(v))
        builder.append(op)
    for adapter in adapters:
        builder.state += [adapter.a, adapter.b]
        builder.initializers += _first(adapter)
    return builder.program()


def _held(builder: Builder, adapters: list[Adapter], base: str | None) -> dict[Variable, Any]:
    """Keep the weights in fewer bits; for each the op that makes it of that."""
    if base is None:
        return {}
    pairs = {a.weight: held(a.weight, base, a.axes.inputs, builder.names.new) for a in adapters}
    kept = tuple(v for v in builder.source.state if v not in pairs)
    builder.source = replace(builder.source, state=kept)
    for first, _ in pairs.values():
        builder.state += first.outputs
        builder.initializers.append(first)
    return {v: op for v, (_, op) in pairs.items()}


def _first(adapter: Adapter) -> list[Any]:
    """The initializers of the factors."""
    inputs = adapter.axes.count(adapter.weight.shape, adapter.axes.inputs)
    normal = initializer.normal(1 / math.sqrt(inputs))
    return [initialization(adapter.a, normal), initialization(adapter.b, initializer.constant(0.0))]


def weights_made_of_fewer_bits(program: Program) -> Mapping[str, Op]:
    """For each weight that is kept in fewer bits the op that makes it of them, wherever loops now hold it."""
    recipe = recipe_of(program, "to find its weights", "Take the Program that low_rank returned")
    forward = build(recipe.until(Phase.PRECISION), whole_types(program))
    return {op.outputs[0].name: op for op in forward.ops if op.type is DEQUANTIZE}


def adapters_in(program: Program) -> tuple[LowRank, list[Adapter]] | None:
    """The arguments of ``low_rank`` and the weights that it adapted; None of a Program without factors.

    Raises:
        RecipeError: its ops were changed by hand, or it has factors and was loaded from a file.
    """
    recipe = recipe_of(program, "to find its factors", "Take the Program that low_rank returned")
    steps = recipe.of(adapted)
    if not steps:
        if any(v.kind is Kind.FROZEN for v in program.state):
            raise RecipeError(
                f"{program.name!r} was loaded from a file, which holds the factors of low_rank, and not by "
                "which axes and which scale they are multiplied out. Where the code is: "
                "plain = ow.merge_low_rank(program, state), with the Program that was saved, which takes the "
                "State of the file as well; save(Model(trace(function, plain, x), plain), path) writes them."
            )
        return None
    (given,) = steps[0].arguments
    plain = build(recipe.until(Phase.PRECISION).without(adapted), whole_types(program))
    return given, adapters_of(plain, given)
