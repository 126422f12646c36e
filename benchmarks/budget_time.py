"""How little memory does a GPT train in, for how much more time, beside what people write by hand?

Causal attention, 24 layers, a vocabulary of 50,304, 1,024 tokens, Adam. Bytes are those of the whole compiled
step by ``memory_analysis``: arguments, results, temporaries; state in host memory is not counted, of either.

    onward     ``ow.fit_memory(program, budget)`` for some budgets, of the model as anyone writes it
    by hand    ``jit`` of a scan over stacked layers with Adam, in all combinations of: nothing, products or
               no activation kept (``jax.checkpoint`` policies); the head whole, or in 8 chunks by ``lax.map``
               of a checkpointed body; attention whole, or in 8 chunks of queries by the same means; what Adam
               keeps in pinned host memory

The plain step is the first of those, with all on the device. For each limit on time, relative to it, stand
the two that take the fewest bytes within the limit. Run it by

    python -m benchmarks budget_time --rounds 5

and expect a table such as

    case                          side    against  rounds  time     peer     ratio  min   max   target
    at most 1.15 of a plain step  onward  by hand  5       1070 ms  1077 ms  0.97   0.83  1.01
    at most 1.15 of a plain step: onward / by hand: 300 MiB, by fit_memory(program, 0.3); 400 MiB, by ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import onward as ow
from benchmarks.by_hand import adam
from benchmarks.harness import Row, Side, in_turn, ratio_row

_RATE = 1e-3
_LIMITS = (1.15, 1.5, 2.0)
_BUDGETS = (0.2, 0.17, 0.16, 0.15)
_CHUNKS = 8
_POLICIES: dict[str, Any] = {
    "nothing again": None,
    "products kept": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing kept": jax.checkpoint_policies.nothing_saveable,
}

Params = Any


class Size(NamedTuple):
    """How large the model is."""

    layers: int = 24
    width: int = 128
    heads: int = 4
    words: int = 50_304
    time: int = 1024


class Variant(NamedTuple):
    """A side with the bytes of its step."""

    name: str
    side: Side
    bytes: int


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """For each limit on time the least memory of Onward beside the least by hand."""
    size = Size(1, 8, 2, 64, 16) if quick else Size()
    params, data = _params(size), _data(size)
    ours = list(_ours(size, params, data, (0.9,) if quick else _BUDGETS))
    hand = list(_by_hand(size, params, data, quick))
    variants = {v.name: v for v in (*hand, *ours)}
    for variant in variants.values():
        variant.side.seconds(2)
    losses = [v.side.loss() for v in variants.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    sides = {name: partial(v.side.seconds, 1) for name, v in variants.items()}
    times = in_turn(sides, rounds or (2 if quick else 5))
    plain = median(times[hand[0].name])
    rows = []
    for limit in _LIMITS:
        within = {n for n, spent in times.items() if quick or median(spent) <= limit * plain}
        pair = [[v for v in group if v.name in within] for group in (ours, hand)]
        if all(pair):
            a, b = (min(group, key=_bytes) for group in pair)
            note = f"{_mib(a)}, by {a.name}; {_mib(b)}, by {b.name}; of {_mib(hand[0])}"
            case = f"at most {limit} of a plain step"
            rows.append(ratio_row(case, "by hand", times[a.name], times[b.name], note=note))
    return rows


def _bytes(variant: Variant) -> int:
    return variant.bytes


def _mib(variant: Variant) -> str:
    return f"{variant.bytes / 2**20:,.0f} MiB"


def _ours(
    size: Size, params: Params, data: tuple[Array, ...], budgets: tuple[float, ...]
) -> Iterator[Variant]:
    program = ow.Adam(_RATE).minimize(partial(_loss, size, _unrolled, _head, _attention), params, *data)
    programs = {"the plain Program": program}
    for budget in budgets:
        try:
            programs[f"fit_memory(program, {budget})"] = ow.fit_memory(program, budget)
        except ow.GraphError:  # as little as that does not go
            break
    for name, each in programs.items():
        step = ow.compile(each)
        state = step.init(params)
        there = sum(v.size * v.dtype.itemsize for v in ow.graph.offloaded(each))
        taken = _taken(step.executable(state, *data).memory, there)
        yield Variant(name, Side(step, state, data), taken)


def _taken(plan: Any, on_host: int) -> int:
    whole = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return whole + plan.temp_size_in_bytes - (0 if plan.host_argument_size_in_bytes else on_host)


def _by_hand(size: Size, params: Params, data: tuple[Array, ...], quick: bool) -> Iterator[Variant]:
    stacked = {**params, "layers": jax.tree.map(lambda *ws: jnp.stack(ws), *params["layers"])}
    heads = {"": _head, ", head in chunks": partial(_head_in_chunks, size)}
    attentions = {"": _attention, ", attention in chunks": _attention_in_chunks}
    plain = partial(_loss, size, partial(_scanned, None), _head, _attention)
    yield _adam("the plain step", plain, stacked, data, "device")
    ways = list(product(_POLICIES, heads, attentions))
    for policy, head, attention in ways[6:7] if quick else ways:
        layers = partial(_scanned, _POLICIES[policy])
        loss = partial(_loss, size, layers, heads[head], attentions[attention])
        yield _adam(f"{policy}{head}{attention}", loss, stacked, data, "pinned_host")


def _adam(name: str, loss: Callable[..., Array], params: Params, data: Any, kind: str) -> Variant:
    """A step by hand, with what Adam keeps in memory of this kind."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")

    def step(state: Any, *data: Array) -> Any:
        params, slots, t = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        params, slots = adam(params, gradient, jax.device_put(slots, here), t + 1.0, _RATE)
        return (params, jax.device_put(slots, place), t + 1.0), value

    params = jax.tree.map(jnp.array, params)
    slots = jax.device_put(tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2)), place)
    state = (params, slots, jnp.zeros(()))
    kept = (here, place, here)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(kept, here)).lower(state, *data).compile()
    there = sum(x.nbytes for x in jax.tree.leaves(slots)) if kind != "device" else 0
    return Variant(name, Side(compiled, state, data), _taken(compiled.memory_analysis(), there))


# The model.


def _loss(
    size: Size, layers: Any, head: Any, attention: Any, params: Params, tokens: Array, labels: Array
) -> Array:
    x = params["words"][tokens] + params["places"]
    x = layers(partial(_block, size.heads, attention), x, params["layers"])
    return head(_normal_rows(x).reshape(-1, size.width), params["words"], labels.reshape(-1))


def _block(heads: int, attention: Any, x: Array, p: Params) -> Array:
    q, k, v = (part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(_normal_rows(x) @ p["qkv"], 3, -1))
    x = x + attention(q, k, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_normal_rows(x) @ p["up"]) @ p["down"]


def _normal_rows(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _unrolled(block: Any, x: Array, layers: Params) -> Array:
    for layer in layers:
        x = block(x, layer)
    return x


def _scanned(policy: Any, block: Any, x: Array, layers: Params) -> Array:
    turn = block if policy is None else jax.checkpoint(block, policy=policy)
    return lax.scan(lambda x, layer: (turn(x, layer), None), x, layers)[0]


def _attention(q: Array, k: Array, v: Array, first: Array | int = 0) -> Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    is_before = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(is_before, scores, -jnp.inf)), v)


def _attention_in_chunks(q: Array, k: Array, v: Array) -> Array:
    @jax.checkpoint
    def one(given: tuple[Array, Array]) -> Array:
        first, queries = given
        return _attention(queries, k, v, first)

    time = q.shape[1]
    queries = jnp.moveaxis(q.reshape(q.shape[0], _CHUNKS, -1, *q.shape[2:]), 1, 0)
    return jnp.moveaxis(lax.map(one, (jnp.arange(0, time, time // _CHUNKS), queries)), 0, 1).reshape(q.shape)


def _cross_entropy(h: Array, words: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ words.T), labels[:, None], 1)


def _head(h: Array, words: Array, labels: Array) -> Array:
    return jnp.mean(_cross_entropy(h, words, labels))


def _head_in_chunks(size: Size, h: Array, words: Array, labels: Array) -> Array:
    @jax.checkpoint
    def one(given: tuple[Array, Array]) -> Array:
        return jnp.sum(_cross_entropy(given[0], words, given[1]))

    return (
        jnp.sum(lax.map(one, (h.reshape(_CHUNKS, -1, size.width), labels.reshape(_CHUNKS, -1)))) / h.shape[0]
    )


def _params(size: Size) -> Params:
    rng, d = np.random.default_rng(0), size.width

    def dense(*shape: int) -> np.ndarray:
        return (0.02 * rng.normal(size=shape)).astype(np.float32)

    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    layers = [{name: dense(*shape) for name, shape in shapes.items()} for _ in range(size.layers)]
    return {"words": dense(size.words, d), "places": dense(size.time, d), "layers": layers}


def _data(size: Size) -> tuple[Array, Array]:
    tokens = np.random.default_rng(1).integers(0, size.words, (1, size.time)).astype(np.int32)
    return tokens, np.roll(tokens, -1, 1)
