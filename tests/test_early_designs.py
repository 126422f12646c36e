"""The programs of PaddlePaddle's early design documents, near verbatim: lay them side by side.

What the documents call ``pd`` or ``paddle`` is ``ow`` here; a reader of MNIST reads the digits inside of
scikit-learn. Everything else that is not in a document stands in an assertion.
"""

import gc
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import onward as ow
from onward import (
    AdagradOptimizer,
    Evaluator,
    GradientMachine,
    Kind,
    Model,
    Pass,
    Trainer,
    layer,
    optimize,
    train,
)


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    images = (found.data / 16).astype("float32")
    return images, np.eye(10, dtype="float32")[found.target]


@pytest.fixture(scope="module")
def mnist(digits):
    return SimpleNamespace(train=lambda: ow.batches(digits, 64, shuffle=True))


# Optimizer design -------------------------------------------------------------------------------------------


def the_network():
    images = layer.data("images")
    labels = layer.data("labels")
    w1 = ow.var("w1")
    b1 = ow.var("b1")
    hidden = layer.fc(images, w=w1, b=b1)
    cost = layer.mse(hidden, labels)
    return SimpleNamespace(**locals())


def test_optimizer_design_minimize_and_run_what_it_returns(digits):
    images = layer.data("images")
    labels = layer.data("labels")
    w1 = ow.var("w1")
    b1 = ow.var("b1")
    hidden = layer.fc(images, w=w1, b=b1)
    cost = layer.mse(hidden, labels)

    optimizer = AdagradOptimizer(learning_rate=0.001)

    opt_op_list = optimizer.minimize(cost, parameter_list=[w1, b1])

    session = ow.Session()
    feed = dict(zip(["images", "labels"], digits, strict=True))
    losses = [float(session.run(target=opt_op_list, feed=feed, fetch=[cost])[0]) for _ in range(200)]

    assert losses[-1] < losses[0] / 2
    assert losses == sorted(losses, reverse=True)


def test_optimizer_design_it_is_the_adagrad_that_one_writes_by_hand(digits):
    x, y = digits
    n = the_network()
    target = AdagradOptimizer(learning_rate=0.1).minimize(n.cost, parameter_list=[n.w1, n.b1])
    session = ow.Session()

    @jax.jit
    def by_hand(parameters, sums):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p[0] + p[1] - y) ** 2))(parameters)
        sums = [s + g**2 for s, g in zip(sums, gradients, strict=True)]
        moved = zip(parameters, gradients, sums, strict=True)
        return loss, [p - 0.1 * g / (jnp.sqrt(s) + 1e-10) for p, g, s in moved], sums

    feed = {"images": x, "labels": y}
    loss, *parameters = session.run(target=target, feed=feed, fetch=[n.cost, n.w1, n.b1])  # before the update
    sums = [jnp.zeros_like(p) for p in parameters]
    for _ in range(20):
        expected, parameters, sums = by_hand(parameters, sums)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        [loss] = session.run(target=target, feed=feed, fetch=[n.cost])
    _, parameters, _ = by_hand(parameters, sums)
    np.testing.assert_allclose(session["w1"], parameters[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(session["b1"], parameters[1], rtol=1e-4, atol=1e-6)


def test_optimizer_design_the_update_operators_are_a_list_and_each_is_a_target(digits):
    n = the_network()
    feed = dict(zip(["images", "labels"], digits, strict=True))
    program = AdagradOptimizer(learning_rate=0.1).minimize(ow.trace(n.cost, feed=feed), parameter_list=["*1"])
    opt_op_list = program.updates
    assert [target.op.type for target in opt_op_list] == ["count", "adagrad", "adagrad"]
    updated = {target.op.inputs[0].name: target for target in opt_op_list}
    assert set(updated) == {"step", "w1", "b1"}

    session = ow.Session()
    session.run(target=opt_op_list, feed=feed)
    w1, b1 = session["w1"], session["b1"]
    session.run(target=[updated["b1"]], feed=feed)
    assert np.array_equal(session["w1"], w1)
    assert not np.array_equal(session["b1"], b1)
    gradient_ops = [op for op in session.program([updated["b1"]]).ops if op.made_by is Pass.BACKWARD]
    assert "grad(w1)" not in {v.name for op in gradient_ops for v in op.outputs}


def test_optimizer_design_one_in_the_parameter_list_alone_is_trained(digits):
    n = the_network()
    feed = dict(zip(["images", "labels"], digits, strict=True))
    opt = AdagradOptimizer(learning_rate=0.1).minimize(n.cost, parameter_list=[n.w1])
    session = ow.Session()
    for _ in range(3):
        session.run(target=[opt], feed=feed)
    assert not np.asarray(session["b1"]).any()
    assert not [op for op in session.program(opt).ops if "grad(b1)" in [v.name for v in op.outputs]]


def test_optimizer_design_users_can_inherit_the_optimizer(digits):
    class SignOptimizer(ow.Optimizer):
        learning_rate: ow.Hyperparameter = 0.001

        def update(self, parameter, gradient, slots):
            return parameter - self.learning_rate * jnp.sign(gradient), slots

    n = the_network()
    feed = dict(zip(["images", "labels"], digits, strict=True))
    optimizer = SignOptimizer(learning_rate=0.01)
    network = ow.trace(n.cost, feed=feed)

    with_gradients = optimizer.create_backward_pass(network, parameter_list=[n.w1, n.b1])
    params_grads = with_gradients.gradients
    program = optimizer.create_optimization_pass(with_gradients)

    assert {(p.name, g.name) for p, g in params_grads} == {("w1", "grad(w1)"), ("b1", "grad(b1)")}
    assert [op.type for op in program.ops if op.made_by is Pass.UPDATE] == [
        "count",
        "sign_optimizer",
        "sign_optimizer",
    ]
    assert str(optimizer.minimize(network, parameter_list=[n.w1, n.b1])) == str(program)

    session = ow.Session()
    w1, gradient = session.run(target=program, feed=feed, fetch=[n.w1, "grad(w1)"])
    np.testing.assert_allclose(session["w1"], w1 - 0.01 * np.sign(gradient), rtol=1e-6)


def test_optimizer_design_the_three_steps_on_one_device(digits):
    x, y = digits
    n = the_network()
    session = ow.Session()
    target = ow.SGD(0.5).minimize(n.cost, parameter_list=[n.w1, n.b1])
    fetch = [n.hidden, "grad(fc_0)", "grad(w1)", "grad(b1)", n.w1, n.b1]
    for i in range(0, 192, 64):
        x_i, y_i = x[i : i + 64], y[i : i + 64]
        values = session.run(target=target, feed={"images": x_i, "labels": y_i}, fetch=fetch)
        hidden, grad_hidden, grad_w1, grad_b1, w1, b1 = map(np.asarray, values)
        np.testing.assert_allclose(hidden, x_i @ w1 + b1, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grad_hidden, 2 * (hidden - y_i) / hidden.size, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(grad_w1, x_i.T @ grad_hidden, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(grad_b1, grad_hidden.sum(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(session["w1"], w1 - 0.5 * grad_w1, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(session["b1"], b1 - 0.5 * grad_b1, rtol=1e-4, atol=1e-6)


def test_optimizer_design_the_passes_take_the_cost_as_minimize_does(digits):
    feed = dict(zip(["images", "labels"], digits, strict=True))
    optimizer = AdagradOptimizer(learning_rate=0.1)
    n = the_network()
    params_grads = optimizer.create_backward_pass(n.cost, parameter_list=[n.w1])
    update_ops = optimizer.create_optimization_pass(params_grads)
    minimized = optimizer.minimize(n.cost, parameter_list=[n.w1])
    assert str(update_ops.complete(feed)) == str(minimized.complete(feed))
    assert [p.name for p, _ in params_grads.complete(feed).gradients] == ["w1"]

    sessions = [ow.Session(), ow.Session()]
    for session, target in zip(sessions, [update_ops, minimized], strict=True):
        session.run(target=target, feed=feed)
    assert np.array_equal(sessions[0]["w1"], sessions[1]["w1"])


def test_optimizer_design_the_passes_take_a_function_that_declares_its_network():
    def network():
        hidden = layer.fc(layer.data("x", (None, 4)), 3, name="fc")
        return layer.mse(hidden, layer.data("y", (None, 3)))

    def cost():
        x, y = layer.data("x", (None, 4)), layer.data("y", (None, 3))
        return layer.mse(layer.fc(x, 3, name="fc"), y)

    optimizer = ow.SGD(0.1)
    for described in (network, cost()):
        backward = optimizer.create_backward_pass(described, parameter_list=["fc/w"])
        assert [p.name for p, _ in backward.gradients] == ["fc/w"]
        program = optimizer.create_optimization_pass(backward)
        assert str(program) == str(optimizer.minimize(described, parameter_list=["fc/w"]))


def test_minimize_is_shown_what_a_declared_cost_leaves_open(digits):
    feed = dict(zip(["images", "labels"], digits, strict=True))
    program = ow.SGD(0.1).minimize(the_network().cost, feed=feed)
    assert program["images"].shape == digits[0].shape


def squares(params, x):
    return jnp.mean((x @ params) ** 2)


def with_own_init():
    class OwnOptimizer(ow.Optimizer):
        def __init__(self, learning_rate, power=0.5, mode="fast", **options):
            self.learning_rate = learning_rate


ELSEWHERE = {  # what the early designs write that is written in another way here
    "var_list": (
        lambda n: ow.SGD(0.1).minimize(n.cost, var_list=[n.w1]),
        ow.ArgumentError,
        ["minimize has no argument 'var_list'", "'parameter_list'"],
    ),
    "var_list, a function": (
        lambda n: ow.SGD(0.1).minimize(squares, jnp.ones(3), jnp.ones((2, 3)), var_list=["w"]),
        ow.ArgumentError,
        ["minimize has no argument 'var_list'", "'parameter_list'"],
    ),
    "var_list, later": (
        lambda n: optimize(n.cost, ow.SGD(0.1), var_list=[n.w1]),
        ow.ArgumentError,
        ["optimize has no argument 'var_list'", "'parameter_list'"],
    ),
    "a list by place": (
        lambda n: ow.SGD(0.1).minimize(n.cost, [n.w1, n.b1]),
        ow.ArgumentError,
        ["a list of 2 beside the cost", "parameter_list=[...]"],
    ),
    "a list by place, for a pass": (
        lambda n: ow.SGD(0.1).create_backward_pass(n.cost, [n.w1, n.b1]),
        ow.ArgumentError,
        ["a list of 2 as the loss", "create_backward_pass(cost, parameter_list=[...])"],
    ),
    "arrays in the list": (
        lambda n: ow.SGD(0.1).minimize(squares, jnp.ones(3), jnp.ones((2, 3)), parameter_list=[np.ones(3)]),
        ow.UnknownNameError,
        ["an array of shape (3,) names no Variable", "'params'"],
    ),
    "a pass of a function with arguments": (
        lambda n: ow.SGD(0.1).create_backward_pass(squares),
        ow.ArgumentError,
        ["the function 'squares'", "trace(function, params, *data)"],
    ),
    "pairs": (
        lambda n: ow.SGD(0.1).create_optimization_pass([(n.w1, n.b1)]),
        ow.ArgumentError,
        ["a list of 1", "the Program that create_backward_pass returned"],
    ),
    "append_backward of a cost": (
        lambda n: ow.append_backward(n.cost),
        ow.ArgumentError,
        ["append_backward was given Lazy mse", "trace(cost, feed={'images': array, 'labels': array})"],
    ),
    "append_backward of what waits": (
        lambda n: ow.append_backward(ow.SGD(0.1).minimize(n.cost)),
        ow.ArgumentError,
        ["append_backward was given Deferred", "deferred.complete({'images': array"],
    ),
    "plan of a cost": (
        lambda n: ow.SGD(0.1).plan(n.cost),
        ow.ArgumentError,
        ["plan was given Lazy mse", "trace(cost, feed="],
    ),
    "plan of a cost, across devices": (lambda n: ow.plan(n.cost), ow.ArgumentError, ["trace(cost, feed="]),
    "append_backward as a method": (
        lambda n: ow.SGD(0.1).append_backward(n.cost),
        AttributeError,
        ["optimizer.create_backward_pass(cost, parameter_list=[...])"],
    ),
    "_update": (
        lambda n: ow.SGD(0.1)._update([n.w1]),
        AttributeError,
        ["optimizer.create_optimization_pass(program)"],
    ),
    "apply_gradients": (
        lambda n: ow.SGD(0.1).apply_gradients([(n.w1, n.b1)]),
        AttributeError,
        ["create_optimization_pass(program)", "Trainer(model, optimizer).apply(gradients)"],
    ),
    "a gradient machine without a model": (
        lambda n: GradientMachine(n.cost),
        ow.ArgumentError,
        ["GradientMachine was given a LazyCall", "Model(network)"],
    ),
    "W": (
        lambda n: layer.fc(n.images, W=n.w1),
        ow.ArgumentError,
        ["fc at", "test_early_designs.py:", "has no argument 'W'", "Here it is 'w'"],
    ),
    "param_attr": (
        lambda n: layer.embedding(n.images, 8, 4, param_attr=n.w1),
        ow.ArgumentError,
        ["embedding at", "'w'"],
    ),
    "bias": (
        lambda n: layer.conv(n.images, 8, 3, bias=False),
        ow.ArgumentError,
        ["conv at", "Here it is 'b'"],
    ),
    "an __init__": (
        lambda n: with_own_init(),
        ow.HyperparameterError,
        [
            "OwnOptimizer has an __init__ of its own",
            "learning_rate: ow.Hyperparameter; power: ow.Hyperparameter = 0.5; mode: str = 'fast'.",
        ],
    ),
    "no such optimizer": (
        lambda n: ow.NoSuchOptimizer(0.1),
        AttributeError,
        ["no attribute 'NoSuchOptimizer'"],
    ),
    "no optimizer": (lambda n: ow.AverageOptimizer, AttributeError, ["no attribute 'AverageOptimizer'"]),
    "a misspelled rate": (
        lambda n: AdagradOptimizer(learing_rate=0.001),  # as the designs have it
        ow.HyperparameterError,
        ["'learing_rate'", "'learning_rate'"],
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_written_in_another_way_here_is_said_by_the_call_itself(call, error, words):
    with pytest.raises(error) as raised:
        call(the_network())
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_optimizers_of_the_designs_are_those_that_there_are():
    named = {name: getattr(ow, f"{name}Optimizer") for name in ("Adagrad", "SGD", "Adam", "Momentum", "Ftrl")}
    assert named == {
        "Adagrad": ow.Adagrad,
        "SGD": ow.SGD,
        "Adam": ow.Adam,
        "Momentum": ow.Momentum,
        "Ftrl": ow.optimizer.FTRL,
    }
    assert "AdagradOptimizer" not in dir(ow)
    assert not hasattr(ow, "Adagradoptimizer")
    assert not hasattr(ow, "Optimizer_")


# Computations as graphs -------------------------------------------------------------------------------------


def test_computations_as_graphs_the_six_lines(mnist):
    x = layer.data("images")
    l = layer.data("label")  # noqa: E741
    y = layer.fc(x)
    cost = layer.mse(y, l)
    optimize(cost)
    trainer = train(cost, reader=mnist.train())

    first, last = trainer.history["loss"][[0, -1]]
    assert last < first / 2
    assert len(trainer.history["loss"]) == len(mnist.train())


@pytest.fixture(scope="module")
def graph(digits):
    """The three graphs of the document: forward, forward + backward, and the complete one."""
    x = layer.data("images")
    l = layer.data("label")  # noqa: E741
    y = layer.fc(x, name="fc")
    cost = layer.mse(y, l)
    forward = ow.trace(cost, feed={"images": digits[0], "label": digits[1]})
    backward = ow.append_backward(forward)
    return SimpleNamespace(
        cost=cost, forward=forward, backward=backward, all=ow.append_update(backward, ow.Adam(1e-3))
    )


def test_forward_part_creates_w_and_b_and_their_initialization_operators(graph):
    assert {v.name for v in graph.forward.inputs} == {"images", "label"}
    assert {v.name for v in graph.forward.parameters} == {"fc/w", "fc/b"}
    made = {v.name: op.type for op in graph.forward.initializers for v in op.outputs}
    assert made == {"fc/w": "xavier_uniform", "fc/b": "constant"}
    assert not set(graph.forward.initializers) & set(graph.all.ops)


def test_an_initialization_operator_runs_once_however_often_the_program_does(digits):
    runs = []

    def counting(key, shape, dtype):
        jax.debug.callback(lambda: runs.append(shape))
        return jax.random.normal(key, shape, dtype) / 8

    x = layer.data("images")
    l = layer.data("label")  # noqa: E741
    y = layer.fc(x, initializer=counting)
    cost = layer.mse(y, l)
    session = ow.Session()
    updates = ow.SGD(0.01).minimize(cost)
    for rows in (64, 64, 32, 64):
        feed = {"images": digits[0][:rows], "label": digits[1][:rows]}
        session.run(target=updates, feed=feed)
        session.run(feed=feed, fetch=[cost])
    jax.effects_barrier()
    assert runs == [(64, 10)]


def on_the_path(program):
    """The forward ops between a parameter and the loss: those that a gradient op is made for."""
    after = ow.graph.descendants(program, program.parameters)
    before = ow.graph.ancestors(program, [program.loss])
    forward = [op for op in program.ops if op.made_by is Pass.FORWARD]
    return [op for op in forward if set(op.outputs) & after & before]


def test_rule_1_a_gradient_operator_for_each_operator(graph):
    gradient_ops = [op for op in graph.backward.ops if op.of is not None]
    path = on_the_path(graph.backward)
    assert [op.outputs[0] for op in reversed(path)] == [op.of for op in gradient_ops]
    assert [f"{op.type}_grad" for op in reversed(path)] == [op.type for op in gradient_ops]


def test_rule_2_it_reads_inputs_outputs_and_output_gradients(graph):
    operator = {op.outputs[0]: op for op in graph.backward.ops}
    for g in (op for op in graph.backward.ops if op.of is not None):
        f = operator[g.of]
        output_gradients = {v for v in g.inputs if v.kind is Kind.GRADIENT}
        assert set(g.inputs) - output_gradients <= {*f.inputs, *f.outputs}
        assert output_gradients == {graph.backward[f"grad({g.of.name})"]}


def test_rules_3_and_4_it_makes_a_gradient_of_each_input_that_has_one(graph):
    operator = {op.outputs[0]: op for op in graph.backward.ops}
    have_one = {*graph.backward.parameters, *ow.graph.descendants(graph.backward, graph.backward.parameters)}
    for g in (op for op in graph.backward.ops if op.of is not None):
        expected = [f"grad({v.name})" for v in operator[g.of].inputs if v in have_one]
        assert [v.name for v in g.outputs] == expected
    assert not {"grad(images)", "grad(label)"} & set(graph.backward.variables)
    assert {(p.name, g.name) for p, g in graph.backward.gradients} == {
        ("fc/w", "grad(fc/w)"),
        ("fc/b", "grad(fc/b)"),
    }


def test_optimization_part_has_one_operator_for_each_parameter(graph):
    updates = [op for op in graph.all.ops if op.type == "adam"]
    assert {op.inputs[:2] for op in updates} == set(graph.backward.gradients)
    assert len(updates) == len(graph.all.parameters) == 2
    assert graph.all.ops[: len(graph.backward.ops)] == graph.backward.ops


# API design -------------------------------------------------------------------------------------------------

TEXT, WORDS, TOPICS = 12, 101, 4


def similarity():
    """Two texts go through projections that share their parameters; how near do they come to each other?"""
    text_a = layer.data("text_a", (None, TEXT), "int32")
    text_b = layer.data("text_b", (None, TEXT), "int32")
    table = ow.parameter("table", (WORDS, 16), initializer=ow.initializer.normal(0.5))
    projection = ow.parameter("projection", (16, 8))

    def semantic_projection(text, name):
        words = layer.embedding(text, WORDS, 16, w=table)
        return layer.fc(words.mean(1), w=projection, b=False, act="tanh", name=name)

    layer_a = semantic_projection(text_a, "layer_a")
    layer_b = semantic_projection(text_b, "layer_b")
    output = layer.cosine_similarity(layer_a, layer_b, name="output")
    return layer.mse(output, layer.data("alike", (None,)), name="cost")


def texts(count, seed=0):
    """Pairs of texts, each drawn from the words of one topic, and whether their topics are the same."""
    draw = np.random.default_rng(seed)
    topics = draw.integers(TOPICS, size=(2, count))
    topics[1] = np.where(draw.random(count) < 0.5, topics[0], topics[1])
    words = draw.integers(WORDS // TOPICS, size=(2, count, TEXT)) * TOPICS + topics[..., None]
    return *words.astype("int32"), (topics[0] == topics[1]).astype("float32")


def direct(parameters, text_a, text_b):
    """What the network computes, in NumPy."""
    a, b = (np.tanh(parameters["table"][t].mean(1) @ parameters["projection"]) for t in (text_a, text_b))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return a, b, (a * b).sum(1) / lengths


def test_the_two_projections_share_one_parameter_whose_gradients_are_summed():
    model = Model(similarity)
    assert {v.name for v in model.topology.parameters} == {"table", "projection"}
    text_a, text_b, alike = texts(32)
    machine = GradientMachine(model)
    machine.backward(text_a, text_b, alike)

    def cost(projection_a, projection_b):
        a = jnp.tanh(model["table"][text_a].mean(1) @ projection_a)
        b = jnp.tanh(model["table"][text_b].mean(1) @ projection_b)
        lengths = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
        return jnp.mean(((a * b).sum(1) / lengths - alike) ** 2)

    of_a, of_b = jax.jit(jax.grad(cost, (0, 1)))(model["projection"], model["projection"])
    np.testing.assert_allclose(machine.gradient("projection"), of_a + of_b, rtol=1e-4, atol=1e-6)


def test_it_learns_which_texts_are_alike():
    trainer = Trainer(Model(similarity), ow.Adam(0.02))
    trainer.train(ow.batches(texts(512), 64, shuffle=True), epochs=10)
    text_a, text_b, alike = texts(256, seed=1)
    evaluator = Evaluator(trainer.model)
    evaluator.forward(text_a, text_b)
    output = np.asarray(evaluator.activation("output"))
    assert output[alike == 1].mean() > 0.9
    assert output[alike == 0].mean() < 0.3


def test_a_concurrent_optimizer_made_by_hand_each_thread_with_its_gradient_machine():
    trainer = Trainer(Model(similarity), ow.Adam(0.02))
    data = texts(512)

    def work(machine, part):
        for start in range(0, 128, 32):
            machine.backward(*(x[part][start : start + 32] for x in data))
            trainer.apply(machine.gradients)

    before = trainer.test([data])["loss"]
    parts = [slice(i * 128, i * 128 + 128) for i in range(4)]
    threads = [threading.Thread(target=work, args=(GradientMachine(trainer.model), part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert trainer.step == int(trainer["step"]) == 16
    assert trainer.test([data])["loss"] < before


def test_what_holds_what():
    model = Model(similarity)
    trainer = Trainer(model, ow.Adam(0.02))
    evaluator, machine = trainer.evaluator, GradientMachine(model)
    assert trainer.model is model
    assert evaluator.model is model
    assert machine.model is model

    text_a, text_b, alike = texts(64)
    evaluator.forward(text_a, text_b)
    before = np.asarray(evaluator.activation("output"))
    machine.backward(text_a, text_b, alike)
    assert set(machine.gradients) == {"table", "projection"}

    trainer.update(text_a, text_b, alike)
    evaluator.forward(text_a, text_b)
    assert not np.allclose(evaluator.activation("output"), before)  # nobody told it: it reads the Model's


@contextmanager
def serving(handle):
    """An HTTP server on this machine, a thread for each request; ``handle`` answers a dict with a dict."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(handle(request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(timeout=30)


def ask(port, request):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/", json.dumps(request))
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())
    finally:
        connection.close()


def live(shape):
    """How many arrays of this shape there are in this process."""
    gc.collect()
    return len([x for x in jax.live_arrays() if x.shape == shape])


def requests(count, seed):
    text_a, text_b, _ = texts(count, seed)
    return [
        {"text_a": a[None].tolist(), "text_b": b[None].tolist()} for a, b in zip(text_a, text_b, strict=True)
    ]


def test_an_evaluator_for_each_request_of_a_threaded_server():
    m = Model(similarity)
    evaluators = []

    def handle(req):
        e = Evaluator(m)
        e.forward(**{name: np.array(text, "int32") for name, text in req.items()})
        evaluators.append(e)
        return {"output": np.asarray(e.activation(layer="output")).tolist()}

    asked = requests(96, seed=2)
    tables = live((WORDS, 16))
    with serving(handle) as port, ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda r: ask(port, r), asked, timeout=60))

    expected = direct(jax.tree.map(np.asarray, m.parameters), *texts(96, seed=2)[:2])[2]
    np.testing.assert_allclose([a["output"][0] for a in answers], expected, rtol=1e-4, atol=1e-5)
    assert len(evaluators) == len(asked)
    assert live((WORDS, 16)) == tables  # however many Evaluators there are


def test_evaluators_answer_while_four_threads_train():
    m = Model(similarity)
    trainer = Trainer(m, ow.Adam(0.02))
    reader = ow.batches(texts(512), 64, shuffle=True)
    training = threading.Thread(
        target=trainer.train, args=(reader,), kwargs={"epochs": 15, "threads": 4}, daemon=True
    )
    done = threading.Event()

    def handle(req):
        e = Evaluator(m, activations=["layer_a", "layer_b"])
        e.forward(**{name: np.array(text, "int32") for name, text in req.items()})
        return {name: np.asarray(e.activation(name)).tolist() for name in ("layer_a", "layer_b", "output")}

    def client(port, request):
        answers = [ask(port, request)]
        while not done.is_set():
            answers.append(ask(port, request))
        return answers

    asked = requests(16, seed=2)
    with serving(handle) as port, ThreadPoolExecutor(16) as clients:
        running = [clients.submit(client, port, request) for request in asked]
        training.start()
        training.join(timeout=60)
        done.set()
        answers = [answer for future in running for answer in future.result(timeout=60)]
        last = [ask(port, request) for request in asked]

    assert not training.is_alive()
    losses = trainer.history["loss"]
    assert len(losses) == trainer.step == 15 * 8  # no update is lost
    assert losses[-8:].mean() < losses[:8].mean() / 3
    assert len({answer["output"][0] for answer in answers}) > 2 * len(asked)  # answered in the middle of it
    for answer in answers:  # all of one answer is of the same parameters, whatever was published meanwhile
        a, b = np.array(answer["layer_a"][0]), np.array(answer["layer_b"][0])
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        np.testing.assert_allclose(answer["output"], [cosine], rtol=1e-4, atol=1e-5)
    expected = direct(jax.tree.map(np.asarray, m.parameters), *texts(16, seed=2)[:2])[2]
    np.testing.assert_allclose([a["output"][0] for a in last], expected, rtol=1e-4, atol=1e-5)
