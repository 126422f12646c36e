"""Measured time finds its way back to the pass and the scope that asked for it."""

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.explain.profile.hlo import module_of, place_of, places
from onward.explain.profile.trace import own_time


def loss(params, x):
    with jax.named_scope("light"):
        x = jnp.tanh(x * params["scale"])
    with jax.named_scope("heavy"):
        for _ in range(4):
            x = jnp.tanh(x @ params["w"])
    return jnp.mean(x)


PARAMS = {"scale": jnp.ones(256), "w": jnp.eye(256)}
X = jnp.ones((64, 256))


@pytest.fixture(scope="module")
def step():
    return ow.compile(ow.SGD(1e-3).minimize(loss, PARAMS, X))


def test_the_dear_scope_takes_the_time(step):
    found = ow.profile(step, step.init(PARAMS), X, steps=3)
    heavy = sum(row.seconds for row in found.rows if row.scope == "heavy")
    light = sum(row.seconds for row in found.rows if row.scope == "light")
    assert heavy > light > 0
    assert {row.made_by for row in found.totals if row.seconds} >= {ow.Pass.FORWARD, ow.Pass.BACKWARD}
    lines = str(found).split("\n")
    assert "heavy" in lines[4]
    assert [i for i, line in enumerate(lines) if set(line) == {"─"}] == [3, 4 + len(found.rows)]


def test_shares_and_totals(step):
    found = ow.profile(step, step.init(PARAMS), X, steps=2)
    *passes, whole = found.totals
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert whole.seconds == pytest.approx(sum(row.seconds for row in found.rows))
    assert whole.flops == sum(row.flops for row in passes) == ow.cost(step.plan().compiled).flops
    assert found.seconds > 0


def test_the_state_is_not_spent(step):
    state = step.init(PARAMS)
    ow.profile(step, state, (X,), steps=1)
    ow.profile(step, state, {"x": X}, steps=1)
    step(state, X)


def test_data_of_another_shape(step):
    assert ow.profile(step, step.init(PARAMS), X[:8], steps=1).totals[-1].seconds > 0


def test_on_many_devices():
    program = ow.replicate(ow.SGD(0.1).minimize(loss, PARAMS, X), devices=8)
    step = ow.compile(program)
    found = ow.profile(step, step.init(PARAMS), X, steps=2)
    assert any(row.made_by is ow.Pass.COLLECTIVE and row.bytes for row in found.rows)


def test_almost_every_instruction_has_a_pass(step):
    """By hand: of the instructions that XLA names at all, each belongs to a pass."""
    executable = step.executable(step.init(PARAMS), X)
    found = places(executable.text, executable.program, executable.scopes)
    named = [line for line in executable.text.splitlines() if "dot(" in line and "op_name=" in line]
    assert named
    for line in named:
        name = line.split("=")[0].replace("ROOT", "").strip().lstrip("%")
        assert found[name].scope == "heavy"
        assert found[name].made_by in (ow.Pass.FORWARD, ow.Pass.BACKWARD)


@pytest.mark.parametrize(
    ("path", "made_by", "scope"),
    [
        ("jit(f)/jit(f)/forward/a/mul", ow.Pass.FORWARD, "a"),
        ("forward/a/b/jit(relu)/max", ow.Pass.FORWARD, "a/b"),
        ("jit(f)/backward/a/transpose(jvp())/while/body/forward/a/b/dot", ow.Pass.BACKWARD, "a/b"),
        ("jit(f)/update/add", ow.Pass.UPDATE, ""),
        ("reduce_sum", None, ""),
    ],
)
def test_places(path, made_by, scope):
    assert place_of(path, {"a", "a/b"}) == (made_by, scope)


def test_scopes_that_are_called_as_passes_are():
    known = {"update", "head/forward", "a"}
    assert place_of("jit(f)/forward/update/mul", known) == (ow.Pass.FORWARD, "update")
    assert place_of("backward/head/forward/dot", known) == (ow.Pass.BACKWARD, "head/forward")
    assert place_of("backward/update/while/body/forward/a/dot", known) == (ow.Pass.BACKWARD, "a")


def test_a_program_without_loss():
    program = ow.trace(lambda w, x: (x @ w, x), jnp.eye(4), jnp.ones((2, 4)))
    step = ow.compile(program)
    assert ow.profile(step, step.init(jnp.eye(4)), jnp.ones((2, 4)), steps=1).seconds > 0


def test_own_time_of_what_is_nested_twice():
    events = [("a", 0.0, 100.0), ("b", 10.0, 50.0), ("c", 20.0, 30.0), ("d", 70.0, 10.0), ("e", 200.0, 1.0)]
    assert own_time(events) == {"a": 40.0, "b": 20.0, "c": 30.0, "d": 10.0, "e": 1.0}


def test_the_module_of_no_text():
    assert module_of("") == ""


def test_bad_input(step):
    with pytest.raises(ow.ArgumentError, match=r"onward\.compile"):
        ow.profile(step.program, step.init(PARAMS), X)
    with pytest.raises(ow.ArgumentError, match="at least 1"):
        ow.profile(step, step.init(PARAMS), X, steps=0)
    with pytest.raises(ow.ArgumentError):
        ow.profile(step, step.init(PARAMS), jnp.ones((3, 3)))
