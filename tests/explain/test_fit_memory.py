"""A step within a budget: equal numbers, the compiler's own bytes below it, and nothing faster that fits."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.amounts import bytes_in
from onward.core.errors import ArgumentError, GraphError, RecipeError, UnknownNameError
from onward.develop.offload import offload, offloadable
from onward.develop.stored import stored_values
from onward.distribute.layout.accelerators import H100
from onward.explain.budget.bases import Base, Chunking, Chunkings
from onward.explain.budget.fit_memory import fit_memory
from onward.explain.budget.savings import memory_savings
from onward.explain.budget.search import BudgetChoice, BudgetSearch, bytes_taken

RNG = np.random.default_rng(0)
DEPTH, WIDTH, ROWS, WORDS = 4, 8, 128, 256


def normal(*shape):
    return (0.3 * RNG.normal(size=shape)).astype("float32")


PARAMS = {"layers": [normal(WIDTH, WIDTH) for _ in range(DEPTH)], "words": normal(WIDTH, WORDS)}
DATA = normal(ROWS, WIDTH), RNG.integers(0, WORDS, ROWS).astype("int32")


def loss(params, x, labels):
    """Layers whose activations are cheap to compute again, and a head whose logits are most of the step."""
    for w in params["layers"]:
        h = jnp.sin(x @ w)
        x = x + jnp.tanh(h) * jnp.exp(-h)
    log_p = jax.nn.log_softmax(x @ params["words"])
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


@cache
def plain():
    return ow.Adam(0.01).minimize(loss, PARAMS, *DATA)


@cache
def fitted(budget):
    return fit_memory(plain(), budget)


def compiled_bytes(program):
    """The bytes of a step as ``compile`` makes it, by XLA, without what lies in host memory."""
    step = ow.compile(program)
    plan = step.executable(step.init(PARAMS), *DATA).memory
    there = sum(v.size * v.dtype.itemsize for v in ow.graph.offloaded(program))
    beside = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + beside + plan.temp_size_in_bytes - there


def trained(program, steps=3):
    step = ow.compile(program)
    state = step.init(PARAMS)
    for _ in range(steps):
        state, out = step(state, *DATA)
    return [out.loss, *jax.tree.leaves(state.parameters)]


@pytest.mark.parametrize("budget", [0.6, 0.3, 0.2])
def test_the_compiled_step_fits_and_computes_the_same(budget):
    limit = budget * compiled_bytes(plain())
    assert compiled_bytes(fitted(budget)) <= limit
    for a, b in zip(*map(trained, (plain(), fitted(budget))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_fits_comes_back_as_it_is():
    assert fit_memory(plain(), bytes_taken(plain())) is plain()
    assert fit_memory(plain(), "1GB") is plain()
    assert fit_memory(plain(), float(bytes_taken(plain()))) is plain()


def test_each_way_is_taken_where_it_is_the_one_that_helps():
    assert ow.graph.chunks_of(fitted(0.6))  # the logits are most of the step

    def deep(ws, x):
        for w in ws:
            h = jnp.sin(x @ w)
            x = x + jnp.tanh(h) * jnp.exp(-h)
        return jnp.mean(x**2)

    layers, x = [normal(8, 8) for _ in range(6)], normal(1024, 8)
    less = fit_memory(ow.SGD(0.1).minimize(deep, layers, x), 0.8)
    assert any(row.again for row in ow.graph.recomputed(less).rows)

    wide = ow.Adam(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), normal(128, 128), normal(4, 128))
    assert ow.graph.offloaded(fit_memory(wide, 0.8))


def test_ways_are_put_together_where_one_is_not_enough():
    less = bytes_taken(fitted(0.2))
    assert len(memory_savings(fitted(0.2)).rows) > 1
    alone = [ow.chunk(plain(), 64), ow.recompute(plain(), scopes=lambda _: True), offload(plain())]
    assert less < min(map(bytes_taken, alone))


def test_activations_go_to_the_host_where_the_way_there_is_short():
    def deep(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    layers, x = normal(4, 16, 16), normal(128, 16)
    program = ow.SGD(0.1).minimize(deep, layers, x)
    near, far = (replace(H100, name="mine", host=speed) for speed in (1e15, 1e9))
    swapped, again = fit_memory(program, 0.6, device=near), fit_memory(program, 0.8, device=far)
    assert stored_values(swapped)
    assert not stored_values(again)
    assert bytes_taken(swapped) <= 0.6 * bytes_taken(program)
    [row] = memory_savings(swapped, near).rows
    assert row.way == "host memory"
    found = []
    for each in (program, swapped):
        step = ow.compile(each)
        state, out = step(step.init(layers), x)
        found.append([out.loss, *jax.tree.leaves(state.parameters)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_that_fits_is_faster():
    """Every choice of a small training is compiled: none that fits the budget is foretold less time.

    Bytes fall from rung to rung but for details, so those count that fit with all the rungs behind them.
    """

    def deep(ws, x):
        for w in ws:
            h = jnp.sin(x @ w)
            x = x + jnp.tanh(h) * jnp.exp(-h)
        return jnp.mean(x**2)

    program = ow.Adam(0.1).minimize(deep, [normal(24, 24) for _ in range(3)], normal(128, 24))
    base = Base(program, Chunking(), H100)
    states = offloadable(program)
    slots = [tuple(states[:n]) for n in (0, len(states))]
    choices = [BudgetChoice(base, rung, some) for rung in range(base.last + 1) for some in slots]
    known = {choice: bytes_taken(choice.program) for choice in choices}
    are_met = []
    for budget in (0.9, 0.75):
        limit = int(budget * known[choices[0]])
        late = [
            all(known[replace(c, rung=r)] <= limit for r in range(c.rung, base.last + 1)) for c in choices
        ]
        fitting = [c.seconds for c, fits in zip(choices, late, strict=True) if fits]
        found = BudgetSearch(program, H100).best(limit)
        assert found is not None
        assert found.seconds <= 1.02 * min(fitting, default=1.0)
        are_met.append(bool(fitting))
    assert sum(are_met) == 2


def test_a_budget_that_cannot_be_met_tells_the_least_that_can():
    search = BudgetSearch(plain(), H100)
    with pytest.raises(GraphError, match=r"the least that was reached is .* chunks, .*host memory") as caught:
        fit_memory(plain(), 1000)
    assert "As it is it takes" in str(caught.value)
    assert search.best(1000) is None
    least = search.bytes(search.least)
    assert bytes_taken(fit_memory(plain(), least)) <= least


def told(error):
    """The least that an error tells as it is printed, and the bytes of its shares."""
    least, shares = re.search(r"reached is ([\d.]+ \w+), .*tell (.*)\. Give", str(error)).groups()
    return least, [bytes_in(share.partition(" of ")[0]) for share in shares.split(", ")]


@cache
def wide_and_flat():
    """A training of which the state of the optimizer is most."""
    return ow.Adam(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), normal(67, 131), normal(5, 67))


@pytest.mark.parametrize("make", [plain, wide_and_flat])
def test_the_least_that_is_told_is_a_budget_that_can_be_met_and_is_the_sum_of_its_shares(make):
    with pytest.raises(GraphError) as caught:
        fit_memory(make(), 1000)
    least, shares = told(caught.value)
    assert sum(shares) == pytest.approx(bytes_in(least), rel=0.02)
    assert bytes_taken(fit_memory(make(), least)) <= bytes_in(least)


def test_state_of_no_rows_is_not_moved():
    """What an optimizer keeps of a parameter without rows takes nothing."""
    empty = ow.Momentum(0.1).minimize(lambda w, x: jnp.sum(jnp.sin(x @ w)), normal(4, 0), normal(3, 4))
    with pytest.raises(GraphError, match="the least that was reached"):
        fit_memory(empty, 2)

    def with_an_empty_one(ws, x):
        return jnp.sum(jnp.sin(x @ ws[0])) + jnp.sum(ws[1])

    both = ow.Momentum(0.1).minimize(with_an_empty_one, [normal(64, 64), normal(0, 3)], normal(3, 64))
    fitting = fit_memory(both, bytes_taken(both) - 10_000)
    assert [v.name for v in ow.graph.offloaded(fitting)] == ["ws/0/velocity"]


def head(words, x, labels):
    log_p = jax.nn.log_softmax(x @ words)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


def test_a_count_of_chunks_in_between_is_taken_where_it_is_enough():
    labels = RNG.integers(0, 512, 256).astype("int32")
    program = ow.SGD(0.1).minimize(head, normal(4, 512), normal(256, 4), labels)
    in_8, in_16, in_64 = (bytes_taken(ow.chunk(program, count)) for count in (8, 16, 64))
    assert in_8 > in_16 > in_64
    limit = (in_8 + in_16) // 2
    fitting = fit_memory(program, limit)
    assert [found.count for found in ow.graph.chunks_of(fitting)] == [16]
    assert bytes_taken(fitting) <= limit


def test_a_budget_that_is_far_is_refused_after_two_compilations():
    def flat(w, x):
        return jnp.mean((x @ w) ** 2)

    cases = [
        (ow.Adam(0.01).minimize(loss, PARAMS, *DATA), 2),
        (ow.SGD(0.1).minimize(flat, normal(16, 8), normal(4, 16)), 1),  # nothing helps
    ]
    for program, most in cases:
        search = BudgetSearch(program, H100)
        assert search.best(100) is None
        assert search.compiled <= most


def test_savings_are_those_of_the_compiler():
    found = memory_savings(fitted(0.2))
    assert found.plain[0] == compiled_bytes(plain())
    assert found.rows[-1].bytes == compiled_bytes(fitted(0.2))
    assert found.plain[0] - sum(row.saved for row in found.rows) == found.rows[-1].bytes
    assert found.plain[1] + sum(row.lost for row in found.rows) == pytest.approx(found.rows[-1].seconds)
    told = str(found)
    for words in ("test_fit_memory.py:", " chunks: ", "not kept"):
        assert words in told
    assert memory_savings(plain()).rows == ()


def test_it_goes_together_with_what_comes_before_and_after():
    mixed = fit_memory(ow.mixed_precision(plain(), "bfloat16"), 0.6)
    assert ow.graph.chunks_of(mixed)
    for program in (ow.accumulate(fitted(0.3), 2), ow.replicate(fitted(0.3), 2)):
        for a, b in zip(trained(plain(), 1), trained(program, 1), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_done_already_stays():
    chunked = ow.chunk(plain(), 2)
    assert [head.count for head in ow.graph.chunks_of(fit_memory(chunked, 0.8))] == [2]
    moved = offload(plain(), "words/mean")
    assert [v.name for v in ow.graph.offloaded(fit_memory(moved, 0.5))] == ["words/mean"]


def test_attention_is_cut_where_its_scores_are_most():
    def attending(ws, x):
        for w in ws:
            q, k, v = jnp.split((x @ w)[:, :, None], 3, -1)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0]
        return jnp.mean(x**2)

    program = ow.SGD(0.1).minimize(attending, [normal(4, 12) for _ in range(2)], normal(1, 256, 4))
    assert len(ow.graph.chunks_of(fit_memory(program, 0.4))) == 2
    assert [*Chunkings(program, 10**12)] == [Chunking()]  # what is small beside the peak is left alone


@pytest.mark.parametrize("wrap", [lambda turn: turn, jax.checkpoint])
def test_attention_in_a_loop_over_layers_is_cut_below_what_computing_again_reaches(wrap):
    def layer(x, w):
        q, k, v = jnp.split((x @ w)[:, :, None], 3, -1)
        return x + jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0], None

    def attending(ws, x):
        return jnp.mean(jax.lax.scan(wrap(layer), x, ws)[0] ** 2)

    given = normal(3, 4, 12), normal(1, 256, 4)
    program = ow.SGD(0.1).minimize(attending, *given)
    again = Base(program, Chunking(), H100)
    limit = min(map(bytes_taken, (program, again.at(again.last)))) // 2
    less = fit_memory(program, limit)
    assert bytes_taken(less) <= limit
    (found,) = ow.graph.chunks_of(less)
    assert found.logits.startswith("scan/")
    assert "scan/" in str(memory_savings(less))
    steps = [ow.compile(one) for one in (program, less)]
    a, b = (step(step.init(given[0]), given[1])[0].parameters for step in steps)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "budget", [0, -1, 1.5, 1.0, 2.5, "much", "-3GB", "0.5B", None, True, [1], float("nan"), float("inf")]
)
def test_a_budget_that_is_none(budget):
    with pytest.raises(ArgumentError, match="fit_memory: budget is"):
        fit_memory(plain(), budget)


def test_programs_that_cannot_be_fitted():
    with pytest.raises(GraphError, match="Derive backward pass and update first"):
        fit_memory(ow.trace(loss, PARAMS, *DATA), 0.5)
    for spread, word in ((ow.accumulate(plain(), 2), "accumulate"), (ow.replicate(plain(), 2), "replicate")):
        for ask in (fit_memory, memory_savings):
            with pytest.raises(GraphError, match=f"went through {word} already"):
                ask(spread, *([0.5] if ask is fit_memory else []))
    with pytest.raises(UnknownNameError, match=r"fit_memory: there is no device 'H10'.*H100"):
        fit_memory(plain(), 0.5, device="H10")
    with pytest.raises(RecipeError, match="changed by hand"):
        fit_memory(replace(plain(), ops=(*plain().ops,)), 0.5)
