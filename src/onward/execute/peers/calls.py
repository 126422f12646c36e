"""Calls that all processes make together beside the steps: a test, a checkpoint, a copy of the whole state.

>>> all_call("the test of loss", lambda: 6 * 7)  # alone it only calls
42
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from onward.core.errors import PeerError
from onward.execute.peers.deadline import deadline_of
from onward.execute.peers.peers import Peers
from onward.execute.peers.verdict import calling

T = TypeVar("T")


def all_call(what: str, work: Callable[[], T]) -> T:
    """Run what needs all processes, none of which waits for another longer than until the deadline.

    Args:
        what: the call in words that are the same in all processes, such as "the test of loss".
        work: what to run, as in ``Peers.run``; it makes no such call itself.

    Raises:
        PeerError: another process did not come, or is in another call or in a step.
    """
    if jax.process_count() == 1:
        return work()
    deadline = deadline_of(None)
    try:
        peers = Peers.meet(deadline)
    except PeerError as error:
        raise PeerError(f"{error} This one waited in {what}, which needs all.") from error
    return peers.run(work, deadline, calling(what))
