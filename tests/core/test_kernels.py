"""Which steps are kernels, in which order they run and what is added to them, by hand on a few ops each."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.core.kernels.expanded import expanded
from onward.core.kernels.fused import FusedSteps
from onward.core.kernels.rules import AS_WRITTEN, KernelRules
from onward.core.liveness import lifetimes
from onward.core.steps import steps

N = 8
M = jnp.ones((N, N))
WAVES = KernelRules(in_waves=True)
APART = KernelRules(reduces_apart=True)


def fused(function, *args, rules=AS_WRITTEN):
    program = ow.trace(function, *args)
    return FusedSteps(program, steps(program), set(program.outputs), rules)


def kinds(found, numbers):
    return [found.steps[i].kind for i in numbers]


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (lambda w: jnp.exp(w + 1) @ w, ["exp", "dot_general"]),
        (lambda w: jnp.sum(jnp.exp(w + 1)), ["reduce_sum"]),
        (lambda w: (jnp.sin(x := w + 1), jnp.cos(x)), ["sin", "cos"]),  # cheap, on one array: twice
        (lambda w: (jnp.sin(x := jnp.exp(w)), jnp.cos(x)), ["exp", "sin", "cos"]),  # dear: once
        (lambda w: (x := w + 1) @ jnp.sin(x), ["add", "sin", "dot_general"]),
        (lambda w: [w, jnp.exp(w)][0], []),
        (lambda w: (jnp.sin(x := w + w.T), x - jnp.sum(x)), ["add", "sin", "reduce_sum", "sub"]),
    ],
)
def test_the_kernels_of_a_function(function, kernels):
    found = fused(function, M)
    assert kinds(found, sorted(found.kernels)) == kernels


def test_who_can_computes_a_cheap_step_that_others_read_in_memory():
    found = fused(lambda w: ((x := w + 1) @ w, jnp.sin(x)), M)
    (add,) = [i for i, step in enumerate(found.steps) if step.kind == "add"]
    (sin,) = [i for i, step in enumerate(found.steps) if step.kind == "sin"]
    assert found.again == {add: {sin}}
    assert [v.name for v in found.sources[sin]] == ["w"]


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (lambda w: jnp.sum(jnp.sin(w)), ["sin", "reduce_sum"]),
        (lambda w: jnp.sum(w * w.T), ["reduce_sum"]),
        (lambda w: jnp.sum(-w), ["reduce_sum"]),
        (lambda w: jnp.sum(jnp.sin(w) * w), ["sin", "reduce_sum"]),
        (lambda w: jnp.sum(w * (w > 1).astype("float32")), ["mul", "reduce_sum"]),
    ],
)
def test_the_kernels_beside_a_reduction_apart(function, kernels):
    found = fused(function, M, rules=APART)
    assert [kind for kind in kinds(found, sorted(found.kernels)) if kind != "transpose"] == kernels


def test_in_waves_comes_first_what_needs_nothing():
    def drawn(w, key):
        return jnp.sin(w @ w @ w) * jax.random.uniform(key, w.shape)

    found = fused(drawn, M, jax.random.key(0), rules=WAVES)
    order = [kind for kind in kinds(found, found.order) if kind in ("dot_general", "random_bits")]
    assert order == ["dot_general", "random_bits", "dot_general"]
    as_written = replace(WAVES, in_waves=False)
    order = kinds(found, fused(drawn, M, jax.random.key(0), rules=as_written).order)
    assert [kind for kind in order if kind in ("dot_general", "random_bits")][:2] == ["dot_general"] * 2


@pytest.mark.parametrize(("keeps", "last"), [(True, "cos"), (False, "dot_general")])
def test_what_is_behind_a_barrier_waits_for_all_of_it(keeps, last):
    def held(w):
        late = w @ w @ w
        x, late = jax.lax.optimization_barrier((w, late))
        return jnp.cos(x), late

    found = fused(held, M, rules=replace(WAVES, keeps_barriers=keeps))
    assert kinds(found, [i for i in found.order if i in found.kernels])[-1] == last


def test_what_is_checkpointed_waits_for_the_gradient():
    def loss(w):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(w @ w))(w))

    program = ow.append_backward(ow.trace(loss, M))
    assert [step.kind for step in steps(program)].count("optimization_barrier") == 1
    forward = ow.trace(loss, M)
    assert "optimization_barrier" not in [step.kind for step in steps(forward)]


def added(function, *args):
    program = ow.trace(function, *args)
    before = [step.kind for step in steps(program)]
    after = [step.kind for step in expanded(steps(program))]
    for kind in before:
        if kind in after:
            after.remove(kind)
    return after


LOW = jnp.ones((N, N), jnp.bfloat16)
NUMBERS = ("NHWC", "HWIO", "NHWC")
LAID = ("CHWN", "HWIO", "NHWC")


def convolved(numbers):
    return lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize(
    ("function", "args", "kinds"),
    [
        (lambda x, g: jnp.einsum("bi,bo->io", x, g), (LOW, LOW), ["convert_element_type"] * 2),
        (lambda x: jnp.einsum("bi,bo->io", x, x), (LOW,), ["convert_element_type"]),
        (lambda x, w: x @ w, (LOW, LOW), []),
        (lambda x, g: jnp.einsum("bi,bo->io", x, g), (M, M), []),
        (convolved(NUMBERS), (jnp.ones((2, 4, 4, 2)), jnp.ones((1, 1, 2, 2))), []),
        (convolved(LAID), (jnp.ones((2, 4, 4, 2)), jnp.ones((1, 1, 2, 2))), ["transpose"]),
        (jax.scipy.special.erfinv, (M,), ["log1p", "log1p", "select_n"]),
    ],
)
def test_what_is_added_to_a_step(function, args, kinds):
    assert added(function, *args) == kinds


@pytest.mark.usefixtures("optimized")
def test_the_gradient_of_a_maximum_over_windows_reads_the_padded_array():
    def pooled(x):
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "SAME"))

    found = [*expanded(steps(ow.append_backward(ow.trace(pooled, jnp.ones((3, 3))))))]
    (padded,) = next(step.outputs for step in found if step.kind == "pad")
    assert padded.shape == (4, 4)
    assert any(padded in step.inputs for step in found)


@pytest.mark.parametrize(("kind", "words"), [("threefry2x32", 4), ("rbg", 1)])
def test_random_bits_are_as_many_words_as_their_kind_has(kind, words):
    program = ow.trace(lambda key: jnp.sum(jax.random.bits(key, (1024,))), jax.random.key(0, impl=kind))
    given = sum(a.bytes for a in lifetimes(program).arrays if a.begin < 0)
    assert max(lifetimes(program).bytes) - given == pytest.approx(4 * 1024 * words, rel=0.05)
