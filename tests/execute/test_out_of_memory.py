"""A step that asks for more memory than any machine has says what it holds, and what to write instead."""

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.execute.memory.advice import Shortage, advice
from onward.execute.memory.exhausted import out_of_memory
from onward.execute.memory.use import MemoryUse

LARGE = 6_100_000  # squared, four bytes each, it is more than a processor addresses: nothing is ever taken
GIB = 2**30


def pairs(w, x):
    row = jnp.broadcast_to(w * jnp.sum(x), (1, LARGE))
    y = jnp.tanh(row.T @ row) if x.shape[0] > 1 else row.T
    return jnp.sum(y @ jnp.ones((y.shape[1], 1)))


W, X = jnp.ones(()), jnp.ones((2,))
LINE = f"tanh  test_out_of_memory.py:{pairs.__code__.co_firstlineno + 2}"
TOLD = ("(RESOURCE_EXHAUSTED)", "135.4 TiB", LINE, "ow.recompute(program")


@pytest.fixture(scope="module")
def program():
    return ow.SGD(0.1).minimize(pairs, W, X)


@pytest.fixture(scope="module")
def step(program):
    return ow.compile(program)


def raised_by(call):
    with pytest.raises(ow.OutOfMemoryError) as raised:
        call()
    assert isinstance(raised.value, MemoryError)
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)
    assert [word for word in TOLD if word not in str(raised.value)] == []
    assert raised.value.asked >= 4 * LARGE**2
    return raised.value


def test_at_the_first_call(step):
    state = step.init(W)
    error = raised_by(lambda: step(state, X))
    assert "The State was given to this step and is spent." in str(error)
    assert ow.memory(error.program).peak >= 4 * LARGE**2


def test_at_a_later_call_and_where_the_state_is_kept(program):
    step = ow.compile(program, donate=False, tune=False)
    state, out = step(step.init(W), X[:1])
    assert out.loss == LARGE
    assert "spent" not in str(raised_by(lambda: step(state, X)))
    step(state, X[:1])


def test_in_many_steps_at_once(step):
    raised_by(lambda: step.run(step.init(W), [X, X], steps=2))


def test_while_it_is_compiled(program, monkeypatch):
    """As on a TPU, whose compiler knows how much there is."""
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 300.0T of 15.48G hbm."

    def refused(*options):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refused)
    error = raised_by(lambda: ow.compile(program))
    assert error.limit == int(15.48 * GIB)


def training(w, x):
    loss, gradient = jax.value_and_grad(pairs)(w, x)
    return w - 0.1 * gradient, loss


def test_in_a_step_of_someone_else():
    raised_by(lambda: ow.adopt(jax.jit(training))(W, X))
    program = ow.inspect(training, W, X)
    text = str(out_of_memory(RuntimeError("RESOURCE_EXHAUSTED"), program))
    assert "ow.adopt(step, ...) in place of ow.inspect" in text


ALLOCATORS = {
    "Out of memory while trying to allocate 29995136128 bytes.": (29995136128, None),
    "Out of memory while trying to allocate 16.00GiB.": (16 * GIB, None),
    "Failed to allocate request for 8.00GiB (8589934592B) on device ordinal 0": (8 * GIB, None),
    "Attempting to allocate 2.00G. That was not possible. There are 1.50G free.; (1x0x0_HBM0)": (
        2 * GIB,
        1.5 * GIB,
    ),
    "something new": (None, None),
}


def test_what_allocators_say(program):
    found = [out_of_memory(RuntimeError(f"RESOURCE_EXHAUSTED: {text}"), program) for text in ALLOCATORS]
    assert [(error.asked, error.free) for error in found] == list(ALLOCATORS.values())


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def fitting(program, **given):
    return " | ".join(advice(Shortage(MemoryUse(program), **given)))


def test_advice_is_what_fits():
    ws, x = [jnp.ones((8, 8))] * 4, jnp.ones((1024, 8))
    deep = ow.SGD(0.1).minimize(layers, ws, x)
    peak = ow.memory(deep).peak
    assert "accumulate(program, 4): 256 rows at a time" in fitting(deep, room=peak // 2)
    assert "recompute(program, budget=0.5)" in fitting(deep)
    assert "not enough alone" in fitting(deep, room=peak // 8)
    assert "mixed_precision" in fitting(deep, platform="gpu")
    assert "mixed_precision" not in fitting(deep)
    assert "recompute(" not in fitting(ow.recompute(deep, scopes="layer_*"))
    assert "more micro-batches" in fitting(ow.accumulate(deep, 2))
    wide = ow.Adam(0.1).minimize(layers, [jnp.ones((8, 8))] * 40, x[:1])
    assert "ow.partition(program" in fitting(wide)
    assert "ow.partition(program" not in fitting(ow.partition(wide, {"of": 8}, {"*": "of"}))
    assert "such as ow.Adafactor" in fitting(wide)
    assert "accumulate" not in fitting(wide)
    assert "donate=True" in fitting(wide, beside=2**20)
