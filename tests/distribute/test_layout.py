"""Layouts foretold without a device: bytes of the compiled step, ranks of a brute force, what is split."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import onward as ow
from onward.core.program import Program
from onward.distribute.layout.accelerators import H100
from onward.distribute.layout.families import families
from onward.distribute.layout.foretold import Foretelling, Spreading
from onward.distribute.layout.layouts import foretold
from onward.distribute.layout.placing import StageShare
from onward.distribute.layout.tensor import split_families

RANDOM = np.random.default_rng(0)
SHAPE = jax.ShapeDtypeStruct


def gpt(
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    shared: int = 2,
    ffn: int = 64,
    words: int = 64,
    dtype: str = "float32",
    blocks: int = 0,
) -> tuple[Any, Any]:
    """A language model as Llama is: grouped heads, a gate, layers in a loop; attention in blocks of rows."""
    size = width // heads

    def weight(*shape: int) -> Any:
        return SHAPE(shape, dtype)

    layer = {
        "norm": weight(layers, width),
        "q": weight(layers, width, width),
        "k": weight(layers, width, shared * size),
        "v": weight(layers, width, shared * size),
        "o": weight(layers, width, width),
        "second": weight(layers, width),
        "gate": weight(layers, width, ffn),
        "up": weight(layers, width, ffn),
        "down": weight(layers, ffn, width),
    }
    params = {"embed": weight(words, width), "layers": layer, "head": weight(width, words)}

    def norm(x: Any, scale: Any) -> Any:
        return (x * jax.lax.rsqrt(jnp.mean(x.astype("float32") ** 2, -1, keepdims=True))).astype(
            x.dtype
        ) * scale

    def attend(q: Any, k: Any, v: Any, first: Any = 0) -> Any:
        mask = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        scores = jnp.einsum("bsgqd,btgd->bgqst", q, k).astype("float32") / size**0.5
        return jnp.einsum(
            "bgqst,btgd->bsgqd", jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(q.dtype), v
        )

    @jax.checkpoint
    def attend_in_blocks(q: Any, k: Any, v: Any) -> Any:
        rows = q.shape[1] // blocks
        parts = jnp.moveaxis(q.reshape(len(q), blocks, rows, *q.shape[2:]), 1, 0)
        one = jax.checkpoint(lambda at, part: (at + rows, attend(part, k, v, at)))
        return jnp.moveaxis(jax.lax.scan(one, 0, parts)[1], 0, 1).reshape(q.shape)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        h = norm(x, w["norm"])
        q = (h @ w["q"]).reshape(*x.shape[:2], shared, heads // shared, size)
        k, v = ((h @ w[name]).reshape(*x.shape[:2], shared, size) for name in "kv")
        x = x + (attend_in_blocks if blocks else attend)(q, k, v).reshape(x.shape) @ w["o"]
        h = norm(x, w["second"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    def loss(params: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
        logits = (x @ params["head"]).astype("float32")
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return loss, params


def chain(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


CHAIN = [{"up": np.ones((8, 16), "float32"), "down": np.ones((16, 8), "float32")} for _ in range(4)]


@pytest.fixture(scope="module")
def program() -> Program:
    loss, params = gpt()
    return ow.Momentum(1e-3).minimize(loss, params, SHAPE((16, 17), "int32"))


@pytest.fixture(scope="module")
def small() -> Program:
    return ow.Momentum(0.1).minimize(chain, CHAIN, np.ones((12, 8), "float32"))


def compiled(program: Program) -> tuple[Any, Any, Any]:
    """A step with a State and a batch, of numbers that mean nothing."""
    step = ow.compile(program, roll=False)
    _, params = gpt()
    state = step.init(jax.tree.map(lambda v: np.full(v.shape, 0.01, v.dtype), params))
    return step, state, np.zeros((16, 17), "int32")


@pytest.mark.parametrize(
    ("choice", "bounds"),
    [
        (Spreading(fsdp=8), (0.6, 1.4)),
        (Spreading(data=2, tensor=4), (0.8, 1.2)),
    ],
    ids=["fsdp", "both"],
)
def test_bytes_are_those_of_the_compiled_step(
    program: Program, choice: Spreading, bounds: tuple[float, float]
) -> None:
    one = foretold(Foretelling(program, H100), choice)
    step, state, tokens = compiled(one.apply(program))
    memory = step.executable(state, tokens)._compiled.memory_analysis()
    assert one.kept.arguments == memory.argument_size_in_bytes
    assert bounds[0] < (one.kept.all - one.kept.arguments) / memory.temp_size_in_bytes < bounds[1]
    sent: Counter[Any] = Counter()
    for found in ow.collectives(step, state, tokens):
        sent[found.axes] += found.bytes * found.times
    told = {s.axis: s.bytes for s in one.sent if s.by == "all-reduce"}
    if choice.data > 1:  # the gradients, and the loss
        assert sent["data",] - 4 == told["data"] * choice.data / (2 * (choice.data - 1))
    if choice.tensor > 1:  # XLA for CPU sums the gradients of q, k, v and of gate, up each by itself
        assert sent["tensor",] >= told["tensor"] * choice.tensor / (2 * (choice.tensor - 1))


def brute(about: Foretelling, devices: int, most: int) -> list[Spreading]:
    """All that fits, by trying every number for every axis, the fastest first."""
    numbers = range(1, devices + 1)
    found = []
    for d, f, t, s in itertools.product(numbers, repeat=4):
        for m, again in itertools.product(range(1, about.rows + 1), (False, True)):
            choice = Spreading(d, f, t, s, m, again)
            is_split = t == 1 or any(one.divides % t == 0 for one in about.families)
            is_fit = d * f * t * s == devices and about.rows % (d * f * m) == 0
            if is_fit and is_split and s <= about.layers.count and (s == 1 or m > 1):
                found.append(foretold(about, choice))
    found = [one for one in found if one.kept.all <= most]
    return [
        one.choice for one in sorted(found, key=lambda one: (one.seconds, sum(s.bytes for s in one.sent)))
    ]


def test_the_search_ranks_as_trying_everything_does(small: Program, program: Program) -> None:
    """On small graphs, for numbers of devices that axes divide and that they do not."""
    for given, devices, memory in (
        (small, 4, 10**9),
        (small, 6, 5000),
        (small, 8, 10**9),
        (program, 4, 10**6),
    ):
        about = Foretelling(given, H100)
        known = {
            c for c in brute(about, devices, memory) if not c.recompute or about.saves_by_recompute(c.tensor)
        }
        layouts = ow.layout(given, devices, memory)
        assert {one.choice for one in layouts} == known
        assert layouts.tried >= len(layouts) == len(known) > 3
        seconds = [one.seconds for one in layouts]
        assert seconds == sorted(seconds)
        assert all(one.kept.all <= memory for one in layouts)


def test_what_lies_in_memory_is_what_the_plan_of_the_partitioned_program_says(
    small: Program, program: Program
) -> None:
    for given in (small, program):
        plain = {one.choice: one for one in ow.layout(given, 8) if one.choice.stages == 1}
        seen = 0
        for choice, one in plain.items():
            if choice.micro_batches == 1 and not choice.recompute:
                assert one.kept.arguments == ow.plan(one.apply(given)).kept
                seen += 1
        assert seen > 3


def split_of(program: Program) -> list[dict[str, int]]:
    return [{v.name: i for v, i in one.parameters} for one in split_families(families(program))]


def test_columns_and_rows_are_told_from_the_graph(small: Program, program: Program) -> None:
    """Heads in groups, a gate, layers in a loop or one by one; what is normalized or cut is whole."""
    found = split_of(program)
    assert {"layers/gate": 2, "layers/up": 2, "layers/down": 1} in found
    assert {"layers/q": 2, "layers/k": 2, "layers/v": 2, "layers/o": 1} in found
    assert len(found) == 2
    assert {one.divides for one in split_families(families(program))} == {2, 64}
    assert sorted(map(str, split_of(small))) == [
        f"{{'params/{i}/down': 0, 'params/{i}/up': 1}}" for i in range(4)
    ]

    (rolled,) = split_of(ow.roll(small))
    assert rolled == {f"params/{i}/{name}": name == "up" for i in range(4) for name in ("up", "down")}

    def joined(w: Any, x: Any) -> Any:  # queries, keys and values in one matrix, which is cut
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        return jnp.mean((jax.nn.softmax(q @ k.T) @ v @ w["o"]) ** 2)

    def normed(w: Any, x: Any) -> Any:  # the columns meet in a softmax
        return jnp.mean((jax.nn.softmax(x @ w["up"]) @ w["down"]) ** 2)

    def biased(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["up"] + w["b"]) @ w["down"]) ** 2)

    def three(w: Any, x: Any) -> Any:  # no parameter is split twice
        return jnp.mean((jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]) ** 2)

    pair = {"up": np.ones((6, 8), "float32"), "down": np.ones((8, 6), "float32")}
    square = {name: np.ones((6, 6), "float32") for name in "abc"}
    x = np.ones((4, 6), "float32")
    qkv = {"qkv": np.ones((6, 18), "float32"), "o": np.ones((6, 6), "float32")}
    assert split_of(ow.trace(joined, qkv, x)) == []
    assert split_of(ow.trace(normed, pair, x)) == []
    assert split_of(ow.trace(biased, {**pair, "b": np.ones(8, "float32")}, x)) == [
        {"b": 0, "down": 0, "up": 1}
    ]
    assert len(split_of(ow.trace(three, square, x))) == 1
    notes = ow.layout(ow.SGD(0.1).minimize(normed, pair, x), 2).notes
    assert notes[0].startswith("tensor parallelism is left out: no product")
    assert notes[1] == "stages are left out: no layer repeats."


def test_stages_share_layers_so_that_the_slowest_has_the_least(small: Program, program: Program) -> None:
    about = Foretelling(small, H100)
    assert about.stages(1, 2) == (StageShare(2, ends=False), StageShare(2, begins=False))
    assert about.stages(1, 4)[1] == StageShare(1, False, False)
    one = foretold(about, Spreading(stages=4, micro_batches=6))
    assert one.bubble == 3 / 9
    alone = foretold(about, Spreading(micro_batches=6))
    parameters = prod(CHAIN[0]["up"].shape) * 2 * 4
    assert alone.kept.parameters == 4 * parameters
    assert one.kept.parameters == parameters
    (handed,) = (s for s in about.sent(one.choice, about.stages(1, 4)[1]) if s.axis == "stages")
    assert handed.bytes == 6 * 2 * (12 // 6) * 8 * 4  # forth and back: 2 rows of 8 numbers

    def over_time(w: Any, x: Any) -> Any:  # no layers: all turns read the same weight
        return jnp.sum(jax.lax.scan(lambda h, now: (jnp.tanh(h @ w + now), None), x[0], x)[0])

    recurrent = ow.SGD(0.1).minimize(over_time, np.eye(4, dtype="float32"), np.ones((6, 2, 4), "float32"))
    assert Foretelling(recurrent, H100).layers.count == 1
    loop = Foretelling(program, H100)
    two, begin = Spreading(stages=2, micro_batches=4), StageShare(1, ends=False)
    assert loop.kept(two, begin, 2).activations == 2 * loop.kept(two, begin, 1).activations > 0


def test_what_fsdp_sends_and_what_recompute_leaves(small: Program) -> None:
    about, parameters = Foretelling(small, H100), 4 * 2 * 8 * 16 * 4
    choice = Spreading(fsdp=2, micro_batches=3)
    one, again = (foretold(about, replace(choice, recompute=r)) for r in (False, True))
    sent = {s.by: s for s in one.sent}
    link = H100.link(1, 2)
    for by, times in (("all-gather", 2 * 3), ("reduce-scatter", 3)):  # forth and back; the gradients
        assert sent[by].bytes == times * parameters / 2
        arrays = 4 + 1 + 1  # layers, and what stands around them
        assert sent[by].seconds == sent[by].bytes / link.bandwidth + times * arrays * link.latency
    left, whole = (found.kept.all - found.kept.arguments for found in (again, one))
    assert about.left(again.choice) == left / whole


def test_its_code_is_what_apply_does_and_trains_as_one_device(small: Program) -> None:
    layouts = ow.layout(small, 8)
    one = layouts.find(data=2, tensor=4, stages=1, micro_batches=2, recompute=False)
    names: dict[str, Any] = {"ow": ow, "P": P, "program": small}
    exec(one.code, names)
    assert str(names["program"]) == str(one.apply(small))
    assert names["program"].partition.specs == one.apply(small).partition.specs
    x = RANDOM.normal(size=(12, 8)).astype("float32")
    losses = []
    for given in (one.apply(small), small):
        step = ow.compile(given)
        state, _ = step(step.init(CHAIN), x)
        losses.append(step(state, x)[1].loss)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    names["program"] = small
    exec(ow.layout(small, 4).find(stages=4, recompute=False).code, names)
    assert type(names["program"]) is not Program  # stages, each with a device of its own
    names["program"] = small
    exec(layouts.find(stages=4, data=2, recompute=False).code, names)
    assert names["program"].partition.mesh == {"data": 2}
    for choice in ({"tensor": 2, "stages": 4}, {"fsdp": 2, "tensor": 2, "stages": 2}):
        staged = layouts.find(**choice, recompute=False)
        names["program"] = small
        exec(staged.code, names)
        applied = staged.apply(small)
        assert (str(applied), applied.partition) == (str(names["program"]), names["program"].partition)
        step = ow.compile(applied)
        state, _ = step(step.init(CHAIN), x)
        kept: Counter[Any] = Counter()
        for part in (part for v in small.parameters for part in state[v.name].addressable_shards):
            kept[part.device] += part.data.nbytes
        assert max(kept.values()) == staged.kept.parameters
        np.testing.assert_allclose(step(state, x)[1].loss, losses[0], rtol=1e-5)
    assert all(one.runs for one in layouts)
    assert "* is foretold" not in str(layouts)


def test_stages_share_the_layers_of_a_loop_evenly(program: Program) -> None:
    layouts = ow.layout(program, 8)
    assert all(one.runs for one in layouts)
    assert {one.choice.stages for one in layouts} == {1, 2}
    _, params = gpt()
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda v: draw.normal(0, 0.1, v.shape).astype(v.dtype), params)
    tokens = draw.integers(0, 64, (16, 17)).astype("int32")
    losses = []
    for choice in ({"stages": 2, "fsdp": 2, "tensor": 2}, None):
        given = program
        if choice is not None:
            staged = layouts.find(**choice, recompute=False)
            names: dict[str, Any] = {"ow": ow, "P": P, "program": program}
            exec(staged.code, names)
            given = names["program"]
        step = ow.compile(given)
        state, _ = step(step.init(params), tokens)
        state, out = step(state, tokens)
        losses.append(out.loss)
        if choice is not None:
            kept: Counter[Any] = Counter()
            for part in (part for v in program.parameters for part in state[v.name].addressable_shards):
                kept[part.device] += part.data.nbytes
            assert max(kept.values()) == staged.kept.parameters
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_stages_run_whose_layers_hold_a_small_loop_each() -> None:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            turn = lambda h, _, w=w: (jnp.tanh(h @ w), None)  # noqa: E731
            x = x + jax.lax.scan(turn, x, None, length=3)[0]
        return jnp.mean(x**2)

    program = ow.SGD(0.1).minimize(loss, [np.eye(8, dtype="float32")] * 4, np.ones((16, 8), "float32"))
    staged = [one for one in ow.layout(program, 4) if one.choice.stages > 1]
    assert {one.choice.stages for one in staged} == {2, 4}
    assert all(one.runs for one in staged)
    assert ow.pipeline(program, 4, 4).loops.begins == ()


def test_stages_of_other_loops_are_foretold_only() -> None:
    def loss(params: Any, x: Any) -> Any:
        turn = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(turn, x, params, reverse=is_reversed)[0] ** 2)

    params = {"up": np.ones((6, 8, 16), "float32"), "down": np.ones((6, 16, 8), "float32")}
    told = []
    for is_reversed in (False, True):
        layouts = ow.layout(ow.SGD(0.1).minimize(loss, params, np.ones((24, 8), "float32")), 12)
        assert {one.choice.stages for one in layouts if one.runs} == ({1} if is_reversed else {1, 2, 3, 6})
        one = next(one for one in layouts if one.choice.stages == 4)
        assert not one.runs
        with pytest.raises(ow.OnwardError, match="stages"):
            one.apply(ow.SGD(0.1).minimize(loss, params, np.ones((24, 8), "float32")))
        told += [(str(layouts), one.code)]
    (_, uneven), (table, code) = told
    assert "# The layers are a loop, which pipeline shares out evenly: stages divide its 6 turns." in uneven
    marked = [line.split()[:5] for line in table.splitlines() if re.match(r" *\d+\*? +\d", line)]
    assert all(row[0].endswith("*") == (row[4] != "1") for row in marked)
    for text in (table, code):
        assert "a loop, which pipeline does not share out. It takes a lax.scan, forwards, over" in text


def test_its_patterns_meet_no_parameter_that_stays_whole() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((x * w["b1"] + w["b2"]) ** 2) * w["b3"].sum()

    params = {name: np.ones(n, "float32") for name, n in (("b1", 8), ("b2", 8), ("b3", 3))}
    uneven = ow.SGD(0.1).minimize(loss, params, np.ones((8, 8), "float32"))
    names: dict[str, Any] = {"ow": ow, "P": P, "program": uneven}
    exec(ow.layout(uneven, 4).find(fsdp=4).code, names)
    found = dict(names["program"].partition.specs)
    assert found["b1"] == found["b2"] == P("fsdp")
    assert not found.get("b3")


def test_a_model_of_405_billion_is_planned_from_shapes() -> None:
    """Llama 3.1 405B on 512 devices; what torchtitan runs (fsdp 8, tensor 8, stages 8) is among what fits."""
    loss, params = gpt(126, 16384, 128, 8, 53248, 128256, "bfloat16", blocks=16)
    batch = SHAPE((256, 8193), "int32")
    program = ow.AdamW(1e-3).minimize(loss, params, batch)
    layouts = ow.layout(program, devices=512, memory="96GB")
    one = layouts.find(fsdp=8, tensor=8, stages=8)
    assert one.choice.micro_batches == 32
    assert one.choice.recompute
    assert {len(s) for s in (one.where["layers/q"], one.where["layers/o"])} == {3}
    products = 2 * 126 * (2 * 16384 * 16384 + 2 * 16384 * 1024 + 3 * 16384 * 53248) + 2 * 16384 * 128256
    per_token = 4 * products - 2 * 16384 * 128256 * 1  # forward, twice that backward, and layers again
    least = per_token * 256 * 8192 / 512 / H100.flops_of(2)
    assert least < one.working.compute * (16 / 126 * 8) ** -1 * 1.2
    assert all(one.kept.all < 96e9 for one in layouts)
    assert not one.runs
    assert "fsdp 8 x tensor 8 x stages 8, 32 micro-batches, layers computed again" in one.explain()
    told = str(layouts)
    assert told.splitlines()[0].endswith(
        "layouts of loss on 512 devices fit (H100, 89.4 GiB), the fastest first"
    )
    assert "stages" in layouts[0].diff(one)


def test_bad_input_is_refused_with_what_to_write_instead(small: Program) -> None:
    x = np.ones((12, 8), "float32")
    with pytest.raises(ow.ArgumentError, match=r"least that is needed is .* by:\n\nprogram = ow") as told:
        ow.layout(small, 4, memory="1kB")
    assert "Take more devices" in str(told.value)
    for given, error, words in (
        ((small, 0), ow.ArgumentError, "devices is 0"),
        ((small, 4, "80 gigs"), ow.ArgumentError, r"memory is '80 gigs'; expected bytes .* '80GB'"),
        ((small, 4, "1GB", "-3GB/s"), ow.ArgumentError, "link is '-3GB/s'.*'50GB/s'"),
        ((small, 4, "1GB", "400Gb/s"), ow.ArgumentError, "link is '400Gb/s'.*'50GB/s', which is 400 Gb/s"),
        ((small, 10**9), ow.ArgumentError, r"no axes make 1000000000 devices: .* Take 384"),
        ((small, 4, None, None, "H10"), ow.UnknownNameError, "there is no device 'H10'.*H100"),
        ((small, 13), ow.ArgumentError, r"no axes make 13 devices: .* 12 rows .* Take 12"),
        ((ow.replicate(small, 2), 4), ow.GraphError, "is replicated already"),
        ((ow.partition(small, {"data": 2}, {}), 4), ow.GraphError, "is partitioned already"),
        ((ow.accumulate(small, 2), 4), ow.GraphError, "is accumulated already"),
        ((ow.trace(chain, CHAIN, x), 4), ow.GraphError, "not a training Program"),
        ((ow.trace(lambda x: jnp.sum(x), x), 4), ow.GraphError, "not a training|no parameters"),
    ):
        with pytest.raises(error, match=words):
            ow.layout(*given)
    with pytest.raises(ow.UnknownNameError, match=r"a layout has no 'tensr'.*tensor"):
        ow.layout(small, 2).find(tensr=2)
