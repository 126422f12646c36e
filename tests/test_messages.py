"""What a person reads when something is wrong: what was found, where, and what to write instead."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
PARAMS = {"w1": jnp.ones((4, 3)), "w2": jnp.ones((3, 1))}
X, Y = jnp.ones((8, 4)), jnp.ones((8, 1))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def vector_loss(params, x, y):
    return ((x @ params["w1"] @ params["w2"] - y) ** 2)[:, 0]


def count_right(params, x, y):
    return jnp.sum((x @ params["w1"] @ params["w2"] > 0) == (y > 0))


def forgetful(params, x, y):
    return jnp.mean((x.sum(1) - y) ** 2)


def cut_off(params, x, y):
    return loss(jax.lax.stop_gradient(params), x, y)


def branching(params, x, y):
    if jnp.sum(x) > 0:  # a Python branch on a traced value
        return loss(params, x, y)
    return 2 * loss(params, x, y)


def in_numpy(params, x, y):
    return loss(params, np.log(x), y)


def counting(params, x, y):
    return sum(loss(params, x, y) for _ in range(y[0, 0].astype(int)))


kept = []  # one that a test makes: what refers to an array is not found in an older list


def leaking(params, x, y):
    h = x @ params["w1"]
    kept.append(h)
    return loss(params, x, y)


def broken(params, x, y):
    return x @ params["w2"]


def pair(params, x, y):
    return loss(params, x, y), X


LOSSES = {
    "not a scalar": (vector_loss, ow.LossError, ["float32[8]", "must be a scalar", "jnp.mean(loss)"]),
    "not floating": (count_right, ow.LossError, ["int32[]", "floating point", "test_messages.py:"]),
    "not of the parameters": (forgetful, ow.LossError, ["does not depend on any of 'w1', 'w2'"]),
    "cut off": (cut_off, ow.LossError, ["does not depend on", "stop_gradient"]),
    "a pair": (pair, ow.LossError, ["returns 2 arrays", "has_aux=True"]),
    "Python branch": (branching, ow.TraceError, ["test_messages.py:", "in branching", "jnp.where", "if"]),
    "NumPy": (in_numpy, ow.TraceError, ["test_messages.py:", "in in_numpy", "jax.numpy"]),
    "Python count": (counting, ow.TraceError, ["test_messages.py:", "in counting", "static"]),
    "side effect": (leaking, ow.TraceError, ["leaking is not pure", "8,3", "has_aux=True"]),
    "an error of its own": (broken, ow.TraceError, ["test_messages.py:", "in broken", "(4,)", "(3,)"]),
}


@pytest.mark.parametrize(("function", "error", "words"), LOSSES.values(), ids=LOSSES)
def test_a_wrong_loss(function, error, words, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "kept", [])
    with pytest.raises(error) as raised:
        ow.SGD(0.1).minimize(function, PARAMS, X, Y)
    for word in words:
        assert word in str(raised.value)


CALLS = {
    "the loss as a number": (
        lambda: ow.SGD(0.1).minimize(loss(PARAMS, X, Y)),
        ow.ArgumentError,
        ["the loss function itself", "minimize(loss, params, images, labels)"],
    ),
    "no arguments": (
        lambda: ow.SGD(0.1).minimize(loss),
        ow.ArgumentError,
        ["no arguments", "parameters first"],
    ),
    "arguments for a Program": (
        lambda: ow.SGD(0.1).minimize(ow.trace(loss, PARAMS, X, Y), X),
        ow.ArgumentError,
        ["traced already"],
    ),
    "data by name": (
        lambda: ow.SGD(0.1).minimize(loss, PARAMS, x=X, y=Y),
        ow.ArgumentError,
        ["minimize has no argument 'x'", "by place: minimize(loss, params, x, y)"],
    ),
    "an argument of Keras": (
        lambda: ow.Trainer.train(None, (), validation_data=()),
        ow.ArgumentError,
        ["Trainer.train has no argument 'validation_data'. Here it is 'test'."],
    ),
    "a size of Keras": (lambda: ow.layer.fc(X, units=3), ow.ArgumentError, ["Here it is 'size'."]),
    "steps of optax": (
        lambda: ow.schedule.cosine(0.1, decay_steps=3),
        ow.HyperparameterError,
        ["cosine has no argument 'decay_steps'. Here it is 'steps'."],
    ),
    "a column of a history": (lambda: ow.History().loss, AttributeError, ['Write history["loss"]']),
    "parameters for an optimizer": (
        lambda: ow.Adam(PARAMS, 0.1),
        ow.HyperparameterError,
        ["learning_rate is a dict of 2.", "Parameters go to minimize(loss, params, *data)"],
    ),
    "a Model of a pure function": (
        lambda: ow.Model(loss, PARAMS),
        ow.ArgumentError,
        ["Model(trace(function, params, x), params)"],
    ),
    "no floats": (
        lambda: ow.SGD(0.1).minimize(lambda n: n * 1.0, jnp.int32(3)),
        ow.LossError,
        ["no parameters", "holds no floats"],
    ),
    "text as data": (
        lambda: ow.trace(loss, PARAMS, np.array(["a", "b"]), Y),
        ow.ArgumentError,
        ["dtype <U1", "Encode"],
    ),
    "parameter_list": (
        lambda: ow.SGD(0.1).minimize(loss, PARAMS, X, Y, parameter_list=["w3"]),
        ow.UnknownNameError,
        ["parameter_list", "'w3'", "'w1', 'w2'"],
    ),
    "parameter_list, a pattern": (
        lambda: ow.SGD(0.1).minimize(loss, PARAMS, X, Y, parameter_list=["layers/*"]),
        ow.UnknownNameError,
        ["nothing is named 'layers/*'", "'w1', 'w2'"],
    ),
    "no_grad_set": (
        lambda: ow.SGD(0.1).minimize(loss, PARAMS, X, Y, no_grad_set=["tan"]),
        ow.UnknownNameError,
        ["no_grad_set", "'tan'", "'tanh'"],
    ),
    "fetch": (
        lambda: ow.compile(ow.trace(loss, PARAMS, X, Y), fetch=["tahn"]),
        ow.UnknownNameError,
        ["'tahn'", "'tanh'", "print(program)"],
    ),
    "prune": (
        lambda: ow.prune(ow.trace(loss, PARAMS, X, Y), ["tanhh"]),
        ow.UnknownNameError,
        ["'tanhh'", "'tanh'"],
    ),
    "minimized twice": (
        lambda: ow.SGD(0.1).create_optimization_pass(ow.SGD(0.1).minimize(loss, PARAMS, X, Y)),
        ow.GraphError,
        ["only once"],
    ),
    "update without gradients": (
        lambda: ow.append_update(ow.trace(loss, PARAMS, X, Y), ow.SGD(0.1)),
        ow.GraphError,
        ["append_backward", "minimize"],
    ),
    "gradient of an integer": (
        lambda: ow.gradients(ow.trace(count_right, PARAMS, X, Y), "reduce_sum", "x"),
        ow.LossError,
        ["only floating point"],
    ),
    "schedule of a wrong shape": (
        lambda: ow.SGD(lambda step: jnp.ones(3) * step).minimize(loss, PARAMS, X, Y),
        ow.HyperparameterError,
        ["schedule of learning_rate", "one number"],
    ),
    "has_aux without a pair": (
        lambda: ow.trace(loss, PARAMS, X, Y, has_aux=True),
        ow.TraceError,
        ["has_aux=True", "(loss, aux)", "shape ()"],
    ),
    "state without a pair": (
        lambda: ow.trace(lambda p, s, x: jnp.sum(x), PARAMS, X, state=Y),
        ow.TraceError,
        ["(loss, next_state)"],
    ),
    "a next state of another shape": (
        lambda: ow.trace(lambda p, s, x: (jnp.sum(x), {"n": s["n"][1:]}), PARAMS, X, state={"n": Y}),
        ow.TraceError,
        ["s/n", "float32[8, 1]", "float32[7, 1]"],
    ),
    "a next state that lacks something": (
        lambda: ow.trace(lambda p, s, x: (jnp.sum(x), {}), PARAMS, X, state={"n": Y}),
        ow.TraceError,
        ["lacks 'n' of s"],
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), CALLS.values(), ids=CALLS)
def test_a_wrong_call(call, error, words):
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "fast", None])
def test_a_hyperparameter_that_is_no_number(value):
    with pytest.raises(ow.HyperparameterError, match=r"Adam: learning_rate is .*(number|least 0)"):
        ow.Adam(learning_rate=value)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (ow.SGD(1e40), "learning_rate is 1e+40, which float32 holds as infinite"),
        (ow.Adam(beta2=1 - 1e-9), "beta2 is 0.999999999, which float32 cannot tell from 1"),
        (ow.Adam(epsilon=1e-50), "epsilon is 1e-50, which float32 cannot tell from 0"),
        (ow.SGD(0.1, rules=[ow.EMA(1 - 1e-9)]), "ema/decay is 0.999999999, which float32 cannot tell from 1"),
    ],
    ids=repr,
)
def test_a_hyperparameter_that_float32_changes(optimizer, words):
    with pytest.raises(ow.HyperparameterError, match=re.escape(words)):
        optimizer.minimize(loss, PARAMS, X, Y)
    with jax.enable_x64(True):
        wide = np.ones(2)
        program = optimizer.minimize(lambda w: jnp.sum(w), wide) if "1e+40" not in words else None
        assert program is None or all(v.dtype == np.float64 for v in program.hyperparameters)


@pytest.mark.parametrize("changes", [{"learning_rate": 1e40}, {"beta2": 1 - 1e-9}, {"epsilon": 1e-50}])
def test_a_hyperparameter_that_float32_changes_at_run_time(changes):
    step = ow.compile(ow.Adam(0.1).minimize(lambda w: jnp.sum(w), X))
    with pytest.raises(ow.HyperparameterError, match="which float32"):
        step.init(X).replace(changes)


@pytest.fixture(scope="module")
def step():
    return ow.compile(ow.SGD(0.1).minimize(loss, PARAMS, X, Y))


STEPS = {
    "too few": (lambda s: (X,), ["takes 2 data arguments (x, y); 1 were given"]),
    "features": (lambda s: (X[:, :3], Y), ["'x' is float32[8, 3] (traced as float32[8,4])", "(3,) and (4,)"]),
    "dtype": (
        lambda s: (X.astype(int), Y),
        ["'x' is int32[8, 4]; expected float32[8,4]", "x.astype('float32')"],
    ),
    "axes": (lambda s: (X[0], Y), ["'x' is float32[4], of 1 axes; expected 2, as in float32[8,4]"]),
    "no array": (lambda s: ("images", Y), ["'x' is 'images'; expected an array"]),
    "a dict": (lambda s: ({"a": X}, Y), ["'x' is a dict of 1; expected an array"]),
}


@pytest.mark.parametrize(("data", "words"), STEPS.values(), ids=STEPS)
def test_wrong_data_at_a_step(step, data, words):
    state = step.init(PARAMS)
    with pytest.raises(ow.ArgumentError) as raised:
        step(state, *data(state))
    for word in words:
        assert word in str(raised.value)
    step(state, X, Y)  # nothing is lost: the state is as usable as before


def test_a_step_in_place_of_a_program_and_data_in_place_of_a_count(step):
    wrong = {
        "; expected a Program. Give the one that it was made of, step.program": lambda: ow.summary(step),
        "given a dict of 2; expected a Program. Make one": lambda: ow.summary(PARAMS),
        "profile: steps is an array of shape (8, 1)": lambda: ow.profile(step, step.init(PARAMS), X, Y),
        "loss begins with parameters of yours: step.init(params)": step.init,
    }
    for words, call in wrong.items():
        with pytest.raises(ow.ArgumentError, match=re.escape(words)):
            call()


def test_an_auxiliary_output_is_asked_for_by_its_name():
    def with_aux(w, x):
        return jnp.sum(w * x), {"most": jnp.max(x)}

    step = ow.compile(ow.SGD(0.1).minimize(with_aux, X, X, has_aux=True))
    _, out = step(step.init(X), X)
    with pytest.raises(ow.UnknownNameError, match=r"out\.aux\['most'\]"):
        out["most"]
    with pytest.raises(ow.UnknownNameError, match="The step does not return 'least'"):
        out["least"]


def test_params_in_place_of_the_state(step):
    with pytest.raises(ow.ArgumentError, match=r"not a dict.*step\.init\(params\)"):
        step(PARAMS, X, Y)


def test_a_state_used_twice(step):
    state = step.init(PARAMS)
    step(state, X, Y)
    for use in (lambda: step(state, X, Y), lambda: state.parameters, lambda: state.replace({"step": 1})):
        with pytest.raises(ow.StateError, match=r"state, out = step\(state, \.\.\.\).*donate=False"):
            use()


def test_a_state_of_another_program(step):
    other = ow.compile(ow.SGD(0.1).minimize(lambda w: w**2, jnp.float32(1.0)))
    with pytest.raises(ow.StateError, match=r"has no 'w1' \(float32\[4,3\]\)"):
        step(other.init(jnp.float32(1.0)), X, Y)


INITS = {
    "a missing parameter": ({"w1": PARAMS["w1"]}, "it lacks 'w2'"),
    "one too many": ({**PARAMS, "w3": X}, "it has 'w3', which the traced one has not"),
    "a shape": ({**PARAMS, "w1": X}, "'w1' is float32[8, 4]; expected float32[4,3]"),
    "a dtype": ({**PARAMS, "w1": PARAMS["w1"].astype(jnp.bfloat16)}, "'w1' is bfloat16[4, 3]"),
    "only shapes": (jax.eval_shape(lambda: PARAMS), "is only a shape"),
}


@pytest.mark.parametrize(("params", "words"), INITS.values(), ids=INITS)
def test_wrong_parameters(step, params, words):
    with pytest.raises(ow.ArgumentError, match=re.escape(words)):
        step.init(params)


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_hyperparameter_set_at_run_time(step, value):
    state = step.init(PARAMS)
    with pytest.raises(ow.HyperparameterError, match="learning_rate"):
        state.replace({"learning_rate": value})
    with pytest.raises(ow.UnknownNameError, match="nearest names are 'learning_rate'"):
        state.replace({"learnig_rate": 0.1})
    with pytest.raises(ow.UnknownNameError, match=r"fetch=\['tanh'\]"):
        step(state, X, Y)[1]["tanh"]


def test_an_unreached_parameter_is_reported():
    with pytest.warns(ow.UnreachedWarning, match="does not reach 'spare'") as warned:
        program = ow.SGD(0.1).minimize(loss, {**PARAMS, "spare": X}, X, Y)
    assert warned[0].filename == __file__
    assert [p.name for p, _ in program.gradients] == ["w1", "w2"]
    assert program["spare"] not in program.next_state


def test_an_update_that_changes_the_shape():
    class Wrong(ow.Optimizer):
        def update(self, parameter, gradient, slots):
            return gradient.sum(), slots

    with pytest.raises(ow.GraphError, match=r"wrong returned shape \(\) as the next value of 'w1'"):
        Wrong().minimize(loss, PARAMS, X, Y)


def test_a_program_without_a_recipe_refuses_another_shape():
    program = ow.trace(loss, PARAMS, X, Y)
    step = ow.compile(type(program)(**{**vars(program), "recipe": None}))
    with pytest.raises(ow.ArgumentError, match="was not made by trace"):
        step(step.init(PARAMS), X[:2], Y[:2])
