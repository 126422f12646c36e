"""Events, and the callback that ends a training which no longer improves."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.loop.events import EarlyStop, Event, EventKind, StopTraining


def event(kind, step=1, **metrics):
    return Event(EventKind(kind), epoch=0, batch=0, step=step, metrics=metrics, trainer=None)


def stopped_at(stop, values, kind="test"):
    """After how many values the training is stopped; None when it is not."""
    for i, value in enumerate(values, 1):
        try:
            stop(event(kind, **{stop.monitor: value}))
        except StopTraining:
            return i
    return None


def test_kinds_are_words():
    assert [str(k) for k in EventKind] == ["begin", "step", "epoch", "test", "checkpoint", "end"]


def test_an_event_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        event("step").step = 2


def test_stopping_is_no_error():
    assert not issubclass(StopTraining, ow.OnwardError)


CASES = {
    "falls": ({}, [3, 2, 1, 0.5, 0.4], None),
    "stands still": ({}, [1, 1, 1, 1, 1], 4),
    "rises": ({"patience": 2}, [1, 2, 3, 4], 3),
    "recovers in time": ({"patience": 2}, [1, 2, 0.5, 2, 0.4, 2, 3], 7),
    "larger is better": ({"mode": "max", "patience": 1}, [1, 2, 3, 3], 4),
    "too little": ({"min_delta": 0.5, "patience": 2}, [1, 0.9, 0.6], 3),
    "just enough": ({"min_delta": 0.25, "patience": 1}, [1, 0.5, 0.0, 0.0], 4),
    "not a number": ({"patience": 2}, [math.nan, math.nan], 2),
    "not a number at first": ({"patience": 2}, [math.nan, 1, 0.5, 0.4], None),
    "device scalars": ({"patience": 1}, [jnp.float32(1), np.float32(0.5), jnp.float32(0.5)], 3),
}


@pytest.mark.parametrize(("options", "values", "expected"), CASES.values(), ids=CASES)
def test_early_stop(options, values, expected):
    assert stopped_at(EarlyStop(**options), values) == expected
    assert stopped_at(EarlyStop("loss", **options), values, kind="epoch") == expected


def test_the_reason():
    stop = EarlyStop(patience=1)
    stop(event("test", test_loss=0.5))
    with pytest.raises(StopTraining, match=r"^test_loss has not improved on 0\.5 in 1 test$"):
        stop(event("test", test_loss=0.6))


def test_a_metric_in_two_kinds_of_events_counts_once():
    stop = EarlyStop(patience=2)
    stop(event("test", test_loss=0.5))
    stop(event("epoch", test_loss=0.5))
    stop(event("test", test_loss=0.5))
    stop(event("epoch", test_loss=0.5))
    with pytest.raises(StopTraining):
        stop(event("test", test_loss=0.5))


def test_steps_are_not_looked_at():
    assert stopped_at(EarlyStop("loss", patience=1), [1, 2, 3], kind="step") is None


def test_a_new_training_begins_anew_and_a_resumed_one_does_not():
    stop = EarlyStop(patience=2)
    assert stopped_at(stop, [0.1, 0.2]) is None
    resumed = EarlyStop(patience=2)
    resumed.load_state_dict(stop.state_dict())
    resumed(event("begin", step=20))
    assert stopped_at(resumed, [0.2]) == 1
    stop(event("begin", step=0))
    assert stopped_at(stop, [0.5, 0.4, 0.3]) is None


def test_a_training_that_goes_on_after_the_stop_has_patience_again():
    stop = EarlyStop(patience=2)
    assert stopped_at(stop, [1, 1, 1]) == 3
    assert stopped_at(stop, [1, 1]) == 2


def test_a_metric_that_never_appears():
    stop = EarlyStop("tets_loss")
    stop(event("epoch", loss=1.0))
    with pytest.raises(
        ow.ArgumentError, match=r"no metric 'tets_loss'. The nearest names are 'loss', 'test_loss'"
    ):
        stop(event("test", test_loss=1.0))


def test_a_training_without_tests():
    stop = EarlyStop()
    stop(event("epoch", accuracy=1.0))
    with pytest.raises(ow.ArgumentError, match=r"The names are 'accuracy'. No test ran"):
        stop(event("end"))


def test_a_training_that_ends_before_its_first_epoch():
    stop = EarlyStop()
    stop(event("begin", step=0))
    stop(event("end"))


WRONG = {
    "monitor": ({"monitor": 3}, "monitor is 3; expected the name"),
    "patience": ({"patience": 0}, "patience is 0; expected a whole number"),
    "a fraction": ({"patience": 1.5}, "patience is 1.5"),
    "mode": ({"mode": "minimum"}, "mode is 'minimum'; expected 'min'"),
    "min_delta": ({"min_delta": -1.0}, "min_delta is -1.0"),
}


@pytest.mark.parametrize(("options", "words"), WRONG.values(), ids=WRONG)
def test_wrong_options(options, words):
    with pytest.raises(ow.ArgumentError, match=words):
        EarlyStop(**options)


def test_a_metric_of_several_numbers():
    with pytest.raises(
        ow.ArgumentError, match=r"'test_loss' is an array of shape \(2,\); expected one number"
    ):
        EarlyStop()(event("test", test_loss=np.ones(2)))


def test_one_callback_needs_no_list():
    x, kinds = jnp.ones((2, 1)), []
    model = ow.Model(ow.trace(lambda w, x: jnp.mean(x @ w), x[0], x), x[0])
    ow.Trainer(model, ow.SGD(0.1)).train([x], callbacks=lambda event: kinds.append(str(event.kind)))
    assert kinds == ["begin", "step", "epoch", "end"]
    ow.Trainer(model, ow.SGD(0.1)).train([x], callbacks=(kinds.append for _ in range(2)))
    assert len(kinds) == 4 + 2 * 4


@pytest.mark.parametrize("callbacks", [[3], "x", 3, None, ow.EarlyStop, [ow.EarlyStop], {"a": print}])
def test_what_is_no_callback_is_refused_before_anything_is_trained(callbacks):
    w, x = jnp.zeros(2), np.ones((4, 2), "float32")
    trainer = ow.Trainer(ow.Model(ow.trace(lambda w, x: jnp.mean(x @ w), w, x), w), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match=r"callbacks holds .*; expected functions of an Event"):
        trainer.train([(x,)], callbacks=callbacks, progress=False)
    assert trainer.step == 0
