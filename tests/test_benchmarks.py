"""The benchmarks run and say what they measured; how fast is never asked here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import benchmarks
import jax
import pytest
from benchmarks import harness, step_time
from benchmarks.__main__ import BENCHMARKS, main

ROOT = Path(__file__).parents[1]
CASES = {
    "accumulate_time": ["MLP, 16 rows", "transformer, 1 text"],
    "derive_time": ["derive, 1 layers", "and lower, 1 layers"],
    "step_time": [
        "MLP, Adam",
        "CNN, Momentum",
        "transformer, AdamW",
        "LSTM, Adagrad",
        "dispatch, SGD",
        "dispatch, Adam",
    ],
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


@pytest.fixture
def hasty_compiler() -> Iterator[None]:
    """XLA without most of its optimizations: nothing is timed here, and compiling is most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("hasty_compiler")
@pytest.mark.parametrize("name", CASES)
def test_quick_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    rows = main([name, "--quick", "--rounds", "2", "--json", str(path)])[name]
    assert list(dict.fromkeys(row.case for row in rows)) == CASES[name]
    for row in rows:
        assert row.rounds == 2
        assert 0 < row.low <= row.ratio <= row.high
        assert min(row.onward, row.peer) > 0
    printed = capsys.readouterr().out
    assert all(row.case in printed for row in rows)
    written = json.loads(path.read_text())
    assert [row["case"] for row in written["results"][name]] == [row.case for row in rows]
    assert {"python", "jax", "cores"} <= set(written["environment"])


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
    assert (row.onward, row.peer) == (3.0, 3.0)
    assert row.met is False
    assert "<= 1.50  missed" in harness.table([row])


def test_sides_that_part_are_caught() -> None:
    case = step_time.Case("line", step_time.models.line(), step_time.ow.SGD, step_time.sgd, 0)
    agreeing = step_time._onward(case, 1e-3), step_time._by_hand(case, 1e-3)
    step_time.check_agreement(case, *agreeing)
    with pytest.raises(AssertionError, match="apart"):
        step_time.check_agreement(case, step_time._onward(case, 1e-3), step_time._by_hand(case, 1.1e-3))
