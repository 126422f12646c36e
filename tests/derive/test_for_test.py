"""The test Program: the same names, nothing dropped, nothing learned."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def names(variables):
    return [v.name for v in variables]


def noisy():
    hidden = ow.layer.fc(ow.data("x", (None, 3)), 4, act="relu")
    hidden = ow.layer.dropout(ow.layer.batch_norm(hidden), 0.5)
    return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))


def lazily():
    hidden = ow.layer.fc(ow.data("x", (None, 3)), 4, act="relu")
    hidden = ow.layer.dropout(ow.layer.batch_norm(hidden), 0.5)
    return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))


def test_loss(state, x, y):
    """The loss of ``noisy`` when nothing is trained, by hand."""
    v = {name: np.asarray(state[name]) for name in state.layout.position if name != "key"}
    h = np.maximum(x @ v["fc_0/w"] + v["fc_0/b"], 0)
    h = (h - v["batch_norm_0/mean"]) / np.sqrt(v["batch_norm_0/variance"] + 1e-5)
    h = h * v["batch_norm_0/scale"] + v["batch_norm_0/offset"]
    return np.mean((h @ v["fc_1/w"] + v["fc_1/b"] - y) ** 2)


test_loss.__test__ = False

PROGRAMS = {
    "a function": lambda: ow.Adam(0.01).minimize(ow.trace(noisy)),
    "Lazy values": lambda: ow.Adam(0.01).minimize(lazily()),
    "forward": lambda: ow.trace(noisy),
    "forward and backward": lambda: ow.append_backward(ow.trace(noisy)),
}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
def test_the_test_program_drops_nothing_and_learns_nothing(make):
    program = make()
    test = ow.for_test(program)
    assert test.next_state == {}
    assert {op.made_by for op in test.ops} == {ow.Pass.FORWARD}
    assert "key" in names(program.state)
    assert "key" not in names(test.state)
    by_name = {v.name: v.type for v in program.state}
    assert all(by_name[v.name] == v.type for v in test.state)
    assert names(test.parameters) == names(program.parameters)
    assert test.loss.name == program.loss.name == "mse_0"


def test_a_state_of_training_is_a_state_of_the_test():
    program = ow.Momentum(0.01).minimize(ow.trace(noisy))
    step, test = ow.compile(program), ow.compile(ow.for_test(program), donate=False)
    state = step.init()
    for rows in (8, 8, 5):
        state, _ = step(state, X[:rows], Y[:rows])
        before = {name: np.asarray(state[name]) for name in ("fc_0/w", "batch_norm_0/mean")}
        same, out = test(state, X, Y)
        np.testing.assert_allclose(out.loss, test_loss(state, X, Y), rtol=1e-4)
        assert all(np.array_equal(before[name], same[name]) for name in before)
    _, short = test(state, X[:3], Y[:3])
    np.testing.assert_allclose(short.loss, test_loss(state, X[:3], Y[:3]), rtol=1e-4)
    assert test.traces == 2


def test_batches_of_any_size_are_rows_on_their_own():
    test = ow.compile(ow.for_test(PROGRAMS["forward"]()), donate=False, fetch=["fc_1"])
    state = test.init(seed=3)
    _, whole = test(state, X, Y)
    rows = [test(state, X[i : i + 1], Y[i : i + 1])[1]["fc_1"] for i in range(8)]
    np.testing.assert_allclose(np.concatenate(rows), whole["fc_1"], rtol=1e-5)


def test_a_function_may_ask_whether_it_is_trained():
    def network(w, x):
        y = x * w
        return jnp.sum(y * 2 if ow.is_training() else y)

    program = ow.SGD(0.1).minimize(network, np.ones(3, "float32"), X)
    assert len(ow.graph.forward_pass(program).ops) - len(ow.for_test(program).ops) == 1


def test_a_network_without_anything_to_leave_out_stays_as_it_is():
    program = ow.trace(lambda w, x: jnp.sum(jnp.tanh(x @ w)), np.ones((3, 2), "float32"), X)
    assert str(ow.for_test(program)) == str(program)
    assert str(ow.for_test(ow.for_test(program))) == str(program)


@ow.transform
def renamed(program, name):
    return replace(program, name=name)


@ow.transform
def doubled(program, loss):
    """A forward transform that adds an op, by tracing one."""
    extra = ow.trace(lambda x: 2 * x, jnp.float32(0), name="twice").ops[0]
    out = ow.Variable("twice", (), program[loss].dtype)
    op = replace(extra, inputs=(program[loss],), outputs=(out,))
    return replace(program, ops=(*program.ops, op), outputs=(*program.outputs, out))


def test_transforms_before_the_backward_pass_are_replayed_and_later_ones_left_away():
    program = renamed(ow.SGD(0.1).minimize(doubled(renamed(ow.trace(noisy), "before"), "mse_0")), "after")
    test = ow.for_test(program)
    assert test.name == "before"
    assert names(test.outputs) == ["mse_0", "twice"]
    step = ow.compile(test)
    _, out = step(step.init(), X, Y)
    assert float(out["twice"]) == 2 * float(out["mse_0"])


def test_a_pruned_program_is_pruned_again():
    program = ow.prune(ow.trace(noisy), ["fc_1"])
    test = ow.for_test(program)
    assert names(test.outputs) == ["fc_1"]
    assert names(test.inputs) == ["x"]


def test_model_state_that_is_passed_in_stays():
    def network(w, stats, x):
        mean = 0.9 * stats["mean"] + 0.1 * x.mean(0)
        return jnp.sum((x - mean) @ w), {"mean": mean}

    arguments = np.ones(3, "float32"), X
    program = ow.SGD(0.1).minimize(network, *arguments, state={"mean": np.zeros(3, "float32")})
    test = ow.for_test(program)
    assert names(test.state) == ["w", "stats/mean"]
    assert [old.name for old in test.next_state] == ["stats/mean"]


def test_ops_that_were_changed_by_hand_are_refused():
    program = ow.trace(noisy)
    by_hand = replace(program, ops=tuple(op for op in program.ops))
    with pytest.raises(ow.RecipeError, match=r"'noisy' were changed by hand.*onward\.transform"):
        ow.for_test(by_hand)


def test_a_program_that_was_not_traced_is_refused():
    program = replace(ow.trace(noisy), recipe=None)
    with pytest.raises(ow.RecipeError, match=r"not made by trace.*Trace the network with training=False"):
        ow.for_test(program)


def test_dropout_is_scaled_so_that_the_test_program_is_its_mean():
    def network():
        return jnp.mean(ow.layer.dropout(ow.data("x", (None, 3)), 0.25))

    program = ow.trace(network)
    step, test = ow.compile(program), ow.compile(ow.for_test(program))
    state, losses = step.init(), []
    many = np.ones((4000, 3), "float32")
    for _ in range(5):
        state, out = step(state, many)
        losses.append(float(out.loss))
    _, out = test(test.init(), many)
    assert float(out.loss) == 1.0
    assert len(set(losses)) == 5
    assert abs(np.mean(losses) - 1.0) < 0.01
    assert jax.tree.leaves(test.init()) == []
