"""What people do wrong: each mistake gets an error that teaches, and changes nothing."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
IDS = np.arange(4, dtype="int32")
LABELS = np.array([0, 1, 0, 1], "int32")
FEED = {"x": X, "ids": IDS, "labels": LABELS}


def network():
    """Five ids, two classes, and a counter of the steps."""
    seen = ow.state("seen", (), "int32")
    ow.assign(seen, seen + 1)
    rows = ow.layer.embedding(ow.data("ids", (None,), "int32"), 5, 3)
    logits = ow.layer.fc(rows + ow.data("x", (None, 3)), 2)
    return ow.layer.cross_entropy(logits, ow.data("labels", (None,), "int32"))


NETWORK = ow.trace(network, batch_size=4)
PROGRAM = ow.SGD(0.1).minimize(NETWORK)


@cache
def compiled(**options):
    return ow.compile(PROGRAM, **options)


class ByStep:
    """A compiled step, fed by name."""

    def __init__(self, **options):
        self.step = compiled(**options)
        self.state = self.step.init()

    def run(self, feed):
        self.state, out = self.step(self.state, **feed)
        return float(out.loss)

    def __getitem__(self, name):
        return self.state[name]


class BySession:
    def __init__(self):
        self.session = ow.Session(PROGRAM)

    def run(self, feed):
        return float(self.session.run(target=PROGRAM, feed=feed, fetch=["loss"])[0])

    def __getitem__(self, name):
        return self.session[name]


class ByTrainer:
    def __init__(self):
        self.trainer = ow.Trainer(ow.Model(NETWORK), PROGRAM)

    def run(self, feed):
        return float(self.trainer.update(**feed).loss)

    def __getitem__(self, name):
        return np.asarray(self.trainer[name])


class ByReader(ByTrainer):
    """A Trainer that reads; its errors name the batch too."""

    def run(self, feed):
        return float(self.trainer.train([feed], progress=False)["loss"][-1])


class ByEvaluator:
    """Evaluates; has nothing to change."""

    def __init__(self):
        self.model = ow.Model(NETWORK)
        self.evaluator = ow.Evaluator(self.model)

    def run(self, feed):
        return float(self.evaluator.forward(**feed).loss)

    def __getitem__(self, name):
        return self.model[name]


WAYS = {
    "Step": ByStep,
    "Session": BySession,
    "Trainer": ByTrainer,
    "reader": ByReader,
    "Evaluator": ByEvaluator,
}


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return WAYS[request.param]()


def values(way):
    return [np.asarray(way[name]).tobytes() for name in ("seen", "fc_0/w", "fc_0/b", "embedding_0/w")]


def wide(value, dtype):
    """An array with one number of its own."""
    array = np.zeros((4, 3) if np.dtype(dtype).kind == "f" else 4, dtype)
    array[-1] = value
    return array


FEEDS = {
    # missing and misspelt: an Evaluator is content with less
    "missing": ({"labels": None}, "was not fed 'labels'; it takes ids, x, labels"),
    "misspelt": ({"labels": None, "lables": LABELS}, "takes no data named 'lables'.*'labels'"),
    "one too many": ({"y": X}, "takes no data named 'y'"),
    # shapes
    "another width": (
        {"x": X[:, :2]},
        r"'x' is float32\[4, 2\].*declared as \[None, 3\] and fed as \[4, 2\]",
    ),
    "too few axes": ({"x": X[0]}, r"'x' is float32\[3\], of 1 axes; expected 2, as in float32"),
    "too many axes": ({"ids": IDS[:, None]}, r"'ids' is int32\[4, 1\], of 2 axes; expected 1"),
    "a number": ({"ids": 3}, r"'ids' is int32\[\], of 0 axes; expected 1"),
    "rows that differ": ({"x": X[:3]}, "batch has 4 rows in 'ids' and 3 in 'x'.*feed equally many rows"),
    # dtypes
    "integers for floats": (
        {"x": X.astype(int)},
        r"'x' is int32\[4, 3\]; expected float32.*x\.astype\('float32'\)",
    ),
    "floats for integers": ({"ids": IDS.astype(float)}, r"'ids' is float32\[4\].*ids\.astype\('int32'\)"),
    "floats in a list for integers": (
        {"ids": [0.0, 1.0, 2.0, 3.0]},
        r"'ids' is float32\[4\]; expected int32",
    ),
    "other integers": ({"ids": IDS.astype("uint8")}, r"'ids' is uint8\[4\].*ids\.astype\('int32'\)"),
    "booleans": ({"x": X > 0}, r"'x' is bool\[4, 3\]; expected float32"),
    "complex numbers": ({"x": X + 1j}, r"'x' is complex64\[4, 3\]; expected float32"),
    "half precision": ({"x": X.astype("float16")}, r"'x' is float16\[4, 3\]; expected float32"),
    # no numbers at all
    "nothing": ({"x": np.array(None)}, "'x' holds None in an array that is none of numbers"),
    "a string": ({"x": "abc"}, "'x' is 'abc'; expected an array float32"),
    "a dict": ({"x": {"a": X}}, r"x is not built as|'x' is a dict of 1; expected an array"),
    "strings": ({"x": np.full((4, 3), "a")}, "'x' holds 'a' in an array.*Encode it as numbers first"),
    "strings in a list": ({"ids": list("abcd")}, "'ids' holds 'a' in an array.*expected int32"),
    "objects": ({"x": np.full((4, 3), None)}, "'x' holds None in an array.*no device can hold"),
    "objects for integers": ({"ids": np.array([None, 1, 2, 3])}, "'ids' holds None in an array"),
    "a ragged list": ({"x": [[1.0, 2.0, 3.0], [1.0]]}, r"'x' is a list of 2 that is not an array.*inhomog"),
    "a ragged list for integers": ({"ids": [[0, 1], [1]]}, "'ids' is a list of 2 that is not an array"),
    "a ragged list of arrays": ({"x": [np.ones(3), np.ones(2)]}, "'x' is a list of 2 that is not an array"),
    "dates": ({"ids": IDS.astype("datetime64[D]")}, "'ids' holds .* in an array that is none of numbers"),
    "a declaration": ({"x": ow.data("x", (None, 3))}, "'x' is a LazyData; expected an array"),
    # what JAX would swallow in silence
    "a masked array": (
        {"x": np.ma.masked_greater(X, 0)},
        r"'x' is a masked array of NumPy, float32\[4, 3\].*Pass x\.filled\(0\)",
    ),
    "masked ids": ({"ids": np.ma.masked_equal(IDS, 2)}, r"'ids' is a masked array of NumPy, int32\[4\]"),
    "masked rows": ({"x": [np.ma.masked_greater(row, 0) for row in X]}, "'x' is a masked array of NumPy"),
    "float64 beyond float32": ({"x": wide(1e300, "f8")}, r"'x' holds .*1e\+300.*which float32 cannot hold"),
    "a list beyond float32": ({"x": [[1e300] * 3] * 4}, "'x' holds .*which float32 cannot hold.*in silence"),
    "Python integers beyond 64 bits": ({"x": [[10**30] * 3] * 4}, "'x' holds an integer of 100 bits"),
    "ids beyond 64 bits": ({"ids": [0, 1, 2, 2**70]}, "'ids' holds an integer of 71 bits.*into range"),
    "one id beyond 64 bits": ({"ids": 2**70}, "'ids' holds an integer of 71 bits"),
    # bounds
    "an id too large": (
        {"ids": wide(5, "i4")},
        r"'ids' holds 5 at \[3\]; embedding ids must lie from 0 to 4",
    ),
    "an id below 0": ({"ids": [0, 1, 2, -1]}, r"'ids' holds -1 at \[3\]; embedding ids must lie"),
    "an id that int32 cannot hold": ({"ids": wide(2**32, "i8")}, r"'ids' holds 4294967296 at \[3\]"),
    "a label too large": (
        {"labels": wide(2, "i4")},
        r"'labels' holds 2 at \[3\]; labels must lie from 0 to 1",
    ),
}
ONLY_TRAINING = {
    "no rows": (
        {"x": X[:0], "ids": IDS[:0], "labels": LABELS[:0]},
        "without rows has no mean|0 rows: the batch is empty",
    ),
}


def refused(way, change, message):
    feed = {name: value for name, value in {**FEED, **change}.items() if value is not None}
    way.run(FEED)
    before = values(way)
    with pytest.raises(ow.ArgumentError, match=message) as caught:
        way.run(feed)
    assert values(way) == before
    assert np.isfinite(way.run(FEED))
    return str(caught.value)


@pytest.mark.parametrize(("change", "message"), FEEDS.values(), ids=FEEDS)
def test_a_feed_that_does_not_fit(way, change, message):
    if isinstance(way, ByEvaluator) and change.keys() == {"labels"} and change["labels"] is None:
        with pytest.raises(ow.UnknownNameError):
            way.run({"x": X, "ids": IDS})
        return
    said = refused(way, change, message)
    assert said.startswith("Batch 0 of epoch ") == isinstance(way, ByReader)


@pytest.mark.parametrize(("change", "message"), ONLY_TRAINING.values(), ids=ONLY_TRAINING)
def test_a_feed_that_cannot_be_trained_on(way, change, message):
    if not isinstance(way, ByEvaluator):
        refused(way, change, message)


FITS = {
    "lists": ({"x": X.tolist(), "ids": IDS.tolist(), "labels": LABELS.tolist()}, 4),
    "whole numbers in a list": ({"x": [[1, 2, 3]] * 4}, 4),
    "64 bits": ({"x": X.astype("f8"), "ids": IDS.astype("i8"), "labels": LABELS.astype("i8")}, 4),
    "arrays on the device": ({name: jnp.asarray(v) for name, v in FEED.items()}, 4),
    "a shorter batch": ({name: v[:2] for name, v in FEED.items()}, 2),
    "one row": ({name: v[:1] for name, v in FEED.items()}, 1),
    "views": ({name: v[::-2] for name, v in FEED.items()}, 2),
    "read only": ({"x": np.broadcast_to(X[0], (4, 3))}, 4),
}


@pytest.mark.parametrize(("change", "rows"), FITS.values(), ids=FITS)
def test_a_feed_that_fits(way, change, rows):
    feed = {**FEED, **change}
    assert len(feed["x"]) == rows
    assert np.isfinite(way.run(feed))


# --------------------------------------------------------------------------- bounds on the host


@pytest.mark.parametrize("name", ["ids", "labels"])
def test_bounds_are_looked_at_on_the_host_unless_that_is_switched_off(name):
    wrong = {**FEED, name: wide(9, "i4")}
    on_device = {**FEED, name: jnp.asarray(wide(9, "i4"))}
    with pytest.raises(ow.ArgumentError, match=f"{name!r} holds 9"):
        ByStep().run(wrong)
    with pytest.raises(ow.ArgumentError, match=f"{name!r} holds 9"):  # a CPU reads them for nothing
        ByStep().run(on_device)
    assert np.isnan(ByStep(check_feeds=False).run(wrong))
    assert np.isnan(ByStep(check_feeds=False).run(on_device))


def test_a_target_of_yes_or_no_on_a_device_that_is_neither():
    """The host refuses it; unchecked, as on an accelerator, the cost is NaN."""
    targets = np.array([0, 1, 2], "int32")
    program = ow.trace(
        lambda w, x, t: ow.layer.binary_cross_entropy(w * x, t), 1.0, np.ones(3, "f4"), targets
    )
    step = ow.compile(program)
    for given in (targets, jnp.asarray(targets)):
        with pytest.raises(ow.ArgumentError, match=r"holds 2 at \[2\]; targets must lie from 0 to 1"):
            step(step.init(1.0), np.ones(3, "f4"), given)
    step = ow.compile(program, check_feeds=False)
    assert np.isnan(step(step.init(1.0), np.ones(3, "f4"), jnp.asarray(targets))[1].loss)
    assert np.isfinite(step(step.init(1.0), np.ones(3, "f4"), jnp.asarray(targets % 2))[1].loss)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ow.batches((x, IDS), 2),
        lambda x: ow.trace(lambda w, x: jnp.sum(w * x), np.ones(3, "f4"), x),
        lambda x: ow.compile(ow.trace(lambda w: jnp.sum(w), X)).init(x),
    ],
)
def test_masked_arrays_are_refused_wherever_they_enter(call):
    with pytest.raises(ow.ArgumentError, match="masked array of NumPy"):
        call(np.ma.masked_greater(X, 0))


def test_a_program_knows_its_bounds():
    assert {v.name: bound for v, bound in PROGRAM.bounds.items()} == {
        "ids": (5, "embedding ids"),
        "labels": (2, "labels"),
    }
    assert ow.prune(PROGRAM, ["embedding_0"]).bounds.keys() == {PROGRAM["ids"]}


# --------------------------------------------------------------------------- arguments of a traced function


def loss(w, x, n):
    return jnp.sum(w * x) * n


ARGUMENTS = {
    "float64 beyond float32": ((np.full(3, 1e300), 2), r"'x' holds .*1e\+300"),
    "an integer beyond int32": (
        (np.ones(3, "f4"), np.int64(2**40)),
        "'n' holds .*1099511627776.*int32 cannot hold",
    ),
    "a Python integer beyond 64 bits": ((np.ones(3, "f4"), 2**63), "'n' holds an integer of 64 bits"),
    "strings": ((np.array(["a", "b", "c"]), 2), "'x' holds 'a'"),
    "another shape": ((np.ones(4, "f4"), 2), r"'x' is float32\[4\] \(traced as float32\[3\]\)"),
    "one too few": ((np.ones(3, "f4"),), r"takes 2 data arguments \(x, n\); 1 were given"),
    "by place and by name": ((np.ones(3, "f4"), 2, {"n": 2}), r"takes 2 data|by place and by name"),
}


@pytest.fixture(scope="module")
def step():
    return ow.compile(ow.SGD(0.1).minimize(loss, np.ones(3, "f4"), np.ones(3, "f4"), 2))


@pytest.mark.parametrize(("data", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_do_not_fit(step, data, message):
    state = step.init(np.ones(3, "f4"))
    with pytest.raises(ow.ArgumentError, match=message):
        step(state, *data)
    state, out = step(state, np.ones(3, "f4"), 2)
    assert float(out.loss) == 6.0


# --------------------------------------------------------------------------- readers


def good():
    return dict(FEED)


def raising():
    yield good()
    yield good()
    raise OSError("the disk is gone")


NAN = {**FEED, "x": wide(np.nan, "f4")}
INFINITE = {**FEED, "x": wide(np.inf, "f8")}
READERS = {
    "empty": ([], 0, "yielded no batch in epoch 0.*reader=lambda: read"),
    "an exhausted iterator": (iter(()), 0, "yielded no batch"),
    "no reader": (None, 0, "The reader is None; expected an iterable of batches"),
    "an array": (X, 0, r"The reader is an array.*batches\(arrays, batch_size=32\)"),
    "one batch": (FEED, 0, "The reader is a dict of 3; expected an iterable of batches"),
    "a callable that returns nothing": (lambda: None, 0, "The reader returned None"),
    "a callable of too much": (lambda a, b: [], 0, "takes 2 arguments.*Bind the others"),
    "one array": ([X], 0, r"Batch 0 of epoch 0 .*a batch of 1 arrays; the network takes 3: ids, x, labels"),
    "too many arrays": (
        [(IDS, X, LABELS, X)],
        0,
        "Batch 0 of epoch 0 .*a batch of 4 arrays; the network takes 3",
    ),
    "nested": ([((IDS, X, LABELS),)], 0, "Batch 0 of epoch 0 .*a batch of 1 arrays"),
    "misspelt": (
        [good(), {**FEED, "lable": X}],
        1,
        "Batch 1 of epoch 0 .*takes no data named 'lable'.*'labels'",
    ),
    "a missing name": ([good(), {"x": X, "ids": IDS}], 1, "Batch 1 of epoch 0 .*was not fed 'labels'"),
    "out of order": ([good(), (X, IDS, LABELS)], 1, "Batch 1 of epoch 0 .*'ids' is float32"),
    "NaN": ([good(), good(), NAN], 2, r"Batch 2 of epoch 0 .*'x' holds nan at \[3, 0\].*check=False"),
    "infinity": ([good(), INFINITE], 1, r"Batch 1 of epoch 0 .*'x' holds inf at \[3, 0\]"),
    "out of bounds": ([good(), {**FEED, "ids": wide(5, "i4")}], 1, "Batch 1 of epoch 0 .*'ids' holds 5"),
}


@pytest.fixture(scope="module")
def trainer_and_beginning(tmp_path_factory):
    """A trainer that compiles once, and where it was saved before its first step."""
    folder = tmp_path_factory.mktemp("beginning")
    trainer = ByTrainer().trainer
    trainer.checkpoint(folder)
    return trainer, folder


@pytest.fixture
def trainer(trainer_and_beginning):
    """A trainer before its first step."""
    trainer, folder = trainer_and_beginning
    trainer.restore(folder)
    assert (trainer.step, trainer.epoch, trainer.batch) == (0, 0, 0)
    return trainer


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("reader", "steps", "message"), READERS.values(), ids=READERS)
def test_a_reader_that_does_not_fit(trainer, reader, steps, message, prefetch):
    with pytest.raises(ow.ArgumentError, match=message):
        trainer.train(reader, prefetch=prefetch)
    assert (trainer.step, trainer.batch, int(trainer["seen"])) == (steps, steps, steps)
    assert np.all(np.isfinite(trainer["fc_0/w"]))
    assert np.isfinite(float(trainer.update(**FEED).loss))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reader_that_raises_in_the_middle_keeps_the_state_before(trainer, threads):
    with pytest.raises(OSError, match="the disk is gone") as caught:
        trainer.train(raising, threads=threads)
    assert "in epoch 0 at batch 2" in " ".join(caught.value.__notes__)
    assert trainer.step == int(trainer["step"]) == 2
    if threads == 1:
        twin = ByTrainer().trainer
        twin.train([good(), good()])
        np.testing.assert_array_equal(trainer["fc_0/w"], twin["fc_0/w"])
    assert np.isfinite(float(trainer.update(**FEED).loss))


def test_a_loss_that_is_no_number_stops_and_names_the_batch(trainer):
    with pytest.raises(ow.ArgumentError, match="'x' holds nan at"):
        ByTrainer().trainer.train([{**FEED, "x": jnp.asarray(NAN["x"])}])
    device = {**FEED, "x": np.full_like(NAN["x"], 3e38)}
    with pytest.raises(
        ow.NonFiniteError, match=r"loss was (nan|inf) at step 3: batch 2 of epoch 0.*trainer\.restore\(\)"
    ):
        trainer.train([good(), good(), device])
    unchecked = ByTrainer().trainer
    assert np.isnan(unchecked.train([good(), NAN], check=False)["loss"][-1])


def test_readers_of_an_evaluator():
    evaluator = ow.Evaluator(ow.Model(NETWORK))
    assert np.isfinite(evaluator.test([good(), good()])["loss"])
    for reader, message in (
        ([], "yielded no batch"),
        ([X], "a batch of 1 arrays; the network takes 3"),
        ([good(), {**FEED, "x": X[:, :2]}], "'x' is float32"),
        (X, "The test reader is an array"),
    ):
        with pytest.raises(ow.ArgumentError, match=message):
            evaluator.test(reader)


# --------------------------------------------------------------------------- one name, two shapes


def test_two_parameters_of_one_name_and_different_shape_show_both_lines():
    def twice():
        x = ow.data("x", (None, 3))
        one = ow.layer.fc(x, 4, name="same")
        return jnp.sum(one) + jnp.sum(ow.layer.fc(x, 5, name="same"))

    with pytest.raises(
        ow.TraceError, match=r"'same/w' is declared twice: as parameter float32\[3, 4\]"
    ) as caught:
        ow.trace(twice)
    assert str(caught.value).count("test_bad_input.py:") == 2
    assert "float32[3, 5]" in str(caught.value)


def test_steps_and_states_of_other_programs():
    def other():
        return jnp.sum(ow.layer.fc(ow.data("x", (None, 3)), 2, name="mine"))

    step, foreign = compiled(), ow.compile(ow.trace(other)).init()
    with pytest.raises(ow.StateError, match=r"This State has no .*'embedding_0/w'.*own init"):
        step(foreign, **FEED)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(foreign))
