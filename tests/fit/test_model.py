"""Model, Evaluator, GradientMachine: right numbers, parameters held once, and no mixture of old and new."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype("float32")
Y = RNG.normal(size=(8, 1)).astype("float32")


def network():
    hidden = ow.layer.fc(ow.data("x", (None, 4)), 3, act="relu", name="hidden")
    return ow.layer.mse(ow.layer.fc(hidden, 1, name="last"), ow.data("y", (None, 1)))


def deep():
    """Dropout and batch normalization: training and testing differ."""
    h = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 4)), 6, name="hidden"), name="norm")
    h = ow.layer.dropout(jax.nn.relu(h), 0.5, name="drop")
    return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))


@jax.jit
def predict(p, x):
    return jax.nn.relu(x @ p["hidden/w"] + p["hidden/b"]) @ p["last/w"] + p["last/b"]


@jax.jit
def loss(p, x, y):
    return jnp.mean((predict(p, x) - y) ** 2)


@cache
def topology(function=network):
    return ow.trace(function)


@cache
def compiled_once(function, seed):
    return ow.Model(topology(function), seed=seed)


@pytest.fixture
def model():
    """Values of its own; what is compiled is shared with other tests."""
    return compiled_once(network, 3).copy()


@pytest.fixture
def deep_model():
    return compiled_once(deep, 1).copy()


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------- against plain JAX


def test_forward_is_the_plain_function(model):
    out = ow.Evaluator(model).forward(x=X, y=Y)
    close(out.loss, loss(model.parameters, X, Y))
    close(out.value, out.loss)


def test_an_activation_is_computed_when_it_is_asked_for(model):
    evaluator = ow.Evaluator(model)
    evaluator.forward(x=X, y=Y)
    p = model.parameters
    close(evaluator.activation("hidden"), jax.nn.relu(X @ p["hidden/w"] + p["hidden/b"]))
    close(evaluator.activation("last"), predict(p, X))


def test_an_activation_that_was_asked_for_comes_at_once(model):
    evaluator = ow.Evaluator(model, activations=["hidden"])
    out = evaluator.forward(x=X, y=Y)
    assert evaluator.activation("hidden") is out["hidden"]


@pytest.mark.parametrize("name", ["hidden", "last"])
def test_an_activation_is_that_of_the_request_though_its_array_is_filled_again(model, name):
    evaluator, x = ow.Evaluator(model), X.copy()
    evaluator.forward(x=x)
    x[:] = 100
    p = model.parameters
    expected = {"hidden": jax.nn.relu(X @ p["hidden/w"] + p["hidden/b"]), "last": predict(p, X)}
    found = evaluator.activation(name)
    close(found, expected[name])
    assert evaluator.activation(name) is found
    evaluator.forward(x=x)
    assert not np.allclose(evaluator.activation(name), found)


def test_gradients_are_those_of_jax(model):
    machine = ow.GradientMachine(model, activations=["last"])
    out = machine.backward(X, Y)
    expected, gradient = jax.value_and_grad(loss)(model.parameters, X, Y)
    close(out.loss, expected)
    assert machine.gradients.keys() == gradient.keys()
    for name, value in gradient.items():
        close(machine.gradient(name), value)
    close(machine.activation("last"), predict(model.parameters, X))


def test_the_gradients_of_some_parameters(model):
    machine = ow.GradientMachine(model, ["last/*"])
    machine.backward(x=X, y=Y)
    assert set(machine.gradients) == {"last/w", "last/b"}
    close(machine.gradient("last/w"), jax.grad(loss)(model.parameters, X, Y)["last/w"])
    with pytest.raises(ow.UnknownNameError, match=r"no gradient of a parameter 'hidden/w'.*'last/"):
        machine.gradient("hidden/w")


def test_gradients_follow_the_parameters(model):
    machine = ow.GradientMachine(model)
    machine.backward(X, Y)
    model.replace({"last/w": np.zeros((3, 1), "float32")})
    machine.backward(X, Y)
    assert not np.any(machine.gradient("hidden/w"))
    close(machine.gradient("last/b"), jax.grad(loss)(model.parameters, X, Y)["last/b"])


def test_backward_changes_no_parameter(model):
    before = model.state
    ow.GradientMachine(model).backward(X, Y)
    assert model.state is before


def test_every_batch_size(model):
    evaluator, machine = ow.Evaluator(model), ow.GradientMachine(model)
    for n in (8, 3, 1, 8):
        expected = loss(model.parameters, X[:n], Y[:n])
        close(evaluator.forward(X[:n], Y[:n]).loss, expected)
        close(machine.backward(X[:n], Y[:n]).loss, expected)
        close(evaluator.activation("last"), predict(model.parameters, X[:n]))


@pytest.mark.parametrize(
    "convert", [jnp.asarray, np.float64, lambda a: a.tolist()], ids=["jax", "wide", "list"]
)
def test_every_kind_of_array(model, convert):
    out = ow.Evaluator(model).forward(x=convert(X), y=convert(Y))
    close(out.loss, loss(model.parameters, X, Y))


def test_under_jit_and_vmap(model):
    evaluator = ow.Evaluator(model)
    several = jax.jit(jax.vmap(lambda x, y: evaluator.forward(x=x, y=y).loss))(X[:, None], Y[:, None])
    close(several, jax.vmap(lambda x, y: loss(model.parameters, x, y))(X[:, None], Y[:, None]))


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_results_keep_their_places_where_another_length_gives_other_names(rows):
    def network(w, x):
        e = jnp.sum((x @ w) ** 2, 1)
        return (jnp.sqrt(jnp.mean(e)) if len(x) > 2 else jnp.sum(jnp.sqrt(e))), {"last": jnp.mean(e)}

    w = np.ones((4, 2), "float32")
    evaluator = ow.Evaluator(ow.Model(ow.trace(network, w, X, has_aux=True), w))
    out, (expected, aux) = evaluator.forward(X[:rows]), network(w, X[:rows])
    close(out.loss, expected)
    close(out.aux["last"], aux["last"])


def test_the_mean_over_a_reader_counts_examples():
    def counted():
        logits = ow.layer.fc(ow.data("x", (None, 4)), 3)
        label = ow.data("label", (None,), "int32")
        return ow.layer.cross_entropy(logits, label), {"accuracy": ow.layer.accuracy(logits, label)}

    evaluator = ow.Evaluator(ow.Model(counted, has_aux=True))
    label = np.arange(8, dtype="int32") % 3
    whole = evaluator.forward(X, label)
    found = evaluator.test(ow.batches((X, label), 3))
    close(found["loss"], whole.loss)
    close(found["accuracy"], whole.aux["accuracy"])


# ---------------------------------------------------------------------------- partial feeds


def test_what_is_not_fed_is_not_computed(model):
    evaluator = ow.Evaluator(model)
    out = evaluator.forward(X)
    close(evaluator.activation("last"), predict(model.parameters, X))
    with pytest.raises(ow.UnknownNameError):
        _ = out.loss
    with pytest.raises(ow.ArgumentError, match=r"needs data that was not given, among y"):
        evaluator.activation(model.topology.loss.name)


def test_several_outputs_those_that_can_be():
    def towers():
        a, b = (ow.layer.fc(ow.data(n, (None, 4)), 2, name="same") for n in "ab")
        return {"a": a, "b": b, "both": (a * b).sum()}

    evaluator = ow.Evaluator(ow.Model(towers))
    both = evaluator.forward(a=X, b=2 * X)
    one = evaluator.forward(b=2 * X)
    assert len(both.values), len(one.values) == (3, 1)
    close(one.values[0], both.value["b"])
    close(evaluator.activation(both.results.signature.result.leaves[1]), both.value["b"])
    with pytest.raises(ow.UnknownNameError, match="computes no"):
        _ = one.value


def test_data_may_be_a_container():
    program = ow.trace(lambda p, d: jnp.sum(p * d["a"]) + d["b"], jnp.ones(2), {"a": jnp.ones(2), "b": 1.0})
    evaluator = ow.Evaluator(ow.Model(program, jnp.array([1.0, 2.0])))
    d = {"a": np.float32([3, 4]), "b": np.float32(5)}
    assert float(evaluator.forward(d=d).loss) == 16
    d["a"][:], d["b"] = 100, np.float32(100)
    assert evaluator.activation("mul").tolist() == [3, 8]


# ---------------------------------------------------------------------------- parameters held once


def addresses(values):
    return {name: value.unsafe_buffer_pointer() for name, value in values.items()}


def test_parameters_are_shared_by_all(model):
    before = addresses(model.parameters)
    trainer = ow.Trainer(model, ow.SGD(0.1))
    evaluators = [ow.Evaluator(model) for _ in range(5)]
    machines = [ow.GradientMachine(model, number=n) for n in range(5)]
    for each in evaluators:
        each.forward(X, Y)
    for each in machines:
        each.backward(X, Y)
    assert addresses(model.parameters) == before
    assert {n: trainer[n].unsafe_buffer_pointer() for n in before} == before
    joined = trainer.joined()
    assert {n: joined[n].unsafe_buffer_pointer() for n in before} == before


def test_many_evaluators_hold_no_array_more(model):
    def held():
        return sum(x.nbytes for x in jax.live_arrays())

    ow.Evaluator(model).forward(X, Y)
    before = held()
    evaluators = [ow.Evaluator(model) for _ in range(20)]
    assert held() == before
    for each in evaluators:
        each.forward(X, Y)
    assert held() - before <= 20 * 4  # a loss each


def test_evaluators_share_what_is_compiled(model):
    calls = []
    step = jax.monitoring
    evaluators = [ow.Evaluator(model) for _ in range(4)]
    evaluators[0].forward(X, Y)
    listener = lambda name, *_, **__: calls.append(name)  # noqa: E731
    step.register_event_duration_secs_listener(listener)
    try:
        for each in evaluators:
            each.forward(X, Y)
            each.forward(y=Y, x=X)
    finally:
        step.unregister_event_duration_listener(listener)
    assert not [name for name in calls if "compile" in name]


def test_given_parameters_are_copied():
    w = jnp.ones((4, 3))
    model = ow.Model(network, {"hidden/w": w})
    assert model["hidden/w"].unsafe_buffer_pointer() != w.unsafe_buffer_pointer()
    close(model["hidden/w"], w)


# ---------------------------------------------------------------------------- training and testing


def test_the_test_network_drops_nothing_and_uses_running_statistics(deep_model):
    model = deep_model
    model.replace({"norm/mean": np.full(6, 0.3, "float32"), "norm/variance": np.full(6, 4.0, "float32")})
    p = model.parameters

    @jax.jit
    def expected(x):
        h = (x @ p["hidden/w"] + p["hidden/b"] - 0.3) * jax.lax.rsqrt(4 + 1e-5)
        h = jax.nn.relu(h * p["norm/scale"] + p["norm/offset"])
        return h @ p["last/w"] + p["last/b"]

    evaluator = ow.Evaluator(model)
    state = model.state
    close(evaluator.forward(X, Y).loss, np.mean((expected(X) - Y) ** 2))
    close(evaluator.activation("last"), expected(X))
    assert model.state is state
    assert not [v.name for v in model.test_program.state if v.name == "key"]


def test_backward_moves_statistics_and_keys(deep_model):
    model = deep_model
    before = {name: model[name] for name in ("norm/mean", "key", "hidden/w")}
    machine = ow.GradientMachine(model)
    losses = [float(machine.backward(X, Y).loss) for _ in range(2)]
    assert losses[0] != losses[1]
    h = X @ np.asarray(before["hidden/w"])
    close(model["norm/mean"], 0.1 * h.mean(0) + 0.09 * h.mean(0))
    assert model["hidden/w"] is before["hidden/w"]
    assert not np.array_equal(*(jax.random.key_data(k) for k in (model["key"], before["key"])))


def test_machines_of_other_numbers_draw_other_keys_and_leave_the_models(deep_model):
    model = deep_model
    before = jax.random.key_data(model["key"])
    machines = [ow.GradientMachine(model, number=n) for n in (1, 2, 1)]
    first, second, again = (float(m.backward(X, Y).loss) for m in machines)
    assert first == again != second
    assert float(machines[0].backward(X, Y).loss) not in (first, second)
    assert np.array_equal(jax.random.key_data(model["key"]), before)


# ---------------------------------------------------------------------------- published whole


def test_replace_publishes_a_new_state_and_leaves_the_old(model):
    old = model.state
    w = old["last/w"]
    model.replace({"last/w": np.ones((3, 1), "float32"), "last/b": np.ones(1, "float32")})
    assert np.all(model["last/w"] == 1)
    assert old["last/w"] is w
    assert model["hidden/w"] is old["hidden/w"]


def test_replace_is_all_or_nothing(model):
    old = model.state
    with pytest.raises(ow.ArgumentError, match=r"'last/b' is float32\[2\]; expected float32\[1\]"):
        model.replace({"last/w": np.ones((3, 1), "float32"), "last/b": np.ones(2, "float32")})
    with pytest.raises(ow.UnknownNameError, match=r"nothing named 'last/v'.*last/"):
        model.replace({"last/w": np.ones((3, 1), "float32"), "last/v": 1.0})
    assert model.state is old


def test_an_activation_on_demand_is_of_the_parameters_of_its_forward(model):
    evaluator = ow.Evaluator(model)
    evaluator.forward(X, Y)
    before = predict(model.parameters, X)
    model.replace({"last/w": np.zeros((3, 1), "float32")})
    close(evaluator.activation("last"), before)
    evaluator.forward(X, Y)
    close(evaluator.activation("last"), predict(model.parameters, X))


def pair():
    a, b = (ow.parameter(n, (), initializer=ow.initializer.constant(0.0)) for n in "ab")
    x = ow.data("x", (None,))
    return jnp.mean(x) * a, jnp.mean(x) * b


def test_eight_threads_never_read_a_mixture():
    model = ow.Model(pair)
    stop = Event()
    one = np.ones(2, "float32")

    def read(_):
        evaluator, seen = ow.Evaluator(model), set()
        while not stop.is_set():
            a, b = map(float, evaluator.forward(one).value)
            assert a == b
            values = model.state
            assert float(values["a"]) == float(values["b"])
            seen.add(a)
        return seen

    ow.Evaluator(model).forward(one)
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read, n) for n in range(8)]
        try:
            for number in range(1, 150):
                model.replace({"a": float(number), "b": float(number)})
        finally:
            stop.set()
        seen = [r.result() for r in readers]
    assert len(set.union(*seen)) > 1


def test_eight_threads_run_forward_for_the_first_time_at_once():
    model = ow.Model(topology())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: float(ow.Evaluator(model).forward(n * X, Y).loss), range(8)))
    close(found, [float(loss(model.parameters, n * X, Y)) for n in range(8)])


# ---------------------------------------------------------------------------- what a model is made of


def plain(params, x, y):
    h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((h @ params["last"]["kernel"] - y) ** 2), {"size": jnp.sum(h)}


PARAMS = {
    "hidden": {"kernel": RNG.normal(size=(4, 3)).astype("float32"), "bias": np.zeros(3, "float32")},
    "last": {"kernel": np.ones((3, 1), "float32")},
}


def test_containers_that_were_traced():
    model = ow.Model(ow.trace(plain, PARAMS, X, Y, has_aux=True), PARAMS)
    assert jax.tree.structure(model.parameters) == jax.tree.structure(PARAMS)
    (expected, aux), gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(PARAMS, X, Y)
    out = ow.Evaluator(model).forward(X, Y)
    close(out.loss, expected)
    close(out.aux["size"], aux["size"])
    machine = ow.GradientMachine(model)
    machine.backward(X, Y)
    close(machine.gradient("hidden/kernel"), gradient["hidden"]["kernel"])


def test_state_that_was_traced():
    def counting(params, seen, x):
        return jnp.sum(params * x), {"seen": seen["seen"] + 1}

    program = ow.trace(counting, jnp.ones(4), X, state={"seen": jnp.int32(0)})
    model = ow.Model(program, jnp.ones(4), {"seen": jnp.int32(5)})
    ow.GradientMachine(model).backward(X)
    assert int(model.state.model_state["seen"]) == 6


def test_a_training_program_gives_its_forward_pass():
    model = ow.Model(ow.Adam(1e-3).minimize(topology()), seed=3)
    assert {v.name for v in model.state.layout.variables} == {"hidden/w", "hidden/b", "last/w", "last/b"}
    close(ow.Evaluator(model).forward(X, Y).loss, loss(compiled_once(network, 3).parameters, X, Y))


def test_lazy_values():
    y = ow.layer.fc(ow.data("x"), 2, name="last")
    model = ow.Model(y, feed={"x": X})
    evaluator = ow.Evaluator(model)
    out = evaluator.forward(X)
    close(out.value, X @ model["last/w"])
    close(evaluator.activation(y), out.value)


def test_the_seed_decides():
    one, same, other = (ow.Model(topology(), seed=n)["hidden/w"] for n in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_repr(model):
    assert repr(model) == "Model('network', 4 parameters, 19 numbers)"
    assert repr(ow.Evaluator(model)) == f"Evaluator({model!r})"
    assert repr(ow.GradientMachine(model)) == f"GradientMachine({model!r})"


# ---------------------------------------------------------------------------- what a person does wrong


def nothing_shows_shapes():
    ow.Model(ow.layer.fc(ow.data("x"), 2))


WRONG = {
    "no network": (lambda: ow.Model(3), "Model was given .*3.*; expected a function"),
    "options too late": (
        lambda: ow.Model(ow.trace(network), has_aux=True),
        "traced already; has_aux comes too late",
    ),
    "no shape": (nothing_shows_shapes, "'x'"),
    "no parameters": (lambda: ow.Model(ow.trace(plain, PARAMS, X, Y, has_aux=True)), "params"),
    "a parameter too many": (lambda: ow.Model(network, {"lost/w": X}), "keeps nothing named 'lost/w'"),
    "another shape": (
        lambda: ow.Model(network, {"last/b": X}),
        r"'last/b' is float32\[8, 4\]",
    ),
    "seed": (lambda: ow.Model(network, seed=-1), "The seed is -1"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_model(make, message):
    with pytest.raises(ow.OnwardError, match=message):
        make()


FEEDS = {
    "misspelt": ({"z": X}, "takes no data named 'z'.*'x'"),
    "another width": ({"x": X[:, :3]}, r"'x' is float32\[8, 3\]"),
    "another rank": ({"x": X[0]}, r"'x' is float32\[4\], of 1 axes; expected 2"),
    "text": ({"x": "images"}, "'x' is 'images'; expected an array"),
    "complex": ({"x": X + 1j}, r"'x' is complex64\[8, 4\]; expected float32"),
    "beyond range": ({"x": np.full((2, 4), 1e300)}, "float32 cannot hold"),
    "batches that disagree": ({"x": X, "y": Y[:3]}, "'y' is"),
}


@pytest.mark.parametrize(("feed", "message"), FEEDS.values(), ids=FEEDS)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_wrong_feed(model, feed, message, warm):
    if not warm:
        model = ow.Model(topology(), seed=3)  # nothing of it is compiled
    evaluator = ow.Evaluator(model)
    if warm:
        evaluator.forward(x=X, y=Y)
    feed = {"y": Y, **feed}
    with pytest.raises(ow.ArgumentError, match=message):
        evaluator.forward(**feed)
    with pytest.raises(ow.ArgumentError, match=message):
        ow.GradientMachine(model).backward(**feed)


def test_too_much_data(model):
    evaluator = ow.Evaluator(model)
    with pytest.raises(ow.ArgumentError, match=r"takes 2 data \(x, y\); 3 were given"):
        evaluator.forward(X, Y, Y)
    with pytest.raises(ow.ArgumentError, match="given 'x' by place and by name"):
        evaluator.forward(X, x=X)


def test_labels_out_of_range_are_refused():
    def classify():
        return ow.layer.cross_entropy(
            ow.layer.fc(ow.data("x", (None, 4)), 3), ow.data("label", (None,), "int32")
        )

    evaluator = ow.Evaluator(ow.Model(classify))
    evaluator.forward(X, np.zeros(8, "int32"))
    for dtype in ("int32", "int64"):
        with pytest.raises(ow.ArgumentError, match=r"'label' holds 3 at \[7\]; labels must lie from 0 to 2"):
            evaluator.forward(X, np.array([0, 1, 2, 0, 0, 0, 0, 3], dtype))


def test_too_early(model):
    with pytest.raises(ow.StateError, match=r"call forward\(\.\.\.\) first"):
        ow.Evaluator(model).activation("last")
    with pytest.raises(ow.StateError, match=r"call backward\(\.\.\.\) first"):
        ow.GradientMachine(model).gradient("last/w")


def test_unknown_names(model):
    evaluator = ow.Evaluator(model)
    evaluator.forward(X, Y)
    with pytest.raises(ow.UnknownNameError, match=r"'hiden'.*'hidden'"):
        evaluator.activation("hiden")
    with pytest.raises(ow.UnknownNameError, match=r"'hiden'.*'hidden'"):
        ow.Evaluator(model, ["hiden"])
    with pytest.raises(ow.UnknownNameError, match="'hiden/w'"):
        ow.GradientMachine(model, ["hiden/w"])


def test_readers_that_cannot_be_tested_on(model):
    evaluator = ow.Evaluator(model)
    with pytest.raises(ow.ArgumentError, match="no batch"):
        evaluator.test([])
    with pytest.raises(ow.ArgumentError, match="batch of 3 arrays; the network takes 2: x, y"):
        evaluator.test([(X, Y, Y)])
    with pytest.raises(ow.ArgumentError, match="yielded 'x'; network takes x, y"):
        evaluator.test([{"x": X}])
    with pytest.raises(ow.ArgumentError, match="yielded 'x'; network takes x, y"):
        evaluator.test([{"x": X, "y": Y}, {"x": X}])


def test_parameters_that_a_trainer_took_over(model):
    evaluator = ow.Evaluator(model)
    evaluator.forward(X, Y)
    ow.Trainer(model, ow.SGD(0.1), share=False).update(X, Y)
    with pytest.raises(ow.StateError, match="took its buffers over"):
        evaluator.activation("last")
    close(evaluator.forward(X, Y).loss, loss(model.parameters, X, Y))
