"""What ``example_weight`` does to a loss and to results, in whole batches and in those that are filled up."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)), RNG.normal(size=16)
WEIGHT = RNG.uniform(0.1, 2, 16)
PARAMS = {"w": RNG.normal(size=(3, 3)), "out": RNG.normal(size=3)}


def added_up(each, examples):
    return jax.lax.scan(lambda total, one: (total + each(one), None), 0.0, examples)[0]


LOSSES = {
    "mean": lambda e, w: jnp.sum(e * w) / jnp.sum(w),
    "sum": lambda e, w: jnp.sum(e * w),
    "product": lambda e, w: e @ w / jnp.maximum(jnp.sum(w), 1),
    "weights of sum 1": lambda e, w: jnp.sum(e * (w / jnp.sum(w))),
    "a sum and a number": lambda e, w: jnp.sum(e * w) / (jnp.sum(w) + 0.1),
    "chosen": lambda e, w: jnp.mean(e, where=w > 0),
    "average": lambda e, w: jnp.average(e, weights=w),
    "by map": lambda e, w: jnp.sum(jax.lax.map(lambda a: a[0] * a[1], (e, w))) / jnp.sum(w),
    "added up by a loop": lambda e, w: added_up(lambda a: a[0] * a[1], (e, w)) / jnp.sum(w),
}
BY_ROWS = {
    "mean of products": lambda e, w: jnp.mean(e * w),
    "two means": lambda e, w: jnp.sum(e * w) / jnp.sum(w) + 0.1 * jnp.mean(e * w),
}
WITHIN = {
    "loop": lambda e, w: jax.lax.fori_loop(0, 2, lambda _, s: s + jnp.sum(e * w) / len(w), 0.0),
    "scan": lambda e, w: jax.lax.scan(lambda s, c: (s + c * (e @ w) / len(w), None), 0.0, jnp.ones(2))[0],
    "branches": lambda e, w: jax.lax.cond(
        jnp.sum(w) > 9, lambda e: jnp.mean(e * w), lambda e: jnp.sum(e * w) / len(w), e
    ),
}
WITHOUT = {
    "mean": lambda e, w: jnp.mean(e),
    "sum": lambda e, w: jnp.sum(e),
    "weighed by half": lambda e, w: jnp.sum(e * w) / jnp.sum(w) + 0.1 * jnp.sum(e),
}
LAYOUTS = {
    "accumulate": lambda program: ow.accumulate(program, 4),
    "replicate": lambda program: ow.replicate(program, 4),
    "accumulate after replicate": lambda program: ow.accumulate(ow.replicate(program, 2), 2),
    "replicate after accumulate": lambda program: ow.replicate(ow.accumulate(program, 2), 2),
    "pipeline": lambda program: ow.pipeline(program, 2, 2, data=2),
}


def each(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["out"] - y) ** 2


def trained(made, rows):
    step = ow.compile(made)
    state, out = step(step.init(PARAMS), X[:rows], Y[:rows], WEIGHT[:rows])
    return {**{name: state[name] for name in PARAMS}, "loss": out.loss, "aux": out.aux}


def program_of(loss, rows, results=lambda e, w: ()):
    def function(params, x, y, example_weight):
        e = each(params, x, y)
        return loss(e, example_weight), results(e, example_weight)

    return ow.SGD(0.1).minimize(function, PARAMS, X[:rows], Y[:rows], WEIGHT[:rows], has_aux=True)


def expect_equal(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, wanted)


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [16, 14])
def test_losses_that_weigh_their_examples_are_those_of_one_device(layout, rows):
    for loss in [*LOSSES.values(), *(BY_ROWS.values() if rows == 16 else ())]:
        program = program_of(loss, rows)
        expect_equal(trained(LAYOUTS[layout](program), rows), trained(program, rows))


@pytest.mark.parametrize("layout", ["accumulate", "replicate"])
def test_groups_are_other_ones_where_the_batch_is_filled_up(layout):
    def grouped(e, w):
        products = jax.lax.map(lambda a: a[0] * a[1], (e, w), batch_size=2)
        return jnp.sum(products) + jnp.sum(products.reshape(-1, 2).max(1))

    def in_turns(e, w):
        return jax.lax.scan(lambda total, t: (total + t * grouped(e, w), None), 0.0, jnp.ones(2))[0]

    for total in (grouped, jax.checkpoint(grouped), in_turns):

        def loss(e, w, total=total):
            return total(e, w) / jnp.sum(w)

        program = program_of(loss, 16)
        expect_equal(trained(LAYOUTS[layout](program), 16), trained(program, 16))
        with pytest.warns(UserWarning, match="the loss reads examples in groups, into which others may come"):
            trained(LAYOUTS[layout](program_of(loss, 14)), 14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_without_weights_are_those_of_one_device_where_nothing_is_filled_up(layout):
    for loss in WITHOUT.values():
        program = program_of(loss, 16)
        expect_equal(trained(LAYOUTS[layout](program), 16), trained(program, 16))


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        (BY_ROWS, "is divided by a number of rows"),
        (WITHIN, "is divided by a number of rows"),
        (WITHOUT, "adds up numbers that are not 0"),
    ],
)
def test_a_loss_that_is_another_one_where_the_batch_is_filled_up_is_warned_of(losses, why):
    for loss in losses.values():
        program = program_of(loss, 14)
        for parts, layout in {"4 micro-batches": "accumulate", "4 devices": "replicate"}.items():
            said = f"14 examples are filled up with examples of weight 0 for {parts}, and the loss .*{why}"
            with pytest.warns(UserWarning, match=said):
                trained(LAYOUTS[layout](program), 14)


def test_devices_read_the_number_of_all_rows():
    program = program_of(lambda e, w: jnp.sum(e * w) / (e.size - 1) + jnp.var(e * w, ddof=1), 16)
    expect_equal(trained(ow.replicate(program, 4), 16), trained(program, 16))
    step = ow.compile(ow.replicate(program, 4))
    with pytest.warns(UserWarning, match="the loss adds up numbers"):
        step(step.init(PARAMS), X[:14], Y[:14], WEIGHT[:14])


def right(e, w):
    """Results that are the same where the batch is filled up, in however many parts."""
    total = jnp.sum(w)
    return {
        "weights": total,
        "sum": jnp.sum(e * w),
        "hits": jnp.sum((e > 0.5) * w),
        "share": jnp.sum((e > 0.5) * w) / total,
        "count": jnp.sum((w > 0) & (e > 0.5)),
        "chosen": jnp.sum(jnp.where(w > 0, e, 0)),
        "parts": jnp.sum(e * (w / total)),
        "largest": jnp.max(e),
        "columns": jnp.sum(e[:, None] * w[:, None] * jnp.ones((1, 2)), 0),
        "product": jnp.stack([e, e]) @ w,
        "within": jax.checkpoint(lambda e, w: jnp.sum(jnp.tanh(e) * w))(e, w),
        "added up by a loop": added_up(lambda a: jnp.tanh(a[0]) * a[1], (e, w)),
        "made within": jnp.sum(jax.checkpoint(lambda e, w: e * w)(e, w)),
        "each": e,
        "of each": e * w / total,
    }


def wrong(e, w):
    """Others, each in its own way."""
    return {
        "sum": jnp.sum(e),
        "mean": jnp.mean(e),
        "mean of products": jnp.mean(e * w),
        "hits": jnp.sum(e > 0.5),
        "guarded": jnp.sum(e * (w + 1e-2)),
        "rest": jnp.sum((1 - w) * e),
        "sum of both": jnp.sum(e * w + e),
        "exponential": jnp.sum(e * jnp.exp(w)),
        "power": jnp.sum(e * w**0.0),
        "chosen": jnp.sum(jnp.where(w > 0, e, 1.0)),
        "neither": jnp.sum(~((e > 0.5) & (w > 0.5))),
        "counted": jnp.sum(e * w) / jnp.sum(w >= 0),
        "products": jnp.stack([e, w]) @ jnp.stack([e, w]).T,
        "by map": jnp.sum(jax.lax.map(lambda a: a[0] + a[1], (e, w))),
        "added up by a loop": added_up(lambda a: a[0] + a[1], (e, w)),
        "counted by a loop": added_up(lambda a: 1.0, (e, w)),
        "largest by map": jnp.max(jax.lax.map(lambda a: -a[0] * a[1], (e, w))),
        "least": jnp.min(w),
        "largest": jnp.max(-w * e),
        "all": jnp.all(w > 0),
        "any": jnp.any(w == 0),
        "rows": jnp.asarray(len(e)),
        "weights": jnp.mean(w),
        "one or the other": jnp.sum(jnp.where(e > 1, e, w)),
        "joined": jnp.sum(jnp.concatenate([w[:, None], e[:, None]], 1)),
        "divided within": jax.checkpoint(jnp.mean)(e * w),
        "plain within": jax.checkpoint(lambda e, w: jnp.sum(e) + 0 * jnp.sum(w))(e, w),
        "divided by an array": jnp.sum(e * w) / np.full(2, float(len(e))),
    }


def named(told, program, results):
    """The results that warnings name."""
    names = {
        v.name: key for v, key in zip(program.signature.result.variables[1:], sorted(results), strict=True)
    }
    found = re.findall(r"the result '([^']+)'", " ".join(str(w.message) for w in told))
    return {names[name] for name in found}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [16, 14])
def test_results_of_numbers_that_weights_make_0_are_those_of_one_device(layout, rows):
    program = program_of(LOSSES["mean"], rows, right)
    expect_equal(trained(LAYOUTS[layout](program), rows), trained(program, rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_results_are_right_in_whole_batches_and_right_or_named_in_those_that_are_filled_up(layout):
    results = wrong(*2 * [jnp.ones(2)])
    program = program_of(LOSSES["mean"], 16, wrong)
    expect_equal(trained(LAYOUTS[layout](program), 16), trained(program, 16))
    program = program_of(LOSSES["mean"], 14, wrong)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(LAYOUTS[layout](program), 14)
    wanted = trained(program, 14)
    expect_equal(found | {"aux": ()}, wanted | {"aux": ()})
    differing = {key for key in results if not np.allclose(found["aux"][key], wanted["aux"][key], rtol=1e-9)}
    assert differing <= named(told, program, results)
    if layout == "accumulate":  # it divides once, behind the loop, by the number of all rows
        assert {"weights", "mean of products"}.isdisjoint(differing | named(told, program, results))
    assert len(differing) >= 10
    assert "examples are filled up with examples of weight 0 for" in str(told[0].message)


def test_statistics_of_data_are_of_the_rows_that_were_fed():
    """Micro-batches read those of the whole batch, which is not filled up for that."""
    program = program_of(lambda e, w: jnp.sum(e * w) / jnp.sum(jnp.ones_like(w)), 14)
    expect_equal(trained(ow.accumulate(program, 4), 14), trained(program, 14))


@pytest.mark.parametrize("layout", ["accumulate", "replicate"])
def test_state_is_named_too(layout):
    def loss(params, state, x, y, example_weight):
        e, w = each(params, x, y), example_weight
        following = {"right": state["right"] + jnp.sum(e * w), "wrong": 0.9 * state["wrong"] + jnp.mean(e)}
        return jnp.sum(e * w) / jnp.sum(w), following

    state = {"right": 0.0, "wrong": 0.0}
    program = ow.SGD(0.1).minimize(loss, PARAMS, X[:14], Y[:14], WEIGHT[:14], state=state)

    def stepped():
        step = ow.compile(LAYOUTS[layout](program))
        return step(step.init(PARAMS, state), X[:14], Y[:14], WEIGHT[:14])

    with pytest.warns(
        UserWarning, match=r"the state 'state/wrong' adds up numbers that .* from that of the 14\."
    ):
        stepped()


def test_a_weighted_mean_that_is_not_looked_into_is_taken_by_weights():
    """It is right, which nothing tells; so the words say what is done."""

    def loss(e, w):
        return jax.checkpoint(lambda e, w: jnp.sum(e * w) / jnp.sum(w))(e, w)

    program = program_of(loss, 16)
    with pytest.warns(UserWarning, match=r"but for a mean weighed by example_weight, jnp.sum\(w \* e\)"):
        made = ow.accumulate(program, 4)
    expect_equal(trained(made, 16), trained(program, 16))


def test_a_step_warns_when_it_meets_a_batch_that_is_filled_up():
    step = ow.compile(ow.replicate(program_of(BY_ROWS["mean of products"], 16), 4))
    state, _ = step(step.init(PARAMS), X, Y, WEIGHT)
    with pytest.warns(UserWarning, match="14 examples are filled up"):
        state, _ = step(state, X[:14], Y[:14], WEIGHT[:14])
    step(state, X[:14], Y[:14], WEIGHT[:14])  # which is said once


@pytest.mark.parametrize("layout", ["accumulate", "replicate"])
def test_a_program_of_one_example_knows_what_more_of_them_need(layout):
    step = ow.compile(LAYOUTS[layout](program_of(LOSSES["mean"], 1, right)))
    for rows in (16, 14, 1):
        program = program_of(LOSSES["mean"], rows, right)
        data = X[:rows], Y[:rows], WEIGHT[:rows]
        state, out = step(step.init(PARAMS), *data)
        found = {**{name: state[name] for name in PARAMS}, "loss": out.loss, "aux": out.aux}
        expect_equal(found, trained(program, rows))


def test_a_loss_that_nothing_is_known_of_is_warned_of_and_weighed_by_shares():
    """The mean of the micro-batches' losses, weighed by their weights: what a log of a mean is not."""
    program = program_of(lambda e, w: jnp.log(jnp.sum(e * w) / jnp.sum(w)), 16)
    with pytest.warns(UserWarning, match="neither a mean over examples nor a sum: 'log'"):
        step = ow.compile(ow.accumulate(program, 4))
    _, out = step(step.init(PARAMS), X, Y, WEIGHT)
    e, parts = np.asarray(each(PARAMS, X, Y)), np.split(np.arange(16), 4)
    shares = [WEIGHT[rows].sum() / WEIGHT.sum() for rows in parts]
    means = [np.log((e[rows] * WEIGHT[rows]).sum() / WEIGHT[rows].sum()) for rows in parts]
    np.testing.assert_allclose(out.loss, np.dot(shares, means), rtol=1e-10)


def test_people_who_say_what_their_loss_is_are_left_to_it():
    program = program_of(LOSSES["sum"], 16)
    expect_equal(trained(ow.accumulate(program, 4, is_sum=True), 16), trained(program, 16))
    left, told = (ow.accumulate(program_of(LOSSES["mean"], 16), 4, is_sum=said) for said in (False, None))
    expect_equal(trained(left, 16), trained(told, 16))
    assert [any(op.type == "of_whole_batch" for op in made.ops) for made in (left, told)] == [False, True]
