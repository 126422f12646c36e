"""Trainer: equal to a loop by hand, whatever the reader, alone or with several threads."""

import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import compiled_once

import onward as ow
from onward.execute.step import Step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
SIZE = 8  # three batches


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_once(tmp_path_factory):
    with compiled_once(tmp_path_factory.mktemp("cache")):
        yield


def network():
    hidden = ow.layer.fc(ow.data("x", (None, 4)), 3, act="tanh", name="hidden")
    return ow.layer.mse(ow.layer.fc(hidden, 1, name="last"), ow.data("y", (None, 1)))


def loss(p, x, y):
    h = jnp.tanh(x @ p["hidden/w"] + p["hidden/b"])
    return jnp.mean((h @ p["last/w"] + p["last/b"] - y) ** 2)


def deep():
    """Dropout and batch normalization: state that the network itself carries."""
    h = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 4)), 6, name="hidden"), name="norm")
    h = ow.layer.dropout(jax.nn.relu(h), 0.5, name="drop")
    return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))


def counting():
    """The gradient of w is the sum of a batch: whole numbers, added without rounding."""
    w = ow.parameter("w", (), initializer=ow.initializer.constant(0.0))
    return jnp.sum(ow.data("n", (None,))) * w


def reader(**options):
    return ow.batches((X, Y), SIZE, **options)


def uneven():
    """Two batches of 8 and one of 4: a second shape to compile."""
    return ow.batches((X[:20], Y[:20]), SIZE)


@cache
def idle():
    """A trainer for calls that are refused: it is never trained."""
    return ow.Trainer(ow.Model(network), ow.SGD(0.1))


def trained(make=network, optimizer=None, epochs=2, share=True, **options):
    trainer = ow.Trainer(ow.Model(make, seed=3), optimizer or ow.Momentum(0.05, 0.9), share=share)
    trainer.train(reader(), epochs=epochs, **options)
    return trainer


@cache
def well_trained():
    """A trainer that tests compare with and leave as it is."""
    return trained()


def same(a, b, tolerance=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def bits(state):
    """Every value of a State as NumPy, keys too."""
    values = zip(state.layout.variables, state.values, strict=True)
    return {v.name: np.asarray(jax.random.key_data(x) if v.name == "key" else x) for v, x in values}


# ---------------------------------------------------------------------------- against a loop by hand


def test_a_plain_network_step_by_step():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9))
    params = {n: np.array(v) for n, v in trainer.model.parameters.items()}
    velocity = jax.tree.map(np.zeros_like, params)

    @jax.jit
    def step(params, velocity, x, y):
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        return jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity), velocity, value

    losses = []
    seen = []
    trainer.train(uneven(), epochs=3, callbacks=[lambda e: seen.append(dict(e.trainer.model.parameters))])
    per_step = [p for p in seen if p is not None]
    for _ in range(3):
        for x, y in uneven():
            params, velocity, value = step(params, velocity, x, y)
            losses.append(float(value))
    np.testing.assert_allclose(trainer.history["loss"], losses, rtol=1e-6)
    same(per_step[-1], params, 1e-6)
    same(trainer["last/w/velocity"], velocity["last/w"], 1e-6)


def test_a_network_with_dropout_and_statistics_step_by_step():
    trainer = ow.Trainer(ow.Model(deep, seed=3), ow.SGD(0.05))
    step = Step(ow.SGD(0.05).minimize(ow.trace(deep)), (), donate=False, ahead=False)
    state = trainer.state
    state = step.init(seed=3).replace({n: v for n, v in bits(state).items() if n not in ("key", "step")})
    by_hand = jax.jit(step.function)  # the pure function, jitted by hand
    for x, y in [*uneven(), *uneven()]:
        state, out = by_hand(state, x, y)
        found = trainer.update(x, y)
        np.testing.assert_allclose(found.loss, out.loss, rtol=1e-6)
    for name, value in bits(state).items():
        np.testing.assert_allclose(bits(trainer.state)[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_statistics_by_hand():
    trainer = ow.Trainer(ow.Model(deep, seed=3), ow.SGD(0.0))
    w, b = np.array(trainer["hidden/w"]), np.array(trainer["hidden/b"])
    trainer.train(uneven(), epochs=1)
    mean = np.zeros(6)
    for x, _ in uneven():
        mean = 0.9 * mean + 0.1 * np.mean(x @ w + b, 0)
    np.testing.assert_allclose(trainer["norm/mean"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "optimizer"), [(network, None), (deep, ow.SGD(0.05))])
def test_sharing_changes_no_number(make, optimizer):
    shared, alone = (trained(make, optimizer, share=share) for share in (True, False))
    same(bits(shared.state), bits(alone.state))
    same(shared.history["loss"], alone.history["loss"])


def test_without_sharing_the_buffers_are_reused():
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1), share=False)
    before = trainer.model.state
    trainer.update(X, Y)
    assert before.is_spent
    trainer = ow.Trainer(ow.Model(network), ow.Adam(0.1))
    before, slots = trainer.model.state, trainer["hidden/w/mean"]
    trainer.update(X, Y)
    assert not before.is_spent
    assert slots.is_deleted()


def test_update_and_train_are_the_same():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9))
    losses = [float(trainer.update(x=x, y=y).loss) for _ in range(2) for x, y in reader()]
    same(well_trained().history["loss"], np.array(losses))
    assert trainer.step == 6


def test_schedules_follow_the_step():
    rate = lambda n: 0.1 / (n + 1)  # noqa: E731
    trainer = ow.Trainer(ow.Model(counting), ow.SGD(rate))
    trainer.train([np.ones(1, "float32")] * 4)
    assert float(trainer["w"]) == pytest.approx(-0.1 * (1 + 1 / 2 + 1 / 3 + 1 / 4))


# ---------------------------------------------------------------------------- epochs, history, events


def test_where_the_training_stands():
    trainer = trained(epochs=2)
    assert (trainer.epoch, trainer.batch, trainer.step) == (2, 0, 6)
    trainer.train(reader(), epochs=1)
    assert (trainer.epoch, trainer.batch, trainer.step) == (3, 0, 9)
    assert trainer.train(reader(), epochs=0) is trainer.history
    assert trainer.step == int(trainer["step"]) == 9
    assert repr(trainer) == f"Trainer({trainer.model!r}, step 9)"


def test_the_history():
    history = trained(test=reader()).history
    assert list(history) == ["step", "epoch", "loss", "test_loss"]
    assert history["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert history["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
    assert np.isnan(history["test_loss"]).tolist() == [True, True, False] * 2
    assert not np.isnan(history["loss"]).any()
    assert history.of("test_loss")[0].tolist() == [3, 6]


def test_a_metric_is_not_named_as_what_every_record_counts():
    def named(w, x):
        return jnp.mean(x @ w), {"epoch": jnp.sum(x)}

    x = jnp.ones((2, 1))
    trainer = ow.Trainer(ow.Model(ow.trace(named, x[0], x, has_aux=True), x[0]), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match="no metric is named 'epoch'"):
        trainer.train([x], epochs=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loss", "is named 'loss', and is another one"),
        ("test_loss", "is named 'test_loss', as that of the test"),
    ],
)
def test_a_metric_does_not_take_the_name_of_the_loss(name, words):
    def named(w, x):
        return jnp.mean(x @ w), {name: jnp.sum(x)}

    x = jnp.ones((2, 1))
    trainer = ow.Trainer(ow.Model(ow.trace(named, x[0], x, has_aux=True), x[0]), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match=words):
        trainer.train([x], epochs=1, test=[x])
    assert trainer.step == 0


@pytest.mark.parametrize(
    "again", [lambda loss: loss, jax.lax.stop_gradient, lambda loss: loss.astype("bfloat16")]
)
def test_the_loss_may_be_returned_among_the_metrics(again):
    def named(w, x):
        loss = jnp.mean(x @ w)
        return loss, {"loss": again(loss), "sum": jnp.sum(x)}

    x = jnp.ones((2, 1))
    trainer = ow.Trainer(ow.Model(ow.trace(named, x[0], x, has_aux=True), x[0]), ow.SGD(0.0))
    history = trainer.train([x], epochs=1, test=[x])
    assert (history["loss"].tolist(), history["test_loss"].tolist()) == ([1.0], [1.0])


def test_a_test_is_of_the_parameters_as_they_are():
    trainer = trained(test=lambda: uneven())
    last = trainer.history["test_loss"][-1]
    np.testing.assert_allclose(last, jax.jit(loss)(trainer.model.parameters, X[:20], Y[:20]), rtol=1e-6)
    assert trainer.test(uneven()) == {"loss": last}


def test_the_order_of_events(tmp_path):
    seen = []

    def note(event):
        seen.append((str(event.kind), event.epoch, event.batch, event.step))

    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1), checkpoints=ow.Checkpoints(tmp_path, every=4))
    trainer.train(reader(), epochs=2, test=reader(), callbacks=[note])
    assert seen == [
        ("begin", 0, 0, 0),
        *(("step", 0, n, n) for n in (1, 2, 3)),
        ("epoch", 1, 0, 3),
        ("test", 1, 0, 3),
        ("checkpoint", 1, 1, 4),
        *(("step", 1, n, 3 + n) for n in (1, 2, 3)),
        ("epoch", 2, 0, 6),
        ("test", 2, 0, 6),
        ("checkpoint", 2, 0, 6),
        ("end", 2, 0, 6),
    ]


def test_the_numbers_of_events():
    found = {}

    def note(event):
        found.setdefault(event.kind, []).append({n: float(x) for n, x in event.metrics.items()})

    trainer = trained(epochs=1, test=reader(), callbacks=[note])
    assert found["begin"] == [{}]
    assert [m["loss"] for m in found["step"]] == trainer.history["loss"][:3].tolist()
    assert found["epoch"] == [found["step"][-1]]
    assert found["test"] == [{"test_loss": trainer.history["test_loss"][-1]}]


def test_metrics_beside_the_loss():
    def classify():
        logits = ow.layer.fc(ow.data("x", (None, 4)), 3)
        labels = ow.data("labels", (None,), "int32")
        return ow.layer.cross_entropy(logits, labels), {"accuracy": ow.layer.accuracy(logits, labels)}

    trainer = ow.Trainer(ow.Model(classify, has_aux=True), ow.Adam(0.1))
    data = ow.batches((X, X[:, :3].argmax(1).astype("int32")), SIZE)
    trainer.train(data, epochs=60, test=data)
    assert trainer.history["accuracy"][-2] == trainer.history["test_accuracy"][-1] == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_callback_ends_the_training(threads):
    seen = []

    def until(event):
        seen.append(str(event.kind))
        if event.step == 4:  # at every event from here on, the last ones too
            raise ow.StopTraining("enough")

    trainer = trained(epochs=9, callbacks=[until], threads=threads)
    assert trainer.step == 4 or threads == 2
    assert seen[-1] == "end"
    assert np.isfinite(trainer["hidden/w"]).all()


def test_early_stop():
    trainer = trained(optimizer=ow.SGD(0.0), epochs=50, test=reader(), callbacks=[ow.EarlyStop(patience=2)])
    assert trainer.epoch == 3
    with pytest.raises(ow.ArgumentError, match="no metric 'test_accuracy'"):
        trained(test=reader(), callbacks=[ow.EarlyStop("test_accuracy")])


def test_an_error_of_a_callback_surfaces_and_the_state_stays():
    def broken(event):
        if event.step == 2:
            raise ValueError("no disk")

    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1), share=False)
    with pytest.raises(ValueError, match="no disk"):
        trainer.train(reader(), callbacks=[broken])
    assert trainer.step == int(trainer["step"]) == 2
    trainer.train(reader())
    assert (trainer.epoch, trainer.step) == (1, 3)  # the rest of the epoch


def test_progress_is_shown(capsys):
    trained(progress=True, test=reader())
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "6/6" in shown
    assert "test_loss" in shown
    trained(progress=False)
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------- readers


def as_epoch(number):
    assert number in (0, 1)
    return uneven()


class Loader:
    """As those of torch: it can be iterated again and again, and knows its length."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(list(uneven()))


def read_only(views):
    for view in views:
        view.flags.writeable = False
    return views


def refilled(as_batch=tuple):
    """One array for all batches, aligned such that JAX computes on its very memory."""
    memory = [np.empty(SIZE * 4 + 16, "float32"), np.empty(SIZE + 16, "float32")]
    for pair in uneven():
        views = []
        for own, new in zip(memory, pair, strict=True):
            first = -own.ctypes.data % 64 // 4
            views.append(own[first : first + new.size].reshape(new.shape))
            views[-1][:] = new
        yield as_batch(views)


READERS = {
    "batches": uneven(),
    "list": list(uneven()),
    "lists": [list(pair) for pair in uneven()],
    "dicts": [{"y": y, "x": x} for x, y in uneven()],
    "jax arrays": [(jnp.asarray(x), jnp.asarray(y)) for x, y in uneven()],
    "float64": [(x.astype("float64"), y.tolist()) for x, y in uneven()],
    "callable": uneven,
    "generator function": lambda: (pair for pair in uneven()),
    "callable of the epoch": as_epoch,
    "loader": Loader(),
    "one array again and again": refilled,
    "read-only views of it": lambda: refilled(read_only),
    "dicts of it": lambda: refilled(lambda views: dict(zip("xy", views, strict=True))),
}


@pytest.fixture(scope="module")
def trainer_and_beginning(tmp_path_factory):
    """A trainer that compiles once, and where it was saved before its first step."""
    folder = tmp_path_factory.mktemp("beginning")
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9), share=False)
    trainer.checkpoint(folder)
    return trainer, folder


@pytest.fixture
def beginner(trainer_and_beginning):
    """A trainer before its first step."""
    trainer, folder = trainer_and_beginning
    trainer.restore(folder)
    assert (trainer.step, trainer.epoch, trainer.batch) == (0, 0, 0)
    return trainer


@pytest.fixture(scope="module")
def trained_by_hand():
    """The parameters after two epochs of single updates."""
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9))
    for x, y in [*uneven(), *uneven()]:
        trainer.update(x, y)
    return jax.tree.map(np.asarray, trainer.model.parameters)


@pytest.mark.parametrize("source", READERS.values(), ids=READERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_kind_of_reader(beginner, trained_by_hand, source, prefetch):
    beginner.train(source, epochs=2, prefetch=prefetch, test=source if source is not as_epoch else None)
    same(beginner.model.parameters, trained_by_hand, 1e-6)


def test_a_generator_is_read_once():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.SGD(0.05))
    with pytest.raises(ow.ArgumentError, match="can be read only once; epoch 1 needs a new one"):
        trainer.train((pair for pair in reader()), epochs=2)
    assert (trainer.epoch, trainer.step) == (1, 3)


def test_a_shuffled_reader_has_another_order_in_each_epoch():
    first, second = [], []
    for found, epochs in ((first, 1), (second, 2)):
        trainer = ow.Trainer(ow.Model(counting), ow.SGD(1.0))
        data = ow.batches([np.arange(4, dtype="float32")], 1, shuffle=True)
        steps = lambda e, found=found: found.append(float(e.trainer["w"])) if e.kind == "step" else None  # noqa: E731
        trainer.train(data, epochs=epochs, callbacks=[steps])
    assert first == second[:4]
    assert second[7] == 2 * second[3] == -12
    assert np.diff(second[3:]).tolist() != np.diff([0, *second[:4]]).tolist()


def broken_reader():
    yield X, Y
    yield X, Y
    raise OSError("the disk is gone")


BAD = {
    "empty": ([], ow.ArgumentError, ["no batch in epoch 0"]),
    "no reader": (3, ow.ArgumentError, ["The reader is"]),
    "an array": (X, ow.ArgumentError, ["batches(arrays"]),
    "three arrays": ([(X, Y, Y)], ow.ArgumentError, ["Batch 0 of epoch 0", "3 arrays", "takes 2: x, y"]),
    "one array": ([X], ow.ArgumentError, ["Batch 0 of epoch 0", "1 arrays"]),
    "misspelt": ([{"x": X, "label": Y}], ow.ArgumentError, ["Batch 0 of epoch 0", "'label'"]),
    "missing": ([{"x": X}], ow.ArgumentError, ["Batch 0 of epoch 0", "not fed 'y'"]),
    "shape": ([(X, Y), (X, X)], ow.ArgumentError, ["Batch 1 of epoch 0", "'y' is float32[24, 4]"]),
    "dtype": ([(X, Y), (X + 1j, Y)], ow.ArgumentError, ["Batch 1 of epoch 0", "complex64"]),
    "not as many": ([(X, Y), (X, Y[:3])], ow.ArgumentError, ["Batch 1 of epoch 0", "'y' is float32[3, 1]"]),
    "raises": (broken_reader, OSError, ["the disk is gone"]),
    "NaN": (
        [(X, Y), (np.nan * X, Y)],
        ow.ArgumentError,
        ["Batch 1 of epoch 0", "'x' holds nan at"],
    ),
    "infinite": ([(X, Y), (X, np.inf * Y)], ow.ArgumentError, ["Batch 1 of epoch 0", "'y' holds"]),
    "wide": ([(X, Y), (1e300 * X.astype(float), Y)], ow.ArgumentError, ["Batch 1 of epoch 0", "cannot hold"]),
}


@pytest.mark.parametrize(("source", "error", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_bad_reader(beginner, source, error, words, threads):
    trainer = beginner
    with pytest.raises(error) as raised:
        trainer.train(source, threads=threads)
    notes = getattr(raised.value, "__notes__", [])
    message = " ".join([str(raised.value), *notes])
    for word in words:
        assert word in message
    good = 2 if error is OSError else int("Batch 1" in message)
    assert trainer.step == int(trainer["step"]) == trainer.batch == good  # the state before it is kept
    assert np.isfinite(trainer["hidden/w"]).all()
    trainer.update(X, Y)


def test_a_bad_reader_in_the_middle_is_named_where_it_raised():
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.05))
    with pytest.raises(OSError, match="the disk is gone") as raised:
        trainer.train(broken_reader)
    assert "in epoch 0 at batch 2" in raised.value.__notes__[0]


def test_a_loss_that_is_no_number_names_its_batch():
    def root():
        w = ow.parameter("w", (), initializer=ow.initializer.constant(1.0))
        return jnp.sqrt(jnp.sum(ow.data("x", (None,)))) * w

    data = [np.full(2, n, "float32") for n in (1, 1, -1, 1)]
    trainer = ow.Trainer(ow.Model(root), ow.SGD(0.05))
    with pytest.raises(ow.NonFiniteError, match="loss was nan at step 3: batch 2 of epoch 0"):
        trainer.train(data)
    trainer = ow.Trainer(ow.Model(root), ow.SGD(0.05))
    trainer.train(data, check=False)
    assert np.isnan(trainer["w"])


def test_no_checkpoint_is_saved_after_a_loss_that_is_no_number(tmp_path):
    def root():
        w = ow.parameter("w", (), initializer=ow.initializer.constant(1.0))
        return jnp.sqrt(jnp.sum(ow.data("x", (None,)))) * w

    store = ow.Checkpoints(tmp_path, every=1)
    trainer = ow.Trainer(ow.Model(root), ow.SGD(0.05), checkpoints=store)
    with pytest.raises(ow.NonFiniteError, match="batch 2"):
        trainer.train([np.full(2, n, "float32") for n in (1, 1, -1, 1)])
    assert [e.step for e in store.entries()] == [1, 2]


# ---------------------------------------------------------------------------- several threads


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_converge(threads):
    x = np.random.default_rng(1).normal(size=(256, 4)).astype("float32")
    data = ow.batches((x, x.sum(1, keepdims=True)), 32, shuffle=True)
    trainer = ow.Trainer(ow.Model(network, seed=1), ow.Adam(0.02))
    trainer.train(data, epochs=25, threads=threads, test=data)
    assert trainer.step == int(trainer["step"]) == 200
    assert trainer.history["test_loss"][-1] < 0.1 * trainer.history["loss"][0]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_lose_no_update(threads):
    def numbers():
        array = np.empty(1, "float32")
        for n in range(1, 201):
            array[:] = n
            yield array

    trainer = ow.Trainer(ow.Model(counting), ow.SGD(1.0))
    trainer.train(numbers, epochs=3, threads=threads)
    assert float(trainer["w"]) == -3 * sum(range(1, 201))
    assert trainer.step == int(trainer["step"]) == 600
    assert (trainer.epoch, trainer.batch) == (3, 0)
    assert sorted(trainer.history["step"].tolist()) == list(range(1, 601))


def test_threads_lose_no_update_of_slots():
    trainer = ow.Trainer(ow.Model(counting), ow.Adagrad(0.0))
    trainer.train([np.full(1, 2, "float32")] * 100, threads=4)
    assert float(trainer["w/sum"]) == 400


def test_applied_gradients_are_the_update_of_the_whole_step():
    plain, by_hand = (ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9)) for _ in range(2))
    machine = ow.GradientMachine(by_hand.model)
    for start in range(0, 24, SIZE):
        batch = X[start : start + SIZE], Y[start : start + SIZE]
        plain.update(*batch)
        machine.backward(*batch)
        by_hand.apply(machine.gradients)
    same(bits(by_hand.state), bits(plain.state), 1e-6)
    assert by_hand.step == int(by_hand["step"]) == 3


def test_gradients_of_jax_are_applied_and_of_these_parameters_alone():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.SGD(0.5), parameter_list=["last/*"])
    before = dict(trainer.model.parameters)
    gradients = jax.jit(jax.grad(loss))(before, X, Y)
    trainer.apply({name: gradients[name] for name in ("last/b", "last/w")})
    moved = {name: before[name] - 0.5 * gradients[name] for name in ("last/b", "last/w")}
    same(dict(trainer.model.parameters), {**before, **moved}, 1e-6)


def test_threads_that_somebody_starts_lose_no_update():
    """A thread for each machine, as the design of concurrent training has it, while somebody else updates."""
    trainer = ow.Trainer(ow.Model(counting), ow.Adagrad(0.0))
    numbers = [np.full(1, n, "float32") for n in range(1, 41)]

    def work(part):
        machine = ow.GradientMachine(trainer.model)
        for array in part:
            machine.backward(array)
            trainer.apply(machine.gradients)

    threads = [threading.Thread(target=work, args=(numbers[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for array in numbers:
        trainer.update(array)
    for thread in threads:
        thread.join(timeout=60)
    assert float(trainer["w/sum"]) == 2 * sum(n * n for n in range(1, 41))  # whole numbers: no rounding
    assert trainer.step == int(trainer["step"]) == 80


def test_threads_apply_with_machines_of_a_network_that_carries_state():
    trainer = ow.Trainer(ow.Model(deep, seed=3), ow.SGD(0.01))

    def work(number):
        machine = ow.GradientMachine(trainer.model, number=number)
        for start in range(0, 24, SIZE):
            machine.backward(X[start : start + SIZE], Y[start : start + SIZE])
            trainer.apply(machine.gradients)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert trainer.step == int(trainer["step"]) == 6
    assert np.abs(trainer["norm/mean"]).max() > 0


GRADIENTS = {
    "nothing": (None, ow.ArgumentError, ["None", "trainer.apply(machine.gradients)"]),
    "the machine": ("machine", ow.ArgumentError, ["'machine'", "by the name of their parameter"]),
    "a stranger": ({"w": 0.0, "v": 0.0}, ow.UnknownNameError, ["'v'", "does not train", "parameter_list"]),
    "one missing": ({}, ow.ArgumentError, ["no gradient of 'w'"]),
    "another shape": ({"w": np.ones(3, "float32")}, ow.ArgumentError, ["grad(w)"]),
}


def test_gradients_that_do_not_fit_are_refused_and_change_nothing():
    trainer = ow.Trainer(ow.Model(counting), ow.SGD(1.0))
    for given, error, words in GRADIENTS.values():
        with pytest.raises(error) as raised:
            trainer.apply(given)
        assert [word for word in words if word not in str(raised.value)] == []
    assert (trainer.step, float(trainer["w"])) == (0, 0.0)
    trainer.apply({"w": np.float32(2)})
    assert float(trainer["w"]) == -2
    assert "w" in trainer
    assert "w" in trainer.model
    assert "v" not in trainer
    assert "v" not in trainer.model


def test_gradients_cannot_be_applied_where_the_update_is_not_of_gradients_alone():
    searching = ow.Trainer(ow.Model(counting), ow.LBFGS(1.0))
    with pytest.raises(ow.GraphError, match="evaluates the loss again"):
        searching.apply({"w": np.float32(1)})
    checked = ow.Trainer(ow.Model(counting), ow.SGD(1.0), check_finite=True)
    with pytest.raises(ow.GraphError, match=r"reads 'mul' .*or checks it"):
        checked.apply({"w": np.float32(1)})
    devices = ow.Trainer(ow.Model(counting), ow.SGD(1.0), devices=2)
    with pytest.raises(ow.GraphError, match="2 devices"):
        devices.apply({"w": np.float32(1)})
    merging = ow.Trainer(ow.Model(counting), ow.SGD(1.0), merge=ow.merge.LowPrecision())
    with pytest.raises(ow.GraphError, match=r"reads 'low_precision\(grad\(w\)\)'"):
        merging.apply({"w": np.float32(1)})


def test_threads_train_dropout_and_statistics():
    trainer = trained(deep, ow.SGD(0.01), epochs=4, threads=2)
    assert trainer.step == 12
    assert np.abs(trainer["norm/mean"]).max() > 0
    before = bits(trainer.state)
    trainer.train(reader(), epochs=1, threads=2)
    assert not np.array_equal(bits(trainer.state)["hidden/w"], before["hidden/w"])


def test_crews_draw_other_keys_each_time():
    def noisy():
        w = ow.parameter("w", (), initializer=ow.initializer.constant(0.0))
        return w * jax.random.uniform(ow.key()) + 0 * jnp.sum(ow.data("x", (None,)))

    trainer = ow.Trainer(ow.Model(noisy), ow.SGD(1.0))
    moved = []
    for _ in range(3):
        before = float(trainer["w"])
        trainer.train([np.ones(1, "float32")], threads=2)
        moved.append(float(trainer["w"]) - before)
    assert len(set(moved)) == 3


def test_threads_share_the_model_and_others_may_read():
    trainer = ow.Trainer(ow.Model(network, seed=1), ow.SGD(0.05))
    evaluator = ow.Evaluator(trainer.model)
    stop = threading.Event()
    losses, errors = [], []

    def read():
        try:
            while not stop.is_set():
                losses.append(float(evaluator.forward(X, Y).loss))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        trainer.train(reader(), epochs=30, threads=2)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert np.isfinite(losses).all()


def test_an_error_of_a_worker_surfaces_and_the_state_stays():
    before = threading.active_count()
    trainer = ow.Trainer(ow.Model(counting), ow.SGD(1.0))
    numbers = [np.ones(1, "float32")] * 20 + [np.ones((1, 1), "float32")] + [np.ones(1, "float32")] * 20
    with pytest.raises(ow.ArgumentError, match=r"Batch 20 of epoch 0.*expected 1"):
        trainer.train(numbers, threads=4)
    assert float(trainer["w"]) == -trainer.step
    assert trainer.step >= 20 == trainer.batch  # what comes after a gap is read again
    assert threading.active_count() == before


def test_threads_end_with_the_training():
    before = threading.active_count()
    trained(threads=4)
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_a_wrong_number_of_threads(threads):
    with pytest.raises(ow.ArgumentError, match=r"threads is .*; expected a whole number, at least 1"):
        idle().train(reader(), threads=threads)


# ---------------------------------------------------------------------------- what is trained, and how


def test_some_parameters():
    model = ow.Model(network, seed=3)
    before = dict(model.parameters)
    ow.Trainer(model, ow.Adam(0.1), parameter_list=["last/*"]).train(reader())
    moved = {n for n, v in model.parameters.items() if not np.array_equal(v, before[n])}
    assert moved == {"last/w", "last/b"}


def test_some_parameters_by_threads():
    model = ow.Model(network, seed=3)
    before = dict(model.parameters)
    ow.Trainer(model, ow.Adam(0.1), parameter_list=["last/*"]).train(reader(), threads=2)
    moved = {n for n, v in model.parameters.items() if not np.array_equal(v, before[n])}
    assert moved == {"last/w", "last/b"}


def test_a_training_program_in_place_of_an_optimizer():
    model = ow.Model(network, seed=3)
    trainer = ow.Trainer(model, ow.Momentum(0.05, 0.9).minimize(model.topology))
    trainer.train(reader(), epochs=2)
    same(trainer.model.parameters, well_trained().model.parameters)
    with pytest.raises(ow.ArgumentError, match="parameter_list, which that has chosen already"):
        ow.Trainer(model, ow.SGD(0.1).minimize(model.topology), parameter_list=["last/w"])


def test_containers_that_were_traced():
    params = {"hidden/w": X[:4, :3], "hidden/b": np.zeros(3, "float32"), "last/w": X[:3, :1]}
    params["last/b"] = np.zeros(1, "float32")
    trainer = ow.Trainer(ow.Model(ow.trace(loss, params, X, Y), params), ow.SGD(0.1))
    trainer.train(reader(), epochs=2)
    gradient = jax.jit(jax.grad(loss))
    for x, y in [*reader(), *reader()]:
        params = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, gradient(params, x, y))
    same(trainer.model.parameters, params, 1e-5)


class Compilations:
    """Counts what XLA compiles."""

    def __init__(self):
        self.count = 0

    def __call__(self, name, *_, **__):
        self.count += "backend_compile" in name

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self)


def test_nothing_is_compiled_twice():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.05, 0.9))
    trainer.train(uneven(), test=uneven())
    trainer.replace({"learning_rate": 0.0})  # as it is converted for the first time
    with Compilations() as compiled:
        trainer.train(uneven(), epochs=2, test=uneven())
        trainer.replace({"learning_rate": 0.5})
        before = np.asarray(trainer["hidden/w"])
        trainer.update(X[:SIZE], Y[:SIZE])
        assert not np.array_equal(trainer["hidden/w"], before)
    assert compiled.count == 0
    with Compilations() as compiled:
        jax.jit(lambda x: x * 2.5)(X)
    assert compiled.count == 1  # it does count


def test_the_learning_rate_in_the_middle():
    def slower(event):
        if event.kind == "step" and event.step == 2:
            event.trainer.replace({"learning_rate": 1.0})

    trainer = ow.Trainer(ow.Model(counting), ow.SGD(100.0))
    trainer.train([np.ones(1, "float32")] * 4, callbacks=[slower])
    assert float(trainer["w"]) == -202
    with pytest.raises(ow.HyperparameterError):
        trainer.replace({"learning_rate": -1.0})


def test_replaced_parameters_are_trained_on():
    trainer = ow.Trainer(ow.Model(counting), ow.SGD(1.0))
    trainer.replace({"w": 100.0})
    trainer.update(np.ones(1, "float32"))
    assert float(trainer["w"]) == float(trainer.model["w"]) == 99
    trainer.model.replace({"w": 50.0})
    trainer.update(np.ones(1, "float32"))
    assert float(trainer["w"]) == 49


def test_the_state_is_a_copy():
    trainer = ow.Trainer(ow.Model(network, seed=3), ow.Momentum(0.1, 0.9), share=False)
    state = trainer.state
    trainer.update(X, Y)
    assert not state.is_spent
    trainer.take(state)
    assert int(trainer["step"]) == 0


# ---------------------------------------------------------------------------- two lines


def lazy_cost():
    return ow.layer.mse(ow.layer.fc(ow.data("x")), ow.data("y"))


TWO_LINES = {"lazy": lazy_cost, "function": lambda: lambda: network(), "Program": lambda: ow.trace(network)}


@pytest.mark.parametrize("make", TWO_LINES.values(), ids=TWO_LINES)
def test_two_lines(make):
    cost = make()
    ow.optimize(cost, ow.SGD(0.1))
    trainer = ow.train(cost, reader(), epochs=30)
    assert [op.type for op in trainer.program.ops if op.update][-1] == "sgd"
    assert trainer.history["loss"][-1] < 0.1 * trainer.history["loss"][0]
    assert len(trainer.history["loss"]) == 90


def test_two_lines_with_options():
    cost = network
    ow.optimize(cost, ow.SGD(0.1), parameter_list=["last/*"])
    assert [p.name for p, _ in ow.train(cost, reader()).program.gradients] == ["last/w", "last/b"]
    ow.optimize(cost, ow.SGD(0.1))
    assert len(ow.train(cost, reader(), optimizer=ow.Adam(0.1)).program.gradients) == 4


def test_two_lines_with_dicts_and_a_generator():
    cost = lazy_cost()
    dicts = [{"y": y, "x": x} for x, y in reader()]
    assert ow.train(cost, dicts).step == 3
    assert ow.train(lazy_cost(), (pair for pair in reader())).step == 3
    with pytest.raises(ow.ArgumentError, match="read only once"):
        ow.train(lazy_cost(), (pair for pair in reader()), epochs=2)


def test_two_lines_by_default_is_adam():
    trainer = ow.train(lazy_cost(), reader(), test=reader(), threads=2)
    assert [op.type for op in trainer.program.ops if op.update][-1] == "adam"
    assert "test_loss" in trainer.history


# ---------------------------------------------------------------------------- what a person does wrong


def other():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 4)), 1, name="hidden"), ow.data("y", (None, 1)))


WRONG = {
    "no model": (lambda: ow.Trainer(network, ow.SGD(0.1)), "expected a Model: Model"),
    "no optimizer": (
        lambda: ow.Trainer(ow.Model(network), 0.1),
        "expected one such as Adam",
    ),
    "another network": (
        lambda: ow.Trainer(ow.Model(network), ow.SGD(0.1).minimize(ow.trace(other))),
        r"model keeps '.*optimizer.minimize\(model.topology\)",
    ),
    "epochs": (lambda: idle().train(reader(), epochs=1.5), "epochs is .*1.5.*expected a whole number"),
    "less than no epochs": (lambda: idle().train(reader(), epochs=-1), "epochs is .*-1.*at least 0"),
    "nowhere to save": (
        lambda: idle().checkpoint(),
        r"to save to: trainer.checkpoint\('runs/one'\)",
    ),
    "nowhere to restore from": (lambda: idle().restore(), "no folder to restore from"),
    "unknown": (lambda: idle()["last/v"], "keeps nothing named 'last/v'.*last/"),
    "unknown to replace": (lambda: idle().replace({"learningrate": 1.0}), "'learning_rate'"),
    "parameter_list": (lambda: ow.Trainer(ow.Model(network), ow.SGD(0.1), parameter_list=["lost*"]), "lost"),
    "optimize nothing": (lambda: ow.optimize(3), "expected a cost"),
    "optimize with a number": (lambda: ow.optimize(network, 0.1), "expected an optimizer"),
    "train nothing": (lambda: ow.train(3, reader()), "expected a cost"),
    "train on nothing": (lambda: ow.train(network, []), "no batch"),
    "parameters as arguments": (lambda: ow.train(ow.trace(loss, {"hidden/w": X}, X, Y), reader()), "."),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_call(make, message):
    with pytest.raises(ow.OnwardError, match=message):
        make()


def test_threads_clip_the_gradients_as_one_does():
    def clipped(model):
        program = ow.clip_by_global_norm(ow.append_backward(model.topology), 1e-3)
        return ow.append_update(program, ow.SGD(1.0))

    moved = []
    for threads in (1, 2):
        model = ow.Model(counting)
        ow.Trainer(model, clipped(model)).train([np.full(1, 2, "float32")] * 10, threads=threads)
        moved.append(float(model["w"]))
    np.testing.assert_allclose(moved, [-0.01, -0.01], rtol=1e-4)
