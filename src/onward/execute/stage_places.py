"""Where the values of a pipeline lie, and what is compiled for there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.develop.accumulation.loop import LoopResult
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.options import Value, all_options
from onward.execute.stage_rows import StagePlace, StageRows, sharding_of


class StagePlaces:
    """Where the values of a Pipeline lie, of which types they are there, and what is compiled for there.

    Args:
        pipeline: the Programs and their order.
        options: for the compiler.
        scopes: for the ops of a part those that its instructions have; their own unless given.
        rows: the devices of the stages, if not those that JAX shows.

    Attributes:
        rows: the devices of the stages.
        whole: for each stage how a value lies that all of its devices have, and last that of all stages.
        home: how each state Variable lies, by name.
        split: the data that is cut into micro-batches.
        results: what the update is given of all micro-batches.
        compilations: how many executables were compiled.
    """

    compilations = 0

    def __init__(
        self,
        pipeline: Pipeline,
        options: Mapping[str, Value],
        scopes: Callable[[Program], Mapping[Op, str]] | None = None,
        rows: StageRows | None = None,
    ) -> None:
        self.pipeline, self.program, self._scopes = pipeline, pipeline.accumulated, scopes
        self._options = dict(all_options(options))
        self.rows = StageRows(pipeline) if rows is None else rows
        self.whole = self.rows.whole
        self._places: dict[tuple[Variable, int, bool], StagePlace] = {}
        self._kept: dict[Variable, Any] = {}  # how values lie that a compiled part left as it found best
        self.home = {v.name: self.lies(v, pipeline.homes[v]) for v in self.program.state}
        self.split = [v for v in pipeline.loop.turn.inputs if v.name in pipeline.loop.how.split]
        self.results = {r.whole: r for r in pipeline.results}

    def lies(self, v: Variable, stage: int) -> StagePlace:
        """How a value lies in a stage, whose devices may share it out, or over all stages."""
        if v in self._kept:
            return self._kept[v]
        return self._place(v, stage, v in self.pipeline.in_lanes)

    def lies_alike(self, v: Variable, stage: int) -> StagePlace:
        """How a value lies in a stage where all lanes have the same."""
        return self._place(v, stage, False)

    def _place(self, v: Variable, stage: int, in_lanes: bool) -> StagePlace:
        key = v, stage, in_lanes
        if key not in self._places:
            found, pipeline = self.whole[stage], self.pipeline
            is_over_all = stage == pipeline.schedule.stages
            spec = pipeline.over_stages(v) if is_over_all else pipeline.specs.get(v)
            if in_lanes:
                spec = PartitionSpec(pipeline.lanes.axes, *(spec or ()))
            self._places[key] = found if spec is None else NamedSharding(found.mesh, spec)
        return self._places[key]

    def typed(self, v: Variable, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a value as it lies in a stage."""
        return self._type(v, stage, v.shape, v.dtype)

    def _type(self, v: Variable, stage: int, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """The type of what lies as a value does; of several lanes that of all, one after the other."""
        if v in self.pipeline.in_lanes:
            shape = (self.pipeline.lanes.count, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(self.lies(v, stage)))

    def lowered(self, program: Program) -> Callable[..., list[Any]]:
        """The function of a part, from state and inputs."""
        scopes = None if self._scopes is None else self._scopes(program)
        return lower(program, program.outputs, at_once=True, scopes=scopes)

    def compiled(self, run: Any, stage: int, *types: Any, outs: Any = None) -> Any:
        """A function compiled for the devices of a stage, which takes over its first argument.

        All devices have all of what no ``outs`` or type lays out.
        """
        return self.lying(run, stage, types, outs)[0]

    def lying(self, run: Any, stage: int, types: Sequence[Any], outs: Any) -> tuple[Any, Any]:
        """A compiled function, and how its results lie, which it decides where ``outs`` is None."""
        self.compilations += 1
        whole = sharding_of(self.whole[stage])
        laid = jax.tree.map(sharding_of, outs or whole)
        jitted = jax.jit(run, donate_argnums=(0,) if types else (), out_shardings=laid)

        def placed(kind: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding or whole)

        found: tuple[Any, Any] = self.rows.compiled(
            jitted, stage, jax.tree.map(placed, types), laid, self._options
        )
        return found

    def sum_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a sum over all micro-batches as it lies in a stage."""
        kind, place = result.sum_type, sharding_of(self.lies_alike(result.part, stage))
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place)

    def total_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a sum over the micro-batches of each lane."""
        return self._type(result.part, stage, result.part.shape, result.sum_type.dtype)

    def piece_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of what a micro-batch makes of a value that is joined, as it lies in a stage."""
        kind = jax.eval_shape(partial(self.pipeline.loop.share, result), result.part.aval, self.scale)
        return self._type(result.part, stage, kind.shape, kind.dtype)

    @cached_property
    def scale(self) -> Any:
        """The type of the share of a micro-batch; None where all count alike."""
        loop = self.pipeline.loop
        found = jax.eval_shape(lambda batch: loop.batch.scales(self.cut_up(batch)), self.batch)
        return None if found is None else jax.ShapeDtypeStruct((), found.dtype)

    def scale_in(self, stage: int) -> Any:
        """The same as it lies in a stage, for each lane."""
        if self.scale is None or not self.pipeline.lanes.axes:
            return self.scale
        shape, place = (self.pipeline.lanes.count,), self.share_lies(stage)
        return jax.ShapeDtypeStruct(shape, self.scale.dtype, sharding=place)

    def share_lies(self, stage: int) -> StagePlace:
        """How the share of a micro-batch lies in a stage."""
        axes, whole = self.pipeline.lanes.axes, self.whole[stage]
        return NamedSharding(whole.mesh, PartitionSpec(axes)) if axes else whole

    @property
    def batch(self) -> list[Any]:
        """The types of the data that is cut."""
        return [self.program[v.name].aval for v in self.split]

    def cut_up(self, batch: Sequence[Any]) -> list[Any]:
        """Batches of data in micro-batches, as ``[steps, rows, ...]``."""
        return self.pipeline.loop.batch.pieces(dict(zip(self.split, batch, strict=True)))
