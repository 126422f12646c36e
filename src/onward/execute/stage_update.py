"""One phase of the update of a pipeline in one stage, compiled."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.program import Program, Variable
from onward.execute.stage_places import StagePlaces
from onward.execute.stage_rows import sharding_of


class StageUpdate:
    """One phase of the update in one stage, compiled."""

    def __init__(self, stages: StagePlaces, phase: int, stage: int, donate: Collection[str]) -> None:
        pipeline = stages.pipeline
        self.stages, self.stage, self.program = stages, stage, pipeline.updates[phase, stage]
        later = [part for key, part in pipeline.updates.items() if key > (phase, stage)]
        ends = {*stages.program.outputs, *stages.program.next_state.values()}
        may_take = [v for v in self.program.state if v.name in donate and v not in ends]
        self.taken = [v for v in may_take if self._can_take(v, later)]
        given = (*self.program.state, *self.program.inputs)
        self.lent = [v for v in given if v not in set(self.taken)]
        run = stages.lowered(self.program)
        state = len(self.program.state)

        def call(taken: Any, lent: Any) -> Any:
            found = dict(zip((*self.taken, *self.lent), (*taken, *lent), strict=True))
            values = [self._whole(v, found[v]) for v in given]
            return run(values[:state], values[state:])

        call.__name__ = "update"
        types = [[self._type(v) for v in group] for group in (self.taken, self.lent)]
        outs = [stages.lies(v, stage) for v in self.program.outputs]
        self.call = stages.compiled(call, stage, *types, outs=outs)

    def _can_take(self, v: Variable, later: Collection[Program]) -> bool:
        """Whether the buffer of a state Variable can become that of its next value."""
        is_home = self.stages.pipeline.homes[v] == self.stage
        made = {o for op in self.program.ops for o in op.outputs}
        is_made = self.stages.program.next_state[v] in made
        return is_home and is_made and not any(v in part.state for part in later)

    def _type(self, v: Variable) -> Any:
        """The type of what it is given for a Variable: a sum, or all pieces, of what micro-batches made."""
        stages, result = self.stages, self.stages.results.get(v)
        if result is None:
            return stages.typed(v, self.stage)
        if result.is_sum:
            return stages.sum_type(result, self.stage)
        return [stages.piece_type(result, self.stage)] * stages.pipeline.schedule.micro_batches

    def _whole(self, v: Variable, value: Any) -> Any:
        """A result of all micro-batches, put together."""
        result = self.stages.results.get(v)
        if result is None:
            return value
        if result.is_sum:
            return value.astype(v.dtype)
        if not self.stages.pipeline.lanes.axes:
            return result.joined(jnp.stack(value))
        whole = sharding_of(self.stages.whole[self.stage])
        pieces = jax.lax.with_sharding_constraint(jnp.stack(value), whole)
        return result.joined(pieces.reshape(-1, *result.part.shape))
