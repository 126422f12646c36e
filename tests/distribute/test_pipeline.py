"""Stages on devices of their own: the numbers of one device, in the order that the schedule says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.program import Program
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.schedule import SCHEDULES, PipelineSchedule, StageTask, StageWork, schedule_of
from onward.execute.pipeline_run import PipelineRun

RANDOM = np.random.default_rng(0)
WIDE, TALL, WORDS = 4, 3, 7
Issued = tuple[int, StageWork, int]
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CLIPPED = ow.AdamW(1e-2, rules=[ow.ClipByGlobalNorm(0.1)])


def normal(*shape: int) -> Any:
    return RANDOM.normal(0, 0.4, shape)


def gpt(params: Any, words: Any) -> Any:
    h = params["embed"][words]
    for i, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}"):
            scores = jnp.where(np.tri(TALL), h @ h.swapaxes(1, 2), -1e9)
            h = h + jax.nn.softmax(scores) @ h
            h = h + jnp.tanh(h @ block["up"]) @ block["down"]
    logits = h @ params["embed"].T
    told = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), words[:, 1:, None], -1)
    return -told.mean(), logits


def mixer(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(x.swapaxes(1, 2) @ w["tall"]).swapaxes(1, 2)
        x = x + jnp.tanh(x @ w["wide"])
    return jnp.sum(x**2), x.mean((1, 2))


def recurrent(params: Any, x: Any) -> Any:
    """Of two states, as those of an LSTM."""
    h = x.swapaxes(0, 1)
    for w in params:

        def cell(carry: Any, x: Any, w: Any = w) -> Any:
            c = carry[1] + jnp.concatenate([x, carry[0]], -1) @ w
            return (jnp.tanh(c), c), carry[0]

        zero = jnp.zeros_like(h[0])
        _, h = jax.lax.scan(cell, (zero, zero), h)
    return jnp.mean(h**2), np.arange(2.0)  # which no stage makes


NETWORKS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "gpt": (
        gpt,
        {
            "embed": normal(WORDS, WIDE),
            "blocks": [{"up": normal(WIDE, 8), "down": normal(8, WIDE)}],
        },
        RANDOM.integers(0, WORDS, (8, TALL)),
    ),
    "mixer": (
        mixer,
        [{"tall": normal(TALL, TALL), "wide": normal(WIDE, WIDE)} for _ in range(2)],
        normal(8, TALL, WIDE),
    ),
    "recurrent": (recurrent, [normal(2 * WIDE, WIDE) for _ in range(2)], normal(8, TALL, WIDE)),
}


def mlp(params: Any, x: Any) -> Any:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


MLP, X = [normal(WIDE, WIDE) for _ in range(3)], normal(12, WIDE)


@pytest.fixture(scope="module")
def program() -> Program:
    return ow.SGD(0.1).minimize(mlp, MLP, X)


def trained(step: Any, params: Any, data: Any, steps: int) -> tuple[Any, Any]:
    state = step.init(params)
    for _ in range(steps):
        state, out = step(state, data)
    return state, out


def expect_equal(state: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Raise ``AssertionError``, with its name, for a value of a State that is not that of another one."""
    for name in wanted:
        mine, theirs = (
            jax.random.key_data(s[name]) if jnp.issubdtype(s[name].dtype, jax.dtypes.prng_key) else s[name]
            for s in (state, wanted)
        )
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("network", "stages", "data", "schedule", "optimizer"),
    [
        ("gpt", 2, 1, "zero_bubble", CLIPPED),  # embedding and last layer are one parameter
        ("mixer", 4, 2, "gpipe", ow.SGD(0.01)),
        ("recurrent", 2, 2, "1f1b", ow.Momentum(0.1)),
    ],
)
def test_twenty_steps_are_those_of_one_device(
    network: str, stages: int, data: int, schedule: str, optimizer: Any
):
    function, params, x = NETWORKS[network]
    with jax.enable_x64(True):
        program = optimizer.minimize(function, params, x, has_aux=True)
        state, out = trained(ow.compile(program), params, x, 20)
        step = ow.compile(ow.pipeline(program, stages, 4, schedule, data=data), options=QUICK)
        piped, seen = trained(step, params, x, 20)
        expect_equal(piped, state, rtol=0, atol=1e-9)
        for mine, theirs in zip(jax.tree.leaves(seen.value), jax.tree.leaves(out.value), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-9)
        rows = [range(data * stage, data * (stage + 1)) for stage in range(stages)]
        assert {frozenset(d.id for d in piped[v].devices()) for v in program.parameters} == set(
            map(frozenset, rows)
        )
        for made in jax.tree.leaves(seen.aux):  # of each example, or a constant
            assert made.addressable_shards[0].data.shape[0] == (8 // data if len(made) == 8 else 2)


def scaled_mlp(params: Any, x: Any) -> Any:
    """Whose first layer has an input gradient as well, so that each stage has three products."""
    return mlp(params[1:], x * params[0])


def test_schedules_give_the_same_bits_and_hold_and_wait_as_they_say(monkeypatch: pytest.MonkeyPatch):
    """Held: counted of the arrays that are alive, as many of each micro-batch, until it goes back."""
    most: dict[int, int] = {}
    issued: list[Issued] = []
    work = PipelineRun.work

    def counted(run: Any, stage: int, *task: Any) -> None:
        work(run, stage, *task)
        issued.append((stage, *task))
        alive = [
            x for x in jax.live_arrays() if x.shape == (2, WIDE) and x.devices() == {jax.devices()[stage]}
        ]
        most[stage] = max(most.get(stage, 0), len(alive))

    monkeypatch.setattr(PipelineRun, "work", counted)
    params = [normal(WIDE), *MLP]
    program = ow.SGD(0.1).minimize(scaled_mlp, params, X)
    states, held = [], {}
    for name in SCHEDULES:
        cut = ow.pipeline(program, 3, 6, name, at=["layer_1", "layer_2"])
        step = ow.compile(cut, options=QUICK)
        state, _ = step(step.init(params), X)
        most.clear()
        issued.clear()
        states.append(step(state, X)[0])
        held[name] = most[1], cut.schedule.held[1]
        assert span(cut, issued) == cut.schedule.span
    each = cut.kept(1) // (2 * WIDE * 4)  # activations of a micro-batch
    assert held["gpipe"][1] == 6
    assert held["1f1b"][1] == 2
    assert held["zero_bubble"][1] == 3
    for alive, said in held.values():
        assert each * said - 1 <= alive <= each * said + 2  # and what has just come, or is on its way on
    for name in states[0]:
        assert len({np.asarray(state[name]).tobytes() for state in states}) == 1, name


def span(cut: Pipeline, issued: list[Issued]) -> int:
    """How long it takes if a product takes one unit, and each device works in the order of issue."""
    free: dict[int, int] = dict.fromkeys(range(cut.schedule.stages), 0)
    there = {(v, i): 0 for v in cut.loop.turn.inputs for i in range(cut.schedule.micro_batches)}
    for stage, work, i in issued:
        part = cut.parts[stage, work]
        begin = max(free[stage], *(there[v, i] for v in part.inputs))
        free[stage] = begin + sum(len(op.outputs) for op in part.ops if op.type.startswith("dot_general"))
        there.update(((v, i), free[stage]) for v in part.outputs)
    return max(free.values())


def test_what_is_known_of_the_schedules():
    for stages in range(1, 6):
        for count in range(1, 13):
            made = {name: schedule_of(name, stages, count) for name in SCHEDULES}
            bubble = (stages - 1) / (count + stages - 1)
            assert made["gpipe"].idle == pytest.approx(bubble)
            assert made["1f1b"].idle == pytest.approx(bubble)
            assert made["gpipe"].held == (count,) * stages
            assert made["1f1b"].held == tuple(min(count, stages - s) for s in range(stages))
            assert max(made["zero_bubble"].held) <= stages
            if stages > 1:
                assert made["zero_bubble"].idle < made["1f1b"].idle
            if count >= stages:
                assert made["zero_bubble"].span == 3 * count + stages - 1


def test_orders_that_no_stages_can_keep_are_refused():
    f, b = StageTask(StageWork.FORWARD, 0), StageTask(StageWork.BACKWARD, 0)
    with pytest.raises(ow.GraphError, match="never ends: stage 0 waits with B0"):
        _ = PipelineSchedule("mine", 1, ((b, f),)).moments
    with pytest.raises(ow.GraphError, match="has 3 tasks in stage 0; expected 2"):
        _ = PipelineSchedule("mine", 1, ((f, f, b),)).moments


def test_a_checkpoint_of_one_layout_is_one_of_the_other(program: Program):
    one, piped = ow.compile(program), ow.compile(ow.pipeline(program, 2, 3, data=2), options=QUICK)
    state, _ = trained(piped, MLP, X, 2)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(state, 2)
    for restored in (one.restore(path), piped.restore(path)):
        assert all(np.array_equal(restored[name], state[name]) for name in state)
    assert restored["params/2"].devices() == {*jax.devices()[2:4]}
    moved, _ = piped(one.restore(path), X)  # a State of one device is taken over
    state, _ = piped(state, X)
    assert all(np.array_equal(moved[name], state[name]) for name in state)
    wide = [normal(WIDE, 5), normal(5, 5), normal(5, 5)]
    other = ow.compile(ow.SGD(0.1).minimize(mlp, wide, X)).init(wide)
    with pytest.raises(ow.StateError, match=r"'params/0' is float32\[4,5\], here float32\[4,4\]"):
        piped(other, X)
    with pytest.raises(ow.ArgumentError, match="the pipeline was cut for float32"):
        piped(state, X[:6])
    with pytest.raises(ow.ArgumentError, match="cannot be traced"):
        jax.jit(piped)(state, X)
    piped(restored, X)
    with pytest.raises(ow.StateError, match="donated"):
        piped(restored, X)


def test_stages_begin_with_the_scopes_that_are_named(program: Program):
    cut = ow.pipeline(program, 2, 3, at=["layer_1"])
    assert [v.name for v in cut.parts[1, "F"].state] == ["params/1", "params/2"]
    assert ow.plan(cut) is cut
    assert repr(cut) == "Pipeline('mlp', 2 stages, 1f1b)"
    assert repr(cut.schedule) == str(cut.schedule)
    with pytest.raises(ow.ArgumentError, match=r"summary was given Pipeline\('mlp', 2 stages, 1f1b\)"):
        ow.summary(cut)  # type: ignore[arg-type]
    with pytest.raises(ow.ArgumentError, match="do not begin one after the other"):
        ow.pipeline(program, 3, 3, at=["layer_2", "layer_1"])
    with pytest.raises(ow.ArgumentError, match="3 stages begin with 2 of them"):
        ow.pipeline(program, 3, 3, at="layer_1")
    with pytest.raises(ow.ArgumentError, match=r"at is \(1,\); expected names of scopes"):
        ow.pipeline(program, 2, 3, at=[1])
    with pytest.raises(ow.UnknownNameError, match=r"'layer_9'.*nearest names are 'layer_0'"):
        ow.pipeline(program, 2, 3, at=["layer_9"])
    with pytest.raises(ow.GraphError, match="stage 1 reads no parameter"):
        ow.pipeline(ow.SGD(0.1).minimize(ends_plainly, MLP, X), 2, 3, at=["end"])


def ends_plainly(params: Any, x: Any) -> Any:
    loss = mlp(params, x)
    with jax.named_scope("end"):
        return 2 * loss


def normalized(params: Any, x: Any) -> Any:
    return jnp.mean(ow.layer.batch_norm(x @ params[0]) @ params[1])


def printing(params: Any, x: Any) -> Any:
    loss = mlp(params, x)
    jax.debug.print("{}", loss)
    return loss


@pytest.mark.filterwarnings("ignore:.*as batch normalization does")
def test_what_no_pipeline_can_be_made_of_is_refused_by_name(program: Program):
    forward = ow.trace(mlp, MLP, X)
    refused = {
        "decides about a step as a whole": ow.guard(program),
        "check_finite of 'mlp' decides": ow.check_finite(program),
        "watch of 'mlp' looks": ow.watch(program, ["*"]),
        "replicate of 'mlp' lays it out over devices": ow.replicate(program, 2),
        "say micro_batches=": ow.accumulate(program, 2),
        "mixed_precision of .* Take bfloat16": ow.mixed_precision(program, "float16"),
        "has no update": ow.append_backward(forward),
        "prints or calls back": ow.SGD(0.1).minimize(printing, MLP, X),
        "as batch norm does": ow.SGD(0.1).minimize(normalized, MLP[:2], X),
    }
    for words, given in refused.items():
        with pytest.raises(ow.GraphError, match=words):
            ow.pipeline(given, 2, 3)
    for words, more in {
        "there is no schedule 'zerobubble'. The nearest names are 'zero_bubble'": (2, 3, "zerobubble"),
        "cannot be cut into 4 stages: 3 of its": (4, 3),
        "12 rows .'x'., which 5 micro-batches do not divide. Feed 10 or 15": (2, 5),
        "stages is 0; expected how many": (0, 3),
        "micro_batches is 1; expected how many, at least 2": (2, 1),
    }.items():
        with pytest.raises(ow.ArgumentError, match=words):
            ow.pipeline(program, *more)
    with pytest.raises(
        ow.ArgumentError, match="12 rows, which 3 micro-batches for each of data=3 do not divide"
    ):
        ow.pipeline(program, 2, 3, data=3)
    with pytest.raises(ow.ArgumentError, match="4 devices of its own, and JAX shows 8"):
        ow.compile(ow.pipeline(program, 3, 3, data=4))
    with pytest.raises(ow.ArgumentError, match="a Pipeline is one for each stage"):
        ow.compile(ow.pipeline(program, 2, 3), roll=True)  # type: ignore[call-overload]
    deep = ow.SGD(0.1).minimize(mlp, MLP * 3, X)
    with pytest.raises(ow.ArgumentError, match="9 stages, each on a device of its own, and JAX shows 8"):
        ow.compile(ow.pipeline(deep, 9, 3))


def test_micro_batches_divide_by_what_counts_in_the_whole_batch():
    """A loss by mask on stages: micro-batches have several numbers of examples that count, one has none."""

    def loss(params: Any, x: Any, mask: Any) -> Any:
        h = jnp.tanh(x @ params["first"]) @ params["last"]
        return jnp.sum(mask * jnp.sum(h**2, 1)) / jnp.sum(mask), jnp.sum(mask)

    params = {"first": normal(3, WIDE), "last": normal(WIDE, 2)}
    x, mask = normal(8, 3), np.array([0.0, 0, 1, 1, 0, 1, 1, 2])
    program = CLIPPED.minimize(loss, params, x, mask, has_aux=True)
    cuts = [ow.pipeline(program, 2, 4), ow.pipeline(program, 2, 4, schedule="zero_bubble", data=2)]
    found = []
    for step in map(ow.compile, (program, *cuts)):
        state, out = step(step.init(params), x, mask)
        state, out = step(state, x, mask)
        found.append([*(state[name] for name in state), *jax.tree.leaves(out.value)])
    for others in found[1:]:
        for mine, theirs in zip(others, found[0], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stages", "schedule", "optimizer"),
    [(2, "gpipe", ow.SGD(0.1)), (4, "1f1b", CLIPPED), (4, "zero_bubble", ow.SGD(0.1)), (2, "1f1b", CLIPPED)],
)
def test_a_loss_by_mask_is_recomputed_in_stages(stages: int, schedule: str, optimizer: Any):
    """What divides it is of the whole batch: micro-batches have it, and none makes it again."""

    def loss(params: Any, x: Any) -> Any:
        mask = x[:, 0] > 0
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.tanh(jnp.sin(x @ w) * 2)
        return jnp.sum(mask * jnp.sum(x**2, 1)) / jnp.sum(mask)

    params = [*MLP, *MLP[:2]]
    with jax.enable_x64(True):
        program = optimizer.minimize(loss, params, X)
        recomputed = ow.recompute(program, scopes="layer_*")
        cut = ow.pipeline(recomputed, stages, 6, schedule)
        made = [v.name for part in cut.parts.values() for op in part.ops for v in op.outputs]
        assert {f"again(layer_{i}/sin)" for i in range(5)} <= {*made}
        assert not [name for name in made if "whole" in name]
        ways = program, ow.accumulate(recomputed, 6), cut
        plain, one, piped = (trained(ow.compile(way, options=QUICK), params, X, 2)[0] for way in ways)
        expect_equal(piped, one, rtol=0, atol=1e-12)
        expect_equal(piped, plain, rtol=1e-6, atol=1e-9)


def test_what_micro_batches_hand_on_is_made_ahead_and_examples_are_weighed():
    """Random keys; a count of steps that both stages read after it has grown; a batch that is filled up."""

    def loss(params: Any, count: Any, x: Any, example_weight: Any) -> Any:
        count = count + 1
        h = jnp.tanh(x @ params[0]) * count
        each = jnp.sum((ow.layer.dropout(h, 0.5) @ params[1]) ** 2 / count, 1)
        return jnp.sum(each * example_weight) / jnp.sum(example_weight), count

    weights = np.arange(12, dtype="float32")
    program = ow.SGD(0.1).minimize(loss, MLP[:2], X, weights, state=jnp.float32(1))
    steps = (
        ow.compile(ow.accumulate(program, 15)),
        ow.compile(ow.pipeline(program, 2, 5, data=3), options=QUICK),
    )
    states = [step.init(MLP[:2], jnp.float32(1)) for step in steps]
    for _ in range(2):
        states = [step(state, X, weights)[0] for step, state in zip(steps, states, strict=True)]
    one, piped = states
    assert float(piped.model_state) == 3
    for name in ("params/0", "params/1"):
        np.testing.assert_allclose(piped[name], one[name], rtol=1e-5, atol=1e-6)


def by_weight(params: Any, x: Any, example_weight: Any) -> Any:
    each = jnp.sum((jnp.tanh(x @ params[0]) @ params[1]) ** 2, 1)
    return jnp.sum(each * example_weight) / jnp.sum(example_weight), each


@pytest.mark.parametrize("data", [1, 2])
def test_a_shorter_batch_is_filled_up_where_examples_are_weighed(data: int):
    with jax.enable_x64(True):
        params, x, weights = [normal(4, 4), normal(4, 4)], normal(16, 4), RANDOM.uniform(1, 2, 16)
        program = ow.SGD(0.1).minimize(by_weight, params, x, weights, has_aux=True)
        step = ow.compile(ow.pipeline(program, 2, 4, data=data), options=QUICK)
        state, plain = step.init(params), params
        for rows in (16, 13, 3, 1):
            fed = x[:rows], weights[:rows]
            state, out = step(state, *fed)
            (value, each), gradients = jax.value_and_grad(by_weight, has_aux=True)(plain, *fed)
            plain = [w - 0.1 * g for w, g in zip(plain, gradients, strict=True)]
            np.testing.assert_allclose(out.loss, value, rtol=1e-9)
            np.testing.assert_allclose(out.aux, each, rtol=1e-9)
            jax.tree.map(
                partial(np.testing.assert_allclose, rtol=1e-9), jax.device_get(state.parameters), plain
            )
        with pytest.raises(ow.ArgumentError, match=r"is float64\[20, 4\]; the pipeline was cut for"):
            step(state, normal(20, 4), np.ones(20))
        with pytest.raises(ow.ArgumentError, match=r"'example_weight' has 3 rows, 'x' 4; both are the batch"):
            step(state, x[:4], weights[:3])


def test_a_loop_over_any_step_runs_over_stages(tmp_path: Any):
    params, batches = [normal(4, 4), normal(4, 4)], [(normal(8, 4), np.ones(8)) for _ in range(3)]
    program = ow.SGD(0.1).minimize(by_weight, params, *batches[0], has_aux=True)
    alone, step = ow.compile(program), ow.compile(ow.pipeline(program, 2, 4), options=QUICK)
    _, outs = alone.run(alone.init(params), batches, steps=3)
    state, piped = step.run(step.init(params), batches, steps=3)
    np.testing.assert_allclose(piped.loss, outs.loss, rtol=1e-5)
    assert (step.fetch, step.traces) == ((), 0)
    assert step.compilations > len(step.pipeline.parts)
    step.expect_going(state)
    found = ow.find_nonfinite(step, state, (batches[0][0] * np.inf, np.ones(8)))
    assert found is not None
    with pytest.raises(ow.ArgumentError, match=r"batch 1 \(counted from 0\)"):
        step.run(state.copy(), [batches[0], (np.ones((8, 3)), np.ones(8))])
    for word in ("function", "executable", "compiled_text"):
        with pytest.raises(AttributeError, match=r"ow\.compile\(step\.pipeline\.program\)"):
            getattr(step, word)
    for what in (step, step.pipeline):
        with pytest.raises(ow.ArgumentError, match=r"pipeline\.program, path, state\)"):
            ow.save(what, tmp_path / "model", state)
    with pytest.raises(ow.ArgumentError, match=r"for_test was given PipelineStep.*step\.pipeline\.program"):
        ow.for_test(step)
    for transform in (ow.for_test, ow.for_evaluation, ow.mixed_precision, ow.roll):
        with pytest.raises(ow.ArgumentError, match=f"^{transform.__name__} was given Pipeline"):
            transform(step.pipeline)
