"""Stages compute once a step, and keep, all that micro-batches share; their layers are a loop if rolled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import onward as ow
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.pipeline_run import PipelineRun

RANDOM = np.random.default_rng(0)
WIDE = 4
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CLIPPED = ow.AdamW(0.01, rules=[ow.ClipByGlobalNorm(0.1)])
X = RANDOM.normal(0, 0.4, (12, WIDE))


def weights(count: int) -> Any:
    return list(RANDOM.normal(0, 0.4, (count, WIDE, WIDE)))


def masked(params: Any, x: Any) -> Any:
    """A mask that is made of a parameter, and that every layer reads."""
    mask = jnp.tanh(params["mask"])
    for i, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w) * mask
    return jnp.mean(x**2)


def dropped(params: Any, x: Any) -> Any:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x + ow.layer.dropout(jnp.tanh(x @ w), 0.1) / (i + 2)
    return jnp.mean(x**2)


def steps_of(program: Any, params: Any) -> tuple[dict[str, Any], Any]:
    """The floats of the State after two steps, and the loss of the second."""
    step = ow.compile(program, options=QUICK)
    state, _ = step(step.init(params), X)
    state, out = step(state, X)
    floats = (name for name in state if jnp.issubdtype(state[name].dtype, jnp.floating))
    return {name: np.asarray(state[name]) for name in floats}, out.loss


def expect_equal(found: Any, wanted: Any) -> None:
    assert found[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=0, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found[1], wanted[1], rtol=0, atol=1e-9)


def test_what_is_alike_for_all_micro_batches_is_made_and_sent_once(monkeypatch: pytest.MonkeyPatch):
    sent: Counter[tuple[str, int]] = Counter()
    send = PipelineRun._sent

    def counted(run: Any, v: Any, value: Any, stage: int) -> Any:
        sent[v.name, stage] += 1
        return send(run, v, value, stage)

    monkeypatch.setattr(PipelineRun, "_sent", counted)
    params = {"mask": RANDOM.normal(size=WIDE), "layers": weights(3)}
    with jax.enable_x64(True):
        program = ow.Momentum(0.1).minimize(masked, params, X)
        cut = ow.pipeline(program, 3, 4)
        assert "tanh" in [v.name for v in cut.once[0].outputs]
        found = steps_of(cut, params)
        assert {stage: count for (name, stage), count in sent.items() if name == "tanh"} == {1: 2, 2: 2}
        expect_equal(found, steps_of(ow.accumulate(program, 4), params))


def tied(params: Any, x: Any) -> Any:
    """First and last layer are one table, and all between them one weight."""
    h = x @ params["table"]
    for i in range(4):
        with jax.named_scope(f"layer_{i}"):
            h = h + jnp.tanh(h @ params["each"]) / (i + 1)
    return jnp.mean((h @ params["table"].T - x) ** 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("how", ["apart", "bfloat16", "two at once", "split"])
def test_stages_add_up_their_part_of_a_gradient_and_send_it_once(schedule: str, how: str):
    params = {"table": weights(1)[0], "each": weights(1)[0]}
    with jax.enable_x64(how != "bfloat16"):
        program = CLIPPED.minimize(tied, params, X)
        program = ow.mixed_precision(program) if how == "bfloat16" else program
        wanted = steps_of(program if how != "bfloat16" else ow.accumulate(program, 6), params)
        if how == "split":
            program = ow.partition(program, {"fsdp": 2}, {"*": "fsdp"}, batch="fsdp")
        cut = ow.pipeline(program, 3, 6, schedule, data=2 if how == "two at once" else 1)
        found = steps_of(cut, params)
    for part in cut.parts.values():
        assert all(v.shape != (WIDE, WIDE) for v in part.outputs if v in cut.readers), part.name
    sums = [(v.name, cut.home(v.name)) for v in cut.accumulated.parameters]
    added = [sorted(cut.homes[v] for v in op.inputs) for op in cut.accumulated.ops if op.type == "sum"]
    each = [0, 1] if how == "bfloat16" else [0, 1, 2]
    assert (sorted(added), sums) == ([each, [0, 2]], [("each", 0), ("table", 0)])
    if how == "bfloat16":
        for name, value in wanted[0].items():
            np.testing.assert_allclose(found[0][name], value, rtol=0.02, atol=0.004, err_msg=name)
    else:
        expect_equal(found, wanted)
    if how == "split":
        assert {cut.specs[r.part] for r in cut.loop.sums if r.part.shape == (WIDE, WIDE)} == {P("fsdp")}


@jax.custom_vjp
def clipped(w: Any) -> Any:
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def test_what_changes_a_gradient_of_several_stages_otherwise_is_given_its_sum():
    """A part of it, or a sum over micro-batches, would be clipped to another number."""

    def loss(params: Any, x: Any) -> Any:
        return tied({name: clipped(w) for name, w in params.items()}, x)

    params = {"table": weights(1)[0], "each": weights(1)[0]}
    with jax.enable_x64(True):
        program = ow.SGD(1.0).minimize(loss, params, X)
        wanted = steps_of(ow.accumulate(program, 6, is_sum=False), params)
        with pytest.warns(UserWarning, match="'clipped_grad' at .* otherwise than in proportion"):
            cut = ow.pipeline(program, 3, 6)
        expect_equal(steps_of(cut, params), wanted)


def rate_beside(p: Any, s: Any, x: Any) -> Any:
    """A result that follows from the count of steps, and that both stages read."""
    rate = s["steps"] * 0.5
    h = jnp.tanh(jnp.tanh(x @ p["first"]) * rate @ p["last"]) * rate
    return jnp.mean((h - x) ** 2), ({"steps": s["steps"] + 1}, {"rate": rate})


def statistics_of_layers(p: Any, s: Any, x: Any) -> Any:
    """Of each layer, in a loop over layers whose stack of statistics is carried on."""

    def layer(h: Any, given: Any) -> Any:
        w, mean = given
        return h + jnp.tanh((h - mean) @ w), jax.lax.stop_gradient(h.mean(0))

    h, means = jax.lax.scan(layer, x, (p["layers"], s["means"]))
    return jnp.mean(h**2), ({"means": 0.9 * s["means"] + 0.1 * means}, means)


def statistics_apart(p: Any, s: Any, x: Any) -> Any:
    h, means = x, []
    for w, mean in zip(p["layers"], s["means"], strict=True):
        means.append(0.9 * mean + 0.1 * jax.lax.stop_gradient(h.mean(0)))
        h = h + jnp.tanh((h - mean) @ w)
    return jnp.mean(h**2), ({"means": jnp.stack(means)}, h)


@pytest.mark.parametrize("name", ["rate", "loop", "apart", "rolled"])
def test_state_that_several_stages_read_and_make(name: str):
    layers = {"layers": np.stack(weights(4))}
    loss, params, state = {
        "rate": (rate_beside, {"first": weights(1)[0], "last": weights(1)[0]}, {"steps": 1.0}),
        "loop": (statistics_of_layers, layers, {"means": np.ones((4, WIDE))}),
        "apart": (statistics_apart, {"layers": weights(4)}, {"means": np.ones((4, WIDE))}),
        "rolled": (statistics_apart, {"layers": weights(4)}, {"means": np.ones((4, WIDE))}),
    }[name]
    with jax.enable_x64(True):
        program = CLIPPED.minimize(loss, params, X, state=state, has_aux=True)
        cut = ow.pipeline(ow.roll(program) if name == "rolled" else program, 2, 6)
        outs = []
        for made in (program, cut):
            step = ow.compile(made, options=QUICK)
            now, _ = step(step.init(params, state), X)
            now, out = step(now, X)
            outs.append((now.parameters, now.model_state, out.loss, out.aux))
        for wanted, found in zip(*map(jax.tree.leaves, outs), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def normalized(p: Any, s: Any, x: Any) -> Any:
    """By statistics of the batch, which the state follows."""
    h = x @ p["first"]
    var = h.var(0, keepdims=True)
    h = (h - h.mean(0)) / jnp.sqrt(var + 0.1)
    return jnp.mean((h @ p["last"]) ** 2), {"var": 0.9 * s["var"] + 0.1 * var[0]}


def recalling(p: Any, s: Any, x: Any) -> Any:
    """What the batch before was about, which is read together with this one."""
    about = jnp.tanh(s["about"] + (x @ p["first"]).mean(0))
    return jnp.mean((about @ p["last"]) ** 2), {"about": about}


def spread(p: Any, s: Any, x: Any) -> Any:
    """A statistic that the loss never sees."""
    h = jnp.tanh(x @ p["first"])
    return jnp.mean((h @ p["last"]) ** 2), {"std": 0.9 * s["std"] + 0.1 * h.std(0)}


@pytest.mark.parametrize(
    ("loss", "state", "words"),
    [
        (normalized, "var", ", as batch norm does .* Take what normalizes each example by itself"),
        (recalling, "about", r"their data\. .* Leave out that state, or take accumulate"),
        (spread, "std", r"their data\. .* Leave out that state, or take accumulate"),
    ],
)
def test_state_of_data_that_is_handed_on_is_refused_by_what_it_is(loss: Any, state: str, words: str):
    params = {"first": weights(1)[0], "last": weights(1)[0]}
    program = ow.SGD(0.1).minimize(loss, params, X, state={state: np.zeros(WIDE)})
    with pytest.raises(ow.GraphError, match=f"hands 's/{state}' on .*{words}"):
        ow.pipeline(program, 2, 3, is_sum=False)


def test_delayed_scales_are_refused_by_their_name_and_current_ones_are_not():
    program = ow.SGD(0.1).minimize(dropped, weights(2), X)
    delayed = ow.mixed_precision(program, "float8", scaling="delayed")
    with pytest.raises(
        ow.GraphError, match=r'scales of float8 are delayed\. .*"float8", scaling="current"\)'
    ):
        ow.pipeline(delayed, 2, 3)
    assert ow.pipeline(ow.mixed_precision(program, "float8", scaling="current"), 2, 3)


def test_parameters_in_a_low_precision_are_kept_once_a_step():
    params = {"mask": RANDOM.normal(size=WIDE), "layers": weights(3)}
    program = ow.mixed_precision(ow.SGD(0.1).minimize(masked, params, X), "bfloat16")
    cut = ow.pipeline(program, 3, 4, "zero_bubble")
    for stage in (1, 2):
        weight = f"bfloat16(layers/{stage})"
        assert weight in [v.name for v in cut.once[stage].outputs]
        assert weight not in [v.name for v in cut.parts[stage, "F"].outputs]
        assert weight in [v.name for v in cut.parts[stage, "B"].inputs]
    assert "made of parameters and constants once a step, and kept: 48 B in stage 0" in str(cut)
    found, wanted = (steps_of(way, params) for way in (cut, ow.accumulate(program, 4)))
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("function", "optimizer", "stages", "schedule", "data"),
    [(dropped, ow.SGD(0.1), 2, "zero_bubble", 1), (masked, CLIPPED, 2, "1f1b", 3)],
)
def test_layers_of_a_stage_are_a_loop_if_the_program_is_rolled(
    function: Any, optimizer: Any, stages: int, schedule: str, data: int
):
    params: Any = weights(8)
    if function is masked:
        params = {"mask": RANDOM.normal(size=WIDE), "layers": params}
    with jax.enable_x64(True):
        program = optimizer.minimize(function, params, X)
        cut = ow.pipeline(ow.roll(program), stages, 4, schedule, data=data)
        plain = ow.pipeline(program, stages, 4, schedule, data=data)
        for stage in range(stages):
            assert [loop.times for loop in ow.graph.rolls_of(cut.parts[stage, "F"])] == [8 // stages]
            assert "stack" in [op.type for op in cut.once[stage].ops]
            assert parameters_of(cut, stage) == parameters_of(plain, stage)
        expect_equal(steps_of(cut, params), steps_of(ow.accumulate(program, 4), params))


def parameters_of(cut: Pipeline, stage: int) -> list[str]:
    return [v.name for v in cut.accumulated.parameters if cut.homes[v] == stage]


def test_a_rolled_program_is_cut_where_the_one_without_loops_is():
    params = weights(8)
    program = ow.SGD(0.1).minimize(dropped, params, X)
    rolled = ow.pipeline(ow.roll(program), 2, 4, at=["layer_5"])
    found = [ow.graph.rolls_of(rolled.parts[stage, "F"]) for stage in (0, 1)]
    assert [[loop.times for loop in loops] for loops in found] == [[5], [3]]
    kept = ow.roll(program, keep=["layer_3/tanh"])
    assert "layer_3/tanh" in ow.pipeline(kept, 2, 4).program.variables
    with pytest.raises(
        ow.GraphError, match=r"recompute of 'dropped' .*: pipeline\(recompute\(program, budget\)"
    ):
        ow.pipeline(ow.recompute(ow.roll(program), "8KB"), 2, 4)


def test_loops_of_a_stage_keep_no_parameters_of_each_micro_batch():
    program = ow.mixed_precision(ow.SGD(0.1).minimize(dropped, weights(8), X), "bfloat16")
    rolled, plain = (ow.pipeline(way, 2, 4) for way in (ow.roll(program), program))
    for stage in (0, 1):
        assert ow.graph.rolls_of(rolled.parts[stage, "F"])
        assert [op.type for op in rolled.once[stage].ops].count("cast") == 4
        assert rolled.kept(stage) <= 1.1 * plain.kept(stage)
