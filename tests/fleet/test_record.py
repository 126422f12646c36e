"""The record of a parameter server: after a kill at any line, what was acknowledged is there, and no more."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onward.core.errors import ArgumentError, CheckpointError
from onward.fleet import frame
from onward.fleet import record as module
from onward.fleet.frame import Change
from onward.fleet.record import PART, Store
from onward.fleet.recorded import Record

ROWS, WIDTH = 64, 8


def table(version):
    """What the table is after so many updates; each sets two rows."""
    rows = np.zeros((ROWS, WIDTH), np.float32)
    for v in range(1, version + 1):
        rows[[v % ROWS, v * 7 % ROWS]] = v
    return rows


def whole(version, generation=0):
    arrays = {"table": table(version), "step": np.asarray(version, np.int64)}
    return Record(version, generation, {0: (generation, version), 1: (0, 2 * version)}, arrays)


def change(version, generation=0):
    numbers = np.array([version % ROWS, version * 7 % ROWS])
    rows = {"table": (numbers, np.full((2, WIDTH), version, np.float32))}
    ledger = {0: (generation, version), 1: (0, 2 * version)}
    return Change(version, generation, ledger, {"step": np.asarray(version, np.int64)}, rows)


def assert_same(found, expected):
    assert (found.version, found.generation, found.ledger) == (
        expected.version,
        expected.generation,
        expected.ledger,
    )
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        got = found.arrays[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def logged(folder, last=5):
    store = Store(folder)
    store.write(whole(1))
    for v in range(2, last + 1):
        store.append(change(v))
    return store


# ---------------------------------------------------------------------------- what comes back

ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64": np.array([np.nan, -0.0, np.inf]),
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "float8": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "int4": np.arange(-3, 4).astype(ml_dtypes.int4),
    "int64": np.array([[-1], [2**62]]),
    "uint32": np.array([2**32 - 1], np.uint32),
    "bool": np.array([True, False, True]),
    "big endian": np.arange(3, dtype=">i4"),
    "complex64": np.array([1 + 2j], np.complex64),
    "dates": np.array(["2020-02-29"], "M8[D]"),
    "text": np.array(["ä", "onward"]),
    "scalar": np.asarray(np.float32(3.5)),
    "empty": np.zeros((0, 4), np.float32),
    "transposed": np.arange(6).reshape(2, 3).T,
    "every other": np.arange(9)[::2],
    "näme/with space\n": np.zeros(1),
}


def test_every_dtype_comes_back(tmp_path):
    written = Record(3, 4, {0: (1, 2), 10**12: (0, 5)}, ARRAYS)
    Store(tmp_path).write(written)
    found = Store(tmp_path).read()
    assert_same(found, written)
    assert all(array.flags.writeable and array.flags.owndata for array in found.arrays.values())


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, "f4,i8")], ids=["objects", "fields"])
def test_what_is_no_number_is_refused(tmp_path, array):
    with pytest.raises(ArgumentError, match="a record holds numbers"):
        Store(tmp_path).write(Record(0, 0, {}, {"a": array}))
    assert names(tmp_path) == []


def test_nothing_is_there_at_first(tmp_path):
    store = Store(tmp_path / "not" / "yet")
    assert (store.read(), store.read(3), store.versions()) == (None, None, [])
    with pytest.raises(ArgumentError, match="write"):
        store.append(change(1))
    store.write(Record(0, 0, {}, {}))
    assert_same(store.read(), Record(0, 0, {}, {}))


@pytest.mark.parametrize("fsync", [False, True])
def test_changes_are_made_to_the_record_below_them(tmp_path, fsync, monkeypatch):
    monkeypatch.setattr(module, "STRIDE", 64)  # with fsync the disk begins with what is written meanwhile
    Store(tmp_path, fsync=fsync).write(whole(1))
    for v in range(2, 7):
        Store(tmp_path, fsync=fsync).append(change(v))  # every time a writer that knows nothing
    assert Store(tmp_path).versions() == [1, 2, 3, 4, 5, 6]
    for v in range(1, 7):
        assert_same(Store(tmp_path).read(v), whole(v))
    assert_same(Store(tmp_path).read(), whole(6))
    assert Store(tmp_path).read(7) is None


def test_a_change_adds_to_the_ledger_and_to_the_names(tmp_path):
    store = Store(tmp_path)
    store.write(Record(1, 0, {0: (0, 1), 1: (0, 1)}, {}))
    store.append(Change(1, 1, {1: (1, 0)}, {"new": np.zeros((3, 2))}, {}))
    store.append(Change(2, 1, {}, {}, {"new": (np.array([2, 0]), np.ones((2, 2)))}))
    new = np.array([[1.0, 1], [0, 0], [1, 1]])
    assert_same(store.read(), Record(2, 1, {0: (0, 1), 1: (1, 0)}, {"new": new}))


CHANGES = {
    "older": (Change(4, 0, {}, {}, {}), "version 4 cannot follow version 5"),
    "unknown": (Change(6, 0, {}, {}, {"x": (np.array([0]), np.ones((1, 8)))}), "the rows of 'x'"),
    "dtype": (Change(6, 0, {}, {}, {"table": (np.array([0]), np.ones((1, 8)))}), "<f8"),
    "width": (Change(6, 0, {}, {}, {"table": (np.array([0]), np.ones((1, 7), "f4"))}), r"\[1, 7\]"),
    "count": (Change(6, 0, {}, {}, {"table": (np.array([0, 1]), np.ones((1, 8), "f4"))}), r"\[1, 8\]"),
    "range": (Change(6, 0, {}, {}, {"table": (np.array([64]), np.ones((1, 8), "f4"))}), "64 of 'table'"),
    "negative": (Change(6, 0, {}, {}, {"table": (np.array([-1]), np.ones((1, 8), "f4"))}), "rows -1"),
    "numbers": (Change(6, 0, {}, {}, {"table": (np.array([0.5]), np.ones((1, 8), "f4"))}), "row numbers"),
    "of a scalar": (Change(6, 0, {}, {}, {"step": (np.array([0]), np.ones(1, int))}), "the rows of 'step'"),
}


@pytest.mark.parametrize(("wrong", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_could_not_be_read_is_refused(tmp_path, wrong, words):
    store = logged(tmp_path)
    with pytest.raises(ArgumentError, match=words):
        store.append(wrong)
    store.append(change(6))
    assert_same(store.read(), whole(6))


# ---------------------------------------------------------------------------- what it costs, what stays


def test_a_change_costs_what_it_changes(tmp_path):
    store = Store(tmp_path)
    store.write(Record(0, 0, {}, {"table": np.zeros((10_000, 16), np.float32)}))
    assert 640_000 <= store.bytes_written < 640_500
    cost = {}
    for v, count in enumerate([0, 10, 110], 1):
        before = store.bytes_written
        store.append(Change(v, 0, {}, {}, {"table": (np.arange(count), np.ones((count, 16), np.float32))}))
        cost[count] = store.bytes_written - before
    assert abs((cost[110] - cost[10]) - 100 * (8 + 16 * 4)) < 8
    assert cost[0] < 250
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert store.bytes_written == on_disk


def test_a_log_that_is_long_is_followed_by_a_record(tmp_path):
    store = Store(tmp_path, keep=4)
    store.write(whole(1))
    for v in range(2, 60):
        store.append(change(v))
        if store.is_due:
            store.begin(whole(v))
        assert_same(Store(tmp_path).read(), whole(v))
    assert store.versions() == list(range(1, 60))
    bases = [path for path in tmp_path.iterdir() if path.suffix != ".log"]
    assert len(bases) >= 3
    for base in bases:
        log = base.with_name(base.name + ".log")
        assert not log.exists() or log.stat().st_size <= 3 * base.stat().st_size


def test_a_record_of_another_version_does_not_follow_a_log(tmp_path):
    store = logged(tmp_path, 20)
    with pytest.raises(ArgumentError, match=r"the record is of version 1, the log of 20"):
        store.begin(whole(1))
    assert_same(store.read(), whole(20))


def test_what_is_appended_does_not_wait_for_a_record_that_is_written_meanwhile(tmp_path):
    """It goes on in a log of its own, which is read whether the record comes to its end or not."""
    half, goes_on, waited = threading.Event(), threading.Event(), []

    def reach(edge):
        if edge == "meanwhile":
            half.set()
            waited.append(goes_on.wait(20))

    store = Store(tmp_path, reach=reach)
    store.write(whole(1))
    for v in range(2, 8):
        store.append(change(v))
        if v == 4:
            store.begin(whole(v))
    assert half.wait(20)
    new = ["record-00000002-4", "record-00000002-4.log"]
    assert names(tmp_path) == [PART, "record-00000001-1", "record-00000001-1.log", new[1]]
    killed = shutil.copytree(tmp_path, tmp_path.with_name("killed"))
    for v in range(1, 8):
        assert_same(Store(killed).read(v), whole(v))
    Store(killed).append(change(8))
    assert names(killed) == ["record-00000001-1", "record-00000001-1.log", new[1]]
    assert_same(Store(killed).read(), whole(8))
    goes_on.set()
    assert store.versions() == [1, 2, 3, 4, 5, 6, 7]
    assert waited == [True]
    assert names(tmp_path) == ["record-00000001-1", "record-00000001-1.log", *new]
    for v in range(1, 8):
        assert_same(store.read(v), whole(v))
    (tmp_path / "record-00000001-1.log").unlink()
    assert_same(store.read(), whole(7))


def test_a_log_whose_beginning_is_gone_is_not_left_out_in_silence(tmp_path):
    store = Store(tmp_path)
    store.write(whole(1))
    store.append(change(2))
    store.begin(whole(2))
    store.append(change(3))
    store.settle()
    (tmp_path / "record-00000002-2").unlink()
    log = tmp_path / "record-00000001-1.log"
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match="it goes on from version 2, and what stands before it ends at version 1"
    ):
        store.read()
    os.truncate(tmp_path / "record-00000002-2.log", 0)  # the advice
    assert_same(Store(tmp_path).read(), whole(1))
    Store(tmp_path).append(change(2))
    assert_same(Store(tmp_path).read(), whole(2))


def test_the_newest_stay_with_their_logs(tmp_path):
    store = Store(tmp_path, keep=2)
    for v in (1, 3, 5, 7):
        store.write(whole(v))
        store.append(change(v + 1))
    assert names(tmp_path) == [
        *("record-00000003-5", "record-00000003-5.log"),
        *("record-00000004-7", "record-00000004-7.log"),
    ]
    assert store.versions() == [5, 6, 7, 8]
    with pytest.raises(ArgumentError, match="keep is 0"):
        Store(tmp_path, keep=0)


def test_a_lower_version_ends_the_future(tmp_path):
    store = Store(tmp_path, keep=3)
    for v in (1, 10, 20):
        store.write(whole(v))
        for later in range(v + 1, v + 4):
            store.append(change(later))
    assert store.versions() == [1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23]
    store.write(whole(12, generation=1))
    assert store.versions() == [1, 2, 3, 4, 10, 11, 12]
    assert_same(store.read(), whole(12, generation=1))
    assert_same(store.read(11), whole(11))
    assert store.read(13) is store.read(20) is None
    store.append(change(13, generation=2))
    assert_same(Store(tmp_path).read(), whole(13, generation=2))
    for lost in tmp_path.glob("record-00000004-12*"):  # nor does it come back when its successor is lost
        lost.unlink()
    assert Store(tmp_path).versions() == [1, 2, 3, 4, 10, 11]


def test_a_part_of_a_writer_that_is_no_more_is_swept(tmp_path):
    logged(tmp_path, 2)
    (tmp_path / PART).write_bytes(b"half")
    assert_same(Store(tmp_path).read(), whole(2))
    Store(tmp_path).append(change(3))
    assert PART not in names(tmp_path)
    assert_same(Store(tmp_path).read(), whole(3))


def test_a_given_up_future_does_not_outlive_what_hides_it(tmp_path):
    store = Store(tmp_path, keep=1)
    store.write(whole(20))
    given_up = tmp_path / "record-00000001-20"
    data = given_up.read_bytes()
    store.write(whole(10))
    given_up.write_bytes(data)  # as if killed before it was removed
    given_up.with_name(given_up.name + ".log").mkdir()  # and now it cannot be removed
    store.write(whole(30))
    assert store.versions() == [10, 30]
    assert store.read(20) is None


def test_a_torn_change_is_cut_off_before_a_smaller_one(tmp_path):
    logged(tmp_path / "a", 3)
    store = logged(tmp_path / "b", 2)
    rows = np.arange(ROWS), np.ones((ROWS, WIDTH), np.float32)
    store.append(Change(3, 0, {}, {}, {"table": rows}))
    log = tmp_path / "b" / "record-00000001-1.log"
    log.write_bytes(log.read_bytes()[:-1])
    Store(tmp_path / "b").append(change(3))
    assert log.read_bytes() == (tmp_path / "a" / log.name).read_bytes()


# ---------------------------------------------------------------------------- damage


def test_any_flipped_bit_is_found(tmp_path):
    logged(tmp_path, 3)
    wide = np.random.default_rng(0).integers(
        0, 256, 9000, np.uint8
    )  # two blocks whose sums are checked, and a rest
    Store(tmp_path).append(Change(3, 0, {}, {"wide": wide}, {}))
    assert len(names(tmp_path)) == 2
    for path in list(tmp_path.iterdir()):
        good = path.read_bytes()
        for place in range(0, len(good), 13):
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
                Store(tmp_path).read()
        path.write_bytes(good)
    np.testing.assert_array_equal(Store(tmp_path).read().arrays["wide"], wide)


def test_records_of_before_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "MAGIC", frame.BEFORE)
    monkeypatch.setattr(frame, "_check", zlib.crc32)
    wide = Record(0, 0, {}, {"wide": np.arange(9000)})
    Store(tmp_path).write(wide)
    monkeypatch.undo()
    assert_same(Store(tmp_path).read(), wide)
    Store(tmp_path).append(Change(1, 0, {}, {"wide": np.arange(8999)}, {}))
    assert Store(tmp_path).versions() == [0, 1]


def test_a_record_cut_anywhere_is_damaged_and_a_log_ends_there(tmp_path):
    logged(tmp_path, 3)
    base, log = tmp_path / "record-00000001-1", tmp_path / "record-00000001-1.log"
    good = log.read_bytes()
    for place in range(0, len(good), 17):
        log.write_bytes(good[:place])
        assert_same(Store(tmp_path).read(), whole(1 if place < len(good) // 2 else 2))
    Store(tmp_path).append(change(3))
    assert log.read_bytes() == good
    good = base.read_bytes()
    for place in range(0, len(good), 97):
        base.write_bytes(good[:place])
        for use in (
            Store(tmp_path).read,
            Store(tmp_path).versions,
            lambda: Store(tmp_path).append(change(4)),
        ):
            with pytest.raises(CheckpointError, match=r"Move it and its \.log elsewhere"):
                use()


def test_the_advice_for_a_damaged_log_works(tmp_path):
    logged(tmp_path, 5)
    log = tmp_path / "record-00000001-1.log"
    data = bytearray(log.read_bytes())
    data[len(data) * 5 // 8] ^= 1
    log.write_bytes(data)
    with pytest.raises(CheckpointError, match="Cut it to") as raised:
        Store(tmp_path).read()
    os.truncate(log, int(str(raised.value).split("Cut it to ")[1].split()[0]))
    assert_same(Store(tmp_path).read(), whole(3))


def test_the_advice_for_a_damaged_record_works(tmp_path):
    store = logged(tmp_path, 3)
    store.write(whole(9))
    (tmp_path / "record-00000002-9").write_text("something else, and long enough to be looked at")
    with pytest.raises(CheckpointError, match=r"not written by a Store.*no acknowledged update is lost"):
        Store(tmp_path).read()
    assert_same(Store(tmp_path).read(2), whole(2))
    (tmp_path / "record-00000002-9").rename(tmp_path / "elsewhere")
    assert_same(Store(tmp_path).read(), whole(3))


def test_a_renamed_record_is_not_believed(tmp_path):
    logged(tmp_path, 2)
    for other in ("record-00000001-5", "record-00000002-1"):
        (tmp_path / "record-00000001-1").rename(tmp_path / other)
        with pytest.raises(CheckpointError, match="was renamed"):
            Store(tmp_path).read()
        (tmp_path / other).rename(tmp_path / "record-00000001-1")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Expected a folder of records"):
        Store(tmp_path / "file").read()


# ---------------------------------------------------------------------------- a full disk


class Limit:
    """No file of this process may grow beyond some bytes; the system says so in the middle of a write."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_record_that_does_not_fit(tmp_path):
    store = logged(tmp_path, 3)
    before = names(tmp_path)
    with (
        Limit(1000),
        pytest.raises(CheckpointError, match=r"bytes are free\. Make room for at least \d+ bytes"),
    ):
        store.write(whole(4))
    assert names(tmp_path) == before
    assert_same(store.read(), whole(3))
    store.append(change(4))
    store.write(whole(5))
    assert_same(store.read(), whole(5))


def test_a_change_that_does_not_fit(tmp_path):
    store = logged(tmp_path, 3)
    log = tmp_path / "record-00000001-1.log"
    before = log.read_bytes()
    with (
        Limit(len(before) + 100),
        pytest.raises(CheckpointError, match=r"cannot take .* bytes more: .*too large"),
    ):
        store.append(change(4))
    assert log.read_bytes() == before
    store.append(change(4))
    assert_same(store.read(), whole(4))


@pytest.mark.parametrize("use", [lambda s: s.write(whole(4)), lambda s: s.append(change(4))])
def test_a_full_disk(tmp_path, use):
    def full(edge):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logged(tmp_path, 3)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="No space left on device"):
        use(Store(tmp_path, reach=full))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---------------------------------------------------------------------------- kills


def serve():
    """Another process: for every line on its input a child of it that does a task until it is killed."""
    for line in sys.stdin:
        task, folder, number = line.split()
        if child := os.fork():
            os.waitpid(child, 0)
            print("dead", flush=True)
        else:
            signal.alarm(20)  # nobody may be left to kill it
            os.write(1, f"pid {os.getpid()}\n".encode())  # before its first version, which is not a pid
            TASKS[task](Path(folder), int(number))
            os._exit(0)


def acknowledge(version):
    os.write(1, f"{version}\n".encode())


def killing(number):
    """What a Store calls at half written bytes: it kills at the given one, if any."""
    edges = 0

    def reach(edge):
        nonlocal edges
        edges += 1
        if edges == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def loop(folder, number):
    """Write and append forever, from what is there; killed at the given half written bytes, if any."""
    store = Store(folder, reach=killing(number))
    found = store.read()
    version = found.version if found else 0
    if not found:
        store.write(whole(0))
    while True:
        version += 1
        if version % 10 == 5:
            store.write(whole(version))
        else:
            store.append(change(version))
        acknowledge(version)
        if version % 10 == 8:
            store.begin(whole(version))


def pushed(version):
    """What was sent for an update."""
    sent = {"0": np.full((2, WIDTH), version, np.float32)}
    return Change(version, 0, {0: (0, version), 1: (0, 2 * version)}, sent, {}, ((1, (), ()),))


def replayed(arrays, change):
    """The update of what was sent."""
    v, rows = change.version, arrays["table"].copy()
    rows[[v % ROWS, v * 7 % ROWS]] = change.arrays["0"]
    return {"table": rows, "step": np.asarray(v, np.int64)}


def over(folder, number):
    """Log what is sent, forever, over the logs of before; killed likewise."""
    module.WORTH_KEEPING, module.MOST_UPDATES = 0, 4
    store = Store(folder, reach=killing(number), replay=replayed)
    found = store.read()
    version = found.version if found else 0
    while True:
        if store.takes(64):
            store.append(pushed(version))
        else:
            store.write(whole(version))
        acknowledge(version)
        if store.is_due:
            store.begin(whole(version))
        version += 1


def story(folder, number):
    """Records, changes, and a way back, killed at the given line of the source that runs in it."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace if frame.f_code.co_filename == module.__file__ else None

    sys.settrace(trace)
    threading.settrace(trace)
    store = Store(folder)
    for step, (version, generation, act) in enumerate(STORY):
        act(store, version, generation)
        acknowledge(step)


def a_write(store, version, generation):
    store.write(whole(version, generation))


def an_append(store, version, generation):
    store.append(change(version, generation))


def a_begin(store, version, generation):
    store.begin(whole(version, generation))


STORY = [
    *((1, 0, a_write), (2, 0, an_append), (2, 0, a_begin), (3, 0, an_append), (4, 0, a_write)),
    *((5, 0, an_append), (2, 1, a_write), (3, 2, an_append), (3, 2, a_begin), (4, 2, an_append)),
    *((4, 2, a_begin), (6, 2, a_write)),
]
TASKS = {"loop": loop, "over": over, "story": story}


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def start(server, task, folder, number=0):
    print(task, folder, number, file=server.stdin, flush=True)
    word, pid = server.stdout.readline().split()
    assert word == "pid"
    return int(pid)


def acknowledged(server):
    """What the child acknowledged before it was dead, its last word first."""
    said = iter(server.stdout.readline, "dead\n")
    return [int(word) for word in said][::-1]


@pytest.mark.parametrize("task", ["loop", "over"])
@pytest.mark.parametrize("edge", [False, True], ids=["any moment", "half written"])
def test_killed_in_a_loop(server, tmp_path, edge, task):
    draw, last = random.Random(0), 0
    for _ in range(15):
        pid = start(server, task, tmp_path, draw.randint(2, 30) if edge else 0)
        if not edge:
            time.sleep(draw.uniform(0.003, 0.03))
            os.kill(pid, signal.SIGKILL)
        last = (acknowledged(server) or [last])[0]
        found = Store(tmp_path, replay=replayed).read()
        if found is None:
            assert last == 0
            continue
        assert found.version in (last, last + 1)
        assert_same(found, whole(found.version))
        last = found.version
    assert last > 15


def test_killed_at_any_line(server, tmp_path):
    number, done = 3, False
    while not done:
        folder = tmp_path / str(number)
        start(server, "story", folder, number)
        step = (acknowledged(server) or [-1])[0]
        done = step == len(STORY) - 1
        found = Store(folder).read()
        expected = [STORY[s] for s in (step, step + 1) if 0 <= s < len(STORY)]
        assert found is None or (found.version, found.generation) in [e[:2] for e in expected], number
        assert found is not None or step == -1
        if found is not None:
            assert_same(found, whole(found.version, found.generation))
            assert_history(folder, found)
        number += 43
    assert number > 500


def assert_history(folder, newest):
    """No version of the future that was given up is readable, now or after the next writes."""
    store = Store(folder)
    for later in (newest.version + 1, newest.version + 9):
        assert store.versions()[-1] < later
        for v in store.versions():
            found = store.read(v)
            assert found.generation <= newest.generation
            assert found.arrays["table"].tobytes() == table(v).tobytes()
            assert newest.generation == 0 or v < 2 or found.generation > 0
        store.write(whole(later, newest.generation))
    assert len([n for n in names(folder) if not n.endswith(".log")]) == 2


if __name__ == "__main__":
    serve()
