"""Warnings of what micro-batches compute otherwise than the whole batch, told before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.develop.accumulation.carried import beside, is_counted, keys_in, made_of
from onward.develop.accumulation.micro_batches import Accumulation
from onward.develop.over_batch.known import Following, How
from onward.develop.over_batch.meeting import Difference, meetings, same_draws

_BY_SHARE = (
    ", but for a mean weighed by example_weight, jnp.sum(w * e) / jnp.sum(w): micro-batches count as much as "
    "the weights of their examples"
)
_WHOLE = (
    "Data that every micro-batch needs whole, such as the nodes of a graph: accumulate(..., whole=['nodes'])."
)


def expect_apart(part: Program, following: Following, how: Accumulation) -> None:
    """Warn where what a micro-batch returns or carries on needs the examples of others."""
    by_share = "" if how.weight is None else _BY_SHARE
    drawn = same_draws(part, following, keys_in(part, part.next_state))
    for found in (*meetings(part, following, _WHOLE), *drawn, *_disordered(part, following)):
        told = found._replace(differs=found.differs + by_share) if found.instead is _WHOLE else found
        told.warn(part, f"{how.steps} micro-batches", "is_sum=False, or True for a sum over examples")


def _disordered(part: Program, following: Following) -> Iterator[Difference]:
    """Results over examples that are not those of the micro-batches, one behind the other."""
    rows = [v for v in part.outputs if v.is_float and following.found[v].kind is How.ROWS]
    for v in [v for v in rows if following.found[v].power][:1]:
        what = (
            f"the result {v.name!r} holds numbers of the examples that are multiplied or divided by how many"
        )
        yield Difference(f"{what} there are", instead="Return them as they are.")
    for v in following.out_of_order(v for v in part.outputs if v not in part.constants)[:1]:
        what = f"the result {v.name!r} holds the examples several times, or counts them from 0"
        instead = "Return examples once each, as a tuple in place of a concatenation, and count them outside."
        yield Difference(what, instead=instead)


def expect_merged(part: Program, following: Following, results: Iterable[Variable]) -> None:
    """Warn of results that cannot be put together from those of micro-batches."""
    for v in results:
        near = following.reaching(part, [v])
        for op in [*near.bent, *near.counting(part)][:1]:
            warnings.warn(
                f"{part.name}: the result {v.name!r} is neither a mean over examples nor a sum, the largest "
                f"or the smallest: {op.type!r}{op.at} reads or gives a number of all examples, and every "
                f"micro-batch has its own. {'The mean' if v.is_float else 'The sum'} of theirs is returned, "
                "which is not that of the whole batch. Return the mean or the sum that the number is made "
                "of; is_sum=False says that it is meant so.",
                stacklevel=user_level(),
            )


def expect_moved_on(part: Program, following: Following, how: Accumulation) -> None:
    """Warn of state made of examples that micro-batches move on one after the other."""
    state = {old: new for old, new in part.next_state.items() if old.name not in how.merged}
    keys, handed = keys_in(part, state), made_of(part, how.split, state)

    def is_apart(new: Variable) -> bool:
        near = following.reaching(part, [new])
        return bool(near.mixing or near.normalizing)

    told = {} if how.by_share else {old: new for old, new in handed.items() if is_apart(new)}
    told |= beside(part, following, told, handed)  # with the statistic that is warned of
    rest = {old: new for old, new in handed.items() if old not in keys and old not in told}
    left = {old: new for old, new in rest.items() if not is_counted(part, following, old, new)}
    if not left:
        return
    near = following.reaching(part, left.values())
    reading = next(iter((*near.bent, *near.counting(part))), None)
    read = f" ({reading.type!r}{reading.at} reads or gives a number of all examples)" if reading else ""
    warnings.warn(
        f"{part.name}: how the state {' and '.join(repr(v.name) for v in left)} of the whole batch follows "
        f"from that of micro-batches is not known{read}. Each of {how.steps} moves it on by its own "
        "examples, one after the other, so that after a step it differs. Carry the mean or the sum that it "
        "is made of; is_sum=False, or True for a sum over examples, says that it is meant so.",
        stacklevel=user_level(),
    )
