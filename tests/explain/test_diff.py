"""Every op of two Programs is told exactly once, and what was planted is what is found."""

from dataclasses import replace
from functools import cache
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.errors import ArgumentError
from onward.core.jaxprs.body import body_of
from onward.core.program import Replicas
from onward.core.walk import substitute
from onward.explain.diff.diff import diff

X, Y = jnp.ones((8, 6)), jnp.ones((8, 6))


def mlp(params, x, y):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def residual(params, x, y):
    for i, w in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.sin(x @ w) * jnp.exp(-x)
    return jnp.mean((x - y) ** 2)


def recurrent(params, x, y):
    def cell(h, row):
        return jnp.tanh(row @ params[0] + h @ params[1]), None

    h, _ = jax.lax.scan(cell, jnp.zeros(6), x)
    return jnp.mean((h @ params[2] @ params[3] - y) ** 2)


MODELS = {"mlp": mlp, "residual": residual, "recurrent": recurrent}
APART = {"sync_batch_norm": False}  # the recurrent model goes along the batch, which is warned of otherwise
TRANSFORMS = {
    "accumulate": lambda p: ow.accumulate(p, 2, is_sum=False),
    "fence": ow.fence,
    "guard": lambda p: ow.guard(p, "skip"),
    "mixed": lambda p: ow.mixed_precision(p, "bfloat16"),
    "prune": lambda p: ow.prune(p, [p.loss]),
    "recompute": lambda p: ow.recompute(p, scopes="*"),
    "replicate": lambda p: ow.replicate(p, 2, **APART),
    "roll": ow.roll,
    "test": ow.for_test,
    "sharded": lambda p: ow.replicate(ow.mixed_precision(p, "bfloat16"), 2, ow.Sharded(), **APART),
}
CASES = [(m, t) for m in MODELS for t in TRANSFORMS if t not in ("recompute", "roll") or m == "residual"]


def parameters(count=4):
    return [jnp.full((6, 6), 0.1 * i) for i in range(1, count + 1)]


@cache
def program(model="mlp", optimizer="Adam", count=4):
    return getattr(ow, optimizer)(0.1).minimize(MODELS[model], parameters(count), X, Y)


@cache
def transformed(model, name):
    return TRANSFORMS[name](program(model))


def told_once(changes):
    """Every op of both sides is in exactly one part."""
    pairs = (*changes.same, *changes.rewired, *changes.changed)
    before = [*changes.removed, *(p.before for p in pairs)]
    after = [*changes.added, *(p.after for p in pairs)]
    for found, ops in ((before, changes.before.ops), (after, changes.after.ops)):
        assert len(found) == len(set(found))
        assert set(found) == set(ops)
    counted = len(changes.before.ops) - len(changes.removed) + len(changes.added)
    assert counted == len(changes.after.ops)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_op_is_told_once_and_the_other_way_round_it_is_the_mirror(model, name):
    a, b = program(model), transformed(model, name)
    there, back = diff(a, b), diff(b, a)
    told_once(there)
    told_once(back)
    assert set(there.added) == set(back.removed)
    assert set(there.removed) == set(back.added)
    for kind in ("same", "rewired", "changed"):
        forth = {(p.before, p.after) for p in getattr(there, kind)}
        assert forth == {(p.after, p.before) for p in getattr(back, kind)}
    assert there.moved == back.moved
    assert bool(there) == bool(back) == (not there.headline.endswith(" nothing differs"))
    lines = str(there).splitlines()
    assert lines[0] == there.headline
    assert len(lines) < 70
    assert max(map(len, lines)) < 230


@pytest.mark.parametrize("model", MODELS)
def test_a_program_and_itself_do_not_differ(model):
    changes = diff(program(model), program(model))
    assert not changes
    assert changes.headline.endswith("nothing differs")
    assert [p.before for p in changes.same] == list(program(model).ops)


@pytest.mark.parametrize("model", MODELS)
def test_a_second_trace_of_the_same_function_does_not_differ(model):
    again = ow.Adam(0.1).minimize(MODELS[model], parameters(), X, Y)
    changes = diff(program(model), again)
    assert not set(again.ops) & set(program(model).ops)
    assert not changes, changes


def test_every_gradient_passes_through_the_mean_of_the_devices():
    changes = diff(program(), transformed("mlp", "replicate"))
    assert [op.type for op in changes.added] == ["all_mean"] * 5  # four gradients and the loss
    assert "+ 5 ops (all_mean 5)" in changes.headline
    assert "every gradient now passes through all_mean" in changes.headline
    assert [p.after.type for p in changes.rewired] == ["adam"] * 4
    assert {f.what for f in changes.facts} == {"devices", "feed", "return", "loss", "gradient"}


def test_mixed_precision_is_not_all_new():
    changes = diff(program(), transformed("mlp", "mixed"))
    assert {op.type for op in changes.added} == {"cast", "cast_grad"}
    assert not changes.removed
    assert any("float32 -> bfloat16" in p.differences for p in changes.changed)


def test_what_is_computed_again_is_added_and_gradients_read_it():
    changes = diff(program("residual"), transformed("residual", "recompute"))
    assert not changes.removed
    assert {op.made_by for op in changes.added} == {ow.Pass.BACKWARD}
    new = {v for op in changes.added for v in op.outputs}
    for pair in changes.rewired:
        assert all(y in new for _, y in pair.replaced)


def test_equal_changes_in_many_layers_are_one_line():
    short, long = (
        str(diff(p, ow.replicate(p, 2))).splitlines() for p in (program(count=12), program(count=24))
    )
    assert len(short) == len(long)
    assert any("25 x" in line and "all_mean" in line for line in long)


def test_another_optimizer_changes_the_update_alone():
    changes = diff(program(), program(optimizer="Momentum"))
    late = [*changes.added, *changes.removed, *(p.after for p in (*changes.changed, *changes.rewired))]
    assert {op.made_by for op in late} == {ow.Pass.UPDATE}
    assert {(f.what, f.mark) for f in changes.facts} >= {("state", "+"), ("state", "-")}


def edited(params, x, y):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        if i == 1:
            x = jnp.cos(x)
    return jnp.mean((x - y) ** 2)


def test_one_more_op_in_the_function_is_one_more_op_and_one_gradient():
    before, after = (ow.append_backward(ow.trace(f, parameters(), X, Y)) for f in (mlp, edited))
    changes = diff(before, after)
    told_once(changes)
    assert sorted(op.type for op in changes.added) == ["cos", "cos_grad"]
    assert not changes.removed
    assert {p.after.type for p in changes.rewired} <= {"dot_general", "dot_general_grad", "tanh_grad"}


def of_type(p, kind):
    return next(i for i, op in enumerate(p.ops) if op.type == kind)


def with_op(p, i, **changes):
    return replace(p, ops=(*p.ops[:i], replace(p.ops[i], **changes), *p.ops[i + 1 :]))


def test_an_input_swapped_is_found():
    p = program()
    i = of_type(p, "sub")
    x, y = p.ops[i].inputs
    found = diff(p, with_op(p, i, inputs=(y, x)))
    (pair,) = found.rewired
    assert pair.before is p.ops[i]
    assert pair.replaced == ((x, y), (y, x))
    assert (found.added, found.removed, found.changed, found.facts) == ((), (), (), ())


def test_any_two_inputs_of_one_type_swapped_are_found():
    p = program("residual")
    for i, op in enumerate(p.ops):
        pairs = [(j, k) for k in range(len(op.inputs)) for j in range(k)]
        for j, k in pairs:
            x, y = op.inputs[j], op.inputs[k]
            if (x.shape, x.dtype) == (y.shape, y.dtype):
                inputs = [*op.inputs]
                inputs[j], inputs[k] = y, x
                found = diff(p, with_op(p, i, inputs=tuple(inputs)))
                (pair,) = found.rewired
                assert (pair.before, pair.replaced) == (op, ((x, y), (y, x)))
                assert len(found) == 1


@pytest.mark.parametrize("model", MODELS)
def test_any_op_taken_away_is_removed_and_put_back_is_added(model):
    p = program(model)
    for i, op in enumerate(p.ops):
        without = replace(p, ops=(*p.ops[:i], *p.ops[i + 1 :]))
        found, back = diff(p, without), diff(without, p)
        assert (found.removed, len(found)) == ((op,), 1)
        assert (back.added, len(back)) == ((op,), 1)


def test_any_attribute_changed_is_found():
    p = program("residual")
    for i, op in enumerate(p.ops):
        for change in ({"made_by": ow.Pass.COLLECTIVE}, {"scope": "elsewhere"}, {"type": "other"}):
            found = diff(p, with_op(p, i, **change))
            (pair,) = found.changed
            assert pair.before is op
            assert len(pair.differences) == len(found) == 1


def test_an_op_removed_is_found():
    p = ow.trace(residual, parameters(), X, Y)
    i = of_type(p, "sin")
    (out,), (given,) = p.ops[i].outputs[:1], p.ops[i].inputs
    without = substitute(replace(p, ops=(*p.ops[:i], *p.ops[i + 1 :])), {out: given})
    found = diff(p, without)
    told_once(found)
    assert (found.added, found.removed, found.changed) == ((), (p.ops[i],), ())
    assert all(x is out and y is given for pair in found.rewired for x, y in pair.replaced)


def test_an_attribute_changed_is_found():
    p = ow.trace(lambda w, x: jnp.sum(jnp.sort(w * x, axis=0)), jnp.ones((3, 3)), jnp.ones((3, 3)))
    i = of_type(p, "sort")
    body = body_of(lambda x: [jax.lax.sort(x, dimension=1)], *p.ops[i].body.in_types)
    (pair,) = diff(p, with_op(p, i, body=body)).changed
    assert pair.before is p.ops[i]
    assert pair.differences == ("dimension=0 -> 1",)


def test_a_number_changed_is_found():
    p, q = (ow.trace(lambda w, k=k: jnp.sum(w * k), jnp.ones(3)) for k in (2.0, 3.0))
    (pair,) = diff(p, q).changed
    assert pair.differences == ("2.0 -> 3.0",)


def test_ops_in_another_order_are_moved():
    p = ow.trace(lambda w: jnp.sin(w) + jnp.cos(w), jnp.ones(3))
    sin, cos, add = p.ops
    found = diff(p, replace(p, ops=(cos, sin, add)))
    assert found
    assert found.moved == 1
    assert "1 moved" in found.headline


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda p: {"loss": None}, ("loss", "-")),
        (lambda p: {"outputs": ()}, ("return", "-")),
        (lambda p: {"gradients": p.gradients[1:]}, ("gradient", "-")),
        (lambda p: {"next_state": dict(list(p.next_state.items())[1:])}, ("next step", "-")),
        (lambda p: {"limits": {**p.limits, p.state[0]: 1.0}}, ("limit", "~")),
        (lambda p: {"bounds": {p.inputs[0]: (9, "labels")}}, ("bound", "~")),
        (lambda p: {"replicas": Replicas(1, "one")}, ("devices", "~")),
        (lambda p: {"initializers": p.initializers[1:]}, ("begins", "~")),
    ],
)
def test_what_changes_around_the_ops_is_a_fact(change, fact):
    found = diff(program(), replace(program(), **change(program())))
    assert [(f.what, f.mark) for f in found.facts] == [fact]
    assert found
    assert len(found) == 0


def test_a_network_of_48_layers_is_compared_in_little_time():
    def deep(params, x, y):
        for i in range(48):
            with jax.named_scope(f"layer_{i}"):
                for w in params:
                    x = x + jnp.tanh(jnp.sin(x @ w) * jnp.exp(-x)) / (1 + jnp.cos(x) ** 2)
        return jnp.mean((x - y) ** 2)

    first, second = (ow.Adam(0.1).minimize(deep, parameters(3), X, Y) for _ in range(2))
    assert len(first.ops) > 3000
    started = perf_counter()
    assert not diff(first, second)
    mixed = ow.mixed_precision(second, "bfloat16")
    told_once(diff(first, mixed))
    assert {op.type for op in diff(second, mixed).removed} == {"sum"}  # of gradients with other names
    assert perf_counter() - started < 60  # a guard against what is quadratic; it takes about one second


def test_no_program_is_refused():
    with pytest.raises(ArgumentError, match="diff was given the function 'mlp'"):
        diff(program(), mlp)


def test_the_page_escapes_what_it_shows():
    p = replace(program(), name="<b>")
    assert "<b>" not in diff(p, transformed("mlp", "guard"))._repr_html_()


def test_costs_are_those_of_both():
    costs = diff(program(), transformed("mlp", "replicate")).costs
    before, after = costs["operations"]
    assert 0 < after < before
    assert costs["bytes exchanged"] == (0, 4 * 6 * 6 * 4 + 4)


def test_constants_of_other_numbers_are_told():
    def made(c):
        return ow.trace(lambda w: jnp.sum(w * c), jnp.ones(3))

    found = ow.diff(made(np.arange(3.0, dtype="float32")), made(np.arange(3.0, dtype="float32") + 1))
    assert found
    assert "constant ~ 1" in found.headline
    assert "[0.0, 1.0, 2.0] -> [1.0, 2.0, 3.0]" in str(found)
    nan = np.array([1.0, np.nan, 2.0], "float32")
    assert not ow.diff(made(nan), made(nan.copy()))


def test_hyperparameters_that_begin_elsewhere_are_told():
    programs = [ow.SGD(rate).minimize(lambda w: jnp.sum(w**2), jnp.ones(3)) for rate in (0.25, 0.5)]
    found = ow.diff(*programs)
    assert found.headline.endswith("no op differs; learning_rate: 0.25 -> 0.5")


def test_limits_of_state_that_is_gone_are_no_news():
    a = ow.AdamW(0.1).minimize(lambda w: jnp.sum(w**2), jnp.ones(3))
    b = ow.SGD(0.1).minimize(lambda w: jnp.sum(w**2), jnp.ones(3))
    assert "limit" not in str(ow.diff(a, b))
