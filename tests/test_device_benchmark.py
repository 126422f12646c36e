"""The benchmark of a device: what it compares, and what it does when something is missing or fails."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.device import __main__ as device
from benchmarks.device import apart, devices, first, memory, peaks, precision, right, step, steps
from benchmarks.device.apart import Order, here, in_a_process
from benchmarks.device.part import Column, Part, Sheet, Told, is_out_of_memory
from benchmarks.device.works import WORKS

import onward as ow

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")


def told_by(case, rounds=1):
    told = Told()
    case(Sheet(told.take, 60.0, tiny=True, rounds=rounds))
    return told


def parted(cases):
    columns = [Column("name", "name")]
    return Part("right", "does it hold?", columns, cases, 1, is_bad=lambda rows: "unequal" in rows[-1])


@pytest.fixture
def only(monkeypatch):
    """One part, with these cases in place of its own."""

    def place(**cases):
        part = parted(cases)
        monkeypatch.setattr(device, "part_named", lambda name: part)
        monkeypatch.setattr(apart, "part_named", lambda name: part)

    return place


# Bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("speed", "no part is named speed; there are right, step, first, memory, devices"),
        ("--minutes 9", "'9'; expected minutes, more than 0 and at most 8"),
        ("--minutes nan", "expected minutes, more than 0 and at most 8"),
        ("right --json nowhere/at/all.json", "there is no folder"),
    ],
)
def test_what_it_does_not_take(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        device.main(arguments.split())
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_fails_or_runs_out_of_memory_is_left_out_and_the_rest_goes_on(only, capsys, tmp_path):
    def fails(sheet):
        sheet.row(name="before it failed")
        raise ValueError("no such kernel\nand much more")

    def is_large(sheet):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")

    only(fails=fails, large=is_large, works=lambda sheet: sheet.row(name="after"))
    path = tmp_path / "found.json"
    assert device.main(["right", "--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "sizes: tiny, for --quick asks for them" in printed
    assert "before it failed" in printed
    assert "left out: fails: ValueError: no such kernel\n" in printed
    assert "left out: large: out of memory (RuntimeError: RESOURCE_EXHAUSTED" in printed
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["parts"]["right"]["rows"]] == ["before it failed", "after"]
    assert set(found["parts"]["right"]["left_out"]) == {"fails", "large"}


def test_what_is_unequal_is_told_by_the_exit_status(only):
    only(one=lambda sheet: sheet.row(name="one", compared=2, unequal=1))
    assert device.main(["right", "--quick"]) == 1
    assert right.is_bad([])
    assert not right.is_bad([{"compared": 2, "unequal": 0}])


def test_cases_for_which_no_time_is_left_are_named():
    part = parted({"a": lambda sheet: None, "b": lambda sheet: None})
    told = device._run(part, 1.0, True, 1, lambda order, write: pytest.fail("it was begun"))
    assert set(told.left_out) == {"a", "b"}
    assert told.left_out["b"] == "not begun, for the 1 s of this part are used up"


def test_a_process_that_ends_or_hangs_is_left_out_with_the_reason():
    told = Told()
    in_a_process(Order("nothing", "case", 60.0, True, 1), told.take)
    assert "No module named 'benchmarks.device.nothing'" in told.left_out["case"]
    in_a_process(Order("right", "gradients", 0.0, True, 1), told.take)
    assert told.left_out["gradients"] == "ended after the 0 s that were left for it"


def test_a_process_that_told_all_and_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(apart, "_ENDED", 0.05)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert apart._status(process) == 0
        process.kill()


def test_devices_with_one_device_is_a_sentence(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    told = told_by(devices.PART.cases["average"])
    assert "it needs two devices or more, and JAX shows one" in told.left_out["devices"]
    assert not told.rows


def test_torch_without_a_build_for_the_gpu_is_a_sentence(monkeypatch):
    torch = SimpleNamespace(__version__="2.13.0+cpu", cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(steps, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert steps.why_no_torch(WORKS["MLP"]).startswith("torch 2.13.0+cpu has no build for this GPU")
    monkeypatch.setattr(steps, "find_spec", lambda name: None)
    assert steps.why_no_torch(WORKS["MLP"]) == "torch is not installed, so it is not compared"


def test_a_cpu_that_counts_no_memory_is_a_sentence():
    told = told_by(memory.PART.cases["the largest batch that fits"])
    assert "a CPU has no memory of its own" in told.left_out["the largest batch that fits"]


# What it says ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_wrong_is_unequal(monkeypatch):
    monkeypatch.setattr(right.functions, "FAMILIES", {"elementwise": {"sin": (jnp.sin, np.ones(2))}})
    assert [row["unequal"] for row in told_by(right._gradients).rows] == [0]
    derive = right._derived

    def apart_by_a_thousandth(family):
        return ((name, found * 1.001, *rest) for name, found, *rest in derive(family))

    monkeypatch.setattr(right, "_derived", apart_by_a_thousandth)
    told = told_by(right._gradients)
    assert [(row["compared"], row["unequal"]) for row in told.rows] == [(1, 1)]
    assert right.closing(told.rows) == ["1 compared, 1 unequal"]


def test_every_optimizer_is_there():
    names = set(right.optimizers())
    assert {"SGD", "Adam", "Muon", "SOAP", "Prodigy", "PSGDKron"} <= names
    assert all(issubclass(getattr(ow.optimizer, name), ow.Optimizer) for name in names)


def test_bounds_follow_from_the_precision_of_products(monkeypatch):
    assert precision.bound(64, True) == 64 * 2.0**-24
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert precision.bound(64, True) == 64 * 2.0**-11
    assert precision.bound(64, False) == 64 * 2.0**-24
    with jax.default_matmul_precision("highest"):
        assert precision.product_precision() == "float32"
    assert precision.error([1.0, 2.0], [1.0, 4.0]) == 0.5
    assert precision.error([np.nan], [1.0]) == np.inf


def test_peaks_are_of_known_devices_only():
    assert peaks.peak("bfloat16", "NVIDIA H100 80GB HBM3")[0] == 989.4e12
    assert peaks.peak("bfloat16", "NVIDIA H100 PCIe")[0] == 756e12
    assert peaks.peak("bfloat16", "TPU v5 lite")[0] == 197e12
    assert peaks.peak("bfloat16", "TPU v5")[0] == 459e12
    assert peaks.peak("bfloat16", "some other") is None


def test_flop_of_gpt2_are_those_of_its_124_million_parameters():
    work = WORKS["GPT-2 124M, bfloat16"]
    model = work.shapes()
    plain, whole = work.flops(model)
    tokens = 8 * 1024
    assert plain / 6 / tokens == pytest.approx(123.6e6, rel=1e-3)
    assert whole - plain == 6 * 12 * 768 * 1024 * tokens


def test_both_sides_of_a_work_take_the_same_steps_and_are_measured():
    told = told_by(step.PART.cases["LSTM"])
    assert [row["side"] for row in told.rows] == ["by hand", "onward"]
    assert all(row["tokens"] > 0 and row["mfu"] is None for row in told.rows)
    assert any("no peak of cpu is known" in note for note in told.notes)


def test_the_first_step_is_beside_that_by_hand():
    rows = [{"work": "a", "side": "by hand", "seconds": 2.0}, {"work": "a", "side": "onward", "seconds": 1.0}]
    first.PART.complete(rows)
    assert [row["ratio"] for row in rows] == [1.0, 0.5]


def test_the_largest_power_of_two():
    assert memory._last(lambda n: n <= 40) == 32
    assert memory._last(lambda n: n <= 3, 64) == 2
    assert memory._last(lambda n: False, 4) == 0


def test_memory_is_measured_beside_what_is_foretold():
    (row,) = told_by(memory.PART.cases["LSTM, onward"]).rows
    assert row["measured"] > 0
    assert row["foretold"] > 0


def test_errors_for_want_of_memory_are_known():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not is_out_of_memory(ValueError("memory_kind"))


def test_a_case_in_this_process_writes_what_it_raises():
    told = Told()
    here(Order("right", "no such case", 1.0, True, 1), told.take)
    assert told.left_out == {"no such case": "KeyError: 'no such case'"}
