"""Cores as devices: what a user sees is one device, whatever runs; what cannot be so is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute import cores as module
from onward.execute.cores import Cores

ROWS, FEATURES = 8, 3
RNG = np.random.default_rng(0)
W = RNG.normal(size=(FEATURES, FEATURES)).astype("float32")
X = RNG.normal(size=(ROWS, FEATURES)).astype("float32")


def normalized(params: Any, x: Any) -> Any:
    h = x @ params["w"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return jnp.mean(jnp.tanh(h) ** 2) + 0.1 * jnp.sum(params["w"] ** 2), {"rows": h, "most": jnp.max(h)}


def recurrent(params: Any, x: Any) -> Any:
    def turn(h: Any, _: None) -> Any:
        h = jnp.tanh(h @ params["w"] + x)
        return h, h.mean()

    h, means = jax.lax.scan(turn, jnp.zeros_like(x), None, length=5)
    return jnp.mean(h**2) + means.sum(), {"means": means}


def summed(params: Any, x: Any) -> Any:
    return jnp.sum((x @ params["w"]) ** 2) / 7, {"gram": x.T @ x}


def program(loss: Any = normalized, optimizer: Any = None) -> ow.Program:
    optimizer = ow.Adam(0.05, rules=[ow.ClipByGlobalNorm(1.0)]) if optimizer is None else optimizer
    return optimizer.minimize(loss, {"w": W}, X, has_aux=True)


def near(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [normalized, recurrent, summed])
def test_it_is_one_device_for_its_user(loss: Any) -> None:
    made = program(loss)
    fetch = ["grad(w)", "learning_rate", "next(w)", "w"]
    one, two = ow.compile(made, fetch), ow.compile(made, fetch, cores=2)
    assert "cores: 2, each with 4 of 8 rows; 36 B of gradients exchanged" in str(two.plan())
    assert two.program is made
    states = [step.init({"w": W}) for step in (one, two)]
    for batch in (X, X[::-1], X[:5], X[:2], X):  # five rows run on one core
        (a, found), (b, expected) = two(states[1], batch), one(states[0], batch)
        states = [b, a]
        near((found.loss, found.aux, found.value), (expected.loss, expected.aux, expected.value))
        assert [*found.results.position] == [*expected.results.position]
        near([found[name] for name in fetch], [expected[name] for name in fetch])
        near({name: a[name] for name in a}, {name: b[name] for name in b})
    assert two.program.loss is not None
    np.testing.assert_array_equal(found[two.program.loss], found.loss)


def test_run_and_states_of_other_steps() -> None:
    made = program(recurrent)
    one, two = ow.compile(made), ow.compile(made, cores=4)
    expected, before = one.run(one.init({"w": W}), [X] * 5, steps=2)
    state, outs = two.run(two.init({"w": W}), [X] * 5, steps=2)
    near(outs.loss, before.loss)
    assert "it runs on 4 devices" in str(two.plan())
    near(two(expected.copy(), X)[1].loss, one(state.copy(), X)[1].loss)  # each goes on with the other's
    changed = state.copy().replace({"learning_rate": 0.5})
    near(two(changed, X)[0].parameters, one(expected.copy().replace({"learning_rate": 0.5}), X)[0].parameters)
    near(jax.jit(two.function)(state, X)[1].loss, one(expected, X)[1].loss)


def test_it_is_saved_and_restored() -> None:
    made = program(recurrent)
    one, two = ow.compile(made), ow.compile(made, cores=2)
    state, _ = two(two.init({"w": W}), X)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(state, 1)
    near(one(one.restore(path), X)[1].loss, two(two.restore(path), X)[1].loss)
    step, loaded = ow.load_step(ow.save(two, f"{tempfile.mkdtemp()}/step.model", state))
    near(step(loaded, X)[1].loss, two(state, X)[1].loss)


def test_a_step_that_is_not_finite_says_so() -> None:
    step = ow.compile(program(summed), cores=2, check_finite=True)
    bad = X.copy()
    bad[6, 0] = np.nan
    state, _ = step(step.init({"w": W}), bad)
    with pytest.raises(ow.NonFiniteError):
        step.expect_going(state)


def first(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w), (x @ w)[0]


def turned(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w), (x @ w).T


def tiled(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w), jnp.tile(x @ w, (2, 1))


def paired(w: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.softmax((x @ w) @ (x @ w).T)), ()


def features_first(w: Any, x: Any) -> Any:
    return jnp.mean(x.T @ jnp.tile(w, (3, 1))[:ROWS]), ()


def dropped(w: Any, x: Any) -> Any:
    return jnp.mean(ow.layer.dropout(x @ w, 0.5)), ()


REFUSED = {
    "one example": (first, "another training.*leave out cores=.*'slice'.*takes some of the examples"),
    "examples last": (turned, r"another training.*'transpose' \(float32\[3,4\] on each.*another axis"),
    "twice": (tiled, r"another training.*'tile' \(float32\[8,3\] on each.*several times"),
    "features first": (
        features_first,
        r"each takes 4 of the 8 rows of 'x', cut along the first axis, .*Let the first axis of all data be",
    ),
    "all pairs": (paired, "makes an array of all pairs of examples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_training_is_refused(case: str) -> None:
    loss, words = REFUSED[case]
    made = ow.SGD(0.1).minimize(loss, W, X, has_aux=True)
    with pytest.raises(ow.GraphError, match=words):
        ow.compile(made, cores=2)
    everywhere = Cores(2, is_free=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_OPERATIONS", 0)
        patch.setattr(module, "_PER_BYTE", 0)
        kept, note = everywhere(made, ())
    assert kept is made
    assert note.startswith("cores: one: compile: ")


def test_wrong_arguments() -> None:
    made = program(summed)
    for wrong in (0, -1, 2.5, True, "all"):
        with pytest.raises(ow.ArgumentError, match=r"cores is .*; expected how many"):
            ow.compile(made, cores=wrong)
    with pytest.raises(ow.ArgumentError, match=r"3 cores do not divide .* 8 rows\. Trace it with 9"):
        ow.compile(made, cores=3)
    with pytest.raises(ow.ArgumentError, match=r"(?s)cores=9, and JAX has begun with 8 host.*num_cpu"):
        ow.compile(made, cores=9)
    with pytest.raises(ow.GraphError, match="replicated for 2 devices already"):
        ow.compile(ow.replicate(made, 2), cores=2)
    with pytest.raises(ow.GraphError, match="fetch has 'dot_general', of which each core has something else"):
        ow.compile(made, ["dot_general"], cores=2)
    assert ow.compile(made, cores=1).plan().compiled.replicas is None


def large(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)


def test_auto_goes_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_there", lambda: 2)
    small = ow.compile(program(), cores="auto")
    assert "cores: one: 0 million operations are over" in str(small.plan())
    cores = Cores.of("auto")
    assert cores == Cores(2, is_free=True)
    wide = ow.SGD(0.1).minimize(large, np.eye(640, dtype="float32"), np.ones((128, 640), "float32"))
    assert cores(wide, ())[1] == "cores: one: 321 operations for each byte of gradients, and 500 pay"
    long = ow.SGD(0.1).minimize(large, np.eye(256, dtype="float32"), np.ones((640, 256), "float32"))
    made, note = cores(long, ())
    assert made.replicas is not None
    assert note == "cores: 2, each with 320 of 640 rows; 256.0 KiB of gradients exchanged"
    odd = ow.SGD(0.1).minimize(large, np.eye(256, dtype="float32"), np.ones((641, 256), "float32"))
    assert cores(odd, ())[1] == "cores: one, for 2 do not divide a batch of 641 rows"


def deep(ws: Any, x: Any) -> Any:
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_layers_are_one_loop_on_every_core() -> None:
    ws, x = [np.eye(W.shape[0], dtype="float32") * i for i in range(1, 13)], X[:, : W.shape[0]]
    made = ow.SGD(0.01).minimize(deep, ws, x)
    one, two = ow.compile(made, roll=True), ow.compile(made, roll=True, cores=2)
    assert "rolled: 12 layers" in str(two.plan())
    assert len(two.plan().compiled.ops) < len(made.ops) / 2
    states = [step.init(ws) for step in (one, two)]
    for _ in range(3):
        (states[0], a), (states[1], b) = (s(t, x) for s, t in zip((one, two), states, strict=True))
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-6)
    _, note = Cores(2, is_free=True)(ow.roll(made), ())
    assert note == "cores: one: its layers run in one loop, which two cores would hardly make faster"


def convolved(w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)


@pytest.mark.parametrize("cured", [True, False])
def test_auto_leaves_convolutions_that_take_all_cores(cured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFFECTED", cured)
    monkeypatch.setattr(module, "_OPERATIONS", 0)
    images = np.ones((4, 2, 16, 16), "float32")
    made = ow.SGD(0.1).minimize(convolved, np.ones((2, 2, 3, 3), "float32"), images)
    _, note = Cores(2, is_free=True)(made, ())
    assert ("takes all cores by itself" in note) is cured
    assert ("each with 2 of 4 rows" in note) is not cured


def test_random_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ow.SGD(0.1).minimize(dropped, W, X, has_aux=True)
    assert "every core draws random numbers of its own" in str(ow.compile(made, cores=2).plan())
    monkeypatch.setattr(module, "_OPERATIONS", 0)
    monkeypatch.setattr(module, "_PER_BYTE", 0)
    assert Cores(2, is_free=True)(made, ())[1].startswith("cores: one: it draws at random")


def test_auto_takes_no_more_cores_than_there_are() -> None:
    made = ow.SGD(0.1).minimize(normalized, {"w": W}, X[:3], has_aux=True)
    kept, note = Cores(2, is_free=True)(made, ())
    assert kept is made
    assert note == "cores: one, for 2 do not divide a batch of 3 rows"


SCRIPT = """
import numpy as np, jax, onward as ow
if {begun}:
    jax.numpy.ones(1)
program = ow.SGD(0.1).minimize(lambda w, x: (x @ w).mean(), np.ones((3, 3), "f"), np.ones((4, 3), "f"))
try:
    step = ow.compile(program, cores=2)
    print(step(step.init(np.ones((3, 3), "f")), np.ones((4, 3), "f"))[1].loss, jax.device_count())
    print(step.plan())
except ow.ArgumentError as error:
    print(error)
print(ow.compile(program, cores="auto").plan())
"""


def said(begun: bool) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(begun=begun)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_jax_is_given_host_devices_where_it_is_not_too_late() -> None:
    told = said(False)
    assert told.startswith("3.0 2\n")
    assert "cores: 2, each with 2 of 4 rows" in told


def test_what_to_write_where_it_is_too_late() -> None:
    told = said(True)
    assert 'jax.config.update("jax_num_cpu_devices", 2)' in told
    assert "cores: one" in told or module._there() == 1
