"""A recipe: one build, phases in place of the order of calls, a function traced once for a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.core.recipe import rebuilt

PARAMS = [jnp.eye(2)] * 4
X = jnp.ones((16, 2))

TRANSFORMS: dict[str, Callable[[ow.Program], ow.Program]] = {
    "mixed_precision": lambda p: ow.mixed_precision(p, "bfloat16"),
    "roll": ow.roll,
    "watch": lambda p: ow.watch(p, gradients=True),
    "replicate": lambda p: ow.replicate(p, 2),
    "accumulate": lambda p: ow.accumulate(p, 4),
    "guard": ow.guard,
}


class Counted:
    """A loss that counts how often it is traced."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, params, x):
        self.traces += 1
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def program(self) -> ow.Program:
        return ow.Adam(1e-3).minimize(self, PARAMS, X)


def stacked(program, names):
    for name in names:
        program = TRANSFORMS[name](program)
    return program


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        ((), 1),
        (("mixed_precision", "roll", "watch", "guard"), 1),
        (("mixed_precision", "replicate"), 2),
        (("accumulate", "roll", "guard"), 2),
        (("mixed_precision", "accumulate", "replicate", "roll"), 4),
    ],
)
def test_a_loss_is_traced_once_for_each_length(names, lengths):
    """Of the whole batch, that of a device, that of a micro-batch, that of a device's micro-batch."""
    loss = Counted()
    program = stacked(loss.program(), names)
    assert loss.traces == lengths
    again = rebuilt(program, (jax.ShapeDtypeStruct((32, 2), jnp.float32),))
    assert loss.traces == 2 * lengths
    assert [op.type for op in again.ops] == [op.type for op in program.ops]
    rebuilt(program, (jax.ShapeDtypeStruct((32, 2), jnp.float32),))
    assert loss.traces == 2 * lengths


@pytest.mark.parametrize(
    "names", [("mixed_precision", "roll", "guard"), ("replicate", "accumulate", "watch")]
)
def test_the_order_of_calls_does_not_matter(names):
    loss = Counted().program()
    found = [stacked(loss, order) for order in permutations(names)]
    assert len({str(p) for p in found}) == 1
    phases = [step.phase for step in found[0].recipe.steps]
    assert phases == sorted(phases)


def test_what_was_changed_by_hand_stays_told_under_a_later_transform():
    program = Counted().program()
    program = replace(program, ops=(*program.ops[:1], *program.ops[1:]))
    with pytest.raises(ow.RecipeError, match="changed by hand"):
        ow.replicate(ow.guard(program), 2)


def test_a_transform_of_ones_own_acts_where_it_was_called():
    @ow.transform
    def named(program):
        return replace(program, name=f"{program.name}!")

    program = ow.replicate(named(Counted().program()), 2)
    assert program.name.endswith("!")
    assert rebuilt(program, (jax.ShapeDtypeStruct((32, 2), jnp.float32),)).name == program.name


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_default_prng_impl", "rbg"),
        ("jax_enable_custom_prng", True),
        ("jax_numpy_rank_promotion", "warn"),
        ("jax_softmax_custom_jvp", True),
        ("jax_threefry_partitionable", False),
    ],
)
def test_settings_of_jax_are_part_of_a_trace(setting, value):
    loss, before = Counted(), getattr(jax.config, setting)
    program = loss.program()
    jax.config.update(setting, value)
    try:
        again = rebuilt(program, (X,))
    finally:
        jax.config.update(setting, before)
    assert loss.traces == 2
    if value == "highest":
        assert "HIGHEST" in str(next(op for op in again.ops if op.type == "dot_general").body.closed)
    rebuilt(program, (X,))
    assert loss.traces == 2  # that of before is known still


def test_the_length_that_nobody_asked_for_longest_is_traced_again():
    loss = Counted()
    program = loss.program()
    for rows in (2, 3, 4, 5, 6, 7, 8, 16, 9, 16):  # 16 is the length of the program
        rebuilt(program, (jax.ShapeDtypeStruct((rows, 2), jnp.float32),))
    assert loss.traces == 9
    rebuilt(program, (jax.ShapeDtypeStruct((2, 2), jnp.float32),))
    assert loss.traces == 10
