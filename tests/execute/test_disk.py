"""Files and folders appear whole or not at all, have one writer, and are read by others than their writer."""

import errno
import fcntl
import os
import warnings

import numpy as np
import pytest
import safetensors.numpy

from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.disk.durable import appearing, sweep
from onward.execute.disk.fields import parse
from onward.execute.disk.lock import Lock, LockedError
from onward.execute.disk.tensors import CODES, packed, spans, unpacked

ARRAYS = {name: np.ones((3, 2), name) for name in CODES} | {"empty": np.zeros((0, 2)), "scalar": np.array(7)}


def test_the_library_reads_what_is_written_and_the_other_way_round():
    head, pieces = packed(ARRAYS, {"ü": '"\n'})
    data = b"".join([head, *pieces])
    theirs = safetensors.numpy.save(ARRAYS)
    for found in (safetensors.numpy.load(data), dict(unpacked(data)), dict(unpacked(theirs))):
        assert found.keys() == ARRAYS.keys()
        assert all(np.array_equal(x, ARRAYS[n]) and x.dtype == ARRAYS[n].dtype for n, x in found.items())
    places = {name: data[start:end] for name, start, end in spans(memoryview(data))}
    assert places == {name: x.tobytes() for name, x in ARRAYS.items()}
    assert packed(dict(reversed(ARRAYS.items())), {"ü": '"\n'})[0] == head  # the same bytes each time


def test_json_that_says_a_thing_twice_or_nothing_is_refused():
    for text, why in (('{"a": 1, "a": 2}', "same name twice"), ('{"a": NaN}', "NaN is not JSON")):
        with pytest.raises(ValueError, match=why):
            parse(text)


@pytest.mark.parametrize("begin", [lambda part: part.write_text("new"), lambda part: part.mkdir()])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, begin):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), appearing(tmp_path / "a") as part:  # noqa: PT012
        begin(part)
        raise KeyboardInterrupt
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_files_and_folders_of_writers_that_are_no_more_are_swept(tmp_path):
    (tmp_path / f".part-{os.getpid()}-0a").touch()
    (tmp_path / f".part-{os.getpid()}-0b").mkdir()
    with appearing(tmp_path / "a") as part:
        part.touch()
        sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_that_is_locked_and_says_nothing_has_no_name(tmp_path):
    one, two = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    one.acquire()
    for text in ("[]", '{"pid": 1, "host": "h", "since": 1e300}'):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(LockedError) as raised:
            two.acquire()
        assert raised.value.holder is None
    one.release()
    assert not (tmp_path / "lock").exists()


def test_a_file_system_without_locks_is_told_of_once_at_the_line_of_the_user(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Checkpoints(tmp_path, asynchronous=False) as store:
        with pytest.warns(UserWarning, match="no file can be locked .*No locks available") as warned:
            store.save({"w": np.ones(2)}, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.save({"w": np.ones(2)}, 2)
    assert warned[0].filename == __file__
