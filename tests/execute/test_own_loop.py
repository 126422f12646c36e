"""A loop of one's own: Ctrl-C leaves a whole State, checkpoints take it, copies say what to use."""

import copy
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.torture.training_interrupts import speaks

import onward as ow
from onward.execute.line import rescue

pytestmark = pytest.mark.usefixtures("signals_of_a_new_process")
X = np.ones(4, "float32")


@cache
def counting():
    """A Step that adds exactly 1 to every weight, and a State that was never stepped."""
    params = {"w": jnp.zeros(8)}
    step = ow.compile(ow.SGD(1.0).minimize(lambda p, x: -jnp.sum(p["w"]) * jnp.max(x), params, X))
    return step, step.init(params)


def holds(state):
    """The number of steps in a State, which every weight tells alike."""
    (count,) = {*np.asarray(state.parameters["w"]).tolist(), float(state["step"])}
    return count


# ----------------------------------------------------------------------------- Ctrl-C

CHILD = """
import sys, jax.numpy as jnp, numpy as np, onward as ow
from itertools import count
x, params = np.ones(4, "float32"), {"w": jnp.zeros(8)}
step = ow.compile(ow.SGD(1.0).minimize(lambda p, x: -jnp.sum(p["w"]) * jnp.max(x), params, x))
def looped(state):
    while True:
        state, out = step(state, x)
def network():
    w = ow.parameter("w", (8,), initializer=ow.initializer.constant(0.0))
    return -jnp.sum(w) * jnp.mean(ow.data("x", (None,)))
def tell(event):
    if event.kind == "step" and event.step == 2:
        print("running", flush=True)
state, out = step(step.init(params), x)
state, outs = step.run(state, [x] * 4, steps=2)
lengths = count(5)
for kind in sys.argv[1:]:
    try:
        if kind == "train":
            ow.train(network, [x] * 9, optimizer=ow.SGD(1.0), epochs=10**6, callbacks=[tell], progress=False)
        print("running", flush=True)
        if kind == "function":
            looped(state)
        while True:
            if kind == "printed":
                state, out = step(state, x)
            elif kind == "traced":
                state, out = step(state, np.ones(next(lengths), "float32"))
            elif kind == "run-traced":
                state, outs = step.run(state, [np.ones(next(lengths), "float32")] * 4, steps=2)
            else:
                state, outs = step.run(state, [x] * 40, steps=4)
    except KeyboardInterrupt as interrupt:
        found = interrupt.trainer.state if kind == "train" else state
    values = {*np.asarray(found["w"]).tolist(), float(found["step"])}
    print(kind, "kept" if len(values) == 1 else values, flush=True)
"""


@pytest.fixture
def without_cache(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")


def answer(process, errors):
    """Press Ctrl-C, and again where Python says that it has thrown it away: what the process then says."""
    ignored = errors.read_text().count("Exception ignored")
    process.send_signal(signal.SIGINT)
    while not speaks(process.stdout, 0.1):
        if (now := errors.read_text().count("Exception ignored")) > ignored:
            ignored = now
            process.send_signal(signal.SIGINT)
    return process.stdout.readline().split()


@pytest.mark.usefixtures("without_cache")
def test_interrupts_of_a_process_at_random_moments_leave_the_state_whole(tmp_path):
    kinds = 3 * ["printed", "function", "run", "train", "traced", "run-traced"]
    delays, said, errors = np.random.default_rng(0), [], tmp_path / "errors"
    command = [sys.executable, "-c", CHILD, *kinds]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        end = threading.Timer(120, process.kill)
        end.start()
        for kind in kinds:
            assert process.stdout.readline() == "running\n", errors.read_text()
            time.sleep(delays.uniform(0.001, 0.2 if "traced" in kind else 0.03))
            said.append(answer(process, errors))
        assert process.wait(60) == 0
        end.cancel()
    assert said == [[kind, "kept"] for kind in kinds], errors.read_text()


@pytest.fixture
def handler_is_restored():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler_is_restored")
def test_between_the_return_of_a_step_and_the_assignment():
    step, first = counting()
    state = first.copy()

    def returned_and_interrupted(state):
        found = step(state, X)
        signal.raise_signal(signal.SIGINT)
        return found

    for _ in range(3):
        state, _ = step(state, X)
    with pytest.raises(KeyboardInterrupt):
        state, _ = returned_and_interrupted(state)
    assert holds(state) == 4
    state, _ = step(state, X)  # and on it goes, once
    assert holds(state) == 5
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


@contextmanager
def interrupted_in(name, calls):
    """SIGINT at the first call of a function of this name after so many calls of any."""
    left = [calls]

    def watch(frame, event, _):
        if event == "call":
            left[0] -= 1
            if left[0] < 0 and name in (None, frame.f_code.co_name):
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", ["__eq__", "__hash__", None])
@pytest.mark.usefixtures("handler_is_restored")
def test_while_jax_traces_and_compiles_ctrl_c_waits(name):
    step, first = counting()
    state = first.copy()
    for calls in (300, 3000, 12000):
        batch = np.ones(calls + len(str(name)), "float32")
        with pytest.raises(KeyboardInterrupt), interrupted_in(name, calls):
            state, _ = step.run(state, [batch] * 2, steps=2)
        assert holds(state) % 2 == 0


@pytest.mark.usefixtures("handler_is_restored")
def test_a_checkpoint_whose_writing_begins_is_written_before_ctrl_c(tmp_path):
    step, first = counting()
    with (
        pytest.raises(KeyboardInterrupt),
        ow.Checkpoints(tmp_path) as checkpoints,
        interrupted_in("start", 0),
    ):
        checkpoints.save(first, 1)
    assert holds(step.restore(tmp_path)) == 0


@pytest.mark.usefixtures("handler_is_restored")
def test_every_state_that_led_there_is_whole_after_an_interrupt_and_none_without():
    step, first = counting()
    held = first.copy()
    changed = held.replace({"learning_rate": 1.0})  # shares the buffers
    state, _ = step(changed, X)
    state, _ = step(state, X)
    assert [held.is_spent, changed.is_spent] == [True, True]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert [*map(holds, (held, changed, state))] == [2, 2, 2]
    following, _ = step(held, X)
    assert [held.is_spent, state.is_spent, holds(following)] == [True, True, 3]
    with pytest.raises(ow.StateError, match="Go on with the State that the step returned"):
        step(held, X)


@pytest.mark.usefixtures("handler_is_restored")
def test_who_has_a_handler_of_his_own_keeps_it_and_threads_install_none():
    step, first = counting()
    calls = []

    def mine(*call):
        calls.append(call)

    signal.signal(signal.SIGINT, mine)
    state, _ = step(first.copy(), X)
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []
    thread = threading.Thread(target=lambda: found.append(step(state, X)[0]))
    thread.start()
    thread.join(60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (holds(found[0]), calls) == (2, [])


def test_no_state_is_kept_alive():
    step, first = counting()
    held = first.copy()
    state, _ = step(held, X)
    buffer = weakref.ref(state.buffers[0])
    del state
    assert buffer() is None
    rescue()
    assert held.is_spent


# ------------------------------------------------------------------------ checkpoints


def noisy(params, x, key):
    return jnp.mean((x @ params["w"] + jax.random.normal(key, (x.shape[0],)) / 9) ** 2)


@cache
def noisy_step():
    params = {"w": jnp.ones(3)}
    return ow.compile(
        ow.Adam(1e-2).minimize(noisy, params, np.ones((4, 3), "float32"), jax.random.key(0))
    ), params


def reader():
    return ow.batches({"x": np.random.default_rng(0).normal(size=(24, 3)).astype("float32")}, 4, shuffle=True)


def trained(state, batches, key, history, steps, checkpoints=None, stop=None):
    step, _ = noisy_step()
    while int(state["step"]) < steps:
        for batch in batches:
            key, used = jax.random.split(key)
            state, out = step(state, key=used, **batch)
            history.record(step=int(state["step"]), epoch=0, loss=out.loss)
            if int(state["step"]) == stop:
                checkpoints.save(state, stop, reader=batches, key=key, history=history)
                return None
    return state, key, history


def test_an_own_loop_goes_on_bit_for_bit(tmp_path):
    step, params = noisy_step()
    begin = jax.random.key(5)
    whole = trained(step.init(params), reader(), begin, ow.History(), 12)
    with ow.Checkpoints(tmp_path) as checkpoints:
        trained(step.init(params), reader(), begin, ow.History(), 12, checkpoints, stop=8)
    found, batches = ow.Checkpoints(tmp_path).load(), reader()
    again = trained(step.restore(found, reader=batches), batches, found.key, found.history, 12)
    for name in whole[0]:
        np.testing.assert_array_equal(whole[0][name], again[0][name])
    np.testing.assert_array_equal(*(jax.random.key_data(key) for key in (whole[1], again[1])))
    assert whole[2] == again[2]
    assert len(again[2]["loss"]) == 12


def test_a_checkpoint_of_a_state_is_that_of_the_step_or_says_what_is_wrong(tmp_path):
    step, first = counting()
    state, _ = step(first.copy(), X)
    with ow.Checkpoints(tmp_path / "own") as checkpoints:
        path = checkpoints.save(state, 1)
        spent, state = state, step(state, X)[0]
        with pytest.raises(ow.StateError, match="took its buffers over"):
            checkpoints.save(spent, 2)
    for source in (path, checkpoints, tmp_path / "own", str(path), checkpoints.load()):
        assert holds(step.restore(source)) == 1
    with ow.Checkpoints(tmp_path / "less") as less:
        less.save({"w": np.zeros(8, "float32"), "learning_rate": np.float32(1)}, 1)
    with pytest.raises(ow.CheckpointError, match="holds no 'step'"):
        step.restore(less)
    with pytest.raises(ow.ArgumentError, match=r"checkpoints.save\(state, step, reader=reader\)"):
        step.restore(path, reader=reader())


def test_all_that_does_not_fit_is_listed(tmp_path):
    params = {"a": np.ones(3, "float32"), "b": np.ones((), "float32"), "c": np.ones(2, "float32")}
    program = ow.SGD(0.1).minimize(lambda p: sum(jnp.sum(x) for x in p.values()), params)
    step, model = ow.compile(program), ow.Model(program, params)
    arrays = {"a": np.ones(4, "float32"), "c": np.ones(2, "int32"), "x": np.ones(1), "y": np.ones(1)}
    with ow.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(arrays, 1)
    others = (
        r"it holds 'a' as float32\[4\] \(the model has float32\[3\]\), 'c' as int32\[2\] \(the model has "
        r"float32\[2\]\); it holds 'x', 'y', which the model lacks\."
    )
    lacking = rf"holds no 'b' \(float32\[\]\), 'step' \(.*\), 'learning_rate' \(float32\[\]\); {others}"
    with pytest.raises(ow.CheckpointError, match=lacking):
        step.restore(path)
    trainer = ow.Trainer(model, ow.SGD(0.1))
    for target in (model, trainer):
        with pytest.raises(
            ow.CheckpointError, match=rf"holds no 'b' \(float32\[\]\); {others}.*Nothing was ch"
        ):
            target.restore(path)
        np.testing.assert_array_equal(model["a"], params["a"])
    with ow.Checkpoints(tmp_path / "same") as checkpoints:
        path = checkpoints.save({**arrays, "a": params["a"], "b": params["b"]}, 1)
    with pytest.raises(
        ow.CheckpointError, match=r"-1 holds 'c' as int32\[2\] .* lacks\. Nothing was changed"
    ):
        model.restore(path)


WRONG = {
    "a number": ({"arrays": 5}, "given 5; expected the State that a step returned"),
    "a reader": ({"reader": [X]}, "does not tell where it stands; expected state_dict"),
    "a key": ({"key": 5}, r"key= is 5; expected a random key, jax.random.key\(0\)"),
    "a history": ({"history": {}}, r"expected a History: history = onward.History\(\)"),
    "a step": ({"step": "x"}, "step is 'x'; expected a whole number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_things_to_save(tmp_path, name):
    given, message = WRONG[name]
    with pytest.raises(ow.ArgumentError, match=message):
        ow.Checkpoints(tmp_path).save(**({"arrays": counting()[1], "step": 1} | given))


# ------------------------------------------------------------------- copies and pickle


def network():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))


def test_copies_are_copies():
    step, first = counting()
    state, _ = step(first.copy(), X)
    copies = [copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    step(state, X)
    assert [*map(holds, copies)] == [1, 1, 1]
    assert holds(step(copies[2], X)[0]) == 2
    with pytest.raises(ow.StateError, match="Go on with the State"):
        pickle.dumps(state)
    assert copy.deepcopy([step, step.program]) == [step, step.program]
    model = ow.Model(network)
    for made in (copy.copy(model), copy.deepcopy(model)):
        made.replace({"fc_0/b": np.ones(1, "float32")})
    assert model["fc_0/b"].tolist() == [0.0]
    optimizer = ow.Adam(ow.schedule.cosine(1e-3, steps=9), rules=[ow.EMA(0.9)])
    assert pickle.loads(pickle.dumps(optimizer)) == copy.deepcopy(optimizer) == optimizer


def test_what_cannot_be_pickled_says_what_to_use():
    step, _ = counting()
    model = ow.Model(network)
    refused = {
        r"onward.save\(step, path, state\)": step,
        "Make it again where it is needed": step.program,
        r"onward.save\(model, path\)": model,
        r"trainer.checkpoint\(folder\)": ow.Trainer(model, ow.SGD(0.1)),
        r"session.save\(folder\)": ow.Session(step.program),
        r"Evaluator\(model\) is another one": ow.Evaluator(model),
        r"GradientMachine\(model\) is another one": ow.GradientMachine(model),
    }
    for message, value in refused.items():
        with pytest.raises(ow.ArgumentError, match=message):
            pickle.dumps(value)
    for value in list(refused.values())[3:]:
        with pytest.raises(ow.ArgumentError):
            copy.deepcopy(value)


# ------------------------------------------------------------------- what was meant


def examples():
    return ow.batches({"x": np.ones((4, 3), "float32"), "y": np.ones((4, 1), "float32")}, 2)


def test_a_training_that_is_finished_says_so(tmp_path):
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1))
    trainer.train(examples(), epochs=2, progress=False)
    path = trainer.checkpoint(tmp_path)
    again = ow.Trainer(ow.Model(network), ow.SGD(0.1))
    again.restore(path)  # one checkpoint is as good as its folder
    with pytest.warns(UserWarning, match=r"has done 2 epochs, .* Write epochs=3 for one more"):
        again.train(examples(), epochs=2, progress=False)
    assert (again.step, again.epoch) == (4, 2)
    with pytest.raises(ow.CheckpointError, match="is one checkpoint; expected the folder of all of them"):
        ow.Trainer(ow.Model(network), ow.SGD(0.1), checkpoints=path)


@pytest.mark.parametrize("wrong", [5, True, [1]], ids=repr)
def test_what_is_no_folder(wrong, tmp_path):
    model = ow.Model(network)
    trainer = ow.Trainer(model, ow.SGD(0.1))
    calls = {
        "expected a folder, 'runs/one', or Checkpoints": [
            lambda: ow.Trainer(model, ow.SGD(0.1), checkpoints=wrong),
            lambda: ow.Session(checkpoints=wrong),
        ],
        r"expected a folder of checkpoints, restore\('runs/one'\)": [
            lambda: trainer.restore(wrong),
            lambda: model.restore(wrong),
            lambda: ow.Session().restore(wrong),
            lambda: counting()[0].restore(wrong),
        ],
        "expected the path of a folder": [lambda: ow.Checkpoints(wrong), lambda: trainer.checkpoint(wrong)],
        "expected 'latest', 'best', or the path": [lambda: ow.Checkpoints(tmp_path).load(wrong)],
        "expected the path of a file": [lambda: ow.load(wrong), lambda: ow.load_step(wrong)],
    }
    for message, mistakes in calls.items():
        for mistake in mistakes:
            with pytest.raises(ow.ArgumentError, match=message):
                mistake()
