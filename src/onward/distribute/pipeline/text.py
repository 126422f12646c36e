"""A Pipeline as text: what each stage has and does, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onward.core.columns import columns
from onward.core.cost import cost, size
from onward.core.program import Op
from onward.core.show import human_bytes
from onward.core.words import Kind
from onward.distribute.pipeline.schedule import StageWork
from onward.distribute.pipeline.stage_specs import batch_axes

F, B, W = StageWork


def text_of(pipeline: Any) -> str:
    """The stages under each other, notes, and the schedule."""
    head = ("stage", "parameters", "other state", "work", "holds", "of", "sends", "begins with")
    rows = [_row(pipeline, stage) for stage in range(pipeline.schedule.stages)]
    table = columns([head, *rows], right=[1, 2, 3, 4, 5, 6])
    notes = ["what is held and sent is that of one micro-batch; work is counted in operations"]
    notes += [*_of_mesh(pipeline), *_of_state(pipeline), *_of_weights(pipeline)]
    return "\n".join([f"Pipeline of {pipeline.program.name}", table, *notes, "", str(pipeline.schedule)])


def _row(pipeline: Any, stage: int) -> tuple[str, ...]:
    own = pipeline.state_of(stage)
    parameters = sum(pipeline.bytes_of(v) for v in own if v.kind is Kind.PARAMETER)
    work = sum(cost(part).flops for (of, _), part in pipeline.parts.items() if of == stage)
    first = _first(pipeline, stage)
    return (
        str(stage),
        human_bytes(parameters),
        human_bytes(sum(map(pipeline.bytes_of, own)) - parameters),
        f"{100 * work / max(sum(cost(part).flops for part in pipeline.parts.values()), 1):.0f} %",
        str(pipeline.schedule.held[stage]),
        human_bytes(pipeline.kept(stage)),
        human_bytes(pipeline.sent(stage)),
        f"{first.outputs[0].name}{first.at}",
    )


def _first(pipeline: Any, stage: int) -> Op:
    """The first op of a stage that reads what came before: the batch, or what stages before it send."""
    part = pipeline.parts[stage, F]
    before = (pipeline.ahead, *pipeline.once.values())
    keys = {v for program in before for v in program.outputs} | pipeline.loop.before.keys()
    found = (op for op in part.ops if not {*part.inputs}.isdisjoint({*op.inputs} - keys))
    first: Op = next(found, part.ops[0])
    return first


def _of_mesh(pipeline: Any) -> Iterator[str]:
    """A note on the devices of a stage, where it has several."""
    how, stages = pipeline.partition, range(pipeline.schedule.stages)
    if how is None:
        return
    kept = sum(pipeline.bytes_of(v) for stage in stages for v in pipeline.state_of(stage))
    part = kept / max(sum(map(size, pipeline.accumulated.state)), 1)
    more = "; what is held may be split further" * bool(
        how.mesh.keys() - batch_axes(how, pipeline.loop.how.split)
    )
    yield (
        f"each stage has {how.count} devices ({how}), and bytes are those of one; over all stages it keeps "
        f"{100 * part:.0f} % of its stage's state{more}"
    )


def _of_state(pipeline: Any) -> Iterator[str]:
    """Notes on what is made of state once a step, and on what stages read of each other's."""
    made = [
        f"{human_bytes(sum(map(pipeline.bytes_of, part.outputs)))} in stage {stage}"
        for stage, part in pipeline.once.items()
    ]
    if made:
        yield f"made of parameters and constants once a step, and kept: {', '.join(made)}"
    for name, stages in pipeline.borrowed.items():
        others = " and ".join(map(str, stages))
        yield f"{name} lies in stage {pipeline.home(name)}, which sends it to {others} at each step"


def _of_weights(pipeline: Any) -> Iterator[str]:
    """A note on stages that put no gradients of parameters off, where the schedule would have it so."""
    stages = range(pipeline.schedule.stages)
    late = [{w for w in (B, W) if (stage, w) in pipeline.parts} for stage in stages]
    whole = [str(stage) for stage, works in enumerate(late) if works == {B}]
    if pipeline.schedule.splits_backward and whole:
        yield (
            f"W of stage {' and '.join(whole)} is done in B: other stages wait for these gradients, or one "
            "loop computes both"
        )
