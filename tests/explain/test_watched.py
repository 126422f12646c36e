"""What was watched, read back by others: TensorBoard's records byte by byte, pictures, rows for tables."""

import struct
from itertools import pairwise

import numpy as np
import pytest

import onward as ow
from onward.develop.watch.statistics import Statistic
from onward.develop.watch.watch import watch
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchHistory
from onward.explain.style import DARK, LIGHT
from onward.explain.watched.plot import plot_watched
from onward.explain.watched.tensorboard import TensorBoard, to_tensorboard

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def network():
    hidden = ow.layer.fc(ow.data("x", (None, 3)), 4, act="tanh")
    return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))


BASE = ow.Momentum(0.05).minimize(ow.trace(network, batch_size=8))
PROGRAM = watch(
    BASE,
    gradients=True,
    updates="fc_0/w",
    activations="fc_0",
    statistics=["norm", "mean", "ratio", "histogram"],
    bins=6,
    every=3,
)


def trained(program=PROGRAM, epochs=2, **options):
    return ow.train(program, ow.batches((X, Y), 8), epochs=epochs, progress=False, **options)


@pytest.fixture(scope="module")
def history():
    return trained().history


def masked_crc(data):
    """The checksum of a TFRecord: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(folder):
    """The records of the one file in a folder, each with its two checksums looked at."""
    (path,) = folder.iterdir()
    data, place = path.read_bytes(), 0
    while place < len(data):
        head = data[place : place + 8]
        (length,) = struct.unpack("<Q", head)
        body = data[place + 12 : place + 12 + length]
        assert struct.unpack("<I", data[place + 8 : place + 12])[0] == masked_crc(head)
        assert struct.unpack("<I", data[place + 12 + length : place + 16 + length])[0] == masked_crc(body)
        place += 16 + length
        yield body


def fields(message):
    """The fields of a protobuf message: (number, value), values of length-delimited fields as bytes."""
    place = 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            yield number, message[place : place + size]
            place += size


def events(folder):
    """Every (tag, step, value) in a folder: a float, or a histogram as its fields."""
    for record in records(folder):
        event = dict(fields(record))
        for number, entry in fields(event.get(5, b"")):
            assert number == 1
            value = dict(fields(entry))
            step = event.get(2, 0)
            if 5 in value:
                yield value[1].decode(), step, dict(fields(value[5]))
            else:
                yield value[1].decode(), step, struct.unpack("<f", value[2])[0]


def assert_written(folder, history):
    """The files hold what the history does."""
    found = {(tag, step): value for tag, step, value in events(folder)}
    for step, loss in zip(*history.of("loss"), strict=True):
        assert found.pop(("loss", int(step))) == pytest.approx(loss)
    for moment in history.watched:
        for label, told in moment.seen.items():
            for name, value in told.items():
                role, subject = history.watched.subjects[label]
                section = {"value": name, "gradient": f"gradient_{name}", "update": f"update_{name}"}[role]
                written = found.pop((f"{section}/{subject}", moment.step))
                if name != "histogram":
                    assert written == pytest.approx(value)
                    continue
                low, high, count = (struct.unpack("<d", written[i])[0] for i in (1, 2, 3))
                assert (low, high, count) == (value.low, value.high, value.counts.sum())
                np.testing.assert_allclose(np.frombuffer(written[6]), value.edges[1:])
                np.testing.assert_allclose(np.frombuffer(written[7]), value.counts)
    assert not found


def test_a_training_keeps_the_steps_that_were_watched(history):
    watched = history.watched
    assert [m.step for m in watched] == [1, 4, 7]
    assert [m.epoch for m in watched] == [0, 0, 1]
    assert watched.labels[0] == "fc_0"
    assert watched.subjects["grad(fc_0/w)"] == ("gradient", "fc_0/w")
    assert {role for role, _ in watched.subjects.values()} == {"value", "gradient", "update"}
    assert set(watched.statistics) == {"norm", "mean", "ratio", "histogram"}
    steps, values = watched.of("grad(fc_0/w)", "norm")
    assert steps.tolist() == [1, 4, 7]
    assert values.tolist() == [m.seen["grad(fc_0/w)"]["norm"] for m in watched]
    assert "3 steps: 1 to 7" in repr(watched)
    assert watched[-1].step == 7
    assert len(history["loss"]) == 8


def test_the_numbers_are_those_of_a_step_made_by_hand(history):
    model = ow.Model(ow.graph.forward_pass(PROGRAM), seed=0)
    step = ow.compile(BASE, fetch=["grad(fc_0/w)"])
    _, out = step(step.init(model.parameters), X[:8], Y[:8])
    norm = history.watched[0].seen["grad(fc_0/w)"]["norm"]
    assert norm == pytest.approx(np.linalg.norm(out["grad(fc_0/w)"]), rel=1e-5)


def test_rows_for_a_table(history):
    rows = history.watched.rows()
    assert len(rows) == 3 * len(history.watched.labels)
    assert rows[0].keys() == {"step", "epoch", "name", "norm", "mean"}
    assert {row["name"] for row in rows if "ratio" in row} == {"update(fc_0/w)"}


def test_records_that_wait_are_fetched_in_order():
    step = ow.compile(watch(BASE, "fc_0", statistics="mean", every=100))
    state, watched = step.init(), WatchHistory()
    for n in range(1, 450):
        state, out = step(state, X[:8], Y[:8])
        watched.record(out.watched, step=n)
    assert len(watched._waiting) < 400
    assert [m.step for m in watched] == [1, 101, 201, 301, 401]
    with pytest.raises(ow.UnknownNameError, match=r"'fc_1'.*nearest names are 'fc_0'"):
        watched.of("fc_1", "mean")
    with pytest.raises(ow.UnknownNameError, match="has no 'norm' of 'fc_0'"):
        watched.of("fc_0", "norm")


def test_a_checkpoint_is_that_of_the_same_training_without_watch(tmp_path):
    trained(BASE, 1, checkpoints=tmp_path)
    resumed = trained(PROGRAM, 2, checkpoints=tmp_path, resume=True)
    assert [m.step for m in resumed.history.watched] == [7]
    whole = trained(BASE, 2)
    np.testing.assert_allclose(resumed["fc_0/w"], whole["fc_0/w"], rtol=1e-5)
    back = trained(BASE, 3, checkpoints=tmp_path, resume=True)
    assert back.step == 12


def test_threads_train_without_being_watched():
    assert len(trained(PROGRAM, 2, threads=2).history["loss"]) == 8


def test_files_for_tensorboard_hold_what_the_history_does(history, tmp_path):
    to_tensorboard(history, tmp_path)
    assert_written(tmp_path, history)


def test_files_are_written_while_the_training_runs(tmp_path):
    lengths = []

    def look(event):
        lengths.extend(path.stat().st_size for path in tmp_path.iterdir())

    trainer = trained(callbacks=[TensorBoard(tmp_path, every=2), look])
    assert_written(tmp_path, trainer.history)
    assert all(a <= b for a, b in pairwise(lengths))
    assert len(set(lengths)) >= 4


def test_a_statistic_of_several_numbers_is_written_one_by_one(tmp_path):
    both = Statistic("sides", lambda x, over: abs(np.array([1.0, 2.0])) * over.size(x))
    watched = trained(watch(BASE, "fc_0", statistics=both, every=4), 1).history.watched
    to_tensorboard(watched, tmp_path)
    assert list(events(tmp_path)) == [("sides/fc_0/0", 1, 32.0), ("sides/fc_0/1", 1, 64.0)]


def test_there_must_be_something_to_write_and_to_draw(tmp_path):
    for make in (lambda: plot_watched(History()), lambda: to_tensorboard([], tmp_path)):
        with pytest.raises(ow.ArgumentError, match="holds nothing watched"):
            make()
    with pytest.raises(ow.ArgumentError, match=r"Expected trainer\.history"):
        plot_watched(3)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


@pytest.mark.parametrize(("dark", "theme"), [(False, LIGHT), (True, DARK)])
def test_few_things_are_lines_many_a_map(history, dark, theme):
    figure = plot_watched(history, "grad(*)", "norm", dark=dark)
    (axes,) = figure.axes
    assert titles(figure) == ["norm of gradients"]
    assert [line.get_label() for line in axes.lines] == [n for n in history.watched.labels if "grad(" in n]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), history.watched.of("grad(fc_0/w)", "norm")[1])
    assert axes.get_yscale() == "log"
    many = plot_watched(history, statistics=["norm", "histogram"], dark=dark)
    assert titles(many)[:3] == ["norm of fc_0", "norm of gradients", "norm of update(fc_0/w)"]
    assert "histogram of grad(fc_1/b)" in titles(many)
    assert many.get_facecolor()[:3] == pytest.approx(
        tuple(int(theme["page"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    )
    many.savefig("/dev/null", format="svg")


def test_a_pattern_that_matches_nothing_is_told(history):
    with pytest.raises(ow.UnknownNameError, match=r"plot_watched, names: nothing is named 'gradd\(\*\)'"):
        plot_watched(history, "gradd(*)")
    with pytest.raises(ow.UnknownNameError, match=r"'normm'.*'norm'"):
        plot_watched(history, statistics="normm")
