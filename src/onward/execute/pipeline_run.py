"""One step of a pipeline as it is issued: what is there of each micro-batch, and what is sent where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.core.program import Program, Variable
from onward.distribute.pipeline.once import Place
from onward.distribute.pipeline.schedule import StageWork
from onward.execute.stage_executables import StageExecutables

Values = dict[Variable, Any]


class PipelineRun:
    """One step as it is issued.

    Attributes:
        at: for each stage and micro-batch the values that are there.
        borrowed: for each stage what it reads of the state of others.
        given: for each micro-batch its part of the batch, and what was handed on to it.
        scales: the share of each micro-batch, where they do not count alike.
        once: for each stage what is the same for all micro-batches.
        totals: the sums so far.
        pieces: of what is joined, those of all micro-batches.
        raw: the sums and pieces of all micro-batches.
        made: what the update has made.
    """

    def __init__(self, stages: StageExecutables, own: dict[str, Any], fed: Mapping[str, Any]) -> None:
        self.stages, self.own, self._put = stages, own, stages.rows.put
        pipeline, self.fed = stages.pipeline, dict(fed)
        self.at: dict[tuple[int, int], Values] = {}
        self.borrowed: dict[tuple[str, int], Any] = {}
        self.given: list[Values] = []
        self.scales: Any = None
        self.once: dict[int, Values] = {}
        self.totals: dict[Place, list[Any]] = {}
        self.pieces: list[list[Any]] = [
            [None] * pipeline.schedule.micro_batches for _ in pipeline.loop.joined
        ]
        self.raw: Values = {}
        self.made: Values = {}
        self.fed |= self._statistics()
        self._cut_up()
        for stage, program in pipeline.once.items():
            self._once(stage, program)
        for place, zeros in stages.zeros.items():
            self.totals[place] = zeros()

    def _cut_up(self) -> None:
        """Cut the batch, and make what micro-batches hand on."""
        stages, pipeline = self.stages, self.stages.pipeline
        ahead = pipeline.ahead
        batch = [self._put(self.fed[v.name], stages.whole[0]) for v in stages.split]
        state = [self._state(v.name, 0) for v in ahead.state]
        pieces, handed, last, self.scales = stages.begin((), state, batch)
        names = (*pipeline.loop.batch.given, *ahead.outputs)
        pairs = zip(pieces, handed, strict=True)
        self.given = [dict(zip(names, (*mine, *hers), strict=True)) for mine, hers in pairs]
        self.made |= zip((new for *_, new in pipeline.loop.threaded), last, strict=True)

    def _statistics(self) -> dict[str, Any]:
        """The statistics of the whole batch, by their names in a turn and outside of the loop."""
        pipeline = self.stages.pipeline
        program = pipeline.statistics
        if not program.outputs:
            return {}
        data = [self._put(self.fed[v.name], self.stages.lies(v, 0)) for v in program.inputs]
        state = [self._state(v.name, 0) for v in program.state]
        found = dict(zip(program.outputs, self.stages.statistics((), state, data), strict=True))
        read = {part.name: found[v] for part, v in pipeline.loop.before.items() if v in found}
        return {**{v.name: x for v, x in found.items()}, **read}

    def _sent(self, v: Variable, value: Any, stage: int) -> Any:
        return self._put(value, self.stages.lies(v, stage))

    def _state(self, name: str, stage: int) -> Any:
        """A value of state where a stage reads it; that of another stage is sent once a step."""
        if name in self.stages.pieces:
            return self._piece(name, stage)
        lies = self.stages.lies(self.stages.program[name], stage)
        if self.stages.home[name] == lies:
            return self.own[name]
        if (name, stage) not in self.borrowed:
            self.borrowed[name, stage] = self._put(self.own[name], lies)
        return self.borrowed[name, stage]

    def _piece(self, name: str, stage: int) -> Any:
        """The piece of a stack that a stage has, where a stage reads it."""
        if (name, stage) not in self.borrowed:
            stages = self.stages
            stack, piece = stages.pieces[name]
            home, lies = stages.pipeline.home(name), stages.lies(piece, stage)
            if home == stage:
                found = stages.rows.piece(self.own[stack.name], piece.shape, lies)
            else:
                found = self._put(self._piece(name, home), lies)
            self.borrowed[name, stage] = found
        return self.borrowed[name, stage]

    def _once(self, stage: int, program: Program) -> None:
        """Make what is the same for all micro-batches, and send it to the stages that read it."""
        inputs = [self.once[stage][v] for v in program.inputs]
        state = [self._state(v.name, stage) for v in program.state]
        for v, value in zip(program.outputs, self.stages.once[stage]((), state, inputs), strict=True):
            for to in self.stages.readers(v):
                self.once.setdefault(to, {})[v] = value if to == stage else self._sent(v, value, to)

    def micro_batches(self) -> None:
        """Issue the work of all stages on all micro-batches."""
        for stage, work, i in self.stages.order:
            self.work(stage, work, i)
        self.once.clear()

    def work(self, stage: int, work: StageWork, i: int) -> None:
        """Issue the work of a stage on a micro-batch."""
        part = self.stages.parts[stage, work]
        here = self.at.setdefault((stage, i), {})
        inputs = [self._input(v, stage, i, here) for v in part.program.inputs]
        state = [self._state(v.name, stage) for v in part.program.state]
        scale = self._scale(stage, i)
        grown, pieces, outputs = part.call(self.totals.get((stage, work), []), state, inputs, scale)
        if part.sums:
            self.totals[stage, work] = grown
        for place, piece in zip(part.pieces, pieces, strict=True):
            self.pieces[place][i] = piece
        for v, value in zip(part.sends, outputs, strict=True):
            for to in self.stages.readers(v):
                self.at.setdefault((to, i), {})[v] = value if to == stage else self._sent(v, value, to)
        for v in part.program.inputs:
            if self.stages.last[v, stage] is work:
                here.pop(v, None)

    def _input(self, v: Variable, stage: int, i: int, here: Values) -> Any:
        if v in self.once.get(stage, ()):
            return self.once[stage][v]
        if v not in here:
            given = self.given[i].get(v)
            here[v] = self._sent(v, self.fed[v.name] if given is None else given, stage)
        return here[v]

    def _scale(self, stage: int, i: int) -> Any:
        return None if self.stages.scale is None else self._put(self.scales[i], self.stages.share_lies(stage))

    def update(self) -> None:
        """Issue the update, phase by phase."""
        loop = self.stages.pipeline.loop
        for (stage, work), grown in self.totals.items():
            part, merge = self.stages.parts[stage, work], self.stages.merges.get((stage, work))
            grown = grown if merge is None else merge((), grown)
            self.raw.update((loop.sums[i].whole, x) for i, x in zip(part.sums, grown, strict=True))
        self.totals.clear()
        self.raw.update((r.whole, pieces) for r, pieces in zip(loop.joined, self.pieces, strict=True))
        for v, pieces in self.stages.pipeline.loops.pieces.items():
            if pieces[0] in self.raw:
                kind = self.stages.sum_type(self.stages.results[v], self.stages.pipeline.schedule.stages)
                found = [self._put(self.raw[p], self.stages.lies_alike(p, k)) for k, p in enumerate(pieces)]
                self.raw[v] = self.stages.rows.joined(found, kind.shape, kind.sharding)
        for phase in self.stages.updates:
            found = phase.call(
                *([self._read(v, phase.stage) for v in group] for group in (phase.taken, phase.lent))
            )
            self.made.update(zip(phase.program.outputs, found, strict=True))

    def _read(self, v: Variable, stage: int) -> Any:
        """A value as a stage reads it in the update."""
        if v.name in self.own:
            return self._state(v.name, stage)
        if (result := self.stages.results.get(v)) is not None:
            lies = self.stages.lies_alike if result.is_sum else self.stages.lies
            return self._put(self.raw[v], lies(result.part, stage))
        return self._sent(v, self.value(v), stage)

    def value(self, v: Variable) -> Any:
        """The value of a result, or of what a step is given."""
        if v in self.made:
            return self.made[v]
        if v in self.stages.program.constants:
            return self._put(self.stages.program.constants[v], self.stages.whole[0])
        return self.own[v.name] if v.name in self.own else self.fed[v.name]

    def result(self, v: Variable) -> Any:
        """The value of a result; of several processes each has it."""
        return self.stages.rows.for_all(self.value(v))

    def following(self, v: Variable) -> Any:
        """The next value of state, with the stage that owns it."""
        new = self.stages.program.next_state.get(v, v)
        return self._put(self.value(new), self.stages.home[v.name])
