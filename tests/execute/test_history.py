"""Metrics kept without waiting for the device."""

import copy
import json
import pickle
from threading import Thread
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.loop import history as module
from onward.execute.loop.history import History


def filled(steps=4):
    history = History()
    for step in range(1, steps + 1):
        history.record(step=step, epoch=(step - 1) // 2, loss=jnp.float32(1.0) / step)
        if step % 2 == 0:
            history.record(step=step, epoch=(step - 1) // 2, test_loss=0.5, test_accuracy=np.float32(0.25))
    return history


def test_columns_have_nan_where_a_record_lacks_the_metric():
    history = filled()
    nan = np.nan
    np.testing.assert_allclose(history["loss"], [1, 1 / 2, nan, 1 / 3, 1 / 4, nan], rtol=1e-6)
    np.testing.assert_array_equal(history["test_loss"], [nan, nan, 0.5, nan, nan, 0.5])
    np.testing.assert_array_equal(history["step"], [1, 2, 2, 3, 4, 4])
    np.testing.assert_array_equal(history["epoch"], [0, 0, 0, 1, 1, 1])
    assert history["loss"].dtype == np.float64


def test_it_is_a_mapping_in_order_of_appearance():
    history = filled()
    assert list(history) == ["step", "epoch", "loss", "test_loss", "test_accuracy"]
    assert len(history) == 5
    assert "loss" in history
    assert "lose" not in history
    assert history.get("lose") is None
    assert {name: column.shape for name, column in history.items()} == dict.fromkeys(history, (6,))


def test_recording_goes_on_after_reading():
    history = filled()
    first = history["loss"]
    history.record(step=5, epoch=2, loss=9.0, late=1)
    assert history["loss"].tolist()[-1] == 9.0
    assert np.isnan(history["late"][:-1]).all()
    assert len(first) == 6


class Promise:
    """A scalar that notes when somebody waits for it."""

    shape = ()
    waited: ClassVar[list[float]] = []

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        Promise.waited.append(self.value)
        return np.array(self.value, dtype)


def test_recording_does_not_wait():
    history, size = History(), 2 * module.WAITING
    Promise.waited.clear()
    for step in range(size - 1):
        history.record(step=step, epoch=0, loss=Promise(float(step)))
    assert Promise.waited == []
    history.record(step=size - 1, epoch=0, loss=Promise(size - 1.0))
    assert Promise.waited == list(range(module.WAITING))  # the older half
    assert history["loss"].tolist() == list(range(size))
    assert Promise.waited == list(range(size))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_transfers_of_every_kind_of_scalar(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    history = History()
    for value in (1, 1.0, True, np.float32(1), np.int64(1), jnp.bfloat16(1), jnp.int32(1), jnp.float32(1)):
        history.record(step=1, epoch=0, loss=value)
    assert history["loss"].tolist() == [1.0] * 8


def test_old_records_leave_the_device(monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3)
    history = filled(20)
    assert len(history._waiting) < 6
    np.testing.assert_allclose(history["loss"][~np.isnan(history["loss"])], 1 / np.arange(1, 21), rtol=1e-6)


def test_an_interrupted_fetch_is_repeated_whole(monkeypatch):
    class Late:
        shape = ()
        calls = 0

        def __float__(self):
            Late.calls += 1
            if Late.calls == 1:
                raise KeyboardInterrupt
            return 7.0

    history = filled()
    history.record(step=5, epoch=2, late=Late())
    with pytest.raises(KeyboardInterrupt):
        history["loss"]
    assert [len(column) for column in history.values()] == [7] * 6
    assert history["late"][-1] == 7.0
    assert history["step"].tolist() == [1, 2, 2, 3, 4, 4, 5]


@pytest.mark.parametrize("value", [np.complex64(1j), jnp.complex64(1)])
def test_a_complex_number_is_refused_when_it_is_recorded(value):
    with pytest.raises(ow.ArgumentError, match=r"'loss' is complex64; expected a real number. Record abs"):
        History().record(step=1, epoch=0, loss=value)


@pytest.mark.parametrize("value", [np.ones(3), jnp.ones((2, 2)), "0.5", None, [1.0]])
def test_what_is_no_scalar(value):
    history = History()
    with pytest.raises(ow.ArgumentError, match=r"History: 'loss' is .*expected one number"):
        history.record(step=1, epoch=0, loss=value)


def test_an_unknown_name():
    with pytest.raises(ow.UnknownNameError, match=r"no 'lose'\. The nearest names are 'loss'"):
        filled()["lose"]


def test_plain_lists_and_back():
    history = filled()
    again = History.from_dict(json.loads(json.dumps(history.as_dict())))
    assert again == history
    assert all(type(x) is float for column in history.as_dict().values() for x in column)
    again.record(step=5, epoch=2, loss=1.0)
    assert again != history
    assert again["test_loss"].shape == (7,)


def test_pickles_and_copies():
    history = filled()
    assert pickle.loads(pickle.dumps(history)) == history
    assert copy.deepcopy(history) == history
    assert history != "history"


def test_columns_of_unequal_length():
    with pytest.raises(ow.ArgumentError, match="'step' has 2 records and 'loss' has 1"):
        History.from_dict({"step": [1, 2], "loss": [0.5]})


@pytest.mark.parametrize("columns", [[1], {"loss": 3}, {"loss": ["a"]}, {"loss": [[1, 2]]}, {"loss": [1j]}])
def test_columns_that_are_not_numbers(columns):
    with pytest.raises(ow.ArgumentError, match=r"History\.from_dict.*expected a (list|real number)"):
        History.from_dict(columns)


def test_repr_is_short():
    assert repr(History()) == "History(0 steps)"
    assert repr(filled(1)) == "History(1 step: loss 1 -> 1)"
    assert (
        repr(filled()) == "History(4 steps: loss 1 -> 0.25, test_loss 0.5 -> 0.5, test_accuracy 0.25 -> 0.25)"
    )
    bare = History()
    bare.record(step=1, epoch=0)
    assert repr(bare) == "History(1 step)"


def test_a_thread_amends_while_another_one_reads():
    history = History()
    amending = Thread(target=lambda: history.amend(test_loss=0.6))

    class Computing:
        """A loss during whose transfer to the host the other thread comes."""

        shape = ()

        def __array__(self, dtype=None, copy=None):
            amending.start()
            amending.join(0.1)
            return np.array(0.5)

    history.record(step=1, epoch=0, loss=Computing())
    assert history["loss"].tolist() == [0.5]
    amending.join()
    assert history["test_loss"].tolist() == [0.6]


def test_a_thread_records_while_another_one_arranges():
    history = History()
    recording = Thread(target=lambda: history.record(step=3, epoch=0))

    class Asked(str):
        """A name that is looked for while the other thread comes."""

        def __hash__(self):
            if recording.ident is None:
                recording.start()
                recording.join(0.05)
            return super().__hash__()

    history.record(step=2, epoch=0)
    history.record(step=1, epoch=0)
    history.arrange(Asked("step"), "epoch")
    recording.join()
    assert history["step"].tolist() == [1, 2, 3]
