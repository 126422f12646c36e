"""Where examples see each other in a part of the batch, which has only its own, in words.

>>> import jax.numpy as jnp, onward as ow
>>> from onward.develop.over_batch.walk import follow
>>> def loss(w, x):
...     return jnp.mean((x @ w - jnp.flip(x, 0) @ w) ** 2)
>>> whole, part = (ow.trace(loss, jnp.ones(3), jnp.ones((rows, 3))) for rows in (8, 4))
>>> [one.what.partition(" at ")[0] for one in meetings(part, follow(whole, part, 2, {"x"}))]
["'rev'"]
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import NamedTuple

from onward.core.program import Op, Program, Variable
from onward.core.source import user_level
from onward.core.walk import descendants
from onward.develop.over_batch.known import Following, Follows, How

RESULT = "The result differs from that of the whole batch"


class Difference(NamedTuple):
    """Something that a part computes otherwise than the whole batch."""

    what: str
    differs: str = RESULT
    instead: str = ""

    def warn(self, program: Program, parts: str, meant: str) -> None:
        """Warn of it, of parts such as ``"4 micro-batches"``; ``meant`` says that it is meant so."""
        instead = " ".join(filter(None, (self.instead, f"If it is meant so: {meant}.")))
        warnings.warn(
            f"{program.name}: {self.what}, and each of {parts} has only its own. {self.differs}. {instead}",
            stacklevel=user_level(),
        )


def meetings(part: Program, following: Following, whole: str = "") -> Iterator[Difference]:
    """The first op of each kind in which examples see each other.

    Args:
        part: the forward Program of a part of the batch.
        following: how it follows that of the whole.
        whole: what to write for data that each part needs whole.
    """
    near = following.reaching(part, [*part.outputs, *part.next_state.values()])
    for op, why in near.mixing[:1]:
        yield Difference(f"{op.type!r}{op.at} {why}", _reached(part, op), whole)
    for op in near.normalizing[:1]:
        yield Difference(
            f"{op.type!r}{op.at} reads a statistic of the examples, as batch normalization does",
            RESULT,
            "Normalize every example by itself (layer_norm, group_norm).",
        )
    for op, why in following.rules_of_loss(part)[:1]:
        yield Difference(f"{op.type!r}{op.at} {why}", "The gradients differ from those of the whole batch")


def _reached(part: Program, op: Op) -> str:
    """The differences that an op makes, in words: of the results, or of state that is carried on, by name."""
    behind, following = descendants(part, op.outputs), part.next_state
    names = [repr(old.name) for old, new in following.items() if new in behind]
    if not names:
        return RESULT
    state = f"the state {' and '.join(names[:3])}{' and others' * (len(names) > 3)}"
    if behind.isdisjoint({part.loss, *part.outputs} - set(following.values())):
        verb = "differs from that" if len(names) == 1 else "differ from those"
        return f"T{state[1:]} {verb} of the whole batch"
    return f"The result and {state} differ from those of the whole batch"


def same_draws(part: Program, following: Following, apart: Collection[Variable] = ()) -> Iterator[Difference]:
    """The first op that draws the same numbers for the examples of all parts.

    A typed key that an op reads is made one of the part's own; a raw key that it makes one of within is not.

    Args:
        part: the forward Program of a part of the batch.
        following: how it follows that of the whole.
        apart: state that is another one in each part.
    """
    near = following.reaching(part, [*part.outputs, *part.next_state.values()])
    own = descendants(part, apart)
    ops = (op for op in near.hidden_draws if own.isdisjoint(op.inputs))
    for op in [op for op in ops if not any(_may_be_seed(v, following.found[v]) for v in op.inputs)][:1]:
        what = f"{op.type!r}{op.at} draws numbers for its examples by a key that it makes within"
        yield Difference(
            f"{what} of what is the same for all",
            "All draw the same numbers",
            "Give it a typed key that is made outside: jax.random.key(seed), not jax.random.PRNGKey(seed).",
        )


def _may_be_seed(v: Variable, follows: Follows) -> bool:
    """Whether each example may have a seed of its own in it."""
    return follows.kind is How.ROWS and not v.is_float and v.dtype != bool
