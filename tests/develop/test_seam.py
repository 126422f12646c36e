"""Cutting a training Program along its gradients: what makes them, and what applies them."""

from contextlib import nullcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import optimized

import onward as ow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
PARAMS = {"a": RNG.normal(size=(3, 4)).astype("float32"), "b": RNG.normal(size=(4, 1)).astype("float32")}


def names(variables):
    return [v.name for v in variables]


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def network():
    hidden = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 3)), 1))
    return ow.layer.mse(ow.layer.dropout(hidden, 0.5), ow.data("y", (None, 1)))


def schedule(n):
    return 0.1 / (n + 1.0)


OPTIMIZERS = {
    "SGD": ow.SGD(0.1),
    "Momentum": ow.Momentum(0.1, 0.9),
    "Nesterov": ow.Momentum(0.1, 0.9, nesterov=True),
    "Adagrad": ow.Adagrad(0.1),
    "Adam": ow.Adam(0.1),
    "AdamW": ow.AdamW(0.1, weight_decay=0.1),
    "scheduled SGD": ow.SGD(schedule),
    "scheduled Adam": ow.Adam(schedule),
}


def loss_of_each(params, x, y):
    return jnp.mean((jnp.tanh(x @ jnp.stack(list(params.values()), 1)).sum(1, keepdims=True) - y) ** 2)


EACH = {name: RNG.normal(size=3).astype("float32") for name in OPTIMIZERS}
OF_EACH = ow.SGD(0.1, groups=[ow.Group(name, optimizer) for name, optimizer in OPTIMIZERS.items()])
NETWORKS = {
    "each": (lambda optimizer: optimizer.minimize(loss_of_each, EACH, X, Y), (EACH,)),
    "arguments": (lambda optimizer: optimizer.minimize(loss, PARAMS, X, Y), (PARAMS,)),
    "declarations": (lambda optimizer: optimizer.minimize(ow.trace(network, batch_size=len(X))), ()),
}


def bits(state):
    """Every value of a State, to the bit."""

    def data(value):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if is_key else value)

    return {name: data(state[name]).tobytes() for name in state.layout.position}


def before_updates(program):
    carried = ow.graph.forward_pass(program).next_state.values()
    return ow.prune(program, [program.loss, *(g for _, g in program.gradients), *carried])


def compiled(program, make):
    """In haste, sums of batch normalization are rounded otherwise in another program."""
    with optimized() if make == "declarations" else nullcontext():
        return ow.compile(program, donate=False)


@cache
def gradient_step(make):
    """The step up to the gradients: the same for every optimizer."""
    return compiled(before_updates(NETWORKS[make][0](ow.SGD(0.1))), make)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_changes_what_makes_the_gradients(optimizer):
    minimize, _ = NETWORKS["arguments"]
    assert str(before_updates(minimize(OPTIMIZERS[optimizer]))) == str(before_updates(minimize(ow.SGD(0.1))))


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (OF_EACH, "each"),
        (ow.AdamW(0.1, weight_decay=0.1), "declarations"),
    ],
    ids=["each", "AdamW, declared"],
)
def test_gradients_and_then_updates_are_the_fused_step_to_the_bit(optimizer, make):
    minimize, arguments = NETWORKS[make]
    program = minimize(optimizer)
    fused, second = (compiled(p, make) for p in (program, ow.graph.update_pass(program)))
    first = gradient_step(make)
    assert str(before_updates(program)) == str(before_updates(minimize(ow.SGD(0.1))))
    one = two = fused.init(*arguments)
    for _ in range(4):
        one, whole = fused(one, X, Y)
        two, part = first(two, X, Y)
        two, _ = second(two, **{g.name: part[g.name] for _, g in program.gradients})
        assert bits(one) == bits(two)
        assert float(whole.loss) == float(part.loss)


@pytest.mark.parametrize("make", NETWORKS)
def test_every_op_lies_on_one_side_of_the_seam(make):
    program = NETWORKS[make][0](ow.Adam(0.1))
    forward, update = ow.graph.forward_pass(program), ow.graph.update_pass(program)
    passes = [op.made_by for op in program.ops]
    assert len(forward.ops) == passes.count(ow.Pass.FORWARD)
    assert len(update.ops) == passes.count(ow.Pass.UPDATE) == 1 + len(program.parameters)
    assert {op.made_by for op in forward.ops} == {ow.Pass.FORWARD}
    assert {op.made_by for op in update.ops} == {ow.Pass.UPDATE}
    assert update.inputs == tuple(g for _, g in program.gradients)
    assert update.gradients == program.gradients
    assert {*forward.next_state} | {*update.next_state} == {*program.next_state}
    assert not {*forward.next_state} & {*update.next_state}
    assert update.outputs == ()


def test_the_forward_pass_is_the_program_before_minimize():
    forward = ow.trace(network)
    cut = ow.graph.forward_pass(ow.Adam(0.1).minimize(forward))
    assert str(cut) == str(forward)
    assert ow.graph.forward_pass(forward).ops is forward.ops
    assert names(cut.parameters) == names(forward.parameters)
    assert cut.loss.name == forward.loss.name


def test_the_forward_pass_can_be_minimized_again_and_fed_other_batches():
    cut = ow.graph.forward_pass(ow.Adam(0.1).minimize(ow.trace(network)))
    program = ow.SGD(0.1).minimize(cut)
    step = ow.compile(program)
    state, _ = step(step.init(), X[:3], Y[:3])
    assert int(state["step"]) == 1


@pytest.mark.filterwarnings("ignore::onward.UnreachedWarning")
def test_the_forward_pass_keeps_what_the_function_is_given_and_does_not_read():
    params, state = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"last": jnp.ones(2), "unread": jnp.ones(3)}
    program = ow.SGD(0.1).minimize(
        lambda p, s, x: (jnp.mean(x * p["a"]), {**s, "last": x}), params, jnp.ones(2), state=state
    )
    assert names(ow.graph.forward_pass(program).state) == ["a", "b", "s/last", "s/unread"]
    assert set(ow.Model(program, params, state).parameters) == {"a", "b"}


def test_the_update_pass_alone_is_sgd_by_hand():
    program = ow.SGD(0.5).minimize(loss, PARAMS, X, Y)
    step = ow.compile(ow.graph.update_pass(program))
    state = step.init(PARAMS)
    assert names(step.layout.variables) == ["a", "b", "step", "learning_rate"]
    gradient = {name: np.full_like(p, 2.0) for name, p in PARAMS.items()}
    state, _ = step(state, **{f"grad({name})": g for name, g in gradient.items()})
    assert set(state.parameters) == {"a", "b"}
    for name, p in PARAMS.items():
        np.testing.assert_allclose(state[name], p - 1.0, rtol=1e-6)
    state = state.replace({"learning_rate": 0.0})
    kept = np.asarray(state["a"])
    state, _ = step(state, *gradient.values())
    np.testing.assert_array_equal(state["a"], kept)


def test_slots_of_an_update_pass_begin_by_themselves():
    step = ow.compile(ow.graph.update_pass(ow.Adam(0.1).minimize(loss, PARAMS, X, Y)))
    state = step.init(PARAMS)
    assert state["a/mean"].shape == (3, 4)
    assert float(state["learning_rate"]) == np.float32(0.1)
    declared = ow.graph.update_pass(ow.Adam(0.1).minimize(ow.trace(network)))
    assert ow.compile(declared).init().parameters["fc_0/w"].shape == (3, 1)


def test_a_frozen_parameter_is_on_the_forward_side_only():
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, Y, parameter_list=["b"])
    update = ow.graph.update_pass(program)
    assert names(update.parameters) == ["b"]
    assert names(update.inputs) == ["grad(b)"]
    assert names(ow.graph.forward_pass(program).parameters) == ["a", "b"]


class LineSearch(ow.Optimizer):
    """Takes the better of two steps, by evaluating the loss again."""

    learning_rate: ow.Hyperparameter = 0.1
    type = ow.UpdateType.ACROSS
    evaluates_loss = True

    def update(self, parameters, gradients, slots, loss):
        steps = [
            tuple(p - rate * g for p, g in zip(parameters, gradients, strict=True))
            for rate in (self.learning_rate, 2 * self.learning_rate)
        ]
        better = loss(*steps[0]) < loss(*steps[1])
        return tuple(jnp.where(better, a, b) for a, b in zip(*steps, strict=True)), slots


def test_an_optimizer_that_evaluates_the_loss_is_refused_by_name():
    program = LineSearch(0.1).minimize(loss, PARAMS, X, Y)
    with pytest.raises(
        ow.GraphError, match=r"update line_search of Program 'loss' reads 'x'.*evaluates the loss"
    ):
        ow.graph.update_pass(program)
    assert len(ow.graph.forward_pass(program).ops) == len(ow.trace(loss, PARAMS, X, Y).ops)


class Clipped(ow.Optimizer):
    """Looks across parameters, but at gradients alone."""

    learning_rate: ow.Hyperparameter = 0.1
    type = ow.UpdateType.ACROSS

    def update(self, parameters, gradients, slots):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        scale = self.learning_rate / jnp.maximum(norm, 1.0)
        return tuple(p - scale * g for p, g in zip(parameters, gradients, strict=True)), slots


def test_a_rule_across_parameters_is_one_op_of_the_update_pass():
    program = Clipped(0.1).minimize(loss, PARAMS, X, Y)
    update = ow.graph.update_pass(program)
    assert [op.type for op in update.ops] == ["count", "clipped"]
    step = ow.compile(update)
    gradient = {name: np.full_like(p, 3.0) for name, p in PARAMS.items()}
    state, _ = step(step.init(PARAMS), *gradient.values())
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
    np.testing.assert_allclose(state["a"], PARAMS["a"] - 0.1 * 3 / norm, rtol=1e-5)


def test_a_program_without_updates_has_an_empty_update_pass():
    program = ow.append_backward(ow.trace(loss, PARAMS, X, Y))
    assert ow.graph.update_pass(program).ops == ()
    assert len(ow.graph.forward_pass(program).ops) < len(program.ops)
