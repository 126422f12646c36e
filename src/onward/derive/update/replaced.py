"""Refuse randomness and statistics that a training Program carries and no step replaces.

Dropout of a library that keeps its key in the model would draw one mask forever, and statistics of batches
would never move. Both show in the ops: a draw that nothing decides but what stays the same, and a next value
that is computed and read by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from onward.core.errors import ArgumentError
from onward.core.jaxprs.drawing import Deciding, DrawsAlike
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Primitive, Runs
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, needed_ops
from onward.core.words import Kind

_PASSED = """Pass what changes from step to step as state, and return its next value beside the loss:
{recipe}
{instead}The how-to "Bring your own model" has it for flax, equinox and haiku."""
_FED = "Or feed a new key with every batch: loss(params, x, key). "
_RETURNED = (
    "It is passed as state= and comes back as it was. Return its next value beside the loss; with flax.nnx "
    "that is nnx.state(model, nnx.Not(nnx.Param)) after the call."
)
_DECLARED = "It is declared and gets no next value. Write onward.assign({name!r}, value)"

_RECIPES = {
    "flax.nnx": """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest)
        ...
        return value, nnx.state(model, nnx.Not(nnx.Param))

    optimizer.minimize(loss, params, x, state=rest)
""",
    "equinox": """
    model, state = eqx.nn.make_with_state(Model)(key=key)

    def loss(model, state, x):
        out, state = model(x, state)
        ...
        return value, state

    optimizer.minimize(loss, model, x, state=state)
""",
    "": """
    def loss(params, state, x):
        out, state = ...  # linen: apply(..., mutable=["batch_stats"]); haiku: transform_with_state
        ...
        return value, state

    optimizer.minimize(loss, params, x, state=state)
""",
}
_STATISTICS = {"BatchStat": "flax.nnx", "State": "equinox"}  # classes that hold what is never trained


def expect_replaced(program: Program) -> None:
    """Raise ``ArgumentError`` for randomness and statistics that are carried and stay as they are.

    Randomness is what alone decides a draw: a key that is folded with data, or with a counter that is
    replaced, may stay. A statistic is what the loss does not read, or what is not a float, where a next value
    of the same type is computed from it and read by nobody.
    """
    if found := _drawn_alike(program):
        raise ArgumentError(
            f"Every step of {program.name} would draw the same random numbers: they are decided by "
            f"{_listed(found)} alone, which no step replaces. {_advice(program, found[0], random=True)}"
        )
    if found := _left_behind(program):
        raise ArgumentError(
            f"No step of {program.name} would replace {_listed(found)}, of which a next value is computed "
            f"and read by nobody. {_advice(program, found[0])}"
        )
    if found := _trained_statistics(program):
        raise ArgumentError(
            f"{program.name} would train {_listed(found)}, which its library keeps as statistics, not as "
            f"parameters. {_advice(program, found[0])}"
        )


def _stays(program: Program, v: Variable) -> bool:
    return v.kind is Kind.STATE and program.next_state.get(v, v) is v


def _drawn_alike(program: Program) -> list[Variable]:
    """The state that alone decides a draw, and that no step replaces."""
    env: dict[Variable, Deciding] = dict.fromkeys(program.constants, frozenset())
    env.update({v: frozenset({v}) for v in program.state if _stays(program, v) and not v.is_float})
    if len(env) == len(program.constants):
        return []
    walk = DrawsAlike()
    for op in program.ops:
        given = [env.get(v) for v in op.inputs]
        env.update(zip(op.outputs, walk.run(op.body, given), strict=True))
    return [v for v in program.state if v in walk.decided]


def _left_behind(program: Program) -> list[Variable]:
    """The state and parameters whose next value is computed but never read.

    A parameter that is one number, a temperature say, may be in a metric that the function drops.
    """
    results = {*program.outputs, *program.next_state.values(), *(g for _, g in program.gradients)}
    needed = {v for op in needed_ops(program, results) for v in op.inputs}
    unused = [
        v
        for v in program.state
        if (_stays(program, v) and not (v.is_float and v in needed))
        or (v.kind is Kind.PARAMETER and v.shape and v not in needed | results)
    ]
    if not unused:
        return []
    read = {v for op in program.ops for v in op.inputs}
    ends = {v for op in program.ops for v in op.outputs} - read - results
    lost = {v for v in unused if v.kind is Kind.PARAMETER}

    def is_own(end: Variable) -> bool:
        """Whether it is not a result of a layer of several parameters that the loss does not use."""
        return len(lost & ancestors(program, end)) < 2

    return [v for v in unused if any(map(is_own, _ends_of(program, v, ends)))]


def _ends_of(program: Program, v: Variable, ends: set[Variable]) -> Iterator[Variable]:
    """The ends that are a value of this Variable's type, computed from it through values of its shape."""
    reached = {v}
    for op in program.ops:
        if reached.isdisjoint(op.inputs) or _is_product(op):
            continue
        after = op.body.depending_on(i for i, given in enumerate(op.inputs) if given in reached)
        made = [w for j, w in enumerate(op.outputs) if j in after and w.shape == v.shape]
        reached.update(made)
        yield from (w for w in made if w in ends and w.dtype == v.dtype)


def _is_product(op: Op) -> bool:
    """Whether it only multiplies matrices: no next value of either, though a batch may give it the shape."""
    rows = list(map(of, op.body.primitives))
    return any(row.is_product for row in rows) and all(map(_stands_beside_a_product, rows))


def _stands_beside_a_product(row: Primitive) -> bool:
    """Whether it is one, or only lays out what one reads."""
    return row.is_product or row.keeps_order or row.moves is Moves.PERMUTES or row.runs is Runs.CALL


def _trained_statistics(program: Program) -> list[Variable]:
    """The parameters with a gradient that their library keeps as statistics."""
    if program.signature is None:
        return []
    parameters = program.signature.parameters
    tree = parameters.unflatten(parameters.variables)
    nodes = jax.tree.leaves(tree, is_leaf=_holds_statistics)
    held = {v for node in nodes if _holds_statistics(node) for v in jax.tree.leaves(node)}
    return [p for p, _ in program.gradients if p in held]


def _holds_statistics(node: Any) -> bool:
    """Whether the class of a container is one in which a library keeps statistics."""
    return any(
        base.__module__.startswith(f"{_STATISTICS.get(base.__name__, '?')}.") for base in type(node).__mro__
    )


def _advice(program: Program, v: Variable, random: bool = False) -> str:
    """Advice on what to write instead, by where the Variable comes from."""
    signature = program.signature
    if signature is None or v in signature.parameters.variables:
        recipe = _RECIPES[_library_of(program)]
        return _PASSED.format(recipe=recipe, instead=_FED * random)
    if signature.model_state is not None and v in signature.model_state.variables:
        return _RETURNED
    return _DECLARED.format(name=v.name) + (", or take onward.key()." if random else ".")


def _library_of(program: Program) -> str:
    """The library whose containers the parameters came in; empty where they are anybody's."""
    if program.signature is None:
        return ""
    parameters = program.signature.parameters
    modules: list[str] = []

    def seen(node: Any) -> bool:
        modules.extend(base.__module__ for base in type(node).__mro__)
        return False

    jax.tree.leaves(parameters.unflatten(parameters.variables), is_leaf=seen)
    return next((lib for lib in _RECIPES if lib and any(f"{m}.".startswith(f"{lib}.") for m in modules)), "")


def _listed(found: Iterable[Variable]) -> str:
    return ", ".join(f"{v.name!r} ({v.type})" for v in found)
