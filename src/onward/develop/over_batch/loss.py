"""Whether a loss is a sum over examples or a mean, as the graph tells."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from onward.core.errors import OnwardError
from onward.core.program import Program, Variable
from onward.core.recipe import whole_types
from onward.core.source import user_level
from onward.core.walk import producers
from onward.develop.batch import WEIGHT, batch_names, data_types
from onward.develop.over_batch.known import Following, Follows, How
from onward.develop.over_batch.walk import follow


def is_sum(part: Program, following: Following, otherwise: str, meant: str = "is_sum=False") -> bool:
    """Whether the loss of a part of the batch is to be added to those of the others.

    Args:
        part: the forward Program of a part.
        following: how it follows that of the whole.
        otherwise: what is done with a loss that is not a sum, in words.
        meant: the option that says so.

    Warns:
        UserWarning: the loss is neither a sum nor a mean, so parts do not make that of the whole.
    """
    loss = part.loss
    if loss is None:
        return False
    found = following.found[loss]
    is_added = found == Follows(How.MEAN, 1)
    near = following.reaching(part, [loss])
    bent = [*near.bent, *near.counting(part)]  # parts read numbers that count the examples of their own
    if found.kind in (How.MOST, How.LEAST) or (found.power and not is_added):
        bent = [producers(part)[loss]]
    if bent:
        warnings.warn(
            f"{part.name}: the loss is neither a mean over examples nor a sum: {bent[0].type!r}"
            f"{f' at {bent[0].source}' if bent[0].source else ''} reads or gives a number of all examples, "
            f"and every part of the batch has its own. {otherwise}, which is not the loss of the whole "
            f"batch. Return the mean or the sum itself; {meant} says that it is meant so.",
            stacklevel=user_level(),
        )
    return is_added


class TwoBatches(NamedTuple):
    """A function for a batch as it is fed, beside two batches.

    Attributes:
        part: its forward Program for one of them.
        following: how that follows the Program for both; None if they are not the same ops.
        split: the names of the data that holds examples.
    """

    part: Program
    following: Following | None
    split: tuple[str, ...]


def two_batches(program: Program) -> TwoBatches | None:
    """A Program that is fed one of several batches, beside two of them; None if it takes no other length.

    The batch is the first array, or else the first that may be longer, where class weights stand before it.

    >>> import jax.numpy as jnp, onward as ow
    >>> def loss(w, rates, x):
    ...     return jnp.sum(rates * (x @ w) ** 2)
    >>> found = two_batches(ow.trace(loss, jnp.ones((2, 3)), jnp.ones(3), jnp.ones((4, 2))))
    >>> found.split, is_sum(found.part, found.following, "The mean is taken")
    (('x',), True)
    """
    recipe = program.recipe
    if recipe is None or program.signature is None:
        return None
    try:
        part = recipe.origin.trace(whole_types(program))
    except OnwardError:
        return None
    whole: list[Variable] = []
    while split := batch_names(part, whole, WEIGHT, recipe.origin.fixed_data):
        try:
            both = recipe.origin.trace(data_types(part, split, 2 * part[split[0]].shape[0]))
        except OnwardError:  # these take this length alone
            whole += [part[name] for name in split]
        else:
            return TwoBatches(part, follow(both, part, 2, split, lambda *_: False), split)
    return None
