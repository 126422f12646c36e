"""State that the forward pass carries on: what of it is the whole batch's, and what micro-batches hand on.

A count of steps moves on once, and so does a random key. What is made of examples is put together like any
result: a running mean is that of the whole batch. State of which nothing is known goes from one micro-batch
to the next.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, state, x):
...     mean = jnp.mean(x @ w)
...     return mean, {"mean": 0.9 * state["mean"] + 0.1 * mean, "steps": state["steps"] + 1}
>>> part = ow.trace(loss, jnp.ones(3), jnp.ones((4, 3)), state={"mean": jnp.ones(()), "steps": 0})
>>> state = part.next_state
>>> [v.name for v in made_of(part, ["x"], state)], [v.name for v in keys_in(part, state)]
(['state/mean'], [])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from onward.core.marks import OF_WHOLE_BATCH
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, descendants, producers
from onward.core.words import Pass
from onward.develop.over_batch.known import SAME, Following, Follows, How

State = Mapping[Variable, Variable]  # with what replaces it


def made_of(program: Program, split: Iterable[str], state: State) -> State:
    """Of some state that which is made of these data, not of what was carried on before alone.

    What is read of the whole batch differs from none of its micro-batches to another; and what a loaded
    Program updates is nothing that its forward pass carries on.
    """
    ops = (op for op in program.ops if op.type is not OF_WHOLE_BATCH and op.made_by is not Pass.UPDATE)
    program = replace(program, ops=tuple(ops))
    varies = descendants(program, [v for v in program.inputs if v.name in set(split)])
    return {old: new for old, new in state.items() if new in varies}


def keys_in(program: Program, state: State) -> State:
    """Of some state that which random keys are made of, and which one of these keys replaces."""
    ops = [op for op in program.ops if any(of(primitive).makes_keys for primitive in op.body.primitives)]
    read = ancestors(program, [v for op in ops for v in op.inputs])
    made = descendants(program, [v for op in ops for v in op.outputs])
    return {old: new for old, new in state.items() if old in read and new in made}


def untold(part: Program, following: Following, after: Collection[Op], state: State) -> State:
    """Of some state that of which the whole's next value does not follow from those of the parts.

    Running statistics of one array belong together, such as its mean and variance: if it does not of one, it
    is taken to do so of none.

    Args:
        part: the forward Program of a part.
        following: how it follows that of the whole.
        after: the ops that run once, on values of the whole.
        state: made of data.
    """
    held = {v for op in after for v in op.outputs}
    left = {o: new for o, new in state.items() if not _follows(part, following, new, new in held)}
    return {**left, **beside(part, following, left, state)}


def beside(part: Program, following: Following, some: State, state: State) -> State:
    """The state that is made of statistics of the same arrays as some other state."""
    arrays = {v for new in some.values() if new.is_float for v in _reduced(part, following, new)}
    floats = {old: new for old, new in state.items() if new.is_float}
    return {old: new for old, new in floats.items() if arrays & _reduced(part, following, new)}


def _reduced(part: Program, following: Following, new: Variable) -> set[Variable]:
    """The arrays over examples of which a value reads statistics."""
    needed = ancestors(part, [new])
    kinds = {v: following.found[v].kind for v in needed if v in following.found}
    ops = (op for op in part.ops if any(kinds.get(v, How.ROWS) is not How.ROWS for v in op.outputs))
    return {v for op in ops for v in op.inputs if kinds.get(v) is How.ROWS}


def _follows(part: Program, following: Following, new: Variable, of_whole: bool) -> bool:
    """Whether a value of the whole is computed of what is known of it, or put together of the parts'."""
    found = following.found[new]
    is_sum, is_mean = found == Follows(How.MEAN, 1), found.kind is How.MEAN and found.power in (0, 1)
    fits = found == SAME or found.kind in (How.MOST, How.LEAST) or (is_mean if new.is_float else is_sum)
    return (of_whole or fits) and following.is_known(part, new)


def is_counted(part: Program, following: Following, old: Variable, new: Variable) -> bool:
    """Whether a sum over examples is added to state, in whatever parts, and nothing else reads it."""
    maker, same = producers(part).get(new), {old}
    casts = [op for op in part.ops if op.primitive.moves is Moves.ROUNDS and same.issuperset(op.inputs)]
    same.update(v for op in casts for v in op.outputs)
    if maker is None or not of(maker.type).adds:
        return False
    added = [v for v in maker.inputs if v not in same]
    ends = {part.loss, *part.outputs, *part.next_state.values()}
    others = (op for op in part.ops if op is not maker and op not in casts)
    is_read = not same.isdisjoint(ends) or any(not same.isdisjoint(op.inputs) for op in others)
    is_added_to = len(added) == len(maker.inputs) - 1
    return is_added_to and not is_read and all(following.found[v] == Follows(How.MEAN, 1) for v in added)
