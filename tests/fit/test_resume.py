"""Resuming: train(2N) is train(N), another process, train(N), bit for bit; or an error, and no change."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import compiled_once
from tests.torture import training_interrupts, training_kills

import onward as ow
from onward.execute.checkpoint.contents import HISTORY

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
EPOCHS, MIDDLE = 4, 5  # 3 batches in an epoch: the middle of the second


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """The folder of what is compiled."""
    folder = tmp_path_factory.mktemp("cache")
    with compiled_once(folder):
        yield folder


def deep():
    h = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 4)), 6, name="hidden"), name="norm")
    h = ow.layer.dropout(jax.nn.relu(h), 0.5, name="drop")
    return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))


def narrow():
    h = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 4)), 5, name="hidden"), name="norm")
    return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))


def other():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 4)), 1, name="lost"), ow.data("y", (None, 1)))


def decaying(step):
    return 0.1 / (1 + jnp.sqrt(step))


OPTIMIZERS = {
    "SGD, schedule": ow.SGD(decaying),
    "Momentum, Nesterov": ow.Momentum(decaying, 0.9, nesterov=True),
    "Adagrad": ow.Adagrad(0.1),
    "Adam, schedule": ow.Adam(decaying),
    "AdamW, schedules": ow.AdamW(decaying, beta1=lambda n: 0.9 - 0.1 / (n + 1)),
}


def reader():
    return ow.batches((X, Y), 8, shuffle=True, seed=3)


def by_epoch(number):
    """A reader that says nothing about where it stands."""
    order = np.random.default_rng(number).permutation(24)
    return [(X[rows], Y[rows]) for rows in np.split(order, [8, 16])]


def until(step):
    def stop(event):
        if event.kind == "step" and event.step == step:
            raise ow.StopTraining("half way")

    return stop


ADAM, SLOW = ow.Adam(0.01), ow.SGD(0.01)


@cache
def network(make):
    return ow.trace(make)


@cache
def training(make, optimizer, parameter_list):
    return optimizer.minimize(network(make), parameter_list=parameter_list)


def fresh(folder=None, optimizer=None, seed=1, make=deep, parameter_list=None, **options):
    program = training(make, optimizer or ADAM, parameter_list)
    return ow.Trainer(ow.Model(network(make), seed=seed), program, checkpoints=folder, **options)


def stopped(folder, optimizer=None, source=None, step=MIDDLE, make=deep):
    trainer = fresh(folder, optimizer, make=make)
    trainer.train(source or reader(), epochs=EPOCHS, callbacks=[until(step)])
    assert trainer.step == step
    return trainer


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """Copies what a stopped training has saved; returns its trainer, which tests only read."""

    @cache
    def trained(optimizer, source):
        folder = tmp_path_factory.mktemp("half_way")
        return folder, stopped(folder, optimizer, source)

    def copied(folder, optimizer=None, source=None):
        origin, trainer = trained(optimizer, source)
        shutil.copytree(origin, folder, dirs_exist_ok=True)
        return trainer

    return copied


def bits(trainer):
    values = zip(trainer.state.layout.variables, trainer.state.values, strict=True)
    return {v.name: np.asarray(jax.random.key_data(x) if v.name == "key" else x).tobytes() for v, x in values}


@cache
def whole(optimizer=None, source=None, make=deep):
    """What the training ends with that nobody disturbs."""
    trainer = fresh(None, optimizer, make=make)
    trainer.train(source or reader(), epochs=EPOCHS)
    return bits(trainer)


def network_for(name):
    """One optimizer trains the large network, the others a small one."""
    return deep if name == "Adam, schedule" else other


def resume_all(folder):
    """Go on with every optimizer: what the second process does."""
    for name, optimizer in OPTIMIZERS.items():
        trainer = fresh(Path(folder, name), optimizer, seed=9, make=network_for(name))
        trainer.restore()
        trainer.train(reader(), epochs=EPOCHS)


# ---------------------------------------------------------------------------- bit for bit


def test_every_optimizer_in_another_process(tmp_path, compiled):
    for name, optimizer in OPTIMIZERS.items():
        stopped(tmp_path / name, optimizer, make=network_for(name))
    code = f"from tests.fit.test_resume import resume_all; resume_all({str(tmp_path)!r})"
    cached = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30)}
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | cached)
    for name, optimizer in OPTIMIZERS.items():
        make = network_for(name)
        trainer = fresh(tmp_path / name, optimizer, seed=5, make=make)
        report = trainer.restore()
        assert bits(trainer) == whole(optimizer, make=make), name
        assert (trainer.step, report.kept, report.left, report.changed) == (12, (), (), ())


@pytest.mark.parametrize("step", [0, 2, 3, 6, 12], ids="step {}".format)
def test_wherever_it_was_stopped(tmp_path, step):
    trainer = fresh(tmp_path)
    if step:
        trainer = stopped(tmp_path, step=step)
    else:
        trainer.checkpoint()
    again = fresh(tmp_path, seed=7)
    again.restore()
    assert (again.step, again.epoch, again.batch) == (trainer.step, trainer.epoch, trainer.batch)
    again.train(reader(), epochs=EPOCHS)
    assert (again.epoch, again.batch, again.step) == (EPOCHS, 0, 3 * EPOCHS)
    assert bits(again) == whole()


def test_again_and_again(tmp_path):
    for step in (2, 4, 6, 12):
        trainer = fresh(tmp_path, seed=1 if step == 2 else step)
        if step > 2:
            trainer.restore()
        trainer.train(reader(), epochs=EPOCHS, callbacks=[until(step)])
    trainer.train(reader(), epochs=0)
    assert bits(trainer) == whole()


class Grain:
    """An iterator with the spelling of grain, that counts how many batches were read."""

    def __init__(self, epoch, reads):
        self.data, self.next, self.reads = by_epoch(epoch), 0, reads

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 3:
            raise StopIteration
        self.next += 1
        self.reads.append(self.next)
        return self.data[self.next - 1]

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


def test_a_reader_that_says_nothing_is_read_again_and_skipped(half_way, tmp_path):
    half_way(tmp_path, source=by_epoch)
    trainer = fresh(tmp_path, seed=8)
    trainer.restore()
    assert trainer.standing.position is None
    trainer.train(by_epoch, epochs=EPOCHS)
    assert bits(trainer) == whole(source=by_epoch)


def test_a_reader_that_says_where_it_stands_is_not_read_again(tmp_path):
    reads = []
    stopped(tmp_path, source=lambda epoch: Grain(epoch, reads))
    reads.clear()
    trainer = fresh(tmp_path, seed=8)
    trainer.restore()
    assert trainer.standing.position == {"next": 2}
    trainer.train(lambda epoch: Grain(epoch, reads), epochs=EPOCHS)
    assert reads == [3, 1, 2, 3, 1, 2, 3]
    assert bits(trainer) == whole(source=by_epoch)


def test_the_test_after_an_epoch_whose_last_batch_was_saved(tmp_path):
    """The process before ended between the two, and this one makes no step before the test."""
    stopped(ow.Checkpoints(tmp_path), step=3, make=narrow)
    trainer = fresh(ow.Checkpoints(tmp_path), make=narrow)
    trainer.restore()
    trainer.train(reader(), epochs=1, test=reader())
    assert trainer.history["step"].tolist() == [1, 2, 3]
    assert np.isfinite(trainer.history["test_loss"]).tolist() == [False, False, True]


@pytest.mark.parametrize("step", [3, MIDDLE])
def test_the_history_is_that_of_a_training_which_nothing_interrupted(tmp_path, step):
    def trained(trainer, *callbacks):
        trainer.train(reader(), epochs=3, test=[(X, Y)], callbacks=callbacks)
        return trainer.history

    whole = trained(fresh(make=narrow))
    part = trained(fresh(ow.Checkpoints(tmp_path), make=narrow), until(step))
    again = fresh(ow.Checkpoints(tmp_path), seed=2, make=narrow)
    again.restore()
    assert again.history == part
    assert trained(again) == whole


def test_what_was_recorded_after_the_checkpoint_is_dropped_and_older_checkpoints_have_nothing(tmp_path):
    trainer = fresh(make=narrow)
    trainer.train(reader(), epochs=1)
    path, before = trainer.checkpoint(tmp_path), trainer.history.as_dict()
    later = trainer.train(reader(), epochs=1)
    trainer.restore(path)
    assert trainer.history.as_dict() == before
    assert len(later["loss"]) == 6
    found = ow.Checkpoints(tmp_path).load()
    extra = {name: x for name, x in found.extra.items() if name != HISTORY}
    older = dataclasses.replace(found, extra=extra, beside={})
    for used in (fresh(make=narrow), trainer):
        used.restore(older)
        assert (used.step, len(used.history)) == (3, 0)
    trainer.train(reader(), epochs=2)
    assert trainer.history["step"].tolist() == [4, 5, 6]


def test_a_history_that_cannot_be_read_changes_nothing(tmp_path):
    trainer = fresh(make=narrow)
    trainer.train(reader(), epochs=1)
    trainer.checkpoint(tmp_path)
    found = ow.Checkpoints(tmp_path).load()
    again = fresh(seed=2, make=narrow)
    before = again.state.copy()
    with pytest.raises(ow.CheckpointError, match="for step, epoch, loss; expected a row for each name"):
        again.restore(dataclasses.replace(found, beside={}))
    assert again.step == 0
    for name in before:
        np.testing.assert_array_equal(again[name], before[name])


@pytest.mark.parametrize("every", [3, 2, None])
def test_the_last_checkpoint_has_the_test_of_the_last_epoch(tmp_path, every):
    trainer = fresh(ow.Checkpoints(tmp_path, every=every), make=narrow)
    trainer.train(reader(), epochs=2, test=[(X, Y)])
    again = fresh(seed=2, make=narrow)
    again.restore(tmp_path)
    assert again.history == trainer.history
    assert (again.epoch, again.batch) == (2, 0)


def test_a_shorter_reader_is_refused(half_way, tmp_path):
    half_way(tmp_path, source=by_epoch)
    trainer = fresh(tmp_path)
    trainer.restore(strict=False)
    with pytest.raises(ow.ArgumentError, match="yielded 1 batches in epoch 1, and 2 were to be skipped"):
        trainer.train(lambda epoch: by_epoch(epoch)[:1], epochs=EPOCHS)


def test_without_sharing(tmp_path):
    trainer = fresh(tmp_path, share=False)
    trainer.train(reader(), epochs=EPOCHS, callbacks=[until(MIDDLE)])
    again = fresh(tmp_path, seed=2, share=False)
    again.restore()
    again.train(reader(), epochs=EPOCHS)
    assert bits(again) == whole()


def test_threads_lose_no_batch(tmp_path):
    def counting():
        w = ow.parameter("w", (), initializer=ow.initializer.constant(0.0))
        return jnp.sum(ow.data("n", (None,))) * w

    numbers = [np.full(1, n, "float32") for n in range(1, 41)]
    trainer = fresh(tmp_path, ow.SGD(1.0), make=counting)
    trainer.train(numbers, threads=4, callbacks=[until(25)])
    again = fresh(tmp_path, ow.SGD(1.0), make=counting)
    again.restore()
    assert again.batch <= again.step
    again.train(numbers, threads=4)
    lost = float(again["w"]) + sum(range(1, 41))
    assert lost <= 0  # batches after a gap may count twice, none is left out
    assert again.step == int(again["step"]) >= 40


def test_the_same_trainer_may_go_back(tmp_path):
    trainer = fresh()
    trainer.train(reader(), epochs=1)
    path = trainer.checkpoint(tmp_path)
    trainer.train(reader(), epochs=1)
    later = bits(trainer)
    trainer.restore(tmp_path, which=path)
    trainer.train(reader(), epochs=2)  # as many as before, the first one included
    assert (trainer.epoch, bits(trainer)) == (2, later)


# ---------------------------------------------------------------------------- what callbacks remember


class Wandering:
    """A reader whose order comes from a generator that goes on from epoch to epoch; no set_epoch."""

    def __init__(self):
        self.rng, self.before, self.at, self.begin = np.random.default_rng(5), None, 0, 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        self.before = self.rng.bit_generator.state
        order = self.rng.permutation(24)
        for self.at in range(begin + 1, 4):
            yield tuple(a[order[8 * self.at - 8 : 8 * self.at]] for a in (X, Y))

    def state_dict(self):
        return {"before": self.before, "at": self.at}

    def load_state_dict(self, state):
        self.rng.bit_generator.state, self.begin = state["before"], state["at"]


class Diary:
    """A user's callback: remembers what it heard, arrays among it."""

    def __init__(self):
        self.heard, self.sum = [], np.zeros(2)

    def __call__(self, event):
        if event.kind in ("step", "epoch", "test"):
            self.heard.append([str(event.kind), event.epoch, event.batch, event.step])
            self.sum += next(float(x) for x in event.metrics.values())

    def state_dict(self):
        return {"heard": self.heard, "sum": self.sum}

    def load_state_dict(self, state):
        self.heard, self.sum = state["heard"], state["sum"]


def listeners():
    """Callbacks that change the training: by tests, by epochs, by steps; and one that only remembers."""
    return [
        ow.schedule.plateau("loss", rate=0.5, patience=1, threshold=0.3),
        ow.schedule.plateau("test_loss", rate=0.7, patience=1, threshold=0.1),
        ow.EarlyStop("test_loss", patience=2, min_delta=0.8),
        Diary(),
    ]


def listened(trainer, callbacks=None, test=None):
    """Train to the end; what came of it."""
    callbacks = callbacks or listeners()
    trainer.train(Wandering(), epochs=8, test=test or reader(), callbacks=callbacks)
    *_, diary = callbacks
    return trainer.step, diary.heard, diary.sum.tolist(), bits(trainer)


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    """A folder with every checkpoint of a training with callbacks, and what came of it."""
    folder = tmp_path_factory.mktemp("listening")
    trainer = fresh(ow.Checkpoints(folder, every=1, keep=None, best="test_loss"), SLOW, make=other)
    return folder, listened(trainer)


def test_callbacks_and_readers_that_remember_go_on_bit_for_bit(listening):
    folder, expected = listening
    assert 3 < expected[0] < 24, "stopped early"
    assert 0 < float(np.frombuffer(expected[-1]["learning_rate"], "float32")[0]) < 0.01
    trainer, steps = fresh(None, SLOW, make=other, seed=9), []
    for entry in ow.Checkpoints(folder).entries()[:-1]:  # the last one is of the end
        trainer.restore(folder, which=entry.path)
        steps.append(trainer.step)
        assert listened(trainer) == expected, entry.path
    assert {*range(1, expected[0])} <= {*steps}


def test_ctrl_c_wherever_it_comes_owes_each_callback_what_it_has_not_heard(listening, tmp_path):
    _, expected = listening

    def during(kind, step):
        def interrupt(event):
            if (event.kind, event.step) == (kind, step):
                raise KeyboardInterrupt

        return interrupt

    def failing():
        if trainer.step == 6:
            raise KeyboardInterrupt
        return iter(reader())

    moments = [(during(kind, 6), None) for kind in ("step", "epoch", "test", "checkpoint")]
    for i, (interrupt, test) in enumerate([*moments, (until(99), failing)]):
        folder = tmp_path / str(i)
        trainer = fresh(ow.Checkpoints(folder, every=2), SLOW, make=other)
        first, second, *rest = listeners()
        with pytest.raises(KeyboardInterrupt):
            listened(trainer, [first, interrupt, second, *rest], test)
        again = fresh(None, SLOW, make=other, seed=9)
        again.restore(folder)
        assert listened(again) == expected, i


def test_other_callbacks_than_those_of_the_checkpoint_are_told(listening):
    folder, _ = listening
    path = ow.Checkpoints(folder).entries()[3].path
    trainer = fresh(None, SLOW, make=other)
    trainer.restore(folder, which=path)
    with pytest.warns(UserWarning, match="callback") as caught:
        trainer.train(Wandering(), epochs=0, callbacks=[*listeners()[1:], ow.EarlyStop("loss"), until(99)])
    left, new = sorted(str(w.message) for w in caught if "callback" in str(w.message))[::-1]
    assert "what the callback plateau (the 2. of them) remembered, and this training has no such" in left
    assert "The callback EarlyStop (the 2. of them) is not in the checkpoint" in new
    trainer.restore(folder, which=path, strict=True)
    with pytest.raises(ow.CheckpointError, match="this training has no such callback"):
        trainer.train(Wandering(), epochs=0)
    trainer.restore(folder, which=path, strict=False)
    assert trainer.checkpoint(folder / "again")  # the states wait for the callbacks that are to come
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(Wandering(), epochs=0)
    trainer.restore(folder / "again")
    assert listened(trainer)[1] == listening[1][1]


def test_a_callback_with_one_of_both_methods_or_a_state_that_cannot_be_kept(tmp_path):
    class Half(Diary):
        load_state_dict = None

    class Odd(Diary):
        def state_dict(self):
            return {"file": object()}

    class Wrong(Diary):
        def load_state_dict(self, state):
            raise ValueError("no")

    trainer = fresh(ow.Checkpoints(tmp_path, every=2), SLOW, make=other)
    with pytest.raises(ow.ArgumentError, match=r"Half has state_dict and no load_state_dict.*Write both"):
        trainer.train(reader(), callbacks=[Half()])
    with pytest.warns(UserWarning, match="Odd has a state .* does not keep: its state holds a object"):
        trainer.train(reader(), callbacks=[Odd()])
    again = fresh(None, SLOW, make=other)
    assert again.restore(tmp_path).kept == ()
    with pytest.warns(UserWarning, match="The callback Diary is not in the checkpoint"):
        again.train(reader(), callbacks=[Diary()], epochs=0)
    trainer.train(reader(), callbacks=[Wrong()])
    again.restore(tmp_path)
    with pytest.raises(ValueError) as caught:
        again.train(reader(), callbacks=[Wrong()])
    assert "The callback Wrong raised this when it was given its state" in caught.value.__notes__[0]


# ---------------------------------------------------------------------------- another optimizer or network


def restored(folder, optimizer, **options):
    trainer = fresh(folder, optimizer, seed=4, **options)
    with pytest.warns(UserWarning, match="Variables restored") as caught:
        report = trainer.restore()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(report) in str(caught[0].message)
    return trainer, report


def test_from_adam_to_sgd(half_way, tmp_path):
    before = half_way(tmp_path)
    trainer, report = restored(tmp_path, ow.SGD(0.05))
    assert report.kept == ()
    assert {"hidden/w/mean", "hidden/w/variance", "beta1"} <= set(report.left)
    assert report.changed == ("learning_rate",)
    assert "in the checkpoint, not needed here: " in str(report)
    assert "hyperparameters that are as saved, not as given: learning_rate" in str(report)
    assert float(trainer["learning_rate"]) == np.float32(0.01)
    np.testing.assert_array_equal(trainer["hidden/w"], before["hidden/w"])
    trainer.train(reader(), epochs=EPOCHS)
    assert trainer.step == int(trainer["step"]) == 12


def test_from_sgd_to_adam(half_way, tmp_path):
    half_way(tmp_path, SLOW)
    trainer, report = restored(tmp_path, ADAM)
    assert {"hidden/w/mean", "last/b/variance", "epsilon"} <= set(report.kept)
    assert report.left == report.changed == ()
    assert "not in the checkpoint, newly initialized: " in str(report)
    assert " more" in str(report)
    assert not np.any(trainer["hidden/w/mean"])
    trainer.train(reader(), epochs=EPOCHS)


def test_slots_of_another_dtype_begin_anew_and_are_named_once(tmp_path):
    fresh(tmp_path, make=other).checkpoint()
    _, report = restored(tmp_path, ow.Adam(0.01, slot_dtype="bfloat16"), make=other)
    assert set(report.kept) == set(report.left) >= {"lost/w/mean", "lost/w/variance"}
    assert "of another type in the checkpoint, newly initialized: lost/w/mean" in str(report)
    assert "not in the checkpoint" not in str(report)
    assert "not needed here" not in str(report)


def test_from_adam_to_adamw(half_way, tmp_path):
    before = half_way(tmp_path)
    trainer, report = restored(tmp_path, ow.AdamW(0.01, weight_decay=0.1))
    assert report.kept == ("weight_decay",)
    np.testing.assert_array_equal(trainer["hidden/w/mean"], before["hidden/w/mean"])
    assert float(trainer["weight_decay"]) == np.float32(0.1)


def test_from_a_number_to_a_schedule(half_way, tmp_path):
    half_way(tmp_path, SLOW)
    trainer, report = restored(tmp_path, ow.SGD(decaying))
    assert report.left == ("learning_rate",)
    trainer.train(reader(), epochs=EPOCHS)


def test_the_learning_rate_set_in_the_middle_is_kept(tmp_path):
    trainer = stopped(tmp_path, SLOW)
    trainer.replace({"learning_rate": 0.001})
    trainer.checkpoint()
    again = fresh(tmp_path, SLOW, seed=4)
    assert again.restore().changed == ()
    assert float(again["learning_rate"]) == np.float32(0.001)
    other_rate, report = restored(tmp_path, ow.SGD(0.02))
    assert (report.changed, report.differences) == (("learning_rate",), ())
    assert float(other_rate["learning_rate"]) == np.float32(0.001)
    fresh(tmp_path, ow.SGD(0.02)).restore(strict=True)


def test_slots_of_other_parameters_only(tmp_path):
    trainer = fresh(tmp_path, ADAM, parameter_list=("last/*",))
    trainer.train(reader())
    again, report = restored(tmp_path, ADAM)
    assert "hidden/w/mean" in report.kept
    assert "last/w/mean" in report.taken
    assert np.any(again["last/w/mean"])


@pytest.mark.parametrize("make", ["narrow", "other"])
def test_a_network_of_other_parameters_is_refused(half_way, tmp_path, make):
    half_way(tmp_path)
    make = {"narrow": narrow, "other": other}[make]
    trainer = fresh(tmp_path, make=make)
    before = bits(trainer)
    words = r"holds 'norm/mean' as float32\[6\] \(the model has" if make is narrow else r"holds no 'lost/w'"
    with pytest.raises(ow.CheckpointError, match=words):
        trainer.restore()
    assert bits(trainer) == before
    assert (trainer.step, trainer.epoch, trainer.standing.resumed) == (0, 0, False)


# ---------------------------------------------------------------------------- which checkpoint


def test_keep_and_best(tmp_path):
    store = ow.Checkpoints(tmp_path, every=2, keep=1, best="test_loss")
    trainer = fresh(store, ow.SGD(lambda n: jnp.where(n < 6, 0.1, 3.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train(reader(), epochs=4, test=reader(), check=False)
    tests = trainer.history["test_loss"]
    tests = tests[~np.isnan(tests)]
    best = int(np.argmin(tests))
    assert best < 3
    assert [e.step for e in store.entries()] == [3 * (best + 1), 12]
    trainer.restore(which="best")
    assert trainer.epoch == best + 1
    assert trainer.test(reader())["loss"] == pytest.approx(tests[best])
    assert trainer.step == 3 * (best + 1)


def test_a_best_that_nothing_measures(tmp_path):
    trainer = fresh(ow.Checkpoints(tmp_path, every=2, best="accuracy"))
    with pytest.raises(ow.ArgumentError, match="no such number"):
        trainer.train(reader(), epochs=4)
    trainer = fresh(ow.Checkpoints(tmp_path, every=2, best="test_accuracy"))
    with pytest.raises(ow.ArgumentError, match=r"no such number.*test_loss"):
        trainer.train(reader(), epochs=4, test=reader())


def test_metrics_stand_in_the_manifest(tmp_path):
    store = ow.Checkpoints(tmp_path, keep=None)
    trainer = fresh(store)
    trainer.train(reader(), epochs=1, test=reader())
    [entry] = store.entries()
    assert entry.metrics == {
        "loss": trainer.history["loss"][2],
        "test_loss": trainer.history["test_loss"][-1],
    }


def damage(folder, number=-1):
    path = [e.path for e in ow.Checkpoints(folder).entries()][number]
    [file] = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_one_is_refused_and_the_one_before_taken_when_asked(tmp_path):
    trainer = fresh(ow.Checkpoints(tmp_path, every=4))
    trainer.train(reader(), epochs=EPOCHS)
    damage(tmp_path)
    again = fresh(tmp_path, seed=3)
    before = bits(again)
    with pytest.raises(ow.CheckpointError, match="safetensors"):
        again.restore()
    assert bits(again) == before
    with pytest.warns(UserWarning, match="Left out"):
        again.restore(fallback=True)
    assert again.step == 8
    with pytest.warns(UserWarning, match=r"step-12/.*does not count towards what is kept"):
        again.train(reader(), epochs=EPOCHS)
    assert bits(again) == whole()


def test_nothing_to_restore(tmp_path):
    with pytest.raises(ow.CheckpointError, match="holds no checkpoint"):
        fresh(tmp_path).restore()


# ---------------------------------------------------------------------------- two lines


def run(folder, **options):
    store = ow.Checkpoints(folder, every=2, best="loss")
    options |= {"optimizer": ADAM, "epochs": EPOCHS, "seed": 1}
    return ow.train(network(deep), reader(), checkpoints=store, resume=True, **options)


def test_two_lines_resume(tmp_path):
    run(tmp_path, callbacks=[until(MIDDLE)])
    trainer = run(tmp_path)
    assert trainer.history["step"].tolist() == list(range(1, 13))
    assert bits(trainer) == whole()
    written = [e.path for e in ow.Checkpoints(tmp_path).entries()]
    done = run(tmp_path)
    assert (done.step, done.history) == (12, trainer.history)
    assert bits(done) == whole()
    assert [e.path for e in ow.Checkpoints(tmp_path).entries()] == written


def test_two_lines_are_as_strict_as_they_are_told(tmp_path):
    begun(tmp_path, reader())
    again = {"checkpoints": tmp_path, "epochs": 1, "resume": True}
    with pytest.raises(ow.CheckpointError, match=r"Momentum|velocity"):
        ow.train(network(other), reader(), optimizer=ow.Momentum(0.01, 0.9), strict=True, **again)
    with pytest.warns(UserWarning, match="nothing to do") as told:
        ow.train(network(other), reader(), optimizer=ow.Momentum(0.01, 0.9), strict=False, **again)
    assert len(told) == 1


def test_two_lines_fall_back_and_say_so(tmp_path):
    run(tmp_path, callbacks=[until(MIDDLE)])
    damage(tmp_path)
    with (
        pytest.warns(UserWarning, match="does not count towards what is kept"),
        pytest.warns(UserWarning, match="Left out"),
    ):
        trainer = run(tmp_path)
    assert bits(trainer) == whole()


def test_two_lines_that_find_nothing_whole_do_not_begin_anew(tmp_path):
    for step in (1, 2):
        (tmp_path / f"00000{step}-step-{step}").mkdir()  # as a power cut may leave them
    with (
        pytest.warns(UserWarning, match="000002-step-2"),
        pytest.raises(ow.CheckpointError, match="No checkpoint is left"),
    ):
        run(tmp_path)


# ---------------------------------------------------------------------------- another run


def written(folder):
    """What lies in a folder, with the bytes of every file."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def begun(folder, source, **options):
    return ow.train(network(other), source, optimizer=SLOW, checkpoints=folder, **options)


def test_a_script_that_is_run_again_is_refused_before_it_reads(tmp_path):
    store = ow.Checkpoints(tmp_path, every=2)
    begun(store, reader())
    before = written(tmp_path)
    for again in (store, tmp_path):  # a notebook cell has the store of the first time
        with pytest.raises(ow.CheckpointError) as raised:
            begun(again, lambda: pytest.fail("it was read"))
        for words in (
            "2 checkpoints of another run, of steps 2, 3; it began 20",
            "resume=True",
            "another folder",
        ):
            assert words in str(raised.value)
    trainer = fresh(tmp_path, SLOW, make=other)
    with pytest.raises(ow.CheckpointError, match=r"trainer\.restore\(\)"):
        trainer.train(lambda: pytest.fail("it was read"))
    assert trainer.step == 0
    assert written(tmp_path) == before
    resumed = begun(tmp_path, reader(), epochs=2, resume=True)
    assert (resumed.step, resumed.identity) == (6, store.identity)


def test_who_goes_on_without_the_newest_is_refused(tmp_path):
    first = begun(tmp_path, reader())
    begun(tmp_path, reader(), epochs=2, resume=True)
    with pytest.raises(ow.CheckpointError, match="of steps 3, 6"):
        first.train(reader())
    first.restore(tmp_path)
    first.train(reader(), epochs=3)
    assert first.step == 9


def test_one_checkpoint_may_be_added_to_any_folder(tmp_path):
    trainer = begun(tmp_path, reader())
    ow.Model(network(other)).save(tmp_path)
    path = fresh(None, SLOW, make=other).checkpoint(tmp_path)
    assert [e.step for e in ow.Checkpoints(tmp_path).entries()] == [3, 0, 0]
    assert ow.Checkpoints(tmp_path).load(path).identity != trainer.identity


# ---------------------------------------------------------------------------- Ctrl-C


def interrupted(folder, callbacks=(), **options):
    def press(event):
        if event.kind == "step" and event.step == MIDDLE:
            signal.raise_signal(signal.SIGINT)

    trainer = fresh(folder, **options)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.train(reader(), epochs=EPOCHS, callbacks=[*callbacks, press])
    return trainer, getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("share", [True, False])
def test_ctrl_c_saves_and_another_trainer_goes_on(tmp_path, share):
    trainer, notes = interrupted(tmp_path, share=share)
    assert (trainer.step, notes) == (MIDDLE, [])
    again = fresh(tmp_path, seed=6)
    again.restore()
    assert bits(again) == bits(trainer)
    again.train(reader(), epochs=EPOCHS)
    assert bits(again) == whole()


def test_ctrl_c_and_the_same_trainer_goes_on():
    trainer, _ = interrupted(None, share=False)
    trainer.train(reader(), epochs=EPOCHS - 1)  # the rest of this epoch is the first
    assert bits(trainer) == whole()


def test_ctrl_c_with_a_disk_that_fails(tmp_path):
    folder = tmp_path / "checkpoints"

    def fail(event):
        if event.step == 1:
            shutil.rmtree(folder)
            folder.write_text("no folder")

    trainer, notes = interrupted(folder, callbacks=[fail])
    assert trainer.step == MIDDLE
    assert any("No checkpoint was saved: " in note for note in notes)


def test_a_disk_that_fails_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("no folder")
    trainer = fresh(tmp_path / "file" / "checkpoints")
    with pytest.raises(ow.CheckpointError, match="cannot be written to"):
        trainer.train(reader())
    assert trainer.step == 0


# ---------------------------------------------------------------------------- SIGTERM


@pytest.mark.usefixtures("signals_of_a_new_process")
@pytest.mark.parametrize("threads", [1, 2])
def test_sigterm_saves_and_another_trainer_goes_on(tmp_path, capsys, threads):
    def terminate(event):
        if event.kind == "step" and event.step == MIDDLE:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fresh(tmp_path)
    with pytest.raises(SystemExit) as raised:
        trainer.train(reader(), epochs=EPOCHS, callbacks=[terminate], threads=threads)
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert f"onward: SIGTERM: step {trainer.step} is saved in {tmp_path}" in capsys.readouterr().err
    again = fresh(tmp_path, seed=6)
    again.restore()
    assert bits(again) == bits(trainer)
    if threads == 1:
        assert again.step == MIDDLE
        again.train(reader(), epochs=EPOCHS)
        assert bits(again) == whole()


def test_sys_exit_saves_too(tmp_path):
    trainer = fresh(tmp_path, SLOW, make=other)
    with pytest.raises(SystemExit):
        trainer.train(reader(), callbacks=[lambda event: sys.exit() if event.step == 2 else None])
    assert ow.Checkpoints(tmp_path).load().step == 2


@pytest.fixture
def without_cache(monkeypatch):
    """Processes that are interrupted would leave half a compiled program, which others would read."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")


@pytest.mark.usefixtures("without_cache")
def test_random_interrupts_of_a_process():
    for kind in training_interrupts.NAMES:
        for found in training_interrupts.torture(kind, 1, seed=2):
            assert found.split()[:2] == ["kept", "saved"]
    for found in training_interrupts.torture("train", 3, number=signal.SIGTERM):
        assert found.split()[:2] == ["kept", "saved"]


def test_kills_of_a_process(tmp_path, monkeypatch):
    """SIGKILL, then SIGTERM, which has to save the step that was made last."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    steps, differ, values = training_kills.compare(count=2, epochs=24, signals="KILL TERM")
    assert differ == []
    assert len(steps) == 3
    assert values > 10
