"""State that the forward pass carries on: what of it is the whole batch's, and what micro-batches hand on.

A count of steps moves on once. What is made of examples is put together like any result: a running mean is
that of the whole batch. Random keys go from one micro-batch to the next, and so does state of which nothing
is known.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, state, x):
...     mean = jnp.mean(x @ w)
...     return mean, {"mean": 0.9 * state["mean"] + 0.1 * mean, "steps": state["steps"] + 1}
>>> part = ow.trace(loss, jnp.ones(3), jnp.ones((4, 3)), state={"mean": jnp.ones(()), "steps": 0})
>>> [v.name for v in made_of(part, ["x"])], [v.name for v in drawn_with(part, ["x"])]
(['state/mean'], [])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, descendants, producers
from onward.develop.over_batch.known import SAME, Following, Follows, How

State = dict[Variable, Variable]  # with what replaces it


def made_of(part: Program, split: Iterable[str]) -> State:
    """The state that is made of these data, or of state that is."""
    given = {v for v in part.inputs if v.name in set(split)}
    while True:
        varies = descendants(part, given)
        found = {old: new for old, new in part.next_state.items() if new in varies}
        if given.issuperset(found):
            return found
        given |= found.keys()


def drawn_with(part: Program, split: Iterable[str]) -> State:
    """The state that random numbers are made of, or that is made of them and of no data."""
    keys, drawn = random_values(part)
    drawn = descendants(part, drawn)
    of_data = made_of(part, split)
    following = part.next_state.items()
    return {old: new for old, new in following if old in keys or (new in drawn and old not in of_data)}


def untold(part: Program, following: Following, after: Collection[Op], state: State) -> State:
    """Of some state that of which the whole's next value does not follow from those of the parts.

    Running statistics belong together: if it does not of one, it is taken to do so of none.

    Args:
        part: the forward Program of a part.
        following: how it follows that of the whole.
        after: the ops that run once, on values of the whole.
        state: made of data.
    """
    held = {v for op in after for v in op.outputs}
    left = {o: new for o, new in state.items() if not _is_told(part, following, new, new in held)}
    if any(new.is_float for new in left.values()):
        left |= {old: new for old, new in state.items() if new.is_float}
    return left


def _is_told(part: Program, following: Following, new: Variable, of_whole: bool) -> bool:
    """Whether a value of the whole is computed of what is known of it, or put together of the parts'."""
    found, near = following.found[new], following.reaching(part, [new])
    is_sum, is_mean = found == Follows(How.MEAN, 1), found.kind is How.MEAN and found.power in (0, 1)
    fits = found == SAME or found.kind in (How.MOST, How.LEAST) or (is_mean if new.is_float else is_sum)
    return (of_whole or fits) and not (near.mixing or near.normalizing or near.bent or near.counting(part))


def is_counted(part: Program, old: Variable, new: Variable) -> bool:
    """Whether state is added to, so that it does not matter in which parts, and nothing else reads it."""
    maker = producers(part).get(new)
    readers = [op for op in part.ops if old in op.inputs]
    is_added = maker is not None and of(maker.type).adds and maker.inputs.count(old) == 1
    ends = (part.loss, *part.outputs, *part.next_state.values())
    return is_added and readers == [maker] and old not in ends


def random_values(program: Program) -> tuple[set[Variable], set[Variable]]:
    """The Variables that random numbers and keys are made of, and those that are drawn."""
    made, drawn = list[Variable](), set[Variable]()
    for op in program.ops:
        rows = [of(primitive) for primitive in op.body.primitives]
        makes_keys = any(row.makes_keys for row in rows)
        if makes_keys or any(row.draws for row in rows):
            made += [v for v in op.inputs if v.is_key or makes_keys]
            drawn.update(op.outputs)
    return ancestors(program, made), drawn
