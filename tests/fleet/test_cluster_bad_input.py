"""What can be wrong with a training on trainers and servers: what is said, and that nothing is left."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.hosting import Threads
from tests.fleet.on_threads import WAIT, trained

import onward as ow
from onward.core import extras
from onward.core.traces import Traces
from onward.develop.over_batch.loss import two_batches
from onward.fleet.modes import as_mode
from onward.fleet.train import _sums

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 5)).astype(np.float32), RNG.normal(size=(48, 2)).astype(np.float32)
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 48, 4)]
FIRST = {"w": RNG.normal(size=(5, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
LOCAL = ow.cluster.Local(2)

pytestmark = pytest.mark.usefixtures("short_pauses")


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


FORWARD = ow.trace(loss, FIRST, *BATCHES[0])
PROGRAM = ow.SGD(0.1).minimize(FORWARD)
NUMBERS = itertools.count(2)


def another_every_time(params, x, y):
    return loss(params, x, y) * next(NUMBERS)


class Apart(Traces):
    """What a process knows of the traces of another one: nothing."""

    def found(self, key, trace):
        return trace()


def traced_apart(program):
    """As in processes of their own, each of which traces the function itself."""
    origin = replace(program.recipe.origin, traces=Apart())
    return replace(program, recipe=replace(program.recipe, origin=origin))


def refused(engine, program=PROGRAM, reader=BATCHES, **options):
    """What is said of a training that cannot begin, or go on."""
    options = {"parameters": FIRST, "deadline": 20.0, **options}
    with pytest.raises(ow.OnwardError) as raised:
        ow.cluster.start(program, reader, engine=engine, **options).wait(WAIT)
    assert not any(host.alive for host in engine.hosts)
    with pytest.raises(ow.StateError):
        ow.cluster.snapshot()
    return raised.value


# ---------------------------------------------------------------------------- refused before anything starts

AT_ONCE = {
    "mode": (
        {"mode": "foo"},
        ow.ArgumentError,
        "mode is 'foo'; expected 'sync', 'async', cluster.Bounded(staleness=4) or cluster.Local(every=8).",
    ),
    "trainers": (
        {"trainers": 0},
        ow.ArgumentError,
        "cluster: trainers is 0; expected how many, at least 1.",
    ),
    "servers": (
        {"servers": 1.5},
        ow.ArgumentError,
        "cluster: servers is 1.5; expected how many, at least 1.",
    ),
    "epochs": (
        {"epochs": True},
        ow.ArgumentError,
        "cluster: epochs is True; expected how many, at least 1.",
    ),
    "merge": (
        {"merge": ow.merge.TopK(0.1)},
        ow.ArgumentError,
        "cluster: merge is a TopK; servers know Average() and Sum().",
    ),
    "deadline": (
        {"deadline": 0},
        ow.ArgumentError,
        "cluster: deadline is 0; expected seconds, more than 0.",
    ),
    "durability": (
        {"durability": 0},
        ow.ArgumentError,
        "Durability: every is 0; expected a number of updates, at least 1, or None.",
    ),
    "option": (
        {"trainer": 3},
        ow.ArgumentError,
        "cluster: there is no option 'trainer'. The nearest names are",
    ),
    "parameters": (
        {"parameters": {"w": FIRST["w"]}},
        ow.ArgumentError,
        "is not built as it was when the Program was traced: it lacks 'b'",
    ),
    "shape": (
        {"parameters": {**FIRST, "b": np.zeros(3, np.float32)}},
        ow.ArgumentError,
        "'b' is float32[3]; expected float32[2]",
    ),
    "no parameters": ({"parameters": None}, ow.ArgumentError, "their first values are needed"),
    "iterator": (
        {"reader": iter(BATCHES)},
        ow.ArgumentError,
        "The reader is an iterator, which cannot be sent to several trainers. Pass a function that makes one",
    ),
    "no reader": (
        {"reader": 3},
        ow.ArgumentError,
        "The reader is 3; expected an iterable of batches, or a callable that returns one.",
    ),
    "array": (
        {"reader": X},
        ow.ArgumentError,
        "The reader is an array of shape (48, 5); expected an iterable of batches.",
    ),
    "three arguments": (
        {"reader": lambda a, b, c: BATCHES},
        ow.ArgumentError,
        "The reader takes 3 arguments",
    ),
    "function": (
        {"program": loss},
        ow.ArgumentError,
        "cluster: a function is not a Program; make one: Adam(1e-3).minimize(loss, params, *data).",
    ),
    "no update": (
        {"program": ow.append_backward(FORWARD)},
        ow.GraphError,
        "has 0 updates; split cuts a Program whose last transform is its update",
    ),
    "replicated twice": (
        {"program": ow.replicate(PROGRAM, 2), "devices": 2},
        ow.ArgumentError,
        "is replicated for 2 devices already, and devices is 2. Leave one of the two out.",
    ),
    "no devices": ({"devices": 0}, ow.ArgumentError, "replicate: devices is 0; expected how many"),
    "many servers": (
        {"servers": 9},
        ow.GraphError,
        "7 parameters and parts of such are too few for 9 servers. Take 7.",
    ),
    "no table": ({"lazy": ["w"]}, ow.UnknownNameError, "lazy: 'w' travels whole: dot_general at "),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_refused_before_anything_starts(case):
    options, kind, text = AT_ONCE[case]
    engine = Threads()
    error = refused(engine, **options)
    assert type(error) is kind
    assert text in str(error)
    assert engine.hosts == []


def test_records_of_several_machines_need_a_folder_that_all_reach():
    engine = Threads()
    engine.machines = 2
    assert "Give a folder that all of them reach" in str(refused(engine))
    assert engine.hosts == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ow.cluster.Bounded(-1), "Bounded: staleness is -1; expected a number of steps, at least 0."),
        (lambda: ow.cluster.Local(0), "Local: every is 0; expected a number of steps, at least 1."),
        (
            lambda: ow.cluster.Local(2, "sgd"),
            "Local: outer is 'sgd'; expected an optimizer",
        ),
        (lambda: ow.cluster.Durability("x"), "Durability: every is 'x'; expected a number of updates"),
    ],
)
def test_modes_say_what_they_expect(make, text):
    with pytest.raises(ow.ArgumentError, match=re.escape(text)):
        make()


def test_a_loss_that_is_neither_sum_nor_mean_matters_where_gradients_are_merged(recwarn):
    def weighed(w, x, example_weight):
        return jnp.sum((x @ w) * example_weight) / jnp.sum(example_weight)

    program = ow.SGD(0.1).minimize(weighed, np.ones(3), np.ones((4, 3)), np.ones(4))
    sync, free = (as_mode(word) for word in ("sync", "async"))
    assert not any(
        (
            _sums(program, two_batches(program), None, 1, sync),
            _sums(program, two_batches(program), None, 2, free),
            list(recwarn),
        )
    )
    with pytest.warns(UserWarning, match=r"neither a mean .* over trainers .*merge=Average\(\) says"):
        _sums(program, two_batches(program), None, 2, sync)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda w, x: -jnp.diag(jax.nn.log_softmax((x @ w) @ (x @ w).T)).mean(), "all pairs of examples"),
        (lambda w, x: ((x @ w) * (x @ w)[::-1]).mean(), "runs along the examples"),
        (lambda w, x: ((x @ w - (x @ w).mean(0)) ** 2).mean(), "reads a statistic of the examples"),
    ],
)
def test_examples_that_trainers_miss_are_warned_of_in_rounds(loss, why, recwarn):
    program = ow.SGD(0.1).minimize(loss, np.eye(3, dtype="float32"), np.ones((4, 3), "float32"))
    _sums(program, two_batches(program), None, 2, as_mode("async"))
    _sums(program, two_batches(program), ow.Average(), 2, as_mode("sync"))
    assert not list(recwarn)
    with pytest.warns(UserWarning, match=f"{why}.* each of 2 trainers has only its own.*merge=Average"):
        _sums(program, two_batches(program), None, 2, as_mode("sync"))


CARRIED = {
    "rows": lambda s, x: s + len(x),
    "hits": lambda s, x: s + jnp.sum(x > 0),
    "largest": lambda s, x: jnp.maximum(s, jnp.max(x)),
    "sums": lambda s, x: 0.9 * s + jnp.sum(x),
}


@pytest.mark.parametrize("name", CARRIED)
def test_state_that_is_no_mean_over_trainers_is_warned_of(name):
    x = np.ones((4, 3), "float32")
    first = {"largest": np.float32(0), "sums": np.float32(0)}.get(name, np.int32(0))
    program = ow.SGD(0.1).minimize(
        lambda w, s, x: (jnp.mean(x @ w), CARRIED[name](s, x)), np.ones(3, "float32"), x, state=first
    )
    for mode, kept in (("sync", "their mean"), ("async", "the last one to send")):
        with pytest.warns(UserWarning, match=f"the state 's' .* mean over trainers, and .*{kept}"):
            _sums(program, two_batches(program), None, 2, as_mode(mode))


def test_a_function_of_one_length_is_told_of_in_rounds():
    program = ow.SGD(0.1).minimize(
        lambda w, x: jnp.mean(x.reshape(4, 3) @ w), np.ones(3, "float32"), np.ones((4, 3), "float32")
    )
    with pytest.warns(UserWarning, match="of twice as many examples .* the mean over trainers is taken"):
        _sums(program, two_batches(program), None, 2, as_mode("sync"))
    assert not _sums(program, two_batches(program), None, 2, as_mode("async"))


def test_state_that_servers_have_as_one_device_is_not_warned_of(recwarn):
    def loss(w, s, x):
        key, now = jax.random.split(s["key"])
        kept = jax.random.bernoulli(now, 0.5, x.shape)
        following = {"mean": 0.9 * s["mean"] + 0.1 * x.mean(0), "steps": s["steps"] + 1, "key": key}
        return jnp.mean(jnp.where(kept, x, 0) @ w), following

    state = {"mean": np.zeros(3, "float32"), "steps": np.int32(0), "key": jax.random.key(0)}
    program = ow.SGD(0.1).minimize(loss, np.ones(3, "float32"), np.ones((4, 3), "float32"), state=state)
    for mode in ("sync", "async"):
        _sums(program, two_batches(program), None, 2, as_mode(mode))
    assert not list(recwarn)


def test_without_ray_the_extra_is_named(monkeypatch):
    def absent(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(extras, "import_module", absent)
    with pytest.raises(ow.MissingExtraError, match=r"pip install 'onward\[cluster\]'"):
        ow.cluster.start(PROGRAM, BATCHES, parameters=FIRST)


# ---------------------------------------------------------------------------- refused by servers and trainers


RAISES = object()


def ending(batch, with_what):
    """A reader that goes wrong at a batch."""

    def read():
        for n, good in enumerate(BATCHES):
            if n != batch:
                yield good
            elif with_what is RAISES:
                raise RuntimeError("the disk is gone")
            else:
                yield with_what

    return read


NARROW, EMPTY = (X[:4, :4], Y[:4]), (X[:0], Y[:0])
RAISED = (
    "The reader of trainer {} raised RuntimeError: the disk is gone. The reader raised this in epoch 0 at "
    "batch {}"
)
LATER = {
    "raises": ({"reader": ending(5, RAISES)}, RAISED.format(1, 5)),
    "raises at once": ({"reader": ending(0, RAISES)}, RAISED.format("[01]", 0)),
    "raises, async": ({"reader": ending(5, RAISES), "mode": "async"}, RAISED.format("[01]", 5)),
    "raises, local": ({"reader": ending(5, RAISES), "mode": LOCAL}, RAISED.format("[01]", 5)),
    "nothing": (
        {"reader": ending(2, None)},
        r"Trainer 0, batch 1 \(counted from 0\): The reader yielded a batch of 1 arrays; the network takes 2",
    ),
    "narrow": (
        {"reader": ending(5, NARROW)},
        r"Trainer 1, batch 2 \(counted from 0\): .*got \(4,\) and \(5,\)",
    ),
    "narrow, local": (
        {"reader": ending(5, NARROW), "mode": LOCAL},
        r"Trainer 1, batch 2 \(counted from 0\): .*'x' is float32\[4, 4\]",
    ),
    "one array, local": (
        {"reader": ending(7, X[:4]), "mode": LOCAL},
        r"Trainer 1, batch 3 \(counted from 0\): The reader yielded a batch of",
    ),
    "no examples": (
        {"reader": ending(5, EMPTY)},
        r"Trainer 1, batch 2 \(counted from 0\): 'x' has 0 rows: the batch is empty",
    ),
    "no examples, local": (
        {"reader": ending(7, EMPTY), "mode": LOCAL},
        r"Trainer 1, batch 3 \(counted from 0\): 'x' has 0 rows: the batch is empty",
    ),
    "empty": (
        {"reader": list},
        "The reader of trainer [01] raised ArgumentError: The reader yielded no batch",
    ),
    "no batches": (
        {"reader": lambda: 3},
        "The reader of trainer [01] raised ArgumentError: The reader returned 3; expected an iterable",
    ),
    "one trainer without": (
        {"reader": lambda trainer, trainers: BATCHES[:trainer]},
        "The reader of trainer 0 raised ArgumentError: The reader yielded no batch in epoch 0",
    ),
    "another graph": (
        {
            "program": traced_apart(ow.SGD(0.1).minimize(another_every_time, FIRST, *BATCHES[0])),
            "merge": ow.Average(),  # other numbers at each trace look as if they counted the batch
        },
        "Server 0 makes the graph [0-9a-f]{16} of .*, and here it makes [0-9a-f]",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_refused_by_servers_and_trainers(case):
    options, text = LATER[case]
    error = refused(Threads(), **options)
    assert type(error) is ow.ClusterError
    assert re.search(text, str(error)), error


def test_a_sum_over_no_examples_is_trained_on_where_it_is_asked_for():
    program = ow.SGD(0.1).minimize(ow.trace(lambda w, x: jnp.sum((x @ w) ** 2), FIRST["w"], X[:4]))
    options = {"parameters": FIRST["w"], "trainers": 1, "check": False}
    run = trained(program, [(X[:4],), (X[:0],)], **options)
    assert np.isfinite(run.model["w"]).all()
    assert run.history["loss"][-1] == 0


@pytest.mark.parametrize("mode", ["sync", LOCAL], ids=str)
def test_a_label_out_of_range_is_named_with_trainer_and_batch(mode):
    def network():
        x, label = ow.data("x", (None, 5)), ow.data("label", (None,), "int32")
        return ow.layer.cross_entropy(ow.layer.fc(x, 3), label)

    labels = np.zeros(4, np.int32)
    batches = [{"x": x, "label": labels} for x, _ in BATCHES]
    batches[7] = {"x": X[:4], "label": np.array([0, 1, 3, 0], np.int32)}
    program = ow.SGD(0.1).minimize(ow.trace(network, batch_size=4))
    error = refused(Threads(), program, batches, parameters=None, mode=mode)
    assert re.search(r"Trainer 1, batch 3 \(counted from 0\): .*'label' holds 3 at \[2\]", str(error)), error


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    error = refused(Threads(), folder=tmp_path / "file")
    assert isinstance(error, ow.ClusterError)
    assert "cannot be used for records" in str(error)
