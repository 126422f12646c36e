"""The benchmarks run and say what they measured; how fast is never asked here."""

from __future__ import annotations

import gc
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import benchmarks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import (
    accumulate_time,
    budget_time,
    by_hand,
    harness,
    models,
    quiet,
    report,
    slowed,
    update_time,
)
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.by_hand import Case
from benchmarks.contest import check_agreement, contest
from benchmarks.harness import Row, Side
from benchmarks.models import Model
from benchmarks.sides import REFERENCE, SIDES
from benchmarks.worker import Local, Report, SideError, Worker
from benchmarks.workloads import WORKLOADS, Workload
from tests.compiled import optimized

import onward as ow

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
ROOT = Path(__file__).parents[1]
CASES = {
    "check_finite_time": ["4-layer transformer"],
    "accumulate_time": ["MLP, 16 rows", "transformer, 1 text"],
    "budget_time": [f"at most {limit} of a plain step" for limit in (1.15, 1.5, 2.0)],
    "chunk_time": ["loss head of 64", "2 layers of attention"],
    "derive_time": ["derive, 3 layers", "and lower, 3 layers", "roll and lower, 3 layers"],
    "first_step_time": ["24-layer transformer, first step"],
    "options_time": ["MLP, Adam"],
    "partition_time": ["residual MLP, 2 layers, 8 devices"],
    "pipeline_time": [
        "4 layers of 8, 16 rows, 4 stages",
        "stages that take equally long",
        *(["stages that sleep equally long"] if slowed.compiler() else []),
    ],
    "recompute_time": ["100-layer MLP"],
    "step_time": ["MLP, Adam", "CNN, Momentum"],
    "update_time": [
        "one leaf, Adam",
        "one leaf, clip + AdamW",
        "many leaves, Adam",
        "many leaves, clip + AdamW",
        "transformer, Adam",
        "transformer, clip + AdamW",
    ],
}


def test_every_benchmark_file_is_listed() -> None:
    listed = benchmarks.__doc__ or ""
    files = {path.stem for path in (ROOT / "benchmarks").glob("*_time.py")}
    assert files == set(CASES)
    assert {*files, "multi_device"} <= set(BENCHMARKS)
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in BENCHMARKS)
    assert all(name in listed for name in (*files, "multi_device"))


POOLING = {"cnn", "step_time"}


def compiler(name: str) -> AbstractContextManager[None]:
    """Nothing is timed here, but what has max pooling is compiled as it should be."""
    return optimized() if name in POOLING else nullcontext()


ONE_CONVOLUTION = {"channels": (2,), "size": 4, "batch": 2}


@pytest.fixture
def few_arrays_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transformer without layers two; of an MLP the last layer, of a deep one all, by SGD.

    A GPT within a budget has attention alone. Half of the time went into Adam. A transformer that has a layer
    is among those of other libraries.
    """

    def few(**sizes: Any) -> Model:
        loss, params, data = transformer(**{**sizes, "layers": 0})
        trained = {name: params[name] for name in ("places", "last")}
        return Model(lambda p, *batch: loss({**params, **p}, *batch), trained, data)

    def last(*args: Any, **sizes: Any) -> Model:
        loss, params, data = mlp(*args, **sizes)
        return Model(lambda p, *batch: loss([*params[:-1], *p], *batch), params[-1:], data)

    def attentive(heads: int, attention: Any, x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        return x + attention(*jnp.split((x @ layer["qkv"])[:, :, None], 3, -1))[:, :, 0] @ layer["out"]

    def narrow(size: Any) -> Any:
        found = whole(size)
        return {**found, "layers": [{name: x[name] for name in ("qkv", "out")} for x in found["layers"]]}

    whole = budget_time._params
    monkeypatch.setattr(budget_time, "_block", attentive)
    monkeypatch.setattr(budget_time, "_params", narrow)
    mlp, transformer, deep, cnn = models.mlp, models.transformer, "100-layer MLP", "CNN, Momentum"
    monkeypatch.setattr(models, "mlp", last)
    monkeypatch.setattr(models, "transformer", few)
    monkeypatch.setattr(update_time, "transformer", few)
    monkeypatch.setitem(WORKLOADS, deep, replace(WORKLOADS[deep], optimizer="SGD", rate=1e-4))
    monkeypatch.setitem(WORKLOADS, cnn, replace(WORKLOADS[cnn], quick=ONE_CONVOLUTION))


@pytest.fixture
def accumulating_step_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same beside each of three peers."""
    build, steps = accumulate_time._onward, dict[str, Any]()

    def side(case: Case, rate: float) -> Side:
        if case.name not in steps:
            steps[case.name] = build(case, rate).step
        step = steps[case.name]
        return Side(step, step.init(case.model.params), case.model.data)

    monkeypatch.setattr(accumulate_time, "_onward", side)


@pytest.fixture
def nothing_to_look_through() -> None:
    """A benchmark collects garbage in each round: not of what others of this module left."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures(
    "few_arrays_are_trained", "accumulating_step_compiled_once", "nothing_to_look_through"
)
@pytest.mark.parametrize("name", CASES)
def test_quick_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    with compiler(name):
        rows = main([name, "--quick", "--rounds", "2", "--json", str(path)])[name]
    assert list(dict.fromkeys(row.case for row in rows)) == CASES[name]
    for row in rows:
        assert not row.note.startswith("failed")
        assert row.rounds == 2
        assert 0 < row.low <= row.ratio <= row.high
        assert min(row.time, row.peer) > 0
    printed = capsys.readouterr().out
    assert all(row.case in printed for row in rows)
    written = json.loads(path.read_text())[name]
    assert [row["case"] for row in written["rows"]] == [row.case for row in rows]
    assert written["printed"] in printed
    assert written["command"] == f"python -m benchmarks {name} --rounds 2 --quick"
    assert {"date", "python", "jax", "cores"} <= set(written["environment"])


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])
    assert f"no benchmark is named speed; there are {', '.join(BENCHMARKS)}" in capsys.readouterr().err


def test_rounds_alternate_and_are_compared_one_by_one() -> None:
    order: list[str] = []
    durations = {"ours": iter([2.0, 9.0, 3.0]), "peer": iter([1.0, 3.0, 3.0])}

    def side(name: str) -> float:
        order.append(name)
        return next(durations[name])

    row = harness.compare("c", "p", lambda: side("ours"), lambda: side("peer"), rounds=3, target=1.5)
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert (row.ratio, row.low, row.high) == (2.0, 1.0, 3.0)
    assert (row.time, row.peer) == (3.0, 3.0)
    assert row.met is False
    assert "<= 1.50  missed" in report.table([row])


def test_no_round_begins_once_the_time_is_up() -> None:
    def side() -> float:
        sleep(0.01)
        return 1.0

    assert len(harness.in_turn({"side": side}, rounds=50, budget=0.0)["side"]) == 5
    assert len(harness.in_turn({"side": side}, rounds=3, budget=0.0)["side"]) == 3


def test_steps_that_part_are_caught() -> None:
    model = models.line()
    case = Case("line", model, ow.Adam, by_hand.adam, 2)

    def sides(rate: float) -> tuple[Side, Side]:
        def step(state: Any, *data: Any) -> tuple[Any, Any]:
            params, slots, t = state
            value, gradient = jax.value_and_grad(model.loss)(params, *data)
            return (*by_hand.adam(params, gradient, slots, t + 1, rate), t + 1), value

        slots = tuple(jax.tree.map(jnp.zeros_like, model.params) for _ in range(2))
        ours = ow.compile(ow.Adam(1e-3).minimize(model.loss, model.params, *model.data))
        peer = Side(jax.jit(step), (model.params, slots, jnp.int32(0)), model.data)
        return Side(ours, ours.init(model.params), model.data), peer

    by_hand.check_agreement(case, *sides(1e-3))
    with pytest.raises(AssertionError, match="apart"):
        by_hand.check_agreement(case, *sides(1.1e-3))


def test_losses_that_part_are_caught() -> None:
    expected = [2.0, 1.9, 1.8]
    check_agreement([2.0, 1.9001, 1.8], expected)
    with pytest.raises(SideError, match=r"another loss at step 2: 1.93, expected 1.9"):
        check_agreement([2.0, 1.93, 1.8], expected)
    with pytest.raises(SideError, match="another loss at step 2: nan"):
        check_agreement([2.0, float("nan"), 1.8], expected)
    with pytest.raises(SideError, match="hardly move"):
        check_agreement([2.0, 2.0], [2.0, 2.0])


class Pretended:
    """A side that takes a second for each step on a core and a half, or fails as its name says."""

    cores = 1.5

    def __init__(self, side: str) -> None:
        if side == "keras":
            raise SideError("it does not build")
        self.side = side
        self.report = Report([3.0, 2.0] if side == "equinox" else [2.0, 1.0], 1.0)

    def seconds(self, steps: int) -> float:
        if self.side == "torch":
            raise SideError("out of memory")
        return 1.0

    def close(self) -> None:
        closed.append(self.side)


closed: list[str] = []


@pytest.mark.usefixtures("nothing_to_look_through")
def test_a_side_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contest.start", lambda side, work, quick: Pretended(side))
    names = ["onward", "equinox", "torch", "keras"]
    rows = contest("MLP, Adam", names, rounds=2, targets={"torch": 1.0, "onward": 1.0})
    assert [row.note.removeprefix("failed: ") for row in rows] == [
        "",
        "another loss at step 1: 3.0, expected 2.0",
        "out of memory",
        "it does not build",
    ]
    assert [row.met for row in rows] == [True, None, False, None]
    assert (rows[0].ratio, rows[0].rounds, rows[0].cores) == (1.0, 2, 1.5)
    assert "<= 1.00  missed" in report.table(rows)
    assert "MLP, Adam: torch: failed: out of memory" in report.table(rows)
    assert sorted(closed) == ["equinox", REFERENCE, "onward", "torch"]


@pytest.mark.usefixtures("nothing_to_look_through")
def test_a_row_names_the_side_it_was_to_be_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contest.start", lambda side, work, quick: Pretended(side))
    rows = contest("MLP, Adam", ["onward", "torch"], rounds=2, against={"onward": "keras"})
    assert [row.note for row in rows] == [
        "not compared, for keras failed",
        "failed: out of memory",
    ]


# Every model, and every optimizer: the costly one where there are few parameters.
OPTIMIZER_OF = {
    "mlp": ("clipped AdamW", 1e-3),
    "residual_mlp": ("Adam", 1e-3),
    "cnn": ("Momentum", 1e-2),
    "lstm": ("Adagrad", 1e-1),
    "transformer": ("SGD", 1e-1),
    "leaves": ("SGD", 1e-3),
}
SMALLER = {
    "residual_mlp": {"layers": 2, "width": 4, "batch": 8},
    "cnn": ONE_CONVOLUTION,
    "leaves": {"count": 3},
}


def small(kind: str) -> Workload:
    work = next(work for work in WORKLOADS.values() if work.kind == kind).small
    optimizer, rate = OPTIMIZER_OF[kind]
    return replace(work, optimizer=optimizer, rate=rate, sizes=SMALLER.get(kind, work.sizes))


def test_every_optimizer_of_a_workload_is_compared_with_other_libraries() -> None:
    assert {optimizer for optimizer, _ in OPTIMIZER_OF.values()} == {w.optimizer for w in WORKLOADS.values()}
    assert set(OPTIMIZER_OF) == {work.kind for work in WORKLOADS.values()} - {"line"}


@cache
def expected_losses(kind: str) -> list[float]:
    return Local(REFERENCE, small(kind)).report.losses


@pytest.fixture
def nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What equinox begins with is replaced by the parameters of the model."""

    def uniform(key: Any, shape: tuple[int, ...] = (), *args: Any, **options: Any) -> jax.Array:
        return jnp.asarray(np.full(shape, 0.5, np.float32))

    monkeypatch.setattr(jax.random, "uniform", uniform)


@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("side", "kind"), [*product(["flax.nnx", "equinox"], OPTIMIZER_OF), ("onward", "transformer")]
)
def test_other_libraries_compute_the_same(side: str, kind: str) -> None:
    if not SIDES[side].is_installed:
        pytest.skip(f"{side} is not installed")
    with compiler(kind):
        check_agreement(Local(side, small(kind)).report.losses, expected_losses(kind))


def test_a_worker_answers_from_its_own_process() -> None:
    with Worker(REFERENCE, "2 numbers, SGD") as worker:
        check_agreement(worker.report.losses, worker.report.losses)
        assert worker.report.first > worker.seconds(3) > 0
        assert worker.cores > 0
        assert worker.temporary() is not None


def test_a_worker_that_crashes_says_its_last_words() -> None:
    with pytest.raises(SideError, match="KeyError: 'speed'"):
        Worker(REFERENCE, "speed")


def test_a_worker_that_hangs_is_ended() -> None:
    with pytest.raises(SideError, match="no answer in 0 seconds"):
        Worker(REFERENCE, "2 numbers, SGD", deadline=0.0)


def test_what_else_computes_is_seen_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(busy: int, stolen: int, browser: int) -> None:
        (tmp_path / "stat").write_text(f"cpu {busy} 0 0 1000 0 0 0 {stolen} 0 0\ncpu0 0\n")
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "stat").write_text(f"7 (a (browser)) S {' '.join(['0'] * 10)} {browser} 0 0")

    def looked(*later: int) -> quiet.Look:
        count(100, 5, 50)
        monkeypatch.setattr(quiet, "sleep", lambda seconds: count(*later))
        found = quiet.look()
        assert found is not None
        return found

    ticks = iter([0.0, 1.0] * 2)
    monkeypatch.setattr(quiet, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(quiet, "_PROCESSES", tmp_path)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    alone, disturbed = looked(101, 5, 50), looked(190, 25, 130)
    assert alone == quiet.Look(2, 0.01, 0.0)
    assert disturbed == quiet.Look(2, 0.9, 0.2, (("a (browser)", 0.8),))
    assert quiet.verdict(alone).startswith(f"The machine was quiet: {alone}.")
    assert quiet.verdict(alone, disturbed, None).startswith(
        "NOT QUIET: other processes kept 0.90 of 2 cores busy (a (browser) 0.80), "
        "and the host of this virtual machine took 0.20. End what"
    )
    assert quiet.verdict(None) == ""


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_picture_shows_every_row(form: str, tmp_path: Path) -> None:
    row = harness.ratio_row("deep", REFERENCE, [1.0, 2.0], [2.0, 2.0], target=0.5)
    rows = [row, Row("deep", REFERENCE, side="torch", note="failed: it does not build")]
    path = tmp_path / f"picture.{form}"
    report.plot(path, {"step_time": rows})
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG") if form == "png" else b"deep: onward" in written
