"""A traced array that the function stores is told by its place; what JAX's caches keep is no side effect."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import onward as ow

pytestmark = pytest.mark.usefixtures("nothing_frozen")
W = jnp.eye(2) / 2
X = jnp.ones(2)
TIMES = jnp.array([0.0, 1.0])
LOG: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_logged():
    yield
    LOG.clear()
    globals().pop("LAST", None)


class Model:
    """Something with attributes."""

    __slots__ = ("__dict__", "hidden")


MODEL, TABLE = Model(), {}


def in_a_list_of_the_module(w):
    LOG.append(w)


def in_a_tuple_in_a_list(w):
    LOG.append((0, (w, w)))


def in_a_dict(w):
    TABLE["w"] = w


def in_an_attribute(w):
    MODEL.h = w


def in_a_private_attribute(w):
    MODEL._h = w


def in_a_slot(w):
    MODEL.hidden = w


def in_a_variable(w):
    global LAST
    LAST = w


def in_a_class(w):
    Model.last = w


def in_a_function(w):
    in_a_function.last = w


def in_a_default(w, seen=[]):  # noqa: B006
    seen.append(w)


def in_a_dict_of_a_default(w, *, seen={}):  # noqa: B006
    seen["w"] = w


def in_a_closure(w):
    LOG.append(lambda: w)


def in_a_partial(w):
    LOG.append(functools.partial(max, w))


def of_vmap(w):
    jax.vmap(LOG.append)(jnp.stack([w, w]))


def of_grad(w):
    jax.grad(lambda w: (LOG.append(w), jnp.sum(w))[1])(w)


def of_what_was_computed(w):
    LOG.append(jnp.tanh(w @ w))


STORES: dict[Callable[..., Any], str] = {
    in_a_list_of_the_module: "in a list of 1",
    in_a_tuple_in_a_list: "in a list of 1",
    in_a_dict: "under the name 'w'",
    in_an_attribute: "under the name 'h'",
    in_a_private_attribute: "under the name '_h'",
    in_a_slot: "under the name",
    in_a_variable: "under the name 'LAST'",
    in_a_class: "under the name 'last'",
    in_a_function: "under the name 'last'",
    in_a_default: "in a list of 1",
    in_a_dict_of_a_default: "under the name 'w'",
    in_a_closure: "under the name 'w'",
    in_a_partial: "in a list of 1",
    of_vmap: "in a list of 1",
    of_grad: "in a list of 1",
    of_what_was_computed: "in a list of 1",
}


@pytest.fixture
def all_forgotten():
    yield
    for holder in (MODEL, Model, in_a_function):
        for name in ("h", "_h", "last"):
            if name in vars(holder):
                delattr(holder, name)
    MODEL.hidden = None
    TABLE.clear()
    in_a_default.__defaults__[0].clear()
    in_a_dict_of_a_default.__kwdefaults__["seen"].clear()


@pytest.mark.usefixtures("all_forgotten")
@pytest.mark.parametrize("store", STORES, ids=lambda store: store.__name__)
def test_wherever_the_function_stores_an_array_it_is_told(store):
    def loss(w, x):
        store(w)
        return jnp.sum(w @ x)

    with pytest.raises(ow.TraceError, match=r"loss is not pure \(.*keeps a traced array after") as error:
        ow.trace(loss, W, X)
    assert f", float32[2,2] {STORES[store]}" in str(error.value)


def test_also_through_what_wraps_the_function_or_goes_in_with_it():
    def told(make, place="under the name 'kept'"):
        kept = deque()
        with pytest.raises(ow.TraceError, match=rf"float32\[2,2\] {place}\."):
            ow.trace(*make(kept), X)

    def storing(kept, w, x):
        kept.append(w)
        return jnp.sum(w @ x)

    class Holding:
        def __init__(self, kept):
            self.kept = kept

        def loss(self, w, x):
            return storing(self.kept, w, x)

    def closing(kept):
        return lambda w, x: storing(kept, w, x)

    def calling(kept):
        inner = jax.jit(closing(kept))
        return lambda w, x: inner.__wrapped__(w, x)

    def activated(kept):
        layer = (kept.append, W)
        return (lambda p, x: (p[0](p[1]), jnp.sum(p[1] @ x))[1]), layer

    told(lambda kept: (closing(kept), W))
    told(lambda kept: (jax.vmap(closing(kept), (None, None), axis_size=2), W))
    told(lambda kept: (calling(kept), W))
    told(lambda kept: (functools.partial(storing, kept), W), "in a deque")
    told(lambda kept: (jax.tree_util.Partial(closing(kept)), W))
    told(lambda kept: (Holding(kept).loss, W))
    told(activated, "in a deque")


def test_a_nonlocal_variable_and_a_set_are_told():
    last, seen = None, set()

    def assigning(w, x):
        nonlocal last
        last = w
        return jnp.sum(w @ x)

    def adding(w, x):
        seen.add(lambda: x)
        return jnp.sum(w @ x)

    with pytest.raises(ow.TraceError, match=r"float32\[2,2\] under the name 'last'"):
        ow.trace(assigning, W, X)
    with pytest.raises(ow.TraceError, match=r"float32\[2\] under the name 'x'"):
        ow.trace(adding, W, X)


def test_an_exception_that_is_kept_is_no_side_effect():
    def loss(w, x):
        try:
            w["missing"]
        except TypeError as error:
            LOG.append(error)
        return jnp.sum(w @ x)

    assert ow.trace(loss, W, X).loss is not None
    assert len(LOG) == 1


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    w: Any


class Layer(eqx.Module):
    w: Any


CONTAINERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "bare": (W, lambda p: p),
    "dict": ({"w": W}, lambda p: p["w"]),
    "list": ([W], lambda p: p[0]),
    "nested": ({"a": [{"w": (W,)}]}, lambda p: p["a"][0]["w"][0]),
    "dataclass": (Weights(W), lambda p: p.w),
    "module": (Layer(W), lambda p: p.w),
    "nested modules": ({"layers": [Layer(W)]}, lambda p: p["layers"][0].w),
}


@functools.partial(jax.jit, static_argnums=0)
def applied(f: Any, x: Any) -> Any:
    return f(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ruled(f: Any, x: Any) -> Any:
    return f(x)


ruled.defvjp(lambda f, x: (f(x), x), lambda f, x, g: (g,))


@functools.cache
def remembered(f: Any) -> Any:
    return f


def converted(f: Any, x: Any) -> Any:
    pure, constants = jax.closure_convert(f, x)
    return pure(x, *constants)


def solved(f: Any, x: Any) -> Any:
    return odeint(lambda y, t: f(y), x, TIMES)[-1]


KEEPERS: dict[str, Callable[[Any, Any], Any]] = {
    "odeint": solved,
    "odeint of a partial": lambda f, x: odeint(functools.partial(lambda g, y, t: g(y), f), x, TIMES)[-1],
    "odeint in vmap": lambda f, x: jax.vmap(lambda y: solved(f, y))(jnp.stack([x, x])),
    "closure_convert": converted,
    "static": applied,
    "static partial": lambda f, x: applied(jax.tree_util.Partial(f), x),
    "jit within": lambda f, x: jax.jit(lambda x: f(x))(x),
    "nondiff": lambda f, x: ruled(lambda y: jax.lax.stop_gradient(f(y)), x),
    "equinox": lambda f, x: eqx.filter_jit(lambda f, x: f(x))(f, x),
    "filter_eval_shape": lambda f, x: f(x) + jnp.zeros(eqx.filter_eval_shape(lambda: f(x)).shape),
    "functools.cache": lambda f, x: remembered(f)(x),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_closure_that_a_cache_keeps_is_no_side_effect(container):
    params, weights = CONTAINERS[container]

    def loss(p, x):
        return jnp.sum(solved(lambda y: jnp.tanh(weights(p) @ y), x) ** 2)

    assert ow.trace(loss, params, X).loss is not None


@pytest.mark.parametrize("container", ["dict", "module"])
def test_whatever_keeps_the_closure(container):
    params, weights = CONTAINERS[container]

    def loss(p, x):
        return sum(jnp.sum(keeper(lambda y: jnp.tanh(weights(p) @ y), x)) for keeper in KEEPERS.values())

    for _ in range(2):
        assert ow.trace(loss, params, X).loss is not None


def test_a_neural_ode_of_a_dict_of_parameters_trains():
    def loss(p, x):
        return jnp.sum(odeint(lambda y, t: jnp.tanh(p["w"] @ y), x, TIMES)[-1] ** 2)

    params = {"w": W}
    step = ow.compile(ow.SGD(0.1).minimize(loss, params, X))
    state, out = step(step.init(params), X)
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, X)
    np.testing.assert_allclose(out.loss, value, 1e-6)
    np.testing.assert_allclose(state.parameters["w"], W - 0.1 * gradient["w"], 1e-5)


def test_only_arrays_of_the_trace_itself_are_blamed():
    kept = []
    jax.jit(lambda z: (kept.append(z), z * 2)[1])(jnp.ones(7))

    def leaking(w, x):
        LOG.append(w)
        return jnp.sum(w @ x)

    for _ in range(2):
        with pytest.raises(ow.TraceError, match=r"leaking is not pure .* float32\[2,2\] in a list of \d"):
            ow.trace(leaking, W, X)
    assert ow.trace(lambda p, x: jnp.sum(solved(lambda y: p["w"] @ y, x)), {"w": W}, X).loss is not None
    assert len(kept) == 1
    assert len(LOG) == 2
