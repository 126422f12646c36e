"""Whether several trainers compute together what one device would of all their batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.develop.over_batch.known import SAME, Following, Follows, How
from onward.develop.over_batch.loss import TwoBatches, is_sum
from onward.develop.over_batch.meeting import meetings, same_draws
from onward.fleet.modes import Mode, Sync, in_rounds

_MEANT = "merge=Average(), or Sum() for a sum over examples"


def adds_up(program: Program, found: TwoBatches | None, trainers: int, mode: Mode) -> bool:
    """Whether the gradients of trainers are to be added up, as those of a loss that is a sum.

    Args:
        program: what is trained.
        found: what is known of it.
        trainers: how many there are.
        mode: how they work together.

    Warns:
        UserWarning: in rounds, examples see each other, so that trainers miss those of others; or state of
            the forward pass is another one than that of one device.
    """
    if found is None or found.following is None:
        fixed = () if program.recipe is None else program.recipe.origin.fixed_data
        if in_rounds(mode) and program.recipe and any(v.name not in fixed for v in program.inputs if v.shape):
            warnings.warn(
                f"{program.name}: of twice as many examples the function cannot be traced, or builds another "
                "graph, so that it is not known whether trainers compute together what one device would; "
                "the mean over trainers is taken. Let it take any number of examples. If it is meant so: "
                f"{_MEANT}.",
                stacklevel=user_level(),
            )
        return False
    part, following = found.part, found.following
    if isinstance(mode, Sync):
        for met in (*meetings(part, following), *same_draws(part, following)):
            met.warn(part, f"{trainers} trainers", _MEANT)
    for v in list(_left(part, following, isinstance(mode, Sync)))[:1]:
        how = "their mean, or that of one of them" if in_rounds(mode) else "that of the last one to send"
        warnings.warn(
            f"{part.name}: the state {v.name!r} of all batches does not follow from the mean over trainers, "
            f"and {how} is kept: it differs from that of one device. Carry floats that are means over "
            f"examples, such as moving averages. If it is meant so: {_MEANT}.",
            stacklevel=user_level(),
        )
    if not in_rounds(mode):
        return False
    return is_sum(part, following, "The mean over trainers is taken", "merge=Average()")


def _left(part: Program, following: Following, meets: bool) -> Iterator[Variable]:
    """The state that servers have otherwise than one device.

    ``meets`` says that examples which see each other are told of already.
    """
    for old, new in part.next_state.items():
        near, found = following.reaching(part, [new]), following.found[new]
        is_told = meets and (near.mixing or near.normalizing)
        is_kept = new.is_key or found == SAME or (new.is_float and found == Follows(How.MEAN))
        if not is_told and not (is_kept and (new.is_key or following.is_known(part, new))):
            yield old
