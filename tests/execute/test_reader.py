"""Batches in memory, readers of any kind, and the thread that reads ahead."""

import gc
import json
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.loop import prefetch
from onward.execute.loop.reader import LoopReader, batches, prefetched

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10)


def labels(reader):
    return [batch["y"].tolist() for batch in reader]


def shuffled(**options):
    return batches({"x": X, "y": Y}, 4, shuffle=True, **options)


# ---------------------------------------------------------------- batches


def test_containers_as_given():
    for x, y in batches([X, Y], 4):
        np.testing.assert_array_equal(x[:, 0], 2 * y)
    assert [list(batch) for batch in batches({"x": X, "y": Y}, 5)] == [["x", "y"]] * 2


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_short_last_batch(drop, sizes):
    reader = batches((Y,), 4, drop_last=drop)
    assert [len(y) for (y,) in reader] == sizes
    assert len(reader) == len(sizes)


def test_an_order_is_a_function_of_seed_and_epoch():
    reader = shuffled()
    epochs = [labels(reader) for _ in range(3)]
    assert len({str(e) for e in epochs}) == 3
    assert [sorted(y for batch in e for y in batch) for e in epochs] == [list(range(10))] * 3
    again = shuffled()
    again.set_epoch(2)
    assert labels(again) == epochs[2]
    assert labels(shuffled(seed=1)) != epochs[0]


def test_rows_stay_together():
    for batch in shuffled():
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])


def test_arrays_of_jax_are_read_too():
    ((x,),) = batches([jnp.ones((3, 2))], 4)
    assert isinstance(x, np.ndarray)


def test_without_shuffle_a_batch_is_a_read_only_view():
    for (x,) in batches([X], 4):
        assert np.shares_memory(x, X)
        with pytest.raises(ValueError, match="read-only"):
            x += 1
    assert X.flags.writeable


def test_a_peek_moves_nothing():
    reader = shuffled()
    first = next(iter(reader))["y"].tolist()
    assert labels(reader)[0] == first


@pytest.mark.parametrize("done", range(7))
def test_it_continues_anywhere(done):
    reader = shuffled()
    whole = labels(reader) + labels(reader) + labels(reader)
    reader = shuffled()
    for _ in range(done // 3):
        labels(reader)
    iterator = iter(reader)
    head = [next(iterator) for _ in range(done % 3)]
    position = json.loads(json.dumps(reader.state_dict()))
    assert position == {"epoch": done // 3, "batch": len(head)}
    again = shuffled()
    again.load_state_dict(position)
    assert again.state_dict() == position
    assert (labels(again) + labels(again) + labels(again))[: 9 - done] == whole[done:]


def test_after_the_last_batch_the_rest_of_the_epoch_is_empty():
    reader = shuffled()
    reader.load_state_dict({"epoch": 0, "batch": 3})
    assert labels(reader) == []
    assert reader.state_dict() == {"epoch": 1, "batch": 0}


WRONG = {
    "unequal": (lambda: batches({"x": X, "y": Y[:7]}, 4), "'x' has 10 examples and 'y' has 7"),
    "no examples": (lambda: batches([X[:0]], 4), "'array 0' has no examples"),
    "no arrays": (lambda: batches({}, 4), "no arrays"),
    "one array": (lambda: batches(X, 4), r"several arrays, not an array of shape \(10, 2\)"),
    "lists": (lambda: batches([[1, 2]], 4), "'array 0' is a list of 2; expected an array"),
    "a scalar": (lambda: batches({"x": np.float32(1)}, 4), "'x' is an array of shape"),
    "batch_size": (lambda: batches([X], 0), "batch_size is 0; expected a whole number, at least 1"),
    "a fraction": (lambda: batches([X], 2.5), "batch_size is 2.5"),
    "seed": (lambda: batches([X], 2, seed=-1), "seed is -1"),
    "nothing left": (lambda: batches([X], 16, drop_last=True), "drop_last=True leaves nothing"),
    "position": (lambda: batches([X], 4).load_state_dict({"epoch": 0, "batch": 40}), "b from 0 to 3"),
    "no position": (lambda: batches([X], 4).load_state_dict({"batch": 1}), "of another reader"),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_batches(call, words):
    with pytest.raises(ow.ArgumentError, match=words):
        call()


# ---------------------------------------------------------------- any reader


class Keeper:
    """A reader that offers its position on itself, as torch's stateful loaders do."""

    def __init__(self, state=None):
        self.at, self.state = 0, state

    def __iter__(self):
        begin, self.at = self.at, 0
        for self.at in range(begin + 1, 6):
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "more": self.state}

    def load_state_dict(self, state):
        self.at, self.state = state["at"], state["more"]


class Grain:
    """A reader whose iterator offers its position, in bytes, as grain's does."""

    def __iter__(self):
        return GrainIterator()


class GrainIterator:
    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state.decode())


@pytest.mark.parametrize("make", [Keeper, Grain, lambda: lambda: Keeper(), lambda: lambda epoch: Grain()])
def test_a_reader_that_offers_its_position(make):
    pairs = list(LoopReader(make()).epoch(0))
    assert [batch for batch, _ in pairs] == list(range(5))
    for batch, position in pairs:
        reading = LoopReader(make())
        reading.restore(json.loads(json.dumps(position)))
        assert [b for b, _ in reading.epoch(0)] == list(range(batch + 1, 5))
        assert [b for b, _ in reading.epoch(1)] == list(range(5))


def test_batches_are_told_the_epoch_unless_they_are_restored():
    whole = [labels(batch for batch, _ in LoopReader(shuffled()).epoch(e)) for e in range(3)]
    assert len({str(e) for e in whole}) == 3
    pairs = list(LoopReader(shuffled()).epoch(1))
    reading = LoopReader(shuffled())
    reading.restore(pairs[0][1])
    assert labels(batch for batch, _ in reading.epoch(1)) == whole[1][1:]
    assert labels(batch for batch, _ in reading.epoch(2)) == whole[2]


def test_a_state_of_bytes_arrays_and_numpy_scalars_comes_back():
    state = {"rng": b"\x00\xff", "n": np.int64(3), "list": [b"", {"a": None}], "dict": {"base64": "x"}}
    state |= {"least": [float("inf"), -np.inf], "array": np.float16([[1, 2]])}
    (_, position), *_ = LoopReader(Keeper(state)).epoch(0)
    reader = Keeper()
    reading = LoopReader(reader)
    reading.restore(json.loads(json.dumps(position)))
    next(reading.epoch(0))
    array = reader.state["array"]
    assert reader.state == state | {"array": array}
    assert (array.dtype, array.tolist(), array.flags.writeable) == ("float16", [[1, 2]], True)


def test_a_state_that_is_no_json_is_not_kept():
    with pytest.warns(
        UserWarning, match=r"its state holds an array of shape \(999999,\), which a checkpoint does"
    ):
        pairs = list(LoopReader(Keeper(np.ones(999_999))).epoch(0))
    assert [position for _, position in pairs] == [None] * 5


def test_a_callable_may_take_the_epoch():
    assert list(LoopReader(lambda: [1]).epoch(3)) == [(1, None)]
    assert list(LoopReader(lambda epoch: [epoch]).epoch(3)) == [(3, None)]
    assert list(LoopReader(lambda epoch=7: [epoch]).epoch(3)) == [(7, None)]
    assert list(LoopReader(lambda *a, **k: [a]).epoch(3)) == [((), None)]


def test_skip():
    reading = LoopReader([0, 1, 2])
    assert [batch for batch, _ in reading.epoch(0, skip=2)] == [2]
    assert list(reading.epoch(0, skip=3)) == []
    with pytest.raises(ow.ArgumentError, match="yielded 3 batches in epoch 4, and 5 were to be skipped"):
        list(reading.epoch(4, skip=5))


def test_an_iterator_is_read_once():
    reading = LoopReader(i for i in range(3))
    assert [batch for batch, _ in reading.epoch(0)] == [0, 1, 2]
    with pytest.raises(ow.ArgumentError, match=r"epoch 1 needs a new one. Pass a callable"):
        reading.epoch(1)


def test_length():
    assert LoopReader([1, 2]).length == 2
    assert LoopReader(batches([X], 4)).length == 3
    assert LoopReader(iter([1])).length is None
    reading = LoopReader(lambda: [1, 2, 3])
    assert reading.length is None
    list(reading.epoch(0))
    assert reading.length == 3


EXHAUSTED = iter(())
READERS = {
    "an array": (lambda: LoopReader(X), r"array of shape \(10, 2\).*batches\(arrays, batch_size=32\)"),
    "a dict": (lambda: LoopReader({"x": X}), "a dict of 1"),
    "a number": (lambda: LoopReader(3), "The reader is 3; expected an iterable"),
    "two arguments": (lambda: LoopReader(lambda files, epoch: []), "takes 2 arguments"),
    "a wrong result": (lambda: list(LoopReader(lambda: 3).epoch(0)), "returned 3; expected an iterable"),
    "empty": (lambda: list(LoopReader([]).epoch(0)), "the reader yielded no batch"),
    "exhausted": (
        lambda: list(LoopReader(lambda: EXHAUSTED).epoch(1)),
        "the reader yielded no batch in epoch 1",
    ),
}


@pytest.mark.parametrize(("call", "words"), READERS.values(), ids=READERS)
def test_wrong_readers(call, words):
    with pytest.raises(ow.ArgumentError, match=f"(?i){words}"):
        call()


def test_a_position_for_a_reader_that_has_none():
    reading = LoopReader([1, 2])
    reading.restore({"epoch": 0, "batch": 1})
    with pytest.raises(ow.ArgumentError, match=r'\{"epoch": 0, "batch": 1\}.*no load_state_dict'):
        next(reading.epoch(0))


def broken():
    yield 0
    yield 1
    raise OSError("the disk is gone")


def test_an_error_of_the_reader_bears_a_note():
    found = []
    with pytest.raises(OSError, match="the disk is gone") as raised:
        found.extend(LoopReader(broken).epoch(5))
    assert raised.value.__notes__ == ["The reader raised this in epoch 5 at batch 2 (both from 0)."]


def test_an_error_of_the_loop_bears_none():
    iterator = LoopReader(broken).epoch(0)
    next(iterator)
    with pytest.raises(ValueError, match="mine") as raised:
        iterator.throw(ValueError("mine"))
    assert not hasattr(raised.value, "__notes__")


# ---------------------------------------------------------------- reading ahead


def threads():
    return [t for t in threading.enumerate() if t.name == "onward-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


def endless(read=None):
    i = 0
    while True:
        if read is not None:
            read.put(i)
        yield i
        i += 1


def test_whoever_waits_for_a_slow_reader_looks_around_meanwhile(monkeypatch):
    monkeypatch.setattr(prefetch, "MOMENT", 0.01)
    may_go_on, calls = threading.Event(), []

    def slow():
        yield 1
        may_go_on.wait(10.0)
        yield 2

    def meanwhile():
        calls.append("looked")
        may_go_on.set()

    assert list(prefetched(slow(), 2, lambda x: x, meanwhile)) == [1, 2]
    assert calls


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_order_is_kept(size):
    assert list(prefetched(iter(range(50)), size, lambda x: x * x)) == [x * x for x in range(50)]


def test_it_reads_so_many_ahead_and_no_more():
    read = SimpleQueue()
    iterator = prefetched(endless(read), 3, lambda x: x)
    assert next(iterator) == 0
    assert [read.get(timeout=10) for _ in range(4)] == [0, 1, 2, 3]  # one was taken, three are ready
    assert read.empty()
    iterator.close()
    assert read.empty()


def test_without_a_thread_nothing_is_read_ahead():
    read = SimpleQueue()
    iterator = prefetched(endless(read), 0, lambda x: x)
    assert next(iterator) == 0
    assert read.qsize() == 1
    assert threads() == []
    iterator.close()


@pytest.mark.parametrize("size", [0, 2])
def test_an_error_comes_where_it_happened(size):
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(prefetched(broken(), size, lambda x: x))
    assert found == [0, 1]
    found.clear()
    with pytest.raises(ZeroDivisionError):
        found.extend(prefetched(iter([2, 1, 0, 1]), size, lambda x: 2 // x))
    assert found == [1, 2]


def left_by_break():
    for item in prefetched(endless(), 2, lambda x: x):
        if item == 3:
            break


def left_by_close():
    iterator = prefetched(endless(), 2, lambda x: x)
    next(iterator)
    iterator.close()


def left_by_an_error():
    with suppress(ValueError):
        for _ in prefetched(endless(), 2, lambda x: x):
            raise ValueError


def left_by_an_interrupt():
    iterator = prefetched(endless(), 2, lambda x: x)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        iterator.throw(KeyboardInterrupt())


def left_unbegun():
    prefetched(endless(), 2, lambda x: x)


def left_in_a_circle():
    iterator = prefetched(endless(), 2, lambda x: x)
    next(iterator)
    circle = [iterator]
    circle.append(circle)
    del iterator, circle
    gc.collect()


LEFT = [left_by_break, left_by_close, left_by_an_error, left_by_an_interrupt, left_unbegun, left_in_a_circle]


@pytest.mark.usefixtures("earlier_objects_frozen")
@pytest.mark.parametrize("leave", LEFT)
def test_no_thread_is_left_behind(leave):
    leave()
    gc.collect()
    assert threads() == []


@pytest.mark.usefixtures("earlier_objects_frozen")
def test_what_was_read_is_let_go():
    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            return 1

    source = Source()
    alive = weakref.ref(source)
    iterator = prefetched(source, 2, lambda x: x)
    next(iterator)
    iterator.close()
    del source, iterator
    gc.collect()
    assert alive() is None


def test_it_places_batches_on_the_device():
    place = lambda pair: (jax.device_put(pair[0]), pair[1])  # noqa: E731
    pairs = list(prefetched(LoopReader(batches([X, Y], 4)).epoch(0), 2, place))
    assert [position["batch"] for _, position in pairs] == [1, 2, 3]
    assert all(isinstance(a, jax.Array) for batch, _ in pairs for a in batch)


def test_a_negative_size():
    with pytest.raises(ow.ArgumentError, match="size is -1"):
        prefetched(iter([]), -1, lambda x: x)
