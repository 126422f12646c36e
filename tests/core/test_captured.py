"""A function whose rule reads what has changed since is another one: no stale gradient, whatever holds it."""

from __future__ import annotations

import array
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.captured import key_of

SCALE = 1.0


class Settings:
    scale = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Called:
    __slots__ = ()

    def __call__(self) -> float:
        return SCALE

    def method(self) -> float:
        return SCALE


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By what holds a number: how a rule reads it, and how somebody changes it to 3."""
    set_scale(1.0)
    Settings.scale = 1.0
    module, instance, slotted = types.ModuleType("settings"), Settings(), Slotted()
    module.scale = 1.0  # type: ignore[attr-defined]
    numbers, queue, big = {1.0}, collections.deque([1.0]), np.ones(70_000)
    mapping, small, doubles = {"scale": 1.0}, np.ones(3), array.array("d", [1.0])
    called, octets, space = Called(), bytearray([1]), types.SimpleNamespace(scale=1.0)
    get = mapping.get
    return {
        "module": (lambda: module.scale, lambda: setattr(module, "scale", 3.0)),
        "class": (lambda: Settings.scale, lambda: setattr(Settings, "scale", 3.0)),
        "class of an instance": (lambda: instance.scale, lambda: setattr(Settings, "scale", 3.0)),
        "slots": (lambda: slotted.scale, lambda: setattr(slotted, "scale", 3.0)),
        "set": (lambda: next(iter(numbers)), lambda: (numbers.clear(), numbers.add(3.0))),
        "deque": (lambda: queue[0], lambda: (queue.clear(), queue.append(3.0))),
        "large array": (lambda: big[0], lambda: big.fill(3.0)),
        "small array": (lambda: small[0], lambda: small.fill(3.0)),
        "bound builtin": (lambda: get("scale"), lambda: mapping.update(scale=3.0)),
        "dict": (lambda: mapping["scale"], lambda: mapping.update(scale=3.0)),
        "namespace": (lambda: space.scale, lambda: setattr(space, "scale", 3.0)),
        "bytearray": (lambda: octets[0], lambda: octets.__setitem__(0, 3)),
        "array.array": (lambda: doubles[0], lambda: doubles.__setitem__(0, 3.0)),
        "callable object": (lambda: called(), lambda: set_scale(3.0)),
        "method": (lambda: called.method(), lambda: set_scale(3.0)),
        "bound method": (called.method, lambda: set_scale(3.0)),
        "global": (lambda: SCALE, lambda: set_scale(3.0)),
    }


def gradient(factor: Callable[[], Any]) -> float:
    """The gradient of the sum of a function whose rule reads a factor."""

    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return x * 1.5

    function.defvjp(lambda x: (x * 1.5, None), lambda _, g: (g * factor(),))
    program = ow.append_backward(ow.trace(lambda w: jnp.sum(function(w)), jnp.ones(2)))
    step = ow.compile(program, fetch=["grad(w)"], tune=False)
    return float(step(step.init(jnp.zeros(2)))[1]["grad(w)"][0])


@pytest.mark.parametrize("holder", cases())
def test_a_rule_reads_what_is_there_now(holder: str) -> None:
    read, change = cases()[holder]
    assert gradient(read) == 1.0
    change()
    assert float(read()) == 3.0
    assert gradient(read) == 3.0


def test_equal_sets_of_different_types_differ() -> None:
    assert key_of(frozenset({1})) != key_of(frozenset({1.0}))
    assert key_of(frozenset({1, 2})) == key_of(frozenset({2, 1}))


def test_a_rule_within_a_function_with_a_rule() -> None:
    @jax.custom_jvp
    def inner(x: jax.Array) -> jax.Array:
        return x * SCALE

    inner.defjvp(lambda primals, tangents: (inner(*primals), tangents[0]))

    def read() -> jax.Array:
        return inner(jnp.float32(1.0))

    set_scale(1.0)
    assert gradient(read) == 1.0
    set_scale(3.0)
    assert gradient(read) == 3.0
