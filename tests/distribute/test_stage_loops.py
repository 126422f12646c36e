"""Layers that are turns of a loop of the user's own: each stage has some, with the numbers of one device."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.distribute.test_pipeline import CLIPPED, QUICK, WIDE, WORDS, expect_equal, normal, trained

import onward as ow

LAYERS = 4
PARAMS = {
    "embed": normal(WORDS, WIDE),
    "layers": {"up": normal(LAYERS, WIDE, 8), "down": normal(LAYERS, 8, WIDE)},
    "head": normal(WIDE, WORDS),
}
DATA = np.random.default_rng(1).integers(0, WORDS, (16, 3))
FSDP = {"data": 2}, {"layers/*": P(None, "data"), "embed": P(None, "data"), "head": "data"}
TENSOR = {"model": 2}, {"layers/up": P(None, None, "model"), "layers/down": P(None, "model")}


def block(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def loss_of(h: Any, head: Any, words: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ head), words[..., None], -1).mean()


def plain(params: Any, words: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), params["embed"][words], params["layers"])
    return loss_of(h, params["head"], words)


def tied(params: Any, words: Any) -> Any:
    """The last layer reads the embedding too, layers are computed again, a counter is handed on."""

    def turn(carry: Any, w: Any) -> Any:
        return (jax.checkpoint(block)(carry[0], w) * (1 + carry[1] / 50), carry[1] + 1), None

    (h, _), _ = jax.lax.scan(turn, (params["embed"][words], 0.0), params["layers"])
    return loss_of(h, params["embed"].T + params["head"], words)


def penalized(params: Any, words: Any) -> Any:
    """All weights are in the loss, each layer adds to it, one matrix is that of all layers."""

    def turn(h: Any, w: Any) -> Any:
        h = block(h, w) @ (jnp.eye(WIDE) + params["embed"][:WIDE] / 9)
        return h, jnp.mean(h**2)

    h, sizes = jax.lax.scan(turn, params["embed"][words], params["layers"], unroll=2)
    squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
    return loss_of(h, params["head"], words) + jnp.sum(sizes) / 9 + squares / 99


def scaled(params: Any, words: Any) -> Any:
    """Stacks are changed number by number before the loop, and what turns give is read behind it."""
    layers = jax.tree.map(lambda w: jnp.tanh(2 * w), params["layers"])
    numbers = np.linspace(0.5, 1, LAYERS)

    def turn(h: Any, own: Any) -> Any:
        w, number, i = own
        return block(h, w) * number + i / 9, h

    h, before = jax.lax.scan(turn, params["embed"][words], (layers, numbers, jnp.arange(LAYERS)))
    return loss_of(h + before.mean(0), params["head"], words)


NETWORKS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (plain, tied, penalized, scaled)}


@pytest.mark.parametrize(
    ("network", "stages", "schedule", "optimizer", "layout"),
    [
        ("plain", 4, "zero_bubble", CLIPPED, None),
        ("tied", 2, "1f1b", ow.Adam(0.01, rules=[ow.EMA(0.5)]), FSDP),
        ("penalized", 4, "gpipe", ow.Momentum(0.1), TENSOR),
        ("scaled", 2, "zero_bubble", ow.Muon(0.02), ({"data": 4}, {})),
        ("plain", 2, "zero_bubble", ow.SGD(0.1), ({"data": 2, "fsdp": 2}, {"layers/*": "fsdp"})),
    ],
)
def test_twenty_steps_are_those_of_one_device(
    network: str, stages: int, schedule: str, optimizer: Any, layout: Any
):
    function = NETWORKS[network]
    with jax.enable_x64(True):
        program = optimizer.minimize(function, PARAMS, DATA)
        state, out = trained(ow.compile(program), PARAMS, DATA, 20)
        parted = program if layout is None else ow.partition(program, *layout)
        cut = ow.pipeline(parted, stages, 4, schedule)
        piped, seen = trained(ow.compile(cut, options=QUICK), PARAMS, DATA, 20)
        expect_equal(piped, state, rtol=0, atol=1e-9)
        np.testing.assert_allclose(seen.loss, out.loss, rtol=0, atol=1e-9)
    for name in ("layers/up", "layers/down"):
        spec = P() if layout is None else parted.partition.specs.get(name, P())
        parts = [n // stages if i == 0 else n for i, n in enumerate(PARAMS["layers"][name[7:]].shape)]
        for i, axis in enumerate(spec):
            parts[i] //= 1 if axis is None else layout[0][axis]
        assert {part.data.shape for part in piped[name].addressable_shards} == {tuple(parts)}
        count = 1 if layout is None else parted.partition.count
        assert len(piped[name].sharding.device_set) == stages * count


def test_a_stage_has_its_layers_and_what_is_kept_of_them():
    program = ow.Adam(0.01).minimize(penalized, PARAMS, DATA)
    cut = ow.pipeline(program, 4, 8)
    assert cut.borrowed == {}  # of the sum of squares each stage sends a number
    rows = [re.split(r"  +", line) for line in str(cut).split("\n")[2:6]]
    each = 4 * 2 * WIDE * 8
    assert [row[1] for row in rows] == [f"{each + n} B" for n in (4 * WORDS * WIDE, 0, 0, 4 * WIDE * WORDS)]
    assert [row[-1].split(" at ")[0] for row in rows[1:]] == ["scan_after_2", "scan_after_3", "scan"]
    for stage in range(4):
        loops = [op for op in cut.parts[stage, "F"].ops if op.type == "scan"]
        assert [op.attributes["length"] for op in loops] == ["1"]
    parts = ((stage, v) for (stage, _), part in cut.parts.items() for v in part.outputs)
    sent = {v.shape for stage, v in parts if {s for s, _ in cut.readers.get(v, ())} - {stage}}
    assert (1, WIDE, 8) not in sent  # the gradient of the sum is spread over a stack where that lies
    step = ow.compile(cut)
    assert len(ow.collectives(step)) == 0  # also the update of all stages


def test_a_loop_that_does_little_stays_whole():
    def mostly_before(params: Any, words: Any) -> Any:
        h = params["embed"][words]
        for w in params["wide"]:
            h = h + jnp.tanh(h @ w) @ w.T
        h, _ = jax.lax.scan(lambda h, w: (h * w, None), h, params["scales"])
        return loss_of(h, params["head"], words)

    params = {**PARAMS, "wide": [normal(WIDE, 64)] * 4, "scales": normal(LAYERS, WIDE)}
    del params["layers"]
    cut = ow.pipeline(ow.SGD(0.1).minimize(mostly_before, params, DATA), 2, 4)
    assert "scales" in [v.name for v in cut.parts[1, "F"].state]


def test_of_a_stack_one_layer_is_gathered_at_a_time():
    program = ow.SGD(0.1).minimize(plain, PARAMS, DATA)
    step = ow.compile(ow.pipeline(ow.partition(program, *FSDP), 2, 4))
    text = step.stages.parts[1, "F"].call.as_text()
    gathered = re.findall(r" = f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in gathered]
    assert sorted(sizes) == sorted([WIDE * 8, 8 * WIDE, WIDE * WORDS])
    (carried,) = [v for v in step.pipeline.parts[0, "F"].outputs if v.name == "scan_after_2"]
    assert step.stages.lies(carried, 1).shard_shape(carried.shape) == (2, 3, WIDE)  # a share of the examples
    state, _ = trained(step, PARAMS, DATA, 1)
    assert {part.data.shape for part in state["layers/up"].addressable_shards} == {(2, 2, 8)}


def reads_all(params: Any, words: Any) -> Any:
    """A turn reads the stack as a whole, and its layers in another order."""
    layers = params["layers"]
    up = layers["up"]
    up = up / jnp.linalg.norm(up, axis=(1, 2), keepdims=True)

    def turn(h: Any, own: Any) -> Any:
        w, other, i = own
        following = layers["up"][(i + 1) % LAYERS, :, :WIDE]
        return block(h, w) + jnp.tanh(h @ other) @ up.mean(0).T @ following, None

    h, _ = jax.lax.scan(turn, params["embed"][words], (layers, layers["up"][::-1], jnp.arange(LAYERS)))
    return loss_of(h, params["head"], words)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_stack_that_is_read_as_a_whole_is_sent(schedule: str):
    program = CLIPPED.minimize(reads_all, PARAMS, DATA)
    cut = ow.pipeline(program, 4, 4, schedule)
    assert cut.borrowed == {f"layers/up[{k}:{k + 1}]": (0,) for k in (1, 2, 3)}
    assert "layers/up[1:2] lies in stage 1, which sends it to 0 at each step" in str(cut)
    state, _ = trained(ow.compile(cut, options=QUICK), PARAMS, DATA, 5)
    expect_equal(state, trained(ow.compile(program), PARAMS, DATA, 5)[0], rtol=1e-4, atol=1e-5)


def dropped(params: Any, state: Any, words: Any) -> Any:
    key, own = jax.random.split(state["key"])

    def turn(h: Any, now: Any) -> Any:
        w, key = now
        return block(h, w) * jax.random.bernoulli(key, 0.5, h.shape), h.mean((1, 2))

    keys = jax.random.split(own, LAYERS)
    h, means = jax.lax.scan(turn, params["embed"][words], (params["layers"], keys))
    return loss_of(h, params["head"], words), ({"key": key}, means)


def test_keys_of_layers_and_results_of_each_layer():
    state = {"key": jax.random.key(3)}
    program = CLIPPED.minimize(dropped, PARAMS, DATA, state=state, has_aux=True)
    found = []
    for one in (ow.accumulate(program, 4), ow.pipeline(program, 2, 4, "zero_bubble")):
        step = ow.compile(one, options=QUICK)
        now = step.init(PARAMS, state)
        for _ in range(3):
            now, out = step(now, DATA)
        found.append((now, out))
    (now, out), (wanted, seen) = found
    assert out.aux.shape == (LAYERS, 16)
    np.testing.assert_allclose(out.aux, seen.aux, rtol=1e-4, atol=1e-6)
    expect_equal(now, wanted, rtol=1e-4, atol=1e-6)


def test_a_step_of_optax_and_checkpoints_of_one_device():
    rule = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.01))

    def step(params: Any, slots: Any, words: Any) -> Any:
        loss, gradients = jax.value_and_grad(plain)(params, words)
        updates, slots = rule.update(gradients, slots, params)
        return optax.apply_updates(params, updates), slots, loss

    slots = rule.init(PARAMS)
    program = ow.adopt(step, PARAMS, slots, DATA)
    alone, piped = ow.compile(program), ow.compile(ow.pipeline(program, 4, 4), options=QUICK)
    state, _ = trained(alone, (PARAMS, slots), DATA, 2)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(state, 2)
    now = piped.restore(path)
    assert now["params/layers/up"].sharding.shard_shape((LAYERS, WIDE, 8)) == (1, WIDE, 8)
    now, _ = piped(now, DATA)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(now, 3)
    expect_equal(alone.restore(path), alone(state, DATA)[0], rtol=1e-5, atol=1e-6)
    moved, _ = piped(alone.restore(path), DATA)  # a State of one device is taken over
    expect_equal(moved, piped(now, DATA)[0], rtol=0, atol=0)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, h: Any, _: Any) -> Any:
        attended = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(h))
        return h + nn.Dense(WIDE)(nn.gelu(nn.Dense(8)(h + attended))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, words: Any) -> Any:
        body = nn.remat(Layer, prevent_cse=False)
        layers = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        h, _ = layers()(nn.Embed(WORDS, WIDE)(words), None)
        return nn.Dense(WORDS)(h)


def test_a_flax_model_that_scans_its_layers():
    model = Scanned()
    params = model.init(jax.random.key(0), DATA)

    def loss(params: Any, words: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, words), words).mean()

    program = ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(0.5)]).minimize(loss, params, DATA)
    cut = ow.pipeline(program, 4, 4)
    assert len(cut.loops.begins) == 4
    assert not cut.borrowed
    state, out = trained(ow.compile(cut, options=QUICK), params, DATA, 3)
    wanted, seen = trained(ow.compile(program), params, DATA, 3)
    expect_equal(state, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-5)


def test_layers_are_computed_again_as_recompute_says():
    program = ow.SGD(0.1).minimize(plain, PARAMS, DATA)
    cut, again = (ow.pipeline(p, 2, 4) for p in (program, ow.recompute(program, budget=0.8)))
    assert again.kept(1) < cut.kept(1)
    state, wanted = (trained(ow.compile(p, options=QUICK), PARAMS, DATA, 3)[0] for p in (again, cut))
    expect_equal(state, wanted, rtol=1e-5, atol=1e-6)


def backwards(params: Any, words: Any) -> Any:
    h, _ = jax.lax.scan(
        lambda h, w: (block(h, w), None), params["embed"][words], params["layers"], reverse=True
    )
    return loss_of(h, params["head"], words)


def numbered(params: Any, words: Any) -> Any:
    def turn(i: Any, h: Any) -> Any:
        return block(h, jax.tree.map(lambda w: w[i], params["layers"]))

    return loss_of(jax.lax.fori_loop(0, LAYERS, turn, params["embed"][words]), params["head"], words)


def named(params: Any, words: Any) -> Any:
    with jax.named_scope("body"):
        h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), params["embed"][words], params["layers"])
    with jax.named_scope("head"):
        return loss_of(h, params["head"], words)


def test_loops_that_stages_cannot_share():
    program = ow.SGD(0.1).minimize(plain, PARAMS, DATA)
    line = plain.__code__.co_firstlineno + 1
    with pytest.raises(
        ow.ArgumentError,
        match=rf"are the 4 turns of a scan at test_stage_loops.py:{line}, .* Take 2 or 4 stages, or",
    ):
        ow.pipeline(program, 3, 4)
    for function in (backwards, numbered):
        with pytest.raises(ow.ArgumentError, match=r"count as one, unless it is a lax\.scan of its own"):
            ow.pipeline(ow.SGD(0.1).minimize(function, PARAMS, DATA), 4, 4)
    uneven = {"data": 2}, {"layers/*": P("data")}
    with pytest.raises(ow.ArgumentError, match=r"'layers/\w+\[0:1\]' is .* does not divide its dimension 0"):
        ow.pipeline(ow.partition(program, *uneven), 4, 4)
    scopes = ow.pipeline(ow.SGD(0.1).minimize(named, PARAMS, DATA), 2, 4, at=["head"])
    assert [v.name for v in scopes.parts[1, "F"].state] == ["head"]
