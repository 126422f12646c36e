"""``tune``: options run in processes of their own; what dies or computes something else is out."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.trials import tune as module
from onward.execute.trials.remembered import cache_folder, file_of, remember, remembered
from onward.execute.trials.trial import OptionsProcess, TrialError
from onward.execute.trials.tune import Tried
from onward.typing import OptionSet

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of XLA's CPU compiler")
X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)


def network(params: Any, state: Any, x: Any) -> Any:
    kept = jax.random.bernoulli(state["key"], 0.5, x.shape)
    h = jnp.where(kept, x, 0) @ params["w"].astype("bfloat16").astype("float32")
    return jnp.mean(h**2), {"key": jax.random.split(state["key"])[0], "seen": state["seen"] + len(x)}


@pytest.fixture(scope="module")
def program() -> ow.Program:
    return ow.Adam(0.1).minimize(
        network,
        {"w": np.eye(3, dtype="float32")},
        X,
        state=begun(),
    )


def begun() -> Any:
    return {"key": jax.random.key(0), "seen": jnp.int32(0)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONWARD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def found(program: ow.Program, cache: Path) -> Any:
    step = ow.compile(program, cores=2)
    state = step.init({"w": np.eye(3, dtype="float32")}, begun())
    tried = {
        "wide": {"xla_cpu_prefer_vector_width": 512},
        "unknown": {"xla_nonsense": True},
    }
    trials = ow.tune(step, state, X, options=tried, rounds=3)
    assert not state.is_spent
    return trials


def test_what_is_tried_is_told(found: Any) -> None:
    default, wide, unknown = found.tried
    assert default.ratio == 1
    assert wide.fault == ""
    assert 0 < wide.low <= wide.ratio <= wide.high
    assert "died: ended with 1: " in unknown.fault
    assert "No such compile option: 'xla_nonsense'" in unknown.fault
    head, columns, *rows = str(found).splitlines()
    assert head.startswith("Options of network on 8 cpu (")
    assert columns.split() == ["options", "ms", "ratio", "min..max", "results"]
    assert [row.split()[0] for row in rows[:3]] == ["default", "wide", "unknown"]
    assert rows[3].startswith("best: ")
    assert rows[4] == f"remembered in {found.file}: compile(program, options='tuned')"


def test_the_best_is_remembered_of_this_program(found: Any, program: ow.Program, cache: Path) -> None:
    assert found.file.parent == cache / "tuned"
    assert remembered(program, cores=2) == found.best
    assert remembered(program) is None
    step = ow.compile(program, options="tuned", cores=2)
    assert f"options: {found.best}, remembered by tune" in str(step.plan())
    other = ow.SGD(0.1).minimize(lambda w, x: (x @ w).mean(), np.ones((3, 3), "float32"), X)
    assert "options: none remembered for this Program" in str(ow.compile(other, options="tuned").plan())
    assert "options" not in str(ow.compile(program).plan())
    checked = ow.compile(program, options="tuned", check_finite=True, cores=2)
    assert f"options: {found.best}, remembered by tune" in str(checked.plan())


def test_a_file_that_is_damaged_is_none(program: ow.Program, cache: Path) -> None:
    chosen = OptionSet("mine", {"xla_cpu_prefer_vector_width": 256}, False, True, True)
    other = ow.trace(lambda w: w * 3, jnp.ones(3))
    file = remember(other, chosen, {})
    assert remembered(other) == chosen
    for text in ("", "{", "[]", '{"format": 0}', file.read_text().replace("256", "[256]")):
        file.write_text(text)
        assert remembered(other) is None
    assert file_of(other) != file_of(program)


def test_where_the_cache_is() -> None:
    home = Path.home()
    assert cache_folder({}, "linux") == home / ".cache" / "onward"
    assert cache_folder({"XDG_CACHE_HOME": "/c"}, "linux") == Path("/c/onward")
    assert cache_folder({}, "darwin") == home / "Library" / "Caches" / "onward"
    assert cache_folder({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/onward/Cache")
    assert cache_folder({"ONWARD_CACHE": "/o"}, "win32") == Path("/o")


def test_a_process_that_hangs_or_dies_is_named(program: ow.Program, tmp_path: Path) -> None:
    with pytest.raises(TrialError, match=r"no answer in 0\.01 seconds"):
        OptionsProcess(tmp_path / "hangs", {"folder": "nowhere", "config": {}}, 0.01)
    step = ow.compile(program)
    state = step.init({"w": np.eye(3, dtype="float32")}, begun())
    job = module._StepOnDisk(tmp_path, step, state, [X]).job(OptionSet(), False)
    trial = OptionsProcess(tmp_path / "dies", job, 60)
    try:
        assert trial.seconds(2) > 0
        os.kill(trial._process.pid, signal.SIGKILL)
        with pytest.raises(TrialError, match="killed by SIGKILL"):
            trial.seconds(2)
    finally:
        trial.close()


def test_what_gains_by_noise_is_not_taken() -> None:
    fast = OptionSet("fast")
    assert Tried(fast, 1.0, 0.9, 0.8, 0.95, often=1.0).gains
    assert not Tried(fast, 1.0, 0.9, 0.5, 3.0, often=0.6).gains
    assert not Tried(fast, 1.0, 0.98, 0.97, 0.99, often=1.0).gains
    assert not Tried(fast, fault="died").gains


def test_wrong_arguments(program: ow.Program) -> None:
    step = ow.compile(program)
    state = step.init({"w": np.eye(3, dtype="float32")}, begun())
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (network, state, {}, "tune takes a Program or a Step, not"),
        (step, X, {}, "the second argument is the State"),
        (step, state, {"rounds": 0}, "rounds is 0"),
        (step, state, {"limit": -1}, "limit is -1"),
        (step, state, {"options": {"a": 3}}, r"options\['a'\] is 3"),
    ]
    for what, given, named, words in wrong:
        with pytest.raises(ow.ArgumentError, match=words):
            ow.tune(what, given, X, **named)

    def calls_back(w: Any, x: Any) -> Any:
        seen = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(X.shape, X.dtype), x)
        return jnp.mean(seen) * w

    back = ow.trace(calls_back, jnp.float32(1), X)
    with pytest.raises(ow.ArgumentError, match="cannot be given to another process"):
        ow.tune(back, ow.compile(back).init(jnp.float32(1)), X)


@pytest.mark.usefixtures("cache")
def test_what_computes_something_else_is_out() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(w) + jnp.sum(jnp.where(x * 0 == 0, 0.0, 1.0))

    x = np.full(8, np.nan, "float32")
    program = ow.SGD(0.1).minimize(loss, jnp.zeros(2), x)
    state = ow.compile(program).init(jnp.zeros(2))
    no_nan = {"xla_cpu_enable_fast_math": True, "xla_cpu_fast_math_honor_nans": False}
    trials = ow.tune(program, state, x, options={"nothing is NaN": no_nan}, rounds=1)
    assert trials.tried[1].fault == "not equal"
    assert trials.best.name == "default"
