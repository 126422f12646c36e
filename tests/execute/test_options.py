"""Options of XLA reach whatever a Step compiles; what XLA does not know is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.compiler import compiler_options
from onward.execute.options import all_options, option_set
from onward.typing import OptionSet

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="options of XLA's CPU compiler")
W, X = np.ones((3, 3), "float32"), np.ones((4, 3), "float32")


@pytest.fixture(scope="module")
def program() -> ow.Program:
    return ow.SGD(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), W, X)


WRONG = {
    "unknown": (
        {"xla_nonsense": True},
        "on cpu, knows no option 'xla_nonsense'[.] Options are",
    ),
    "value": (
        {"xla_cpu_use_onednn": "maybe"},
        "this value of 'xla_cpu_use_onednn': 'maybe' is not a",
    ),
    "number": ({3: True}, "options holds 3: "),
    "nothing": ({"xla_cpu_use_onednn": None}, "options holds 'xla_cpu_use_onednn': None; expected names"),
    "word": ("fast", "options is 'fast'; expected options of XLA by name"),
    "list": (["xla_cpu_use_onednn"], "expected options of XLA by name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options(case: str, program: ow.Program) -> None:
    options, words = WRONG[case]
    with pytest.raises(ow.ArgumentError, match=words):
        ow.compile(program, options=options)  # type: ignore[arg-type]


@pytest.fixture
def nothing_cached() -> Any:
    """What is read from a cache is not compiled, and dumps nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.usefixtures("nothing_cached")
def test_they_reach_whatever_a_step_compiles(program: ow.Program, tmp_path: Path) -> None:
    def dumped() -> int:
        return len(list(tmp_path.glob("*after_optimizations.txt")))

    step = ow.compile(program, options={"xla_dump_to": str(tmp_path)})
    assert f"options: xla_dump_to={tmp_path}" in str(step.plan())
    assert dumped() == 1
    state, _ = step(step.init(W), X[:2])  # another length
    assert dumped() == 2
    step.run(state, [X] * 4, steps=2)
    assert dumped() == 3
    ow.compile(program)
    assert dumped() == 3


def test_those_of_onward_stay_unless_given() -> None:
    own = compiler_options()
    assert all_options({"xla_cpu_use_onednn": True}) == {**own, "xla_cpu_use_onednn": True}
    assert all_options(dict.fromkeys(own, "")) == dict.fromkeys(own, "")


def test_a_set_says_what_it_is(program: ow.Program) -> None:
    chosen = OptionSet("mine", {"xla_cpu_prefer_vector_width": 256}, fission=False, keep_memory=False)
    assert str(chosen) == "xla_cpu_prefer_vector_width=256, no fission, no memory kept"
    step = ow.compile(program, options=chosen)
    assert f"options: {chosen}" in str(step.plan())
    assert "options" not in str(ow.compile(program, options={}).plan())
    assert option_set(chosen) is chosen
    assert str(option_set(None)) == "as compile has it"


def attention(w: Any, x: Any) -> Any:
    h = x @ w
    weights = jax.nn.softmax(jnp.where(jnp.tri(64, dtype=bool), h @ h.T, -1e9))
    return jnp.mean((weights @ h) ** 2)


def test_attention_is_fused_where_nothing_within_is_fetched() -> None:
    w, x = np.eye(8, dtype="float32"), np.linspace(-1, 1, 512, dtype="float32").reshape(64, 8)
    made = ow.SGD(0.1).minimize(attention, w, x)
    chosen = OptionSet(attention=True)
    assert str(chosen) == "fused attention"
    plain, fused = ow.compile(made), ow.compile(made, options=chosen)
    assert "attention: 1 in blocks" in fused.plan().notes
    assert not any("attention" in note for note in plain.plan().notes)
    (expected, _), (found, _) = (step(step.init(w), x) for step in (plain, fused))
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5, atol=1e-6)
    within = ow.compile(made, fetch=["exp"], options=chosen)
    assert "attention as it is written: 'exp' is fetched, which stands within it" in within.plan().notes
    assert within(within.init(w), x)[1]["exp"].shape == (64, 64)
    none = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), w, x)
    assert "attention as it is written: fuse_attention: nothing in" in str(
        ow.compile(none, options=chosen).plan()
    )


def test_fission_is_left_out() -> None:
    def loss(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row @ w), None), jnp.zeros(64), x)
        return jnp.mean(h**2)

    made = ow.SGD(0.1).minimize(loss, np.eye(64, dtype="float32"), np.ones((16, 8, 64), "float32")[:, 0])
    assert "fission" in str(ow.compile(made).plan())
    assert "\nfission" not in str(ow.compile(made, options=OptionSet(fission=False)).plan())
