"""Memory of the stages of a pipeline: equal to what a step that runs finds in memory at each of its tasks."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.test_pipeline import normal

import onward as ow
from onward.core.words import Kind
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.memory.held import MemoryShare

WIDE = 8
X = normal(16, WIDE)
TABLE, LAYERS = normal(WIDE, WIDE), [normal(WIDE, WIDE) for _ in range(4)]
PARAMS = {"table": TABLE, "layers": LAYERS}
CLIPPED = ow.AdamW(0.1, rules=[ow.ClipByGlobalNorm(1.0)])
FSDP = {"layers/*": "fsdp", "table": "fsdp"}


def network(params: Any, x: Any) -> Any:
    """First and last stage read one table; each micro-batch has its keys."""
    h = x @ params["table"]
    for w in params["layers"]:
        h = ow.layer.dropout(h + jnp.tanh(h @ w), 0.1)
    return jnp.mean((h @ params["table"].T - x) ** 2), {"each": h, "most": h.max()}


def weighted(params: Any, x: Any, example_weight: Any) -> Any:
    each = jnp.mean(network(params, x)[1]["each"] ** 2, 1)
    return jnp.sum(each * example_weight) / jnp.sum(example_weight)


def looped(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2)


def apart() -> Any:
    return CLIPPED.minimize(network, PARAMS, X, has_aux=True)


PIPELINES: dict[str, tuple[Callable[[], Pipeline], Any, tuple[Any, ...]]] = {
    "gpipe": (lambda: ow.pipeline(apart(), 4, 4, "gpipe"), PARAMS, (X,)),
    "1f1b": (lambda: ow.pipeline(apart(), 2, 8), PARAMS, (X,)),
    "zero_bubble": (
        lambda: ow.pipeline(ow.mixed_precision(apart()), 4, 4, "zero_bubble"),
        PARAMS,
        (X,),
    ),
    "data": (lambda: ow.pipeline(apart(), 2, 4, data=2), PARAMS, (X,)),
    "parameters split": (
        lambda: ow.pipeline(ow.partition(apart(), {"fsdp": 2}, FSDP, batch="fsdp"), 2, 4),
        PARAMS,
        (X,),
    ),
    "layers in a loop": (
        lambda: ow.pipeline(ow.Adam(0.1).minimize(looped, np.stack(LAYERS), X), 2, 4, "zero_bubble"),
        np.stack(LAYERS),
        (X,),
    ),
    "weights": (
        lambda: ow.pipeline(ow.SGD(0.1).minimize(weighted, PARAMS, X, np.ones(16, "float32")), 2, 4, data=2),
        PARAMS,
        (X, np.ones(16, "float32")),
    ),
}


def measured(pipeline: Pipeline, params: Any, data: tuple[Any, ...]) -> list[list[int]]:
    """For each stage, at each of its tasks, the bytes that are there and those that XLA plans beside."""
    step = ow.compile(pipeline)
    stages, count = step.stages, pipeline.schedule.stages
    found: list[list[int]] = [[] for _ in range(count)]
    gc.collect()
    known = {id(x) for x in jax.live_arrays()}

    def there(stage: int) -> int:
        arrays = [x for x in jax.live_arrays() if id(x) not in known]
        shards = [s for x in arrays for s in x.addressable_shards if s.device.id == stage * step_devices]
        return sum({s.data.unsafe_buffer_pointer(): s.data.nbytes for s in shards}.values())

    step_devices = 1 if pipeline.partition is None else pipeline.partition.count

    def noted(stage: int, call: Any) -> Any:
        used = call.memory_analysis()
        beside = used.temp_size_in_bytes + max(used.output_size_in_bytes - used.alias_size_in_bytes, 0)

        def run(*args: Any) -> Any:
            for at in range(count) if stage == count else [stage]:
                found[at].append(there(at) + beside)
            return call(*args)

        return run

    stages.begin = noted(0, stages.begin)
    stages.once = {stage: noted(stage, call) for stage, call in stages.once.items()}
    stages.zeros = {place: noted(place[0], call) for place, call in stages.zeros.items()}
    stages.merges = {place: noted(place[0], call) for place, call in stages.merges.items()}
    parts = stages.parts.items()
    stages.parts = {place: part._replace(call=noted(place[0], part.call)) for place, part in parts}
    for update in stages.updates:
        update.call = noted(update.stage, update.call)
    if stages.statistics is not None:
        stages.statistics = noted(0, stages.statistics)
    step(step.init(params), *data)
    return found


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_as_many_micro_batches_are_kept_as_the_theory_of_the_schedule_says(schedule: str, held: list[int]):
    """With what has just come for the task that runs: the gradient of what the stage gave."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    pipeline = ow.pipeline(ow.Adam(0.1).minimize(loss, LAYERS, X), 4, 8, schedule)
    for stage, curve in enumerate(ow.memory(pipeline).curves):
        most = max(moment.shares[MemoryShare.SAVED] for moment in curve if moment.made_by != "update")
        kept = pipeline.kept(stage)
        assert held[stage] * kept <= most <= (held[stage] + 1) * kept, stage


def test_the_text_tells_the_peak_of_each_stage():
    pipeline = ow.pipeline(apart(), 2, 4)
    found = ow.memory(pipeline)
    head, *rows = str(found).splitlines()[2:]
    assert head.split()[:2] == ["stage", "parameters"]
    assert [row.split()[-1] for row in rows] == [moment.task for moment in found.peaks]
    assert found.peak == max(moment.bytes for curve in found.curves for moment in curve)
    for stage, moment in enumerate(found.peaks):
        kept = [v.size * 4 for v in pipeline.state_of(stage) if v.kind is Kind.PARAMETER]
        copied = [0, 2 * TABLE.size * 4 + 8][stage]  # the table of stage 0, its transpose, and the key
        assert moment.shares[MemoryShare.PARAMETERS] == sum(kept) + copied
    assert found.plot().svg.count("stage ") == 2


@pytest.mark.parametrize("name", PIPELINES)
def test_each_task_finds_in_memory_what_was_foretold(name: str):
    make, params, data = PIPELINES[name]
    pipeline = make()
    found = ow.memory(pipeline)
    assert [[m.bytes for m in curve] for curve in found.curves] == measured(pipeline, params, data)


@pytest.mark.parametrize("look", [ow.memory, ow.collectives])
def test_one_of_several_processes_does_not_have_all_stages(look: Callable[[Any], Any], monkeypatch: Any):
    cut = ow.pipeline(ow.SGD(0.1).minimize(looped, jnp.stack(LAYERS), X), 2, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ow.ArgumentError, match=f"{look.__name__} compiles all stages.*in one process"):
        look(cut)


@pytest.mark.parametrize("option", [{"tune": False}, {"roll": True}])
def test_an_option_for_one_program_is_refused_by_its_name(option: dict[str, Any]) -> None:
    cut = ow.pipeline(apart(), 2, 2)
    with pytest.raises(ow.ArgumentError, match=f"{min(option)} says how compile changes one Program"):
        ow.memory(cut, **option)
