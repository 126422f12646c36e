"""Ways in which people use optimizers and Programs that were once answered wrongly."""

import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.derive import differentiate

PARAMS = {"w1": jnp.full((4, 3), 0.5), "b1": jnp.zeros(3), "w2": jnp.ones((3, 1))}
X, Y = jnp.ones((8, 4)), jnp.ones((8, 1))


def loss(params, x, y):
    h = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - y) ** 2)


@pytest.mark.parametrize("optimizer", [ow.SGD(0.1), ow.Momentum(0.02), ow.Adagrad(0.5), ow.Adam(0.1)])
def test_complex_parameters_go_downhill(optimizer):
    w = jnp.complex64(1 + 1j)
    step = ow.compile(optimizer.minimize(lambda w: jnp.abs(w) ** 2, w))
    state = step.init(w)
    for _ in range(100):
        state, _ = step(state)
    assert abs(state.parameters) < 0.05
    assert state.parameters.dtype == jnp.complex64


def test_a_program_changed_by_hand_is_not_replayed_without_the_change():
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, Y)
    changed = ow.check(replace(program, ops=(*program.ops,)[:-1], next_state={}))
    step = ow.compile(changed)
    state = step.init(PARAMS)
    with pytest.raises(ow.ArgumentError, match=r"changed by hand.*onward\.transform"):
        step(state, X[:4], Y[:4])


def test_lists_that_can_be_read_only_once_are_kept_for_another_batch():
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, Y, parameter_list=(n for n in ["w1", "w2"]))
    step = ow.compile(program)
    step(step.init(PARAMS), X[:4], Y[:4])
    assert step.traces == 1


def test_rules_are_derived_for_the_precision_at_hand():
    def value(w):
        return jnp.sum(jnp.linalg.qr(w)[1])

    def highest(precision):
        with jax.default_matmul_precision(precision):
            program = ow.append_backward(ow.trace(value, jnp.eye(3)))
        gradient = next(op for op in program.ops if op.type == "qr_grad")
        return str(gradient.body.closed).count("HIGHEST")

    assert highest("highest") > 0
    assert highest(None) == 0


def test_arrays_captured_by_a_forgotten_function_are_let_go(monkeypatch):
    assert differentiate._rules_by_identity.size <= 256
    monkeypatch.setattr(differentiate, "_rules_by_identity", differentiate._RuleCache(8))

    def once(number):
        captured = jnp.full(1000, float(number))

        @jax.custom_vjp
        def f(x):
            return x * captured.sum()

        f.defvjp(lambda x: (x * captured.sum(), None), lambda _, g: (g * captured.sum(),))
        ow.SGD(0.1).minimize(lambda w: f(w), jnp.float32(1.0))
        return weakref.ref(captured)

    first = once(0)
    for i in range(12):
        once(i + 1)
    gc.collect()
    assert first() is None


def test_a_python_number_stays_one_at_another_batch():
    def scaled(w, x, factor):
        return jnp.mean(w * x) * factor

    w, x = jnp.ones((), jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    step = ow.compile(ow.trace(scaled, w, x, 0.5))
    state = step.init(w)
    assert [step(state, x[:n], 0.5)[1].loss.dtype for n in (4, 2)] == [jnp.bfloat16] * 2


@pytest.mark.parametrize("first", [lambda a: (a, a), lambda a: {"ce": a}, lambda a: None])
def test_the_loss_beside_aux_is_one_array(first):
    with pytest.raises(ow.TraceError, match="the first must be the loss, one array"):
        ow.trace(lambda w: (first(jnp.sum(w)), w), jnp.ones(3), has_aux=True)


def test_measuring_the_loss_moves_no_statistics():
    def normed(w, stats, x):
        mean = 0.9 * stats["mean"] + 0.1 * x.mean()
        return jnp.sum(w * (x - mean)), {"mean": mean}

    w, stats = jnp.ones(3), {"mean": jnp.float32(0)}
    program = ow.SGD(0.1).minimize(normed, w, jnp.ones(3), state=stats)
    train, test = ow.compile(program), ow.compile(ow.prune(program, "loss"))
    state = train.init(w, stats)
    same, _ = test(state, jnp.ones(3))
    assert float(same.model_state["mean"]) == 0
    state, _ = train(state, jnp.ones(3))
    assert float(state.model_state["mean"]) == pytest.approx(0.1)


def test_the_updates_alone_are_a_target_at_every_batch():
    program = ow.Adam(0.1).minimize(loss, PARAMS, X, Y)
    step = ow.compile(ow.prune(program, program.updates))
    state = step.init(PARAMS)
    for n in (8, 4):
        state, _ = step(state, X[:n], Y[:n])
    assert int(state["step"]) == 2
    reference = ow.compile(program)
    expected = reference.init(PARAMS)
    for n in (8, 4):
        expected, _ = reference(expected, X[:n], Y[:n])
    np.testing.assert_array_equal(state["w1/mean"], expected["w1/mean"])
    np.testing.assert_array_equal(state["w1"], expected["w1"])


def test_a_slot_is_a_target():
    pruned = ow.prune(ow.Adam(0.1).minimize(loss, PARAMS, X, Y), "w1/mean")
    assert {v.name for v in pruned.state} == {"w1/mean", "w1/variance"}


def test_state_keeps_its_name_whatever_the_network_computes():
    @jax.custom_jvp
    def step(x):
        return x * 2

    step.defjvps(lambda t, out, x: t * 2)
    program = ow.SGD(0.1).minimize(lambda w: jnp.sum(step(w)), jnp.ones(3))
    assert [v.name for v in program.state] == ["w", "learning_rate", "step"]
    assert [op.outputs[0].name for op in program.ops][:2] == ["step_1", "reduce_sum"]
    assert program.next_state[program["step"]].name == "next(step)"


def test_threads_compile_each_shape_once():
    step = ow.compile(ow.trace(loss, PARAMS, X, Y))
    state = step.init(PARAMS)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(step, state, X[:n], Y[:n]) for n in (2, 3, 4) * 8]
        assert len({float(f.result()[1].loss) for f in found}) == 1
    assert (step.traces, step.compilations) == (3, 4)


def test_results_of_two_batch_sizes_can_be_combined():
    step = ow.compile(ow.trace(loss, PARAMS, X, Y))
    state = step.init(PARAMS)
    outs = [step(state, X[:n], Y[:n])[1] for n in (8, 4)]
    mean = jax.tree.map(lambda *values: sum(values) / len(values), *outs)
    assert float(mean.loss) == pytest.approx(float(loss(PARAMS, X, Y)))


def test_a_copy_of_the_state_stays_readable():
    step = ow.compile(ow.SGD(0.1).minimize(loss, PARAMS, X, Y))
    best = step.init(PARAMS)
    kept = best.copy()
    step(best, X, Y)
    np.testing.assert_array_equal(kept.parameters["w1"], PARAMS["w1"])


def test_a_while_loop_on_the_path_is_named():
    def looped(w):
        return jax.lax.while_loop(lambda w: w < 10, lambda w: w * 2, w)

    with pytest.raises(ow.LossError, match=r"while at .*test_review\.py:\d+ has no gradient"):
        ow.SGD(0.1).minimize(looped, jnp.float32(1.0))


def test_a_branch_in_a_schedule_or_a_rule_is_explained():
    with pytest.raises(ow.TraceError, match=r"The schedule of learning_rate cannot be traced.*jnp\.where"):
        ow.SGD(lambda n: 0.1 if n < 10 else 0.01).minimize(loss, PARAMS, X, Y)

    class Branching(ow.Optimizer):
        learning_rate: ow.Hyperparameter = 0.1

        def update(self, parameter, gradient, slots):
            return (parameter if gradient.sum() > 0 else -parameter), slots

    with pytest.raises(ow.TraceError, match=r"The update of Branching cannot be traced.*in update"):
        Branching().minimize(loss, PARAMS, X, Y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ow.Adam(beta1=1.0), "beta1 is 1.0. It must be less than 1"),
        (lambda: ow.SGD("0.1"), "learning_rate is '0.1'"),
        (lambda: ow.SGD(True), "learning_rate is nan"),
        (lambda: type("A", (ow.Optimizer,), {"__annotations__": {"step": int}, "step": 1}), "'step'"),
        (lambda: type("A", (ow.Optimizer,), {"evaluates_loss": True}), "ACROSS"),
    ],
)
def test_optimizers_that_make_no_sense(make, words):
    with pytest.raises(ow.HyperparameterError, match=words):
        make()


def test_one_name_is_as_good_as_a_list_of_one():
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, Y, parameter_list="w1")
    assert [p.name for p, _ in program.gradients] == ["w1"]
    assert program[program.loss] is program["loss"] is program.loss
    step = ow.compile(program, fetch="loss")
    _, out = step(step.init(PARAMS), X, Y)
    assert out["loss"] is out.loss


def test_a_parameter_that_was_asked_to_have_no_gradient_is_not_reported():
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, Y, no_grad_set=["b1"])
    assert [p.name for p, _ in program.gradients] == ["w1", "w2"]


def test_an_op_that_reads_a_captured_array_can_be_printed():
    scale = jnp.arange(3.0)

    @jax.custom_vjp
    def f(x):
        return x * scale

    f.defvjp(lambda x: (x * scale, None), lambda _, g: (g * scale,))
    program = ow.SGD(0.1).minimize(lambda w: jnp.sum(f(w)), jnp.ones(3))
    assert "f_grad(" in str(program)


def test_compile_takes_a_program():
    with pytest.raises(ow.ArgumentError, match="compile takes a Program, not a function"):
        ow.compile(loss)


# ---------------------------------------------------------------- what people write first

NO_PROGRAM = {
    "guard": lambda: ow.guard(loss),
    "accumulate": lambda: ow.accumulate(loss, 2),
    "mixed_precision": lambda: ow.mixed_precision(loss),
    "replicate": lambda: ow.replicate(loss, 2),
    "for_evaluation": lambda: ow.for_evaluation(loss),
    "plan": lambda: ow.Adam().plan(loss),
}


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_a_function_in_place_of_a_program_is_named(name):
    with pytest.raises(
        ow.ArgumentError, match=r"was given the function 'loss'; expected a Program. Make one"
    ):
        NO_PROGRAM[name]()


OTHER_WORDS = {
    "lr": (lambda: ow.Adam(lr=0.1), "Adam has no hyperparameter 'lr'. Here it is 'learning_rate'."),
    "eps": (lambda: ow.RMSProp(eps=0.1), "Here it is 'epsilon'."),
    "of another optimizer": (
        lambda: ow.Adam(weight_decay=0.1),
        "Write ow.AdamW(1e-3, weight_decay=0.01), or",
    ),
    "of Keras": (lambda: ow.Adam(global_clipnorm=1.0), "Write rules=[ow.ClipByGlobalNorm(1.0)]."),
    "misspelt": (lambda: ow.Adam(beta3=0.1), "The nearest names are 'beta1', 'beta2'."),
    "no field": (lambda: ow.Adam(below_one=("beta1",)), "Adam has no hyperparameter 'below_one'."),
    "too many": (lambda: ow.ClipByValue(1.0, -1.0), "ClipByValue was given 2 values; it has max_value, in"),
}


@pytest.mark.parametrize("case", OTHER_WORDS)
def test_words_of_other_libraries_are_translated(case):
    make, text = OTHER_WORDS[case]
    with pytest.raises(ow.HyperparameterError, match=re.escape(text)):
        make()


def test_an_integer_is_never_trained():
    params = {"w": jnp.ones(3), "n": jnp.int32(2)}
    with pytest.raises(ow.LossError, match=r"parameter_list: 'n' is int32\[\], which is never trained"):
        ow.SGD(0.1).minimize(lambda p: jnp.sum(p["w"]) * p["n"], params, parameter_list=["n"])


def test_train_takes_a_training_program():
    def network():
        return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))

    program = ow.guard(ow.accumulate(ow.Adam(0.1).minimize(ow.trace(network, batch_size=8)), 2))
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    history = ow.train(program, [(x, x[:, :1])], epochs=40).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]


def test_a_swept_state_needs_choices():
    state = ow.compile(ow.SGD(0.1).minimize(loss, PARAMS, X, Y)).init(PARAMS)
    for choices in ({}, {"learning_rate": 0.1}, {"learning_rate": []}):
        with pytest.raises(ow.ArgumentError, match="expected equally many choices for each name"):
            state.sweep(choices)


# ---------------------------------------------------------------- updates that were once wrong


def carrying(params, x, stats):
    mean = 0.9 * stats["mean"] + 0.1 * jnp.mean(x)
    return jnp.mean((x @ params["w"]) ** 2), {"count": stats["count"] + 1, "mean": mean}


@pytest.mark.parametrize("way", ["accumulate first", "guard first", "guard to stop", "float16"])
def test_what_the_forward_pass_carries_goes_through_micro_batches_under_a_guard(way):
    stats = {"count": jnp.int32(3), "mean": jnp.float32(2.0)}
    params, x = {"w": jnp.ones(4)}, jnp.arange(32.0).reshape(8, 4) / 32

    def loss(params, stats, x):
        return carrying(params, x, stats)

    program = ow.SGD(0.1).minimize(loss, params, x, state=stats)
    made = {
        "accumulate first": lambda: ow.guard(ow.accumulate(program, 4)),
        "guard first": lambda: ow.accumulate(ow.guard(program), 4),
        "guard to stop": lambda: ow.accumulate(ow.guard(program, "stop"), 4),
        "float16": lambda: ow.accumulate(ow.mixed_precision(program, "float16", scale=1.0), 4),
    }[way]()
    step = ow.compile(made)
    state, _ = step(step.init(params, stats), x)
    mean = 0.9 * 2.0 + 0.1 * np.mean(x)
    assert int(state.model_state["count"]) == 4
    np.testing.assert_allclose(state.model_state["mean"], mean, rtol=1e-3 if way == "float16" else 1e-6)
    state, _ = step(state, jnp.full_like(x, jnp.nan)) if way != "guard to stop" else (state, None)
    assert int(state.model_state["count"]) == 4


def two_valleys(p):
    return 100 * (p["a"][0] - 3) ** 2 + (p["b"][0] + 2) ** 2 + p["a"][0] * p["b"][0]


def test_one_optimizer_that_evaluates_the_loss_in_two_groups():
    start = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    ends = []
    for first, second in [(same := ow.LBFGS(), same), (ow.LBFGS(), ow.LBFGS())]:
        optimizer = ow.SGD(0.1, groups=[ow.Group("a", first), ow.Group("b", second)])
        step = ow.compile(optimizer.minimize(two_valleys, start))
        state = step.init(start)
        for _ in range(4):
            state, out = step(state)
        ends.append(float(out.loss))
    assert ends[0] == ends[1] < 100


class Sending(ow.SGD):
    """Sends each parameter to an optimizer that is made on the way."""

    def route(self, parameter):
        return ow.SGD(0.1 * (1 + int(parameter.name[1:])))


def test_each_parameter_goes_where_it_was_sent():
    params = {f"p{i}": jnp.zeros(2) for i in range(6)}
    program = Sending(1.0).minimize(lambda p: sum(jnp.sum(x) for x in p.values()), params)
    step = ow.compile(program)
    state, _ = step(step.init(params))
    for i in range(6):
        np.testing.assert_allclose(state.parameters[f"p{i}"], -0.1 * (1 + i), rtol=1e-6)


def weighed(params, x, example_weight):
    each = jnp.sum((x @ params["w"] - 1) ** 2, -1)
    return jnp.sum(each * example_weight) / jnp.sum(example_weight)


def test_a_device_without_examples_does_not_spoil_a_rule_that_evaluates_the_loss():
    params, x = {"w": jnp.ones((3, 1)) * 0.3}, jnp.arange(12.0).reshape(4, 3) / 12
    weight = jnp.array([1.0, 1.0, 0.0, 0.0])
    program = ow.SGD(0.1, rules=[ow.SAM(0.1)]).minimize(weighed, params, x, weight)
    one, two = ow.compile(program), ow.compile(ow.replicate(program, 2))
    (expected, _), (found, _) = (s(s.init(params), x, weight) for s in (one, two))
    np.testing.assert_allclose(found.parameters["w"], expected.parameters["w"], rtol=1e-5)


def test_a_guard_looks_at_what_rules_make_of_gradients():
    w = jnp.float32(0.9)
    step = ow.compile(ow.guard(ow.SGD(0.1, rules=[ow.SAM(0.5)]).minimize(lambda w: -jnp.sqrt(1 - w), w)))
    state, _ = step(step.init(w))
    assert int(state["skipped"]) == 1
    assert float(state.parameters) == w


def test_a_slot_of_low_precision_does_not_become_infinite():
    optimizer = ow.Adagrad(0.1, slot_dtype="float16")
    w = jnp.zeros(4)
    step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), w, w))
    state = step.init(w)
    for _ in range(10):
        state, _ = step(state, jnp.full(4, 100.0))
    before = float(state.parameters[0])
    state, _ = step(state, jnp.full(4, 100.0))
    assert np.all(np.isfinite(np.asarray(state["w/sum"], np.float32)))
    assert float(state.parameters[0]) < before


class Forgetful(ow.Optimizer):
    """Returns another slot than it made."""

    def init(self, parameter):
        return {"mean": parameter}

    def update(self, parameter, gradient, slots):
        return parameter - gradient, {"average": slots["mean"]}


REFUSALS = {
    "sums": (
        lambda: ow.replicate(ow.SGD(0.1, rules=[ow.SAM(0.1)]).minimize(loss, PARAMS, X, Y), 2, ow.Sum()),
        "SAM evaluates the loss again, as the mean over the devices, and Sum adds gradients",
    ),
    "float16": (
        lambda: ow.mixed_precision(ow.SGD(0.1, rules=[ow.SAM(0.1)]).minimize(loss, PARAMS, X, Y), "float16"),
        "SAM evaluates the loss again, and its gradients, which nothing scales",
    ),
    "low precision": (
        lambda: ow.SGD(0.1, rules=[ow.SAM(0.1)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(2, jnp.bfloat16)),
        "SAM evaluates the loss close to where the parameters are, and 'w' is bfloat16[2]",
    ),
    "other slots": (
        lambda: Forgetful().minimize(loss, PARAMS, X, Y),
        "Forgetful returned the slots ['average'], and its init made ['mean']",
    ),
    "negative sums": (lambda: ow.Adagrad(initial_accumulator=-1.0), "initial_accumulator is -1.0"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_right_is_refused(case):
    make, text = REFUSALS[case]
    with pytest.raises((ow.GraphError, ow.HyperparameterError), match=re.escape(text)):
        make()


def test_attention_is_no_head():
    muon = ow.Muon()
    shape = (8, 8)
    matrices = {n: ow.Variable(n, shape, np.dtype("float32")) for n in ("multihead/wq", "head/w", "lm_head")}
    assert [muon.route(v) is muon for v in matrices.values()] == [True, False, False]
