"""A file for any length computes what the function does, also where that asks for a length never tried."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import onward as ow
from onward.serve.export.questions import Question, heard

TABLE = {8: 2.0, 32: 3.0}


class Layer:
    def __init__(self) -> None:
        self.table = {11: 2.0}

    def __call__(self, shape: tuple[Any, ...]) -> float:
        return self.table.get(shape[0], 1.0)


def matched(shape: tuple[Any, ...]) -> float:
    match shape:
        case (50, _):
            return 2.0
        case _:
            return 1.0


def in_local(n: Any) -> float:
    table = {9: 2.0}
    return table.get(n, 1.0)


def remainder(n: Any) -> float:
    return 1.0 if n % 7 else 2.0


@functools.lru_cache
def remembered(n: Any) -> float:
    return 2.0


ASKING = {
    "a number": (lambda shape: 2.0 if shape[0] == 100 else 1.0, 100),
    "of NumPy": (lambda shape: 2.0 if np.int64(30) == shape[0] else 1.0, 30),
    "another": (lambda shape: 1.0 if shape[0] != 30 else 2.0, 30),
    "full batches": (lambda shape: 5.0 if shape[0] % 16 == 0 else 1.0, 16),
    "a remainder that is true": (lambda shape: remainder(shape[0]), 7),
    "a remainder of a large number": (lambda shape: 1.0 if shape[0] % 4096 else 2.0, 4096),
    "a shape": (lambda shape: 2.0 if shape == (1000, 3) else 1.0, 1000),
    "a size": (lambda shape: 2.0 if shape[0] * shape[1] == 600 else 1.0, 200),
    "several": (lambda shape: 2.0 if shape[0] in (13, 17) else 1.0, 17),
    "a set": (lambda shape: 2.0 if shape[0] in {12, 20} else 1.0, 20),
    "a pattern": (matched, 50),
    "a table of the module": (lambda shape: TABLE.get(shape[0], 1.0), 32),
    "a table of the function": (lambda shape: in_local(shape[0]), 9),
    "a table of an object": (Layer(), 11),
    "halves": (lambda shape: 2.0 if (shape[0] + 3) // 5 == 9 else 1.0, 42),
    "more than there is room for": (lambda shape: 2.0 if shape[0] == 10**10 else 1.0, 10**10),
}


@pytest.mark.parametrize("case", ASKING)
def test_a_length_that_is_treated_otherwise_is_told(case, tmp_path):
    factor, length = ASKING[case]
    x, w = np.ones((4, 3), "float32"), jnp.float32(2)
    assert factor((length, 3)) != factor((4, 3))
    with pytest.warns(UserWarning, match=r"asks how long its batch is \(.*test_questions.py:\d+\)"):
        ow.save(ow.Model(ow.trace(lambda w, x: w * x * factor(x.shape), w, x), w), tmp_path / "m")
    found = ow.load(tmp_path / "m")
    np.testing.assert_allclose(ow.Evaluator(found).forward(x).value, w * x * factor((4, 3)))


HARMLESS = {
    "nothing": lambda w, x: jax.nn.softmax(w * x) - jnp.mean(x, 0) / x.shape[0],
    "refused": lambda w, x: w * x if x.shape[0] != 0 else 1 / 0,
    "the same": lambda w, x: w * (x * 2.0 if x.shape[0] == 30 else x + x),
    "remembered": lambda w, x: w * x * remembered(x.shape[0]),
    "of JAX": lambda w, x: jnp.where(jnp.asarray(x.shape[0]) == 30, 2.0, 1.0) * x * w,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_a_question_that_changes_nothing_is_not_told(case, tmp_path):
    function, w = HARMLESS[case], jnp.float32(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ow.save(ow.Model(ow.trace(function, w, jnp.ones((4, 3))), w), tmp_path / "m")
    found = ow.Evaluator(ow.load(tmp_path / "m"))
    for n in (1, 3, 30):
        x = jnp.sin(jnp.arange(n * 3.0)).reshape(n, 3)
        np.testing.assert_allclose(found.forward(x).value, function(w, x), rtol=1e-5, atol=1e-6)


def causal(w, a, b):
    s = jnp.einsum("btd,bsd->bts", a, b)
    if a.shape[1] == b.shape[1]:
        s = jnp.where(jnp.tril(jnp.ones((a.shape[1],) * 2, bool)), s, -1e9)
    return w * (jax.nn.softmax(s) @ b)


def full(w, a, b):
    return w * (a * 2 if a.shape[0] == 16 and a.shape[1] == 7 else a) + jnp.sum(b)


@pytest.mark.parametrize(("function", "words"), [(causal, ["s = 5", "t = 5"]), (full, ["b = 16", "t = 7"])])
def test_lengths_that_are_asked_for_together(function, words, tmp_path):
    """Self-attention among cross-attention, and a question that is asked only where another is true."""
    w, a, b = jnp.float32(1), jnp.ones((2, 5, 4)), jnp.ones((2, 3, 4))
    a, b = jnp.sin(jnp.arange(40.0)).reshape(a.shape), jnp.cos(jnp.arange(24.0)).reshape(b.shape)
    model = ow.Model(ow.trace(function, w, a, b), w)
    with pytest.raises(ow.ArgumentError) as caught:
        ow.save(model, tmp_path / "m", shapes={"a": ("b", "t", 4), "b": ("b", "s", 4)})
    said = str(caught.value)
    assert all(f"{word} " in said.replace(",", " ") for word in words)


def test_a_step_from_a_file_for_full_batches(tmp_path):
    def loss(w, x):
        y = x @ w
        return jnp.mean((y * 5 if x.shape[0] % 16 == 0 else y) ** 2)

    x = np.sin(np.arange(64.0, dtype="float32")).reshape(16, 4)
    step = ow.compile(ow.SGD(0.1).minimize(loss, jnp.ones(4), x[:8]))
    with pytest.warns(UserWarning, match="for b = 16 the function gives another"):
        ow.save(step, tmp_path / "m", step.init(jnp.ones(4)))
    found, state = ow.load_step(tmp_path / "m")
    np.testing.assert_allclose(found(state, x[:8])[1].loss, loss(jnp.ones(4), x[:8]), rtol=1e-5)
    with pytest.raises(ow.ArgumentError, match=r"takes x\[8, 4\]"):
        found(state, x)


def test_more_lengths_than_can_be_tried(tmp_path):
    def network(w, x):
        return w * x * (1.0 + 0.0 * sum(x.shape[0] == k for k in range(10, 40)))

    with pytest.warns(UserWarning, match="one of more than 16 lengths"):
        ow.save(ow.Model(ow.trace(network, jnp.float32(2), jnp.ones((4, 3))), jnp.float32(2)), tmp_path / "m")


def test_symbols_answer_as_ever_and_only_their_own_thread_is_heard():
    b, t = export.symbolic_shape("b, t")
    kind = type(b)
    before = {name: vars(kind).get(name) for name in ("__eq__", "__ne__", "__hash__", "__bool__")}
    with heard([b, t]) as questions:
        assert b == b + 0
        assert b != t
        assert b % 2
        assert b not in {2, t}
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(lambda: b == 77).result()
        assert b != "b"
    assert {name: vars(kind).get(name) for name in before} == before
    asked = [q.asked for q in questions]
    assert "mod(b, 2)" in asked
    assert any({"b", "t"} <= set(q) for q in asked)
    assert not any("77" in q for q in asked)


@pytest.mark.parametrize(
    ("asked", "sizes", "yes"),
    [
        ("b - 100", {"b": 4}, {"b": 100}),
        ("-1*b + 1000003", {"b": 4, "t": 2}, {"b": 1000003}),
        ("mod(b, 4096)", {"b": 4}, {"b": 4096}),
        ("floordiv(b, 1000) - 5", {"b": 4}, {"b": 5000}),
        ("mod(b + 700, 1000) - 5", {"b": 4}, {"b": 305}),
        ("b^2 - 900", {"b": 4}, {"b": 30}),
        ("b + 1", {"b": 4}, None),
        ("mod(b, 2)", {"b": 4}, None),
        ("2*b - 7", {"b": 4}, None),
    ],
)
def test_the_lengths_for_which_the_answer_is_yes(asked, sizes, yes):
    assert Question(asked, "").yes(sizes) == yes
