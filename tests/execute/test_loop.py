"""A loop of one's own with the callbacks of a Trainer."""

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow


class WandbRun:
    """The calls of ``wandb.Run`` that are made, as it declares them."""

    def __init__(self):
        self.rows = []

    def log(self, data, step=None, commit=None):
        assert all(type(value) is float for value in data.values())
        self.rows.append((step, data))


class Mlflow:
    """The call of ``mlflow`` that is made, as it declares it."""

    def __init__(self):
        self.rows = []

    def log_metrics(
        self, metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None
    ):
        assert all(type(value) is float for value in metrics.values())
        self.rows.append((step, metrics))


@pytest.fixture(scope="module")
def step():
    program = ow.SGD(0.25).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
    return ow.compile(ow.watch(program, gradients=True, statistics="norm", every=2))


def test_every_step_of_a_run_is_noted(step):
    kinds = []
    state, batches = step.init(jnp.ones(2)), [jnp.ones(2)] * 5
    with ow.Loop([lambda event: kinds.append((str(event.kind), event.epoch, event.batch))]) as loop:
        state, outs = step.run(state, batches)
        loop.step(outs, state, lr=0.25)
        loop.epoch()
        state, out = step(state, batches[0])
        loop.step(out, state, lr=0.125)
        loop.test(test_loss=3.0)
    assert kinds[:2] == [("begin", 0, 0), ("step", 0, 1)]
    assert kinds[5:] == [("step", 0, 5), ("epoch", 0, 5), ("step", 1, 1), ("test", 1, 1), ("end", 1, 1)]
    np.testing.assert_allclose(loop.history["loss"], 2 - np.arange(6) / 2)
    assert loop.history["lr"].tolist() == [0.25] * 5 + [0.125]
    assert loop.history["test_loss"][-1] == 3.0
    assert loop.history.watched.of("grad(w)", "norm")[0].tolist() == [1, 3, 5]
    assert loop.state is state


def test_a_callback_ends_the_block_and_an_error_leaves_it(step):
    with ow.Loop([ow.EarlyStop("loss", patience=1)]) as loop:
        for _ in range(5):
            loop.step(loss=1.0)
            loop.epoch(loss=1.0)
    assert (loop.steps, loop.stopped) == (2, "loss has not improved on 1 in 1 epoch")

    def third(event):
        if event.step == 3:
            raise ow.StopTraining("three")

    with ow.Loop([third]) as loop:
        state, outs = step.run(step.init(jnp.ones(2)), [jnp.ones(2)] * 5)
        loop.step(outs, state)
    assert (loop.steps, loop.stopped, len(loop.history["loss"])) == (5, "three", 5)

    def fails_at_the_end(event):
        if event.kind is ow.typing.EventKind.END:
            raise RuntimeError("of no interest")

    rows = Mlflow()

    def divides():
        with ow.Loop([ow.log_metrics(rows.log_metrics), fails_at_the_end]) as loop:
            loop.step(loss=1.0)
            loop.step(loss=1 / 0)

    with pytest.raises(ZeroDivisionError):
        divides()
    assert rows.rows == [(1, {"loss": 1.0})]
    with pytest.raises(RuntimeError, match="of no interest"), ow.Loop([fails_at_the_end]):
        pass
    with pytest.raises(ow.ArgumentError, match="3 is not a function of an Event"):
        ow.Loop([3])


def test_wrong_steps_and_metrics_are_refused_where_they_are_given(step):
    state, out = step(step.init(jnp.ones(2)), jnp.ones(2))
    loop = ow.Loop()
    loop.step(out)
    wrong = [
        (lambda: ow.Loop(ow.Live()), "callbacks is a Live; expected a list"),
        (lambda: loop.step(0.5), r"is 0.5; expected what the step returned .* loop.step\(loss=0.5\)"),
        (lambda: loop.step((state, out)), "the first argument is"),
        (lambda: loop.step(step=3), "no metric is named 'step'"),
        (lambda: loop.test(epoch=3), "no metric is named 'epoch'"),
        (
            lambda: loop.test(accuracy=np.ones(3)),
            r"'accuracy' is an array of shape \(3,\); expected one number",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(ow.ArgumentError, match=words):
            call()
    assert loop.history["step"][0] == 1


def test_a_test_before_the_first_step_is_at_step_0():
    with ow.Loop() as loop:
        loop.test(accuracy=0.1)
        loop.step(loss=1.0)
    assert loop.history.of("accuracy")[0].tolist() == [0.0]


def test_all_callbacks_hear_of_the_end_and_one_that_ends_it_at_the_beginning_ends_it():
    kinds = []

    def ends(event):
        if event.kind is not ow.typing.EventKind.STEP:
            raise ow.StopTraining(str(event.kind))

    with ow.Loop([ends, lambda event: kinds.append(str(event.kind))]) as loop:
        loop.step(loss=1.0)
        kinds.append("not reached")
    assert (loop.stopped, loop.steps, kinds) == ("begin", 0, ["end"])


def test_rows_that_a_tracker_did_not_take_wait(step):
    rows, is_down = [], [True]

    def write(found, step):
        if is_down[0] and step == 2:
            raise ConnectionError
        rows.append(step)

    with ow.Loop([ow.log_metrics(write, every=3)]) as loop:
        loop.step(loss=1.0)
        loop.step(loss=1.0)
        with pytest.raises(ConnectionError):
            loop.step(loss=1.0)
        is_down[0] = False
    assert rows == [1, 2, 3]


def test_trackers_hear_of_every_step_many_at_once(step):
    run, mlflow = WandbRun(), Mlflow()
    state = step.init(jnp.ones(2))
    with ow.Loop([ow.log_metrics(run.log, every=3), ow.log_metrics(mlflow.log_metrics)]) as loop:
        for _ in range(4):
            state, out = step(state, jnp.ones(2))
            loop.step(out)
        assert (len(run.rows), len(mlflow.rows)) == (3, 0)
        loop.test(test_loss=np.float32(0.5))
    assert run.rows == mlflow.rows
    assert run.rows[3:] == [(4, {"loss": 0.5}), (4, {"test_loss": 0.5})]
    with pytest.raises(ow.ArgumentError, match="log_metrics: every is 0"):
        ow.log_metrics(run.log, every=0)


def test_tensorboard_takes_a_loop_as_its_trainer(step, tmp_path):
    state = step.init(jnp.ones(2))
    with ow.Loop([ow.TensorBoard(tmp_path, every=2)]) as loop:
        for _ in range(3):
            state, out = step(state, jnp.ones(2))
            loop.step(out, state)
    (file,) = tmp_path.iterdir()
    assert b"gradient_norm/w" in file.read_bytes()
