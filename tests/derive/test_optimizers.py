"""What optimizers make of a Program: update ops, hyperparameters, slots. The rules: see ``optimizers``."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow


def loss(params, x):
    return jnp.sum(jnp.cos(params["a"] * x)) + jnp.sum(params["b"] ** 2 * x[0])


def data(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": jax.random.normal(keys[0], (3, 4), dtype),
        "b": jax.random.normal(keys[1], (4,), dtype),
    }
    return params, jax.random.uniform(keys[2], (3, 4), dtype)


def test_the_first_update_uses_the_schedule_at_zero():
    w = jnp.float32(0.0)
    program = ow.SGD(lambda step: 1.0 + 10.0 * step).minimize(lambda w: w, w)
    step = ow.compile(program, fetch=["learning_rate"])
    state = step.init(w)
    rates = []
    for _ in range(3):
        state, out = step(state)
        rates.append(float(out["learning_rate"]))
    assert rates == [1.0, 11.0, 21.0]
    assert float(state.parameters) == -33.0
    assert "learning_rate" not in state.hyperparameters


def test_schedules_hyperparameters_and_the_counter_are_made_once():
    params, x = data(jnp.float32)
    program = ow.Adam(lambda step: 0.1 / (step + 1)).minimize(loss, params, x)
    types = [t.op.type for t in program.updates]
    assert types == ["count", "schedule", "adam", "adam"]
    assert [v.name for v in program.hyperparameters] == ["beta1", "beta2", "epsilon"]
    assert [t.op.update for t in program.updates] == [
        ow.UpdateType.BOOKKEEPING,
        ow.UpdateType.BOOKKEEPING,
        ow.UpdateType.ELEMENTWISE,
        ow.UpdateType.ELEMENTWISE,
    ]
    assert all(t.program is program for t in program.updates)


def test_a_rule_across_parameters_is_one_op():
    class NormalizedDescent(ow.Optimizer):
        """One step of fixed length along the whole gradient."""

        type = ow.UpdateType.ACROSS
        learning_rate: ow.Hyperparameter = 0.1

        def update(self, parameters, gradients, slots):
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
            return tuple(
                p - self.learning_rate * g / norm for p, g in zip(parameters, gradients, strict=True)
            ), slots

    params, x = data(jnp.float32)
    program = NormalizedDescent(0.5).minimize(loss, params, x)
    assert [t.op.type for t in program.updates] == ["count", "normalized_descent"]
    step = ow.compile(program)
    state, _ = step(step.init(params), x)
    moved = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), state.parameters, params)
    np.testing.assert_allclose(jnp.sqrt(sum(moved.values())), 0.5, rtol=1e-5)


def test_a_rule_may_evaluate_the_loss_again():
    class Backtracking(ow.Optimizer):
        """Armijo's rule: halve the step until the loss falls enough."""

        type = ow.UpdateType.ACROSS
        evaluates_loss = True
        learning_rate: ow.Hyperparameter = 1.0

        def update(self, parameters, gradients, slots, loss):
            here, slope = loss(*parameters), sum(jnp.sum(g**2) for g in gradients)

            def moved(rate):
                return tuple(p - rate * g for p, g in zip(parameters, gradients, strict=True))

            rate = jax.lax.while_loop(
                lambda rate: loss(*moved(rate)) > here - 0.5 * rate * slope,
                lambda rate: rate / 2,
                self.learning_rate,
            )
            return moved(rate), slots

    def steep(w, x):
        return jnp.sum(x * w**2)

    w, x = jnp.array([1.0, -2.0]), jnp.array([100.0, 1.0])
    step = ow.compile(Backtracking(1.0).minimize(steep, w, x))
    state = step.init(w)
    losses = []
    for _ in range(20):
        state, out = step(state, x)
        losses.append(float(out.loss))
    assert all(b < a for a, b in pairwise(losses))
    assert losses[-1] < 0.5 * losses[1]


def test_in_an_update_hyperparameters_are_arrays_and_other_fields_are_what_they_were():
    seen, checked = [], []

    class Several(ow.Optimizer):
        """Moves a few times at once."""

        learning_rate: ow.Hyperparameter = 0.5
        power: ow.Hyperparameter = 1.0
        times: int = 1

        def __post_init__(self):
            super().__post_init__()
            checked.append(self.power)

        def update(self, parameter, gradient, slots):
            seen.append([self.learning_rate, self.power, self.step])
            assert self.times == 3
            rate = self.learning_rate / (1 + self.step) ** self.power
            return parameter - self.times * rate * gradient, slots

    optimizer = Several(lambda step: 0.5 - 0.25 * step, times=3, groups=[ow.Group("b", power=0.0)])
    step = ow.compile(optimizer.minimize(lambda p: p["a"] + p["b"], dict.fromkeys("ab", jnp.float32(0))))
    assert all(isinstance(x, float) for x in checked)
    assert all(isinstance(x, jax.core.Tracer) for row in seen for x in row)
    assert {tuple(str(x.dtype) for x in row) for row in seen} == {("float32", "float32", "int32")}
    state = step.init(dict.fromkeys("ab", jnp.float32(0)))
    for _ in range(2):
        state, _ = step(state)
    assert state.parameters == {"a": -1.875, "b": -2.25}
    assert (optimizer.power, optimizer.times) == (1.0, 3)


class Trust(ow.Optimizer):
    type = ow.UpdateType.ACROSS
    evaluates_loss = True
    learning_rate: ow.Hyperparameter = 0.1

    def update(self, parameters, gradients, slots, loss):
        rate = self.learning_rate / (1 + self.step) * loss(*parameters)
        return tuple(p - rate * g for p, g in zip(parameters, gradients, strict=True)), slots


class TrustOfOld(Trust):
    def update(self, parameters, gradients, slots, hyperparameters, loss):
        rate = hyperparameters.learning_rate / (1 + hyperparameters.step) * loss(*parameters)
        return tuple(p - rate * g for p, g in zip(parameters, gradients, strict=True)), slots


class Shorter(ow.GradientRule):
    rate: ow.Hyperparameter = 0.1

    def update(self, parameter, gradient, slots):
        return gradient * self.rate / (self.optimizer["learning_rate"] + self.step), slots


class ShorterOfOld(Shorter):
    def update(self, parameter, gradient, slots, h):
        return gradient * h.rate / (h.learning_rate + h.step), slots


class Between(ow.ParameterRule):
    share: ow.Hyperparameter = 0.5

    def init(self, parameter):
        return {"first": parameter}

    def update(self, parameter, updated, gradient, slots):
        return parameter + self.share * (updated - parameter), slots

    def evaluated(self, parameter, slots):
        return self.share * parameter + (1 - self.share) * slots["first"]


class BetweenOfOld(Between):
    def update(self, parameter, updated, gradient, slots, hyperparameters):
        return super().update(parameter, updated, gradient, slots)

    def evaluated(self, parameter, slots, h):
        return h.share * parameter + (1 - h.share) * slots["first"]


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (Trust(0.5), TrustOfOld(0.5)),
        (ow.SGD(0.5, rules=[Shorter()]), ow.SGD(0.5, rules=[ShorterOfOld()])),
        (ow.SGD(0.5, rules=[Between()]), ow.SGD(0.5, rules=[BetweenOfOld()])),
    ],
    ids=["with the loss", "a gradient rule", "a parameter rule"],
)
def test_the_older_form_which_takes_hyperparameters_as_an_argument_computes_the_same(new, old):
    def bodies(optimizer):
        program = optimizer.minimize(jnp.sum, jnp.ones(2))
        ops = (*program.ops, *ow.for_evaluation(program).ops)
        return [op.body.text for op in ops]

    assert bodies(new) == bodies(old)


def test_a_rule_reads_what_is_its_own_and_what_is_the_optimizers_under_one_name():
    class Beside(ow.GradientRule):
        learning_rate: ow.Hyperparameter = 0.25

        def update(self, parameter, gradient, slots):
            return self.learning_rate / self.optimizer["learning_rate"] * gradient, slots

    step = ow.compile(ow.SGD(0.5, rules=[Beside()]).minimize(lambda w: w, jnp.float32(0)))
    assert float(step(step.init(jnp.float32(0)))[0].parameters) == -0.25


def test_what_self_has_in_an_update_alone_is_refused_elsewhere():
    for read in (lambda: ow.SGD(0.1).step, lambda: ow.EMA().step, lambda: ow.EMA().optimizer):
        with pytest.raises(AttributeError, match="update and evaluated"):
            read()
    with pytest.raises(
        ow.HyperparameterError, match=r"'optimizer', but in an update self\.optimizer is the hyp"
    ):
        type("A", (ow.GradientRule,), {"__annotations__": {"optimizer": int}, "optimizer": 1})
    around = type("Around", (ow.Optimizer,), {"__annotations__": {"optimizer": Any}, "optimizer": None})
    assert around(ow.SGD(0.1)).optimizer == ow.SGD(0.1)


def test_frozen_parameters_have_no_slots():
    params, x = data(jnp.float32)
    program = ow.Adam(0.1).minimize(loss, params, x, parameter_list=["a"])
    assert {v.name for v in program.state if "/" in v.name} == {"a/mean", "a/variance"}
    step = ow.compile(program)
    state, _ = step(step.init(params), x)
    np.testing.assert_array_equal(state.parameters["b"], params["b"])
    assert not np.array_equal(state.parameters["a"], params["a"])


def test_the_names_of_update_ops():
    names = {type(o).__name__: o.name for o in (ow.SGD(), ow.Adam(), ow.AdamW(), ow.Adagrad(), ow.Momentum())}
    assert names == {
        "SGD": "sgd",
        "Adam": "adam",
        "AdamW": "adam_w",
        "Adagrad": "adagrad",
        "Momentum": "momentum",
    }


@pytest.mark.parametrize("name", ["beta1", "ema/decay"])
def test_a_limit_of_a_hyperparameter_holds_while_training(name):
    program = ow.Adam(0.1, rules=[ow.EMA(0.9)]).minimize(loss, *data(jnp.float32))
    state = ow.compile(program).init(data(jnp.float32)[0])
    assert float(state.replace({name: 0.5})[name]) == 0.5
    with pytest.raises(ow.HyperparameterError, match=f"{name} is 1.5. It must be less than 1"):
        state.replace({name: 1.5})
    with pytest.raises(ow.HyperparameterError, match="It must be less than 1"):
        state.sweep({name: [0.5, 1.0]})


def test_more_values_than_hyperparameters_are_counted():
    with pytest.raises(ow.OnwardError, match=r"SGD was given 9 values; it has"):
        ow.SGD(*range(9))


def test_the_step_counter_stays_where_an_int32_would_wrap():
    w = jnp.ones(3)
    optimizer = ow.optimizer.NAdam(ow.schedule.cosine(0.1, steps=100, end=0.01))
    step = ow.compile(optimizer.minimize(lambda w: jnp.sum(w**2), w), fetch=["learning_rate"])
    state = step.init(w).replace({"step": np.int32(2**31 - 130)})
    seen = []
    for _ in range(4):
        state, out = step(state)
        seen.append(int(state["step"]))
        assert np.isfinite(state["w"]).all()
        np.testing.assert_allclose(out["learning_rate"], 0.01, rtol=1e-6)
    assert seen == [2**31 - 129, 2**31 - 128, 2**31 - 128, 2**31 - 128]
