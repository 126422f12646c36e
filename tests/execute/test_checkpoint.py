"""Checkpoints: every bit comes back, or nothing does."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.torture import checkpoint_faults as torture

from onward.core.errors import ArgumentError, CheckpointError, MissingExtraError
from onward.execute.checkpoint import archive, manifest
from onward.execute.checkpoint.backends import BACKENDS, SafetensorsBackend
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.checkpoint.contents import HISTORY
from onward.execute.disk.encoding import DTYPES
from onward.execute.loop.history import History

W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "orbax":
        pytest.importorskip("orbax.checkpoint")
    return request.param


def bits(array):
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def any_bits(dtype, shape):
    """Random bits, among them NaNs with payloads."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return (data % 2 if dtype.kind == "b" else data).view(dtype).reshape(shape)


def save_one(folder, step=1, **options):
    with Checkpoints(folder, **options) as checkpoints:
        checkpoints.claim(resume=True)
        return checkpoints.save({"w": W, "b": np.int8(3)}, step)


# ---------------------------------------------------------------------------- round trips


def test_every_dtype_comes_back_bit_for_bit(tmp_path, backend):
    shapes = [(), (1,), (5,), (4, 3), (0,), (2, 0, 3)]
    arrays = {f"{n} {shape}": any_bits(d, shape) for n, d in DTYPES.items() for shape in shapes}
    with Checkpoints(tmp_path, backend=backend) as checkpoints:
        checkpoints.save(arrays, 1)
    found = checkpoints.load().arrays
    assert {n: bits(a) for n, a in found.items()} == {n: bits(a) for n, a in arrays.items()}
    assert all(type(a) is np.ndarray for a in found.values())


def test_jax_arrays_come_back_as_numpy_arrays(tmp_path):
    dtypes = {n: d for n, d in DTYPES.items() if d.itemsize < 8 and "float6" not in n}
    arrays = {n: jnp.asarray(np.array([0, 1, 1]).astype(d)) for n, d in dtypes.items()}
    assert {n: a.dtype for n, a in arrays.items()} == dtypes
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(arrays, 2)
    found = checkpoints.load().arrays
    assert all(type(a) is np.ndarray for a in found.values())
    assert {n: bits(a) for n, a in found.items()} == {n: bits(a) for n, a in arrays.items()}


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_random_keys(tmp_path, backend, generator):
    key = jax.random.key(7, impl=generator)
    keys = {"one": key, "many": jax.random.split(key, 6).reshape(2, 3), "none": jax.random.split(key, 2)[:0]}
    with Checkpoints(tmp_path, backend=backend) as checkpoints:
        checkpoints.save(keys, 1)
    for name, found in checkpoints.load().arrays.items():
        assert (found.dtype, found.shape) == (keys[name].dtype, keys[name].shape)
        assert bits(jax.random.key_data(found)) == bits(jax.random.key_data(keys[name]))
    assert jax.random.uniform(checkpoints.load().arrays["one"]) == jax.random.uniform(key)


def test_memory_layouts_come_back_as_rows(tmp_path):
    arrays = {
        "t": W.T,
        "strided": np.arange(20.0)[::3],
        "big": W.astype(">f4"),
        "number": 2.5,
        "list": [1, 2],
    }
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(arrays, 1)
    found = checkpoints.load().arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert found["big"].dtype == np.float32


NAMES = [
    "fc_0/w",
    "grad(x)",
    "ключ 🔑",
    "",
    ".",
    "../../etc/passwd",
    "/abs",
    "a\0b",
    "a\nb",
    "__metadata__",
    "\udc80",
]


@pytest.mark.parametrize(
    "names", [NAMES, NAMES[:9], *[[n] for n in NAMES]], ids=lambda n: f"{len(n)} {n[0]!a}"
)
def test_names_are_only_names(tmp_path, backend, names):
    arrays = {name: np.full(3, i) for i, name in enumerate(names)}
    with Checkpoints(tmp_path / "run", backend=backend) as checkpoints:
        checkpoints.save(arrays, 1)
    found = checkpoints.load().arrays
    assert {n: a.tolist() for n, a in found.items()} == {n: a.tolist() for n, a in arrays.items()}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_nothing_can_be_saved_too(tmp_path, backend):
    with Checkpoints(tmp_path, backend=backend) as checkpoints:
        checkpoints.save({}, 0)
    assert (checkpoints.load().arrays, checkpoints.load().step) == ({}, 0)


def test_the_file_is_what_safetensors_writes(tmp_path):
    arrays = {"fc/w": W, "b": np.zeros((), np.int8), "é": np.zeros((0, 2)), "half": np.ones(3, np.float16)}
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    path = checkpoints.save(arrays, 1) / "arrays.safetensors"
    assert {n: bits(a) for n, a in load_file(path).items()} == {n: bits(a) for n, a in arrays.items()}
    save_file(arrays, tmp_path / "theirs")
    assert {n: bits(a) for n, a in load_file(tmp_path / "theirs").items()} == {
        n: bits(a) for n, a in load_file(path).items()
    }
    assert path.stat().st_size == (tmp_path / "theirs").stat().st_size


def test_what_is_said_about_it_comes_back(tmp_path):
    metrics = {
        "a": float("nan"),
        "b": float("inf"),
        "c": float("-inf"),
        "d": 0.1,
        "e": 1e-320,
        "f": np.float32(2),
    }
    extra = {"reader": {"position": 2**60, "names": ["x", None, True]}, "é": 0.1}
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save({"w": W}, 120, metrics=metrics, extra=extra)
    found = checkpoints.load()
    assert (found.step, found.extra, found.path, path.name) == (120, extra, path, "000001-step-120")
    np.testing.assert_equal(dict(found.metrics), metrics)
    assert (path / "manifest.sha256").read_text() == hashlib.sha256(
        (path / "manifest.json").read_bytes()
    ).hexdigest()


# ---------------------------------------------------------------------------- what stays


def test_keep_and_best(tmp_path):
    losses = [5.0, 1.0, 4.0, float("nan"), 3.0, 2.0]
    with Checkpoints(tmp_path, keep=2, best="loss") as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save({"step": step}, step, metrics={"loss": loss})
    assert [e.step for e in checkpoints.entries()] == [1, 4, 5]
    assert checkpoints.load("best").arrays["step"] == 1
    assert Checkpoints(tmp_path, best="loss", mode="max").load("best").step == 4
    assert len(list(tmp_path.iterdir())) == 3


def test_keep_all(tmp_path):
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        paths = [checkpoints.save({"w": W}, 7) for _ in range(5)]
    assert [e.path for e in checkpoints.entries()] == paths
    assert [e.sequence for e in checkpoints.entries()] == [1, 2, 3, 4, 5]


def test_the_latest_is_the_one_saved_last_whatever_its_name_and_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    first, second = checkpoints.save({"w": W}, 900), checkpoints.save({"w": W + 1}, 5)
    first.rename(tmp_path / "zzz")
    second.rename(tmp_path / "aaa")
    assert checkpoints.load().step == 5
    assert checkpoints.save({"w": W}, 6).name == "000003-step-6"


def test_due():
    assert [s for s in range(-3, 10) if Checkpoints("x", every=3).due(s)] == [3, 6, 9]
    assert not Checkpoints("x").due(3)


def test_rubbish_of_dead_processes_is_swept_and_that_of_the_living_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    rubbish = [f".part-{dead.pid}-0a", f".part-{os.getpid()}-0b", ".trash-0c"]
    others = [f".part-{os.getppid()}-0d", ".part-notes", "logs"]
    for name in (*rubbish, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    path = save_one(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {path.name, *others}
    assert Checkpoints(tmp_path).load().path == path


# ---------------------------------------------------------------------------- threads


class SlowBackend(SafetensorsBackend):
    def __init__(self):
        self.gate, self.running, self.error = threading.Event(), 0, None

    def write(self, folder, arrays):
        self.running += 1
        assert self.running == 1
        self.gate.wait(10)
        if self.error:
            raise self.error
        super().write(folder, arrays)
        self.running -= 1


@pytest.fixture
def slow(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "safetensors", SlowBackend)
    checkpoints = Checkpoints(tmp_path / "run", keep=None)
    monkeypatch.undo()
    return checkpoints


def test_save_returns_before_it_is_written_and_one_writes_at_a_time(slow):
    path = slow.save({"w": W}, 1)
    assert not path.exists()
    threading.Timer(0.05, slow._backend.gate.set).start()
    for step in range(2, 6):
        slow.save({"w": W}, step)
    assert slow.load().step == 5
    assert [e.step for e in slow.entries()] == [1, 2, 3, 4, 5]


def test_what_is_saved_is_what_was_there_when_save_was_called(slow):
    step = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    w, host, extra = jnp.full(100_000, 3.0), np.full(1000, 3.0), {"epoch": [1]}
    slow.save({"w": w, "host": host}, 1, extra=extra)
    jax.block_until_ready(step(w))
    assert w.is_deleted()
    host[:], extra["epoch"][0] = 9, 9
    slow._backend.gate.set()
    found = slow.load()
    assert (found.arrays["w"] == 3).all()
    assert (found.arrays["host"] == 3).all()
    assert found.extra == {"epoch": [1]}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unplugged")]
)
def test_an_error_of_the_thread_surfaces_once(slow, error):
    slow._backend.gate.set()
    slow.save({"w": W}, 1)
    slow.wait()
    slow._backend.error = error
    slow.save({"w": W}, 2)
    with pytest.raises(CheckpointError, match=r"Saving step 2 to .*run failed: .*(No space|unplugged)"):
        slow.save({"w": W}, 3)
    slow._backend.error, slow._backend.running = None, 0
    slow.wait()
    assert {p.name for p in slow.folder.iterdir()} == {"000001-step-1", ".writer"}
    slow.save({"w": W}, 4)
    assert slow.load().step == 4


def test_an_error_of_the_thread_ends_a_with_block(slow):
    slow._backend.gate.set()
    slow._backend.error = OSError("full")
    with pytest.raises(CheckpointError, match=r"step 1 .*full"), slow:
        slow.save({"w": W}, 1)
    slow._backend.running = 0
    with pytest.raises(KeyError) as raised:
        fail_after_saving(slow)
    assert "step 2" in raised.value.__notes__[0]


def fail_after_saving(checkpoints):
    with checkpoints:
        checkpoints.save({"w": W}, 2)
        raise KeyError("mine")


EXITING = """
import os, sys, numpy
from onward.execute.checkpoint import checkpoints
if os.fork() == 0:
    checkpoints.write = lambda *_: 1 / 0
    checkpoints.Checkpoints(sys.argv[2]).save({"w": numpy.ones(3)}, 1)
else:
    assert os.wait()[1] == 0
    checkpoints.Checkpoints(sys.argv[1]).save({"w": numpy.ones(10**6)}, 1)
"""


@pytest.fixture(scope="module")
def exited(tmp_path_factory):
    """What two processes said that ended while they were saving, and where: one could, one could not."""
    good, bad = (tmp_path_factory.mktemp(name) for name in ("good", "bad"))
    command = [sys.executable, "-W", "ignore", "-c", EXITING, str(good), str(bad)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr, good, bad


def test_the_interpreter_writes_the_last_checkpoint_before_it_exits(exited):
    _, folder, _ = exited
    assert Checkpoints(folder).load().step == 1


def test_an_error_for_which_nobody_waits_is_printed_at_the_exit(exited):
    said, _, folder = exited
    assert said.startswith(f"CheckpointError: Saving step 1 to {folder}")


def test_files_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    names = {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.replace

    def opened(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        names[descriptor] = os.path.basename(path)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda d: (events.append(names[d].split("-")[0]), real_fsync(d))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), real_rename(a, b))[1])
    (tmp_path / "run").mkdir()
    save_one(tmp_path / "run", asynchronous=False)
    assert events == [*("arrays.safetensors", "manifest.json", "manifest.sha256", ".part", "rename", "run")]


# ---------------------------------------------------------------------------- damage


def test_every_flipped_bit_is_refused(tmp_path, backend):
    refused, named = torture.flips(torture.saved(tmp_path, backend), 200)
    assert refused == 200
    assert named > 40


def test_the_flips_would_show_a_loader_that_does_not_look(tmp_path, monkeypatch):
    path = torture.saved(tmp_path)
    monkeypatch.setattr(archive, "check_files", lambda *_: None)
    monkeypatch.setattr(archive, "_restore", lambda name, v, found: found)
    refused, _ = torture.flips(path, 60)
    assert refused < 60


def test_every_truncation_is_refused(tmp_path, backend):
    path = torture.saved(tmp_path, backend)
    assert torture.truncations(path, 100) == 100
    assert torture.refusal(path) is None


def test_a_truncated_file_names_the_variables_that_are_cut(tmp_path):
    path = torture.saved(tmp_path)
    file = path / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    message = torture.refusal(path)
    assert str(file) in message
    assert "damaged there: 'ключ'." in message


@pytest.mark.parametrize("name", ["arrays.safetensors", "manifest.json", "manifest.sha256"])
def test_a_file_that_is_missing_spare_or_grown(tmp_path, name):
    path = save_one(tmp_path)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data + b"\n")
    assert name in torture.refusal(path)
    (path / name).unlink()
    assert name in torture.refusal(path)
    (path / name).symlink_to("/dev/zero")
    assert torture.refusal(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert torture.refusal(path)
    (path / name).unlink()
    (path / name).write_bytes(data)
    assert torture.refusal(path) is None
    (path / "spare").touch()
    assert "'spare'" in torture.refusal(path)


def test_a_name_that_is_taken_is_not_given_again(tmp_path):
    (tmp_path / "000001-step-1").touch()
    assert save_one(tmp_path).name == "000002-step-1"


def test_foreign_folders(tmp_path):
    (tmp_path / "other").mkdir()
    save_file({"w": W}, tmp_path / "other" / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    store = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint\. Expected folders such as 000007-step-120"):
        store.load()
    for path in (tmp_path / "other", tmp_path / "config.json", str(tmp_path / "nowhere")):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint of Onward: it has no manifest\.json"):
            store.load(path)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.* after checkpoints.wait\(\)"):
        Checkpoints(tmp_path / "missing").load()
    with pytest.raises(CheckpointError, match=r"config\.json is a file; .*read by onward\.load\(path\)"):
        Checkpoints(tmp_path / "config.json")


def damage(path, name="arrays.safetensors"):
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)


def three(folder):
    with Checkpoints(folder, best="loss") as checkpoints:
        paths = [checkpoints.save({"w": W}, s, metrics={"loss": 1 / s}) for s in (1, 2, 3)]
    return checkpoints, paths


@pytest.mark.parametrize("name", ["arrays.safetensors", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("which", ["latest", "best"])
def test_fallback(tmp_path, name, which):
    checkpoints, paths = three(tmp_path)
    damage(paths[2], name)
    with pytest.raises(CheckpointError, match="000003-step-3"):
        checkpoints.load(which)
    with pytest.warns(UserWarning, match=r"Left out: .*000003-step-3.*damaged") as warned:
        assert checkpoints.load(which, fallback=True).step == 2
    assert warned[0].filename == __file__
    damage(paths[1], name)
    with pytest.warns(UserWarning, match="Left out") as warned:
        assert checkpoints.load(which, fallback=True).step == 1
    assert len(warned) == 2
    damage(paths[0], name)
    with (
        pytest.warns(UserWarning, match="Left out"),
        pytest.raises(CheckpointError, match="No checkpoint is left"),
    ):
        checkpoints.load(which, fallback=True)


def test_fallback_from_a_path_goes_to_what_is_older(tmp_path):
    checkpoints, paths = three(tmp_path)
    damage(paths[1])
    assert checkpoints.load(paths[2]).step == 3
    with pytest.warns(UserWarning, match="000002"):
        assert checkpoints.load(str(paths[1]), fallback=True).step == 1


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256"])
def test_an_old_damaged_manifest_does_not_stand_in_the_way_of_the_latest(tmp_path, name):
    checkpoints, paths = three(tmp_path)
    damage(paths[0], name)
    assert checkpoints.load().step == 3
    assert [e.step for e in checkpoints.entries()] == [2, 3]
    checkpoints.save({"w": W}, 4, metrics={"loss": 9})
    assert checkpoints.load().step == 4
    assert paths[0].exists()


def test_a_new_checkpoint_never_takes_the_name_of_a_damaged_one(tmp_path):
    path = save_one(tmp_path)
    damage(path, "manifest.json")
    assert save_one(tmp_path).name == "000002-step-1"
    assert path.exists()


def forge(path, change):
    """Rewrite the manifest, with a seal that fits."""
    record = json.loads((path / "manifest.json").read_bytes())
    data = change if isinstance(change, bytes) else json.dumps(change(record) or record).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "manifest.sha256").write_text(hashlib.sha256(data).hexdigest())


def variable(**changes):
    return lambda record: record["variables"]["w"].update(changes)


FORGED = {
    "huge": variable(shape=[2**40, 2**20]),
    "more than huge": variable(shape=[10**30]),
    "negative": variable(shape=[-2, -3]),
    "boolean shape": variable(shape=[True, 6]),
    "text shape": variable(shape="23"),
    "many axes": variable(shape=[1] * 1000),
    "another shape": variable(shape=[3, 2]),
    "another dtype": variable(dtype="int32"),
    "object": variable(dtype="object"),
    "unknown dtype": variable(dtype="os.system"),
    "key without generator": variable(dtype="key", shape=[3]),
    "key of an unknown generator": variable(dtype="key", shape=[3], generator="evil"),
    "a key that is not in the file": variable(key="../../etc/passwd"),
    "a key twice": variable(key="b"),
    "checksum": variable(crc32=0),
    "no files": lambda r: r.update(files={}),
    "a path that leads out": lambda r: r["files"].update(
        {"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}
    ),
    "a size": lambda r: r["files"]["arrays.safetensors"].update(bytes=2**50),
    "a size that is text": lambda r: r["files"]["arrays.safetensors"].update(bytes="9"),
    "no variables": lambda r: r.update(variables={}),
    "a list": lambda r: [r],
    "null": lambda r: r.update(variables=None),
    "metrics": lambda r: r.update(metrics={"loss": [1]}),
    "step": lambda r: r.update(step=1.5),
    "sequence": lambda r: r.update(sequence=-1),
    "backend": lambda r: r.update(backend="pickle"),
    "deep": b"[" * 200_000,
    "a huge number": b'{"format": ' + b"9" * 10_000 + b"}",
    "NaN": b'{"format": NaN}',
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "too large": b" " * (manifest.LARGEST + 1),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_manifest_is_refused(tmp_path, change):
    path = save_one(tmp_path)
    forge(path, change)
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"manifest\.json|000001-step-1"):
            Checkpoints(tmp_path).load(fallback=fallback)


def test_a_newer_format_says_so(tmp_path):
    forge(save_one(tmp_path), lambda r: r.update(format=2, variables="in another way"))
    with pytest.raises(CheckpointError, match=r"format 2, this Onward reads up to 1; update Onward"):
        Checkpoints(tmp_path).load()


def reseal(path, name):
    """Make the manifest agree with a file that was changed."""
    file = {
        "bytes": (path / name).stat().st_size,
        "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
    }
    forge(path, lambda r: r["files"].update({name: file}))


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{", b"\x02" + b"\0" * 7 + b"{}"],
    ids=["empty", "zeros", "ones", "large header", "no variables"],
)
def test_a_forged_safetensors_file_is_refused(tmp_path, data):
    path = save_one(tmp_path)
    (path / "arrays.safetensors").write_bytes(data)
    reseal(path, "arrays.safetensors")
    assert "does not hold what its manifest.json says" in torture.refusal(path)


@pytest.mark.parametrize("changes", [{"shape": [2**40, 3]}, {"chunks": [2**40, 3]}, {"dtype": "|O"}], ids=str)
def test_a_forged_orbax_file_is_refused(tmp_path, changes):
    pytest.importorskip("orbax.checkpoint")
    path = save_one(tmp_path, backend="orbax")
    file = path / "orbax" / "v0" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    reseal(path, "orbax/v0/.zarray")
    assert "does not hold what its manifest.json says" in torture.refusal(path)


def test_a_checkpoint_knows_its_backend(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    path = save_one(tmp_path, 1, backend="orbax")
    save_one(tmp_path, 2, backend="safetensors")
    assert not (path / "arrays.safetensors").exists()
    for name in BACKENDS:
        store = Checkpoints(tmp_path, backend=name)
        assert bits(store.load(path).arrays["w"]) == bits(store.load().arrays["w"]) == bits(W)


def test_a_missing_orbax_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onward\[orbax\]'"):
        Checkpoints(tmp_path, backend="orbax")


# ---------------------------------------------------------------------------- wrong calls


CALLS = {
    "keep": (lambda c: Checkpoints("x", keep=0), "keep is 0; expected a whole number, at least 1"),
    "every": (lambda c: Checkpoints("x", every=-1), "every is -1; expected a whole number, at least 1"),
    "mode": (lambda c: Checkpoints("x", mode="least"), "mode is 'least'; expected one of 'min', 'max'"),
    "backend": (lambda c: Checkpoints("x", backend="npz"), "backend is 'npz'; .*'safetensors', 'orbax'"),
    "no metrics": (
        lambda c: c.save({}, 1),
        "best='loss', and metrics= has no such number. There are no names",
    ),
    "metric": (lambda c: c.save({}, 1, metrics={"lass": 1}), "The nearest names are 'lass'"),
    "best": (lambda c: Checkpoints("x").load("best"), r'Write Checkpoints\(folder, best="loss"\)'),
    "text": (lambda c: c.save({"t": "abc"}, 1, metrics={"loss": 1}), r"'t' is <U3\[\]; .* extra="),
    "object": (lambda c: c.save({"t": None}, 1, metrics={"loss": 1}), r"'t' is object\[\]"),
    "ragged": (lambda c: c.save({"t": [[1], [1, 2]]}, 1, metrics={"loss": 1}), "'t' cannot be copied"),
    "name": (lambda c: c.save({3: W}, 1, metrics={"loss": 1}), "arrays= has a name that is not a string, 3"),
    "metric name": (
        lambda c: c.save({}, 1, metrics={"loss": 1, 3: 1}),
        "metrics= has a name that is not a string",
    ),
    "step": (
        lambda c: c.save({}, -1, metrics={"loss": 1}),
        "step is -1; expected a whole number, at least 0",
    ),
    "tuple": (lambda c: c.save({}, 1, metrics={"loss": 1}, extra={"a": (1,)}), "lists in place of tuples"),
    "int key": (lambda c: c.save({}, 1, metrics={"loss": 1}, extra={"a": {1: 2}}), "strings as the keys"),
    "array": (lambda c: c.save({}, 1, metrics={"loss": 1}, extra={"a": W}), "extra= is not JSON data"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_wrong_calls(tmp_path, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(Checkpoints(tmp_path, best="loss"))
    assert list(tmp_path.iterdir()) == []


def test_an_array_that_was_given_away(tmp_path):
    w = jnp.ones(3)
    w.delete()
    with pytest.raises(ArgumentError, match=r"'w' cannot be copied to host memory: .*deleted"):
        Checkpoints(tmp_path).save({"w": w}, 1)


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="save less in extra="):
        Checkpoints(tmp_path, asynchronous=False).save({}, 1, extra={"x": "y" * manifest.LARGEST})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- accidents


@pytest.fixture(scope="module")
def server():
    with torture.Server() as running:
        yield running


def test_sigkill_at_random_moments(server):
    assert torture.kills(server, 3) == 3


FAULTS = [
    ("rename", "1", "signal=KILL", "old"),
    ("rename", "2", "signal=KILL", "new"),
    ("fsync", "1", "signal=KILL", "old"),
    ("fsync", "5", "signal=KILL", "new"),
    ("unlinkat", "1", "signal=KILL", "new"),
    ("write", "2", "signal=KILL", "old"),
    ("mkdir", "1+", "error=ENOSPC", "old"),
    ("write", "1+", "error=ENOSPC", "old"),
    ("write", "3+", "error=ENOSPC", "old"),
    ("write", "4", "error=EIO", "old"),
    ("fsync", "2", "error=EIO", "old"),
    ("fsync", "5", "error=EIO", "new"),
    ("rename", "1", "error=EIO", "old"),
    ("unlinkat", "1+", "error=EIO", "new"),
]


@pytest.mark.parametrize(("call", "which", "what", "state"), FAULTS)
def test_a_fault_at_a_system_call(server, call, which, what, state):
    if reason := torture.why_no_strace():
        pytest.skip(reason)
    assert torture.fault(server, call, which, what) == state


@pytest.mark.parametrize(
    ("names", "rows"), [(["step", "epoch"], (3, 2)), (["step"], (1,)), ([], (2, 1)), (["step"], None)]
)
def test_a_history_that_has_no_row_for_each_name_is_told(tmp_path, names, rows):
    store = Checkpoints(tmp_path, asynchronous=False)
    own = {} if rows is None else {HISTORY: np.zeros(rows)}
    store.save({"w": np.ones(2), **own}, 1, extra={HISTORY: names})
    found = store.load()
    with pytest.raises(CheckpointError, match=r"step-1: its history has .* expected a row for each name"):
        _ = found.history


def test_a_history_without_a_record_is_kept(tmp_path):
    store = Checkpoints(tmp_path, asynchronous=False)
    store.save({"w": np.ones(2)}, 1, history=History())
    assert store.load().history == History()
