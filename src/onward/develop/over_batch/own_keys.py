"""Random keys of a part's own, so that parts of a batch do not draw the same numbers for their examples.

What is drawn for no example in particular, such as a random projection, is the same in every part, as it is
for the whole batch.
"""

from __future__ import annotations

from typing import Any

import jax

from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants


def draws_for_examples(op: Op, whole: Op) -> bool:
    """Whether an op of a part draws fewer numbers than the same op of the whole batch, or splits a key so."""
    splits = all(v.is_key for v in op.inputs)
    pairs = zip(op.body.calls_within, whole.body.calls_within, strict=False)
    rows = ((of(mine.primitive), mine.results != theirs.results) for mine, theirs in pairs)
    return any((row.draws or (splits and row.makes_keys)) and is_fewer for row, is_fewer in rows)


def folded(keys: Any, number: Any) -> list[Any]:
    """The keys of the part of this number."""
    return [jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.ravel()).reshape(keys.shape)]


def in_common(program: Program, apart: set[Variable]) -> set[Variable]:
    """The keys that all parts have, where these Variables differ from part to part."""
    return {v for op in program.ops for v in op.inputs if v.is_key} - descendants(program, apart)
