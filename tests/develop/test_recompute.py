"""Recomputed against kept: equal numbers, less compiled memory, no more arithmetic than it takes."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import onward as ow
from onward.core.errors import ArgumentError, GraphError, UnknownNameError
from onward.core.recipe import rebuilt
from onward.develop.recompute.measure import compiled
from onward.develop.recompute.min_cut import Task, choices
from onward.develop.recompute.recompute import recompute
from onward.develop.recompute.report import again_ops, recomputed

RNG = np.random.default_rng(0)
DEPTH, WIDTH, ROWS = 4, 16, 256
PARAMS = [jnp.asarray(RNG.normal(0, 0.2, (WIDTH, WIDTH)), jnp.float32) for _ in range(DEPTH)]
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)


def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            h = checkpoint_name(jnp.sin(x @ w), "h")
            x = x + jnp.tanh(h) * jnp.exp(-h)
    return jnp.mean(x**2)


@cache
def plain():
    return ow.SGD(0.1).minimize(loss, PARAMS, X)


@cache
def within(budget):
    return recompute(plain(), budget)


def trained(program, steps=20, data=X, params=PARAMS):
    step = ow.compile(program)
    state = step.init(params)
    for _ in range(steps):
        state, out = step(state, data)
    return state.parameters, out.loss


@cache
def blocks():
    return recompute(plain(), scopes="block_*")


@cache
def memory(budget):
    return compiled(within(budget) if budget < 1 else plain())


def test_less_memory_at_equal_numbers():
    pair = (trained(within(0.6)), trained(plain()))
    for found, expected in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_those_of_jax():
    program = recompute(ow.append_backward(ow.trace(loss, PARAMS, X)), scopes="block_*")
    step = ow.compile(program, fetch=[g for _, g in program.gradients])
    _, out = step(step.init(PARAMS), X)
    expected = jax.jit(jax.grad(loss))(PARAMS, X)
    for (_, g), wanted in zip(program.gradients, expected, strict=True):
        np.testing.assert_allclose(out[g], wanted, rtol=1e-5, atol=1e-7)


def test_a_smaller_budget_keeps_part_of_what_a_larger_one_keeps():
    larger, smaller = ({op.of for op in again_ops(within(budget))} for budget in (0.8, 0.6))
    assert larger < smaller
    assert memory(0.8) <= 0.8 * memory(1)
    assert memory(0.6) <= 0.6 * memory(1)


def test_a_budget_that_the_step_keeps_anyway_changes_nothing():
    assert recompute(plain(), memory(1)) is plain()
    assert recompute(plain(), "1 GB") is plain()
    assert recompute(plain(), 1e9) is plain()


def test_a_budget_below_the_least_says_the_least_and_what_holds_it():
    with pytest.raises(GraphError, match=r"the least that was reached is [\d,]+\..*test_recompute.py:\d+\)"):
        recompute(plain(), 0.05)


@pytest.mark.parametrize("budget", [0, 1, 1.5, True, -3, "half", "0 B"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(ArgumentError, match="a whole number or such as '12GB', or a fraction between 0"):
        recompute(plain(), budget)


def test_budget_or_scopes():
    for options in ({}, {"budget": 0.5, "scopes": "block_0"}):
        with pytest.raises(ArgumentError, match="one of the two"):
            recompute(plain(), **options)


def test_refused_by_name_with_the_order_to_use():
    with pytest.raises(GraphError, match="no backward pass"):
        recompute(ow.trace(loss, PARAMS, X), 0.5)
    with pytest.raises(GraphError, match="recomputed already"):
        recompute(recompute(plain(), scopes="block_1"), scopes="block_2")
    with pytest.raises(GraphError, match=r"accumulate\(recompute\(program"):
        recompute(ow.accumulate(plain(), 2), 0.5)
    with pytest.raises(GraphError, match=r"replicate\(recompute\(program, ...\), 2\)"):
        recompute(ow.replicate(plain(), 2), 0.5)
    with pytest.raises(UnknownNameError, match="nearest names are 'block_"):
        recompute(plain(), scopes="blocks_7")


def test_scopes_are_computed_again_from_what_enters_them():
    program = recompute(plain(), scopes=lambda scope: scope in ("block_1", "block_3"))
    assert {op.scope for op in again_ops(program)} == {"block_1", "block_3"}
    barriers = [op for op in program.ops if op.type == "optimization_barrier"]
    assert [[v.name for v in op.inputs] for op in barriers] == [
        ["block_2/add", "grad(block_3/mul)"],
        ["block_0/add", "grad(block_1/mul)"],
    ]
    waits = barriers[0].body(jnp.ones((ROWS, WIDTH)), jnp.full((ROWS, WIDTH), jnp.nan))[0]
    assert np.isnan(waits[0, 0])  # so it waits for the gradient, whatever becomes of the barrier
    assert np.all(waits.ravel()[1:] == 1)


def test_named_values_are_kept():
    program = recompute(plain(), scopes="block_*", keep="h*")
    assert not {"again(h)", "again(block_0/sin)"} & program.variables.keys()
    assert {"again(h)", "again(block_0/sin)"} <= blocks().variables.keys()


def test_ops_run_again_behind_the_gradient_that_arrives():
    program = within(0.6)
    late = {v for op in program.ops if op.type == "optimization_barrier" for v in op.outputs}
    assert late
    for op in again_ops(program):
        assert not late.isdisjoint(op.inputs), op
        late.update(op.outputs)


def test_the_choice_is_replayed_for_another_batch():
    program = within(0.6)
    other = rebuilt(program, (jnp.ones((32, WIDTH)),))
    assert [op.type for op in other.ops] == [op.type for op in program.ops]
    found, expected = trained(program, 3, X[:32]), trained(plain(), 3, X[:32])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


TRANSFORMS = {
    "accumulate": lambda p: ow.accumulate(p, 4),
    "mixed_precision": ow.mixed_precision,
    "guard": ow.guard,
    "replicate": lambda p: ow.replicate(p, 2),
}


@cache
def short():
    return ow.SGD(0.1).minimize(loss, PARAMS[:2], X)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_after(name):
    programs = recompute(short(), scopes="block_*"), short()
    found, expected = (trained(TRANSFORMS[name](p), 5, params=PARAMS[:2]) for p in programs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mixed_precision", "guard"])
def test_transforms_before(name):
    program = TRANSFORMS[name](short())
    programs = recompute(program, scopes="block_*"), program
    found, expected = (trained(p, 5, params=PARAMS[:2]) for p in programs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_effects_and_draws():
    said = []

    def noisy(w, x, key):
        with jax.named_scope("all"):
            h = jnp.exp(x @ w)
            jax.debug.callback(lambda value: said.append(float(value)), h[0, 0])
            kept = jnp.sin(h) * jax.random.uniform(key, h.shape)
            return jnp.mean(jnp.tanh(kept) * kept)

    key = jax.random.key(3)
    program = ow.SGD(0.1).minimize(noisy, PARAMS[0], X, key)
    less = recompute(program, scopes="all")
    assert "uniform" in {op.type for op in again_ops(less)}
    step = ow.compile(less)
    _, out = step(step.init(PARAMS[0]), X, key)
    jax.effects_barrier()
    assert len(said) == 1
    np.testing.assert_allclose(out.loss, jax.jit(noisy)(PARAMS[0], X, key), rtol=1e-5)


def test_a_checkpoint_of_the_function_stays():
    @jax.checkpoint
    def inner(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    def twice(params, x):
        with jax.named_scope("outer"):
            h = jnp.cos(jnp.exp(inner(params[0], x)))
        return jnp.mean(jnp.sin(h @ params[1]) ** 2)

    program = ow.SGD(0.1).minimize(twice, PARAMS[:2], X)
    less = recompute(program, scopes="outer")
    kinds = [
        [op.type for op in p.ops if "checkpoint" in op.type or "remat" in op.type] for p in (program, less)
    ]
    assert kinds[0]
    assert set(kinds[0]) <= set(kinds[1])
    step = ow.compile(less, fetch=[g for _, g in less.gradients])
    _, out = step(step.init(PARAMS[:2]), X)
    for (_, g), wanted in zip(less.gradients, jax.jit(jax.grad(twice))(PARAMS[:2], X), strict=True):
        np.testing.assert_allclose(out[g], wanted, rtol=1e-5, atol=1e-7)


def test_what_is_measured_is_what_the_step_takes():
    step = ow.compile(within(0.6))
    step.init(PARAMS)
    executable = step._executables.first
    taken = executable._compiled.memory_analysis().temp_size_in_bytes
    assert taken == pytest.approx(memory(0.6), rel=0.01)


# ---------------------------------------------------------------- the cut, against every choice there is


def cost(task, again, price):
    """The bytes and effort of a set of ops to run again, or None if that does not give what is needed."""
    open_, kept = list(task.needed), set()
    seen = set()
    while open_:
        v = open_.pop()
        if v in seen:
            continue
        seen.add(v)
        maker = task.values[v][0]
        if maker in again:
            open_ += task.reads[maker]
        else:
            kept.add(v)
    return price * sum(task.values[v][1] for v in kept) + sum(task.efforts[i] for i in again)


def random_task(rng, count=7):
    reads = tuple(
        tuple(sorted({int(v) for v in rng.integers(0, i, min(i, 2))})) if i else () for i in range(count)
    )
    efforts = tuple(int(e) for e in rng.integers(1, 50, count))
    values = tuple((i, int(rng.integers(1, 40))) for i in range(count))
    return Task(efforts, reads, values, tuple(int(v) for v in np.flatnonzero(rng.random(count) < 0.6)))


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_best_of_all_choices_at_every_price(seed):
    task = random_task(np.random.default_rng(seed))
    found = choices(task)
    subsets = [{i for i in range(7) if bits >> i & 1} for bits in range(2**7)]
    for price in (0.01, 0.1, 0.5, 1, 2, 5, 100):
        best = min(cost(task, again, price) for again in subsets)
        assert min(price * c.bytes + c.effort for c in found) == pytest.approx(best)
    assert all(a.bytes > b.bytes and a.again < b.again for a, b in pairwise(found))


def test_the_table_tells_what_is_kept_and_what_runs_again():
    told = recomputed(blocks(), compile=True)
    rows = {row.made_by: row for row in told.rows}
    assert (rows["sin"].again, rows["sin"].kept) == (DEPTH, 0)
    assert (rows["add"].again, rows["add"].kept) == (0, DEPTH - 1)
    assert rows["dot_general"].flops == DEPTH * 2 * ROWS * WIDTH * WIDTH
    assert told.compiled[1] < told.compiled[0]
    assert told.estimated[1] < told.estimated[0]
    assert f"{told.compiled[1] / 1e6:,.2f} MB" in str(told)
    assert {row.again for row in recomputed(plain()).rows} == {0}


@cache
def with_head():
    """A training whose layers and loss head stand in scopes."""
    rng = np.random.default_rng(1)
    params = [rng.normal(size=shape).astype("float32") for shape in ((4, 4), (4, 4), (4, 64))]

    def loss(params, x, labels):
        for w in params[:2]:
            with jax.named_scope("layer"):
                x = x + jnp.tanh(jnp.sin(x @ w))
        with jax.named_scope("head"):
            log_p = jax.nn.log_softmax(x @ params[2])
            return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))

    x, labels = rng.normal(size=(16, 4)).astype("float32"), rng.integers(0, 64, 16).astype("int32")
    return ow.Adam(0.1).minimize(loss, params, x, labels)


@pytest.mark.parametrize("scopes", ["head", "head/log_softmax", lambda scope: scope.startswith("head")])
def test_scopes_within_a_loop_over_chunks_are_refused(scopes):
    with pytest.raises(
        GraphError, match=r"in 4 chunks at test_recompute.py:\d+, a loop that keeps only what"
    ):
        recompute(ow.chunk(with_head(), 4), scopes=scopes)


def test_the_head_in_chunks_runs_no_third_time_in_either_order():
    first = recompute(ow.chunk(with_head(), 4), scopes="layer")
    second = ow.chunk(recompute(with_head(), scopes="layer"), 4)
    assert ow.cost(second).flops == pytest.approx(ow.cost(first).flops, rel=0.01)
    for program in (first, second):
        assert {op.type for op in again_ops(program)} >= {"dot_general", "sin", "tanh"}


def test_scopes_are_named_in_errors_as_they_were_given():
    def none(scope):
        return False

    for scopes, word in ((none, "chosen by none"), (lambda _: False, r"the lambda at test_recompute.py:\d+")):
        with pytest.raises(UnknownNameError, match=f"stands in a scope .*{word}"):
            recompute(plain(), scopes=scopes)
    with pytest.raises(UnknownNameError, match="stands in a scope 'a', 'b'"):
        recompute(plain(), scopes=iter(["a", "b"]))
    in_turn = (scope for scope in ("block_1", "block_3"))
    assert {op.scope for op in again_ops(recompute(plain(), scopes=in_turn))} == {"block_1", "block_3"}


def test_roll_behind_recompute_says_the_order():
    ow.roll(plain())
    with pytest.raises(GraphError, match=r"of 'loss' repeat, but recompute .*recompute\(roll\(program\), "):
        ow.roll(within(0.6))


@pytest.mark.parametrize("scopes", ["product", ["product", "mean"]])
def test_scopes_of_which_nothing_could_be_computed_again_are_refused(scopes):
    def loss(w, x):
        with jax.named_scope("product"):
            h = x @ w
        h = jnp.tanh(h) * jnp.sin(h)
        with jax.named_scope("mean"):
            return jnp.mean(h @ w)

    program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    with pytest.raises(
        GraphError, match=r"nothing in the scopes 'product'.* but what enters or leaves a scope"
    ):
        recompute(program, scopes=scopes)


def loss_of_masked(w, x, key, made_by):
    h = x @ w
    with jax.named_scope("masked"):
        h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape) if made_by == "bernoulli" else h > 0, h, 0)
    return jnp.mean(h @ w)


@pytest.mark.parametrize("made_by", ["gt", "bernoulli"])
def test_a_mask_alone_is_computed_again(made_by):
    loss = partial(loss_of_masked, made_by=made_by)
    program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 4)), jnp.ones((8, 4)), jax.random.key(0))
    less = recompute(program, scopes="masked")
    assert any(op.type == made_by for op in less.ops if op.made_by is ow.Pass.BACKWARD)
    assert not any(op.type == made_by for op in program.ops if op.made_by is ow.Pass.BACKWARD)


def test_a_mask_that_is_the_same_in_each_step_is_told():
    loss = partial(loss_of_masked, key=jax.random.key(0), made_by="bernoulli")
    program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 4)), jnp.ones((8, 4)))
    with pytest.raises(GraphError, match=r"bernoulli at .*reads nothing that the step is given.*random key"):
        recompute(program, scopes="masked")
