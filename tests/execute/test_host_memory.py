"""``keep_host_memory``: in processes of their own, since it cannot be taken back."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.execute import host_memory
from onward.execute.host_memory import (
    KeptMemory,
    arrays_of,
    can_keep_host_memory,
    in_pieces,
    keep_host_memory,
)
from onward.explain.compare.values import AllValues

FAULTS = """
import resource, sys
import numpy as np
if sys.argv[1] == "keep":
    from onward.execute.host_memory import keep_host_memory
    assert keep_host_memory()
def use():
    return np.ones(8_000_000, np.int8).sum()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


STEPS = """
import resource, sys
import jax.numpy as jnp, onward as ow
def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)
w, x = jnp.eye(64), jnp.ones((3 * 2**14, 64))
step = ow.compile(ow.SGD(0.1).minimize(loss, w, x), keep_memory={"no": False, "yes": True}.get(sys.argv[1]))
print(step.plan())
if sys.argv[1] == "plan":
    sys.exit()
state = step.init(w)
def run(state):
    return step(state, x)[0]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
least = 10**9
for _ in range(12):
    before, state = faults(), run(state)
    state["w"].block_until_ready()
    least = min(least, faults() - before)
print(least)
"""


MANY = (
    STEPS.replace("(jnp.tanh(x @ w) @ w)", "chain(x, w)")
    .replace("3 * 2**14", "2**16")
    .replace(
        "def loss",
        """def chain(x, w):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x
def loss""",
    )
)


def told(script, how, **environment):
    made = subprocess.run(
        [sys.executable, "-c", script, how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return made.stdout.splitlines()


def faults(how):
    return int(told(FAULTS, how)[-1])


@pytest.mark.skipif(not can_keep_host_memory(), reason="only glibc can be told so")
def test_memory_that_was_used_is_not_asked_for_again():
    assert faults("keep") < 0.1 * faults("leave")


@pytest.mark.skipif(not can_keep_host_memory(), reason="only glibc can be told so")
def test_a_step_of_large_arrays_keeps_them_unless_told_not_to():
    *plan, kept = told(STEPS, "default")
    *refused, left = told(STEPS, "no")
    forbidden = told(STEPS, "plan", ONWARD_KEEP_MEMORY="0")
    assert "MiB of temporary arrays are kept for the next step" in " ".join(plan)
    assert int(kept) < 0.1 * int(left)
    for lines in (refused, forbidden):
        assert "MiB of temporary arrays go back to the system after each step" in " ".join(lines)


@pytest.mark.skipif(not can_keep_host_memory(), reason="only glibc can be told so")
def test_more_than_a_heap_of_a_thread_holds_is_kept_in_pieces():
    """It takes some steps until each thread that XLA runs a step in has had its own."""
    *plan, kept = told(MANY, "default", JAX_ENABLE_COMPILATION_CACHE="false")
    *flagged, left = told(MANY, "default", XLA_FLAGS="--xla_multiheap_size_constraint_per_heap=500000000")
    taken = re.search(r"(\d+) MiB of temporary arrays are kept for the next step", " ".join(plan))
    assert int(taken[1]) > 64
    assert "go back to the system after each step, unless ow.keep_host_memory()" in " ".join(flagged)
    assert int(kept) < 0.1 * int(left)


@pytest.mark.skipif(jax.default_backend() != "cpu" or not can_keep_host_memory(), reason="of glibc on a CPU")
def test_pieces_are_for_many_arrays_of_which_each_fits_in_one():
    def pieces(mib, wanted=None, dtype=jnp.float32, environment={}, around=lambda loss: loss):  # noqa: B006
        x, w = jax.ShapeDtypeStruct((mib * 2**20 // 256, 64), dtype), jax.ShapeDtypeStruct((64, 64), dtype)
        program = ow.SGD(0.1).minimize(around(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), w, x)
        return in_pieces(arrays_of(program), wanted, environment)

    before, some = (
        jax.config.jax_enable_compilation_cache,
        {"xla_multiheap_size_constraint_per_heap": 48 * 2**20},
    )
    no = {"ONWARD_KEEP_MEMORY": "0"}
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        assert (
            pieces(16)
            == pieces(48)
            == pieces(48, dtype=jnp.bfloat16)
            == pieces(16, True, environment=no)
            == some
        )
        assert pieces(1) == {}  # glibc keeps so little as one piece, too
        assert pieces(49) == pieces(49, dtype=jnp.bfloat16) == {}  # no piece holds it
        assert pieces(16, around=jax.checkpoint) == some
        assert pieces(16, False) == pieces(16, environment=no) == {}
        assert pieces(16, environment={"XLA_FLAGS": "--xla_multiheap_size_constraint_per_heap=1000000"}) == {}
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_a_small_step_asks_for_nothing(monkeypatch):
    monkeypatch.setattr("onward.execute.host_memory._keep", lambda: pytest.fail("asked"))
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    assert "host memory" not in str(ow.compile(program).plan())


@pytest.fixture
def asked(monkeypatch):
    """How often memory was asked to be kept, where every step is large."""
    times = []
    monkeypatch.setattr(host_memory, "LARGE", 1)
    monkeypatch.setattr(host_memory, "_keep", lambda: times.append(1) or KeptMemory(True, ""))
    return times


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)


W, X = jnp.eye(4), jnp.ones((8, 4))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memory of a CPU")
def test_many_steps_in_one_call_keep_it_as_one_step_does(asked):
    program = ow.SGD(0.1).minimize(loss, W, X)
    for keep_memory, times in ((None, 1), (False, 0)):
        step = ow.compile(program, keep_memory=keep_memory)
        assert len(asked) == times
        step.run(step.init(W), [X] * 6, steps=2)
        assert len(asked) == 2 * times
        asked.clear()


def test_who_only_looks_keeps_nothing(asked):
    program = ow.SGD(0.1).minimize(loss, W, X)
    AllValues(ow.replicate(program, 2), (X,))
    ow.collectives(program)
    assert asked == []


def test_it_says_why_not_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    kept = keep_host_memory()
    assert not kept
    assert kept.reason == "on darwin there is no mallopt; the system's own allocator decides"


def test_a_call_that_did_nothing_is_not_counted_as_an_early_one(monkeypatch):
    monkeypatch.setattr(host_memory, "_called", [])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_host_memory()
    assert host_memory._called == []


@pytest.mark.skipif(jax.default_backend() != "cpu" or not can_keep_host_memory(), reason="of glibc on a CPU")
@pytest.mark.parametrize("is_early", [False, True])
def test_the_plan_says_whether_one_large_piece_is_kept(monkeypatch, asked, is_early):
    monkeypatch.setattr(host_memory, "_called", [True] * is_early)
    monkeypatch.setattr(host_memory, "_HEAP", 1)
    notes = " ".join(ow.compile(ow.SGD(0.1).minimize(loss, W, X)).plan().notes)
    assert ("are kept for the next step" in notes) is is_early
    assert ("unless ow.keep_host_memory() is called first" in notes) is not is_early


def test_it_says_why_not_with_another_c_library(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    kept = keep_host_memory()
    assert not kept
    assert "GNU" in kept.reason
