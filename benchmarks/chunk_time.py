"""What do chunks of a loss head, and of attention, cost and save, beside the same loops by hand?

One step of SGD, its state donated. Temporary memory is what the compiled step asks for beside its arguments
and results, by ``memory_analysis``.

    onward     the plain step; with ``roll=True`` where the layers are rolled
    chunk      ``ow.chunk``: of the head by the rows of the logits, of attention by its queries
    jax        by hand: ``jax.value_and_grad`` of the same function; a scan over layers where they are rolled
    fused      ``ow.fuse_attention``: attention in four blocks, over the keys that the mask lets them see
    by hand    that of a function with ``jax.lax.map`` over the chunks, and ``jax.checkpoint`` around each

All sides must agree after two steps. Below the table stand the bytes of each pair. Run it by

    python -m benchmarks chunk_time --rounds 7

and expect a table such as

    case                           side    against  rounds  time     peer     ratio  min   max   target
    4 layers of attention          onward  jax      7       1070 ms  1077 ms  0.97   0.83  1.01
    4 layers of attention          chunk   onward   7       712 ms   1070 ms  0.67   0.66  0.70
    4 layers of attention          chunk   by hand  7       712 ms   733 ms   0.98   0.93  1.41  <= 1.10
    4 layers of attention: chunk / onward: 100 MiB of temporaries, 1,588 MiB
    4 layers of attention: chunk / by hand: 100 MiB of temporaries, 98 MiB
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import onward as ow
from benchmarks.harness import ONWARD, Row, Side, in_turn, ratio_row

_RATE, _TARGET = 0.1, 1.1
CHUNK, FUSED, JAX, BY_HAND = "chunk", "fused", "jax", "by hand"
_PAIRS = {(ONWARD, JAX): None, (CHUNK, ONWARD): None, (CHUNK, BY_HAND): _TARGET, (FUSED, ONWARD): None}

Params = Any
Loss = Callable[..., Array]


class Case(NamedTuple):
    """What is trained: as anyone writes it, in Onward and for JAX alone, and with chunks by hand."""

    name: str
    loss: Loss
    plain: Loss
    by_hand: Loss
    params: Params
    data: tuple[np.ndarray, ...]
    chunks: int
    is_attention: bool = False
    roll: bool = False


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """For each case the plain step beside JAX, and chunks beside it and beside the loop by hand."""
    head = _head(vocabulary=64, rows=8, width=4, chunks=2) if quick else _head()
    size = {"layers": 2, "batch": 1, "time": 8, "heads": 2, "width": 4, "chunks": 2} if quick else {}
    found = [head, *(_attention(roll, **size) for roll in ((False,) if quick else (False, True)))]
    return [row for case in found for row in _rows(case, rounds or (2 if quick else 7), quick)]


def _rows(case: Case, rounds: int, quick: bool) -> list[Row]:
    program = ow.SGD(_RATE).minimize(case.loss, case.params, *case.data)
    where = ow.graph.attention_scores(program) if case.is_attention else None
    chunked = ow.chunk(program, case.chunks, where=where)
    made = {
        ONWARD: _onward(program, case),
        CHUNK: _onward(chunked, case),
        JAX: _jax(case.plain, case),
        BY_HAND: _jax(case.by_hand, case),
    }
    if case.is_attention:
        made[FUSED] = _onward(ow.fuse_attention(program), case)
    sides = {name: side for name, (side, _) in made.items()}
    for side in sides.values():
        side.seconds(2)
    losses = [side.loss() for side in sides.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4, err_msg=case.name)
    times = in_turn({name: partial(side.seconds, 1) for name, side in sides.items()}, rounds)
    rows = []
    for (ours, peer), target in _PAIRS.items():
        if ours not in made:
            continue
        note = f"{_mib(made[ours][1])} of temporaries, {_mib(made[peer][1])}"
        more = {"side": ours, "target": None if quick else target, "note": note}
        rows.append(ratio_row(case.name, peer, times[ours], times[peer], **more))
    return rows


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _onward(program: ow.Program, case: Case) -> tuple[Side, int]:
    """A side, and the bytes of temporary memory of its step."""
    step = ow.compile(program, roll=case.roll)
    side = Side(step, step.init(case.params), case.data)
    return side, step.executable(side.state, *case.data).memory.temp_size_in_bytes


def _jax(loss: Loss, case: Case) -> tuple[Side, int]:
    def step(params: Params, *data: Array) -> tuple[Params, Array]:
        value, gradient = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda w, g: w - _RATE * g, params, gradient), value

    layers = case.params
    if case.roll:
        layers = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}
    params = jax.tree.map(jnp.array, layers)
    compiled = jax.jit(step, donate_argnums=0).lower(params, *case.data).compile()
    return Side(compiled, params, case.data), compiled.memory_analysis().temp_size_in_bytes


def _head(vocabulary: int = 50_304, rows: int = 2048, width: int = 256, chunks: int = 8) -> Case:
    """The logits of a large vocabulary, and the cross-entropy of its labels."""
    rng = np.random.default_rng(0)

    def cross_entropy(h: Array, words: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ words), y[:, None], 1)

    def loss(p: Params, x: Array, y: Array) -> Array:
        return jnp.mean(cross_entropy(jnp.tanh(x @ p["hidden"]), p["words"], y))

    def by_hand(p: Params, x: Array, y: Array) -> Array:
        h = jnp.tanh(x @ p["hidden"]).reshape(chunks, -1, width)

        @jax.checkpoint
        def one(given: tuple[Array, Array]) -> Array:
            h, y = given
            return jnp.sum(cross_entropy(h, p["words"], y))

        return jnp.sum(lax.map(one, (h, y.reshape(chunks, -1)))) / rows

    shapes = {"hidden": (width, width), "words": (width, vocabulary)}
    params = {name: _normal(rng, *shape) / width**0.5 for name, shape in shapes.items()}
    data = _normal(rng, rows, width), rng.integers(0, vocabulary, rows).astype(np.int32)
    return Case(f"loss head of {vocabulary:,}", loss, loss, by_hand, params, data, chunks)


def _attention(
    roll: bool,
    layers: int = 4,
    batch: int = 2,
    time: int = 2048,
    heads: int = 4,
    width: int = 128,
    chunks: int = 16,
) -> Case:
    """Layers of causal attention over long sequences."""
    rng = np.random.default_rng(0)

    def attended(first: Array | int, q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        is_before = first + jnp.arange(q.shape[1])[:, None] >= jnp.arange(time)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(is_before, scores, -jnp.inf)), v)

    def in_chunks(q: Array, k: Array, v: Array) -> Array:
        @jax.checkpoint
        def one(given: tuple[Array, Array]) -> Array:
            return attended(*given, k, v)

        queries = jnp.moveaxis(q.reshape(batch, chunks, -1, *q.shape[2:]), 1, 0)
        found = lax.map(one, (jnp.arange(0, time, time // chunks), queries))
        return jnp.moveaxis(found, 0, 1).reshape(q.shape)

    def layer(attention: Callable[..., Array], x: Array, p: Params) -> Array:
        q, k, v = ((x @ p[name]).reshape(batch, time, heads, -1) for name in "qkv")
        return x + jnp.tanh(attention(q, k, v).reshape(x.shape) @ p["o"])

    def loss(attention: Callable[..., Array], rolled: bool, p: Params, x: Array, y: Array) -> Array:
        if rolled:
            x, _ = lax.scan(lambda x, one: (layer(attention, x, one), None), x, p)
        for one in () if rolled else p:
            x = layer(attention, x, one)
        return jnp.mean((x - y) ** 2)

    whole = partial(attended, 0)
    params = [{name: _normal(rng, width, width) / width**0.5 for name in "qkvo"} for _ in range(layers)]
    data = tuple(_normal(rng, batch, time, width) for _ in range(2))
    losses = partial(loss, whole, False), partial(loss, whole, roll), partial(loss, in_chunks, roll)
    name = f"{layers} layers of attention{', rolled' * roll}"
    return Case(name, *losses, params, data, chunks, is_attention=True, roll=roll)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)
