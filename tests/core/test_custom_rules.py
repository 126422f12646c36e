"""A function whose rule reads what has changed since is another one: no stale gradient, whatever holds it."""

from __future__ import annotations

import array
import collections
import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.jaxprs.body import body_of
from onward.core.keys import key_of

SCALE = 1.0


class Settings:
    scale = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Meta(type):
    factor = 1.0

    @property
    def scale(cls) -> float:
        return Meta.factor


class OfMeta(metaclass=Meta):
    pass


class Config(dict):
    """A dict that carries attributes."""


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
    Settings.scale = Meta.factor = 1.0
    module, instance, slotted = types.ModuleType("settings"), Settings(), Slotted()
    module.scale = 1.0  # type: ignore[attr-defined]
    numbers, queue, big = {1.0}, collections.deque([1.0]), np.ones(70_000)
    mapping, small, doubles = {"scale": 1.0}, np.ones(3), array.array("d", [1.0])
    called, octets, space = Called(), bytearray([1]), types.SimpleNamespace(scale=1.0)
    get, config = mapping.get, Config()
    config.scale = 1.0  # type: ignore[attr-defined]
    imported = sys.modules["onward_test_settings"] = types.ModuleType("onward_test_settings")
    imported.scale = 1.0  # type: ignore[attr-defined]
    return {
        "getattr of a module": (lambda: getattr(module, "sca" + "le"), lambda: setattr(module, "scale", 3.0)),
        "vars of a module": (lambda: vars(module)["scale"], lambda: setattr(module, "scale", 3.0)),
        "sys.modules": (
            lambda: sys.modules["onward_test_settings"].scale,
            lambda: setattr(imported, "scale", 3.0),
        ),
        "eval": (lambda: eval("SCALE"), lambda: set_scale(3.0)),
        "metaclass": (lambda: OfMeta.scale, lambda: setattr(Meta, "factor", 3.0)),
        "attribute of a dict": (lambda: config.scale, lambda: setattr(config, "scale", 3.0)),
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


class Numbers(list):
    pass


class Array(np.ndarray):
    pass


class Lazy:
    def __getattr__(self, name: str) -> None:
        return None


class AttributeDict(dict):
    __getattr__ = dict.get


HOLDERS: dict[str, Callable[[], Any]] = {
    "dict": Config,
    "list": Numbers,
    "ndarray": lambda: np.zeros(2).view(Array),
    "defaultdict": type("Counted", (collections.defaultdict,), {}),
    "UserDict": collections.UserDict,
    "masked array": lambda: np.ma.zeros(2),
    "namespace": types.SimpleNamespace,
    "Lazy": Lazy,
    "AttributeDict": AttributeDict,
}


def rule_over(holder: Any) -> Callable[[jax.Array], jax.Array]:
    """The same function for every holder, with a rule that multiplies by what that carries."""

    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return x * 1.5

    function.defvjp(lambda x: (x * 1.5, None), lambda _, g: (g * holder.scale,))
    return function


def gradients_by_onward_and_jax(loss: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    program = ow.append_backward(ow.trace(loss, *arguments))
    step = ow.compile(program, fetch=[g for _, g in program.gradients], tune=False)
    _, out = step(step.init(arguments[0]), *arguments[1:])
    return [out[g] for _, g in program.gradients], jax.tree.leaves(jax.grad(loss)(*arguments))


@pytest.mark.parametrize("kind", HOLDERS)
def test_two_rules_that_differ_in_what_an_object_carries_are_two(kind: str) -> None:
    first, second = HOLDERS[kind](), HOLDERS[kind]()
    vars(first)["scale"], vars(second)["scale"] = 1.0, 10.0

    def loss(w: dict[str, Any], x: Any) -> Any:
        return jnp.sum(rule_over(first)(w["a"] * x)) + jnp.sum(rule_over(second)(w["b"] * x))

    found, expected = gradients_by_onward_and_jax(loss, {"a": jnp.ones(2), "b": jnp.ones(2)}, jnp.ones(2))
    np.testing.assert_array_equal(found, expected)


def test_layers_whose_rules_differ_are_not_rolled() -> None:
    holders = [Config() for _ in range(4)]
    for i, holder in enumerate(holders):
        holder.scale = float(i)  # type: ignore[attr-defined]

    def loss(params: list[Any], x: Any) -> Any:
        for w, holder in zip(params, holders, strict=True):
            x = rule_over(holder)(jnp.tanh(x @ w))
        return jnp.sum(x)

    arguments = [jnp.eye(2)] * 4, jnp.ones((1, 2))
    with pytest.raises(ow.GraphError, match="part of a layer that repeats"):
        ow.roll(ow.trace(loss, *arguments))
    holders[:] = [holders[2]] * 4
    assert [len(p.ops) for p in (ow.trace(loss, *arguments), ow.roll(ow.trace(loss, *arguments)))] == [13, 3]


def test_rules_that_differ_only_in_their_own_derivative_are_two() -> None:
    def second_order(factor: float) -> Callable[[Any], Any]:
        @jax.custom_jvp
        def slope(x: Any) -> Any:
            return x * 1.0

        slope.defjvp(lambda p, t: (slope(*p), t[0] * factor))

        @jax.custom_jvp
        def function(x: Any) -> Any:
            return x * x

        function.defjvp(lambda p, t: (function(*p), t[0] * slope(*p)))
        return function

    def signature(factor: float) -> Any:
        function = second_order(factor)
        return body_of(lambda x: [function(x)], jnp.ones(3)).signature

    first, again, other = map(signature, (2.0, 2.0, 5.0))
    assert first is again
    assert first is not other


def test_a_loop_of_equinox_that_saves_checkpoints() -> None:
    def loss(w: Any, x: Any) -> Any:
        loop = eqx.internal.while_loop(
            lambda c: c[1] < 5,
            lambda c: (jnp.tanh(c[0] * w), c[1] + 1),
            (x, 0),
            kind="checkpointed",
            max_steps=8,
        )
        return jnp.sum(loop[0])

    found, expected = gradients_by_onward_and_jax(loss, jnp.ones(3), jnp.linspace(0.1, 1.0, 3))
    np.testing.assert_array_equal(found, expected)


def test_an_output_that_no_gradient_reaches_needs_no_rule() -> None:
    """As the number of steps that a solver counts beside its solution."""

    @jax.custom_vjp
    def solved(x: Any, scale: Any) -> Any:
        return x * scale, scale * 1.0

    def backward(saved: Any, cotangents: Any) -> Any:
        x, scale = saved
        return cotangents[0] * scale, jnp.sum(cotangents[0] * x) + cotangents[1]

    solved.defvjp(lambda x, scale: (solved(x, scale), (x, scale)), backward)

    def loss(w: Any, x: Any) -> Any:
        values, scale = jax.vmap(solved, in_axes=(0, None), out_axes=(0, None))(x * w, jnp.float32(2.0))
        return jnp.sum(values) + jax.lax.stop_gradient(scale)

    found, expected = gradients_by_onward_and_jax(loss, jnp.float32(3.0), jnp.ones((4, 2)))
    np.testing.assert_array_equal(found, [expected[0]])


def test_a_rule_that_cannot_be_traced_does_not_stop_the_forward_pass() -> None:
    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return x * 2

    def never(*_: Any) -> Any:
        raise NotImplementedError

    function.defvjp(lambda x: (x * 2, None), never)
    program = ow.trace(lambda w: jnp.sum(function(w)), jnp.ones(2))
    step = ow.compile(program)
    assert float(step(step.init(jnp.ones(2)))[1].loss) == 4.0


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
