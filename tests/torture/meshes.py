"""Is a training that is split over a mesh, or cut into stages, equal to the same training on one device?

    python -m tests.torture.meshes                 # five models, 14 layouts, three optimizers
    python -m tests.torture.meshes gpt fsdp adamw  # those with all of these words

Each pair makes twenty steps in float64 on eight devices of the host, and the parameters and losses of all
steps must agree to 1e-9 of the largest number of each array; in bfloat16 to twice what its rounding makes of
the same training in float32 on one device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import onward as ow

STEPS = 20
Model = tuple[Callable[..., Any], Any, tuple[Any, ...]]
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(0, 1 / np.sqrt(shape[0]), shape)


def rms(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def gpt() -> Model:
    wide, heads, words, turns = 16, 4, 24, 8
    shapes = {"wq": (wide, wide), "wk": (wide, wide), "wv": (wide, wide), "wo": (wide, wide)}
    shapes |= {"w1": (wide, 4 * wide), "w2": (4 * wide, wide)}
    blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(4)]
    params = {"embed": normal(words, wide), "blocks": blocks}

    def attention(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[w]).reshape(*x.shape[:2], heads, -1) for w in ("wq", "wk", "wv"))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((turns, turns), bool)), scores, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["wo"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = x + attention(p, rms(x))
            x = x + jax.nn.gelu(rms(x) @ p["w1"]) @ p["w2"]
        logits = rms(x) @ params["embed"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    return loss, params, (RANDOM.integers(words, size=(8, turns + 1)),)


def mixer() -> Model:
    rows, wide = 8, 16
    layers = [
        {"t1": normal(rows, 16), "t2": normal(16, rows), "w1": normal(wide, 32), "w2": normal(32, wide)}
        for _ in range(3)
    ]

    def loss(params: Any, x: Any, y: Any) -> Any:
        for p in params["layers"]:
            x = x + (jnp.tanh(jnp.swapaxes(x, 1, 2) @ p["t1"]) @ p["t2"]).swapaxes(1, 2)
            x = x + jnp.tanh(x @ p["w1"]) @ p["w2"]
        return jnp.mean((x.mean(1) @ params["head"] - y) ** 2)

    return loss, {"layers": layers, "head": normal(wide, 4)}, (normal(16, rows, wide), normal(16, 4))


def lstm() -> Model:
    wide = 16

    def layer(p: Any, x: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["w1"] + h @ p["w2"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        begin = (jnp.zeros((x.shape[1], wide), x.dtype),) * 2
        return jax.lax.scan(turn, begin, x)[1]

    def loss(params: Any, x: Any, y: Any) -> Any:
        h = x.swapaxes(0, 1)
        for p in params["layers"]:
            h = layer(p, h)
        return jnp.mean((h[-1] @ params["head"] - y) ** 2)

    layers = [{"w1": normal(n, 4 * wide), "w2": normal(wide, 4 * wide)} for n in (8, wide, wide)]
    return loss, {"layers": layers, "head": normal(wide, 4)}, (normal(16, 6, 8), normal(16, 4))


class Perceptron(nn.Module):
    """A network of flax, whose step is adopted."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for name, wide in (("w1", 32), ("w2", 16), ("w3", 32)):
            x = jnp.tanh(nn.Dense(wide, name=name, param_dtype=jnp.float64)(x))
        return nn.Dense(4, name="w4", param_dtype=jnp.float64)(x)


def flax_step(tx: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    model = Perceptron()
    x, y = normal(16, 8), normal(16, 4)
    params = model.init(jax.random.key(0), x)

    def step(params: Any, slots: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - y) ** 2))(params)
        updates, slots = tx.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots, loss

    return step, (params, tx.init(params)), (x, y)


def equinox_step(tx: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    x, y = normal(16, 8), normal(16, 4)
    model = eqx.nn.MLP(8, 4, 32, 3, key=jax.random.key(0), dtype=jnp.float64)
    params, static = eqx.partition(model, eqx.is_array)

    def step(params: Any, slots: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

        found, grads = jax.value_and_grad(loss)(params)
        updates, slots = tx.update(grads, slots, params)
        return eqx.apply_updates(params, updates), slots, found

    return step, (params, tx.init(params)), (x, y)


MODELS = {"gpt": gpt, "mixer": mixer, "lstm": lstm, "flax": flax_step, "equinox": equinox_step}
COLUMNS, ROWS = P(None, "model"), P("model")
TENSOR = {
    "gpt": {"*/w[qkv1]": COLUMNS, "*/wo": ROWS, "*/w2": ROWS},
    "mixer": {"*/t1": COLUMNS, "*/t2": ROWS, "*/w1": COLUMNS, "*/w2": ROWS},
    "lstm": {"*/w1": COLUMNS, "*/w2": COLUMNS, "head": ROWS},
    "flax": {"*w[13]/kernel": COLUMNS, "*w[13]/bias": ROWS, "*w[24]/kernel": ROWS},
    "equinox": {"*layers/0/weight": ROWS, "*layers/1/weight": COLUMNS},
}
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"data": 8},
    "hsdp": {"copies": 2, "data": 4},
    "tensor2": {"model": 2},
    "tensor4": {"model": 4},
    "data2tensor4": {"data": 2, "model": 4},
    "fsdp-accumulated": {"data": 4},
    "fsdp-accumulated-bfloat16": {"data": 4},
}
STAGES: dict[str, dict[str, Any]] = {
    f"stages{n}-{schedule}": {"stages": n, "micro_batches": 4, "schedule": schedule}
    for n in (2, 4)
    for schedule in ("gpipe", "1f1b", "zero_bubble")
}
STAGES["data2stages4"] = {"stages": 4, "micro_batches": 4, "data": 2}


def optimizers(word: str) -> tuple[Any, Any]:
    """The rule of ours, and that of optax which the adopted steps have."""
    return {
        "sgd": (ow.SGD(0.1), optax.sgd(0.1)),
        "adamw": (
            ow.AdamW(1e-2, rules=[ow.ClipByGlobalNorm(1.0)]),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        ),
        "muon": (ow.Muon(1e-2), optax.contrib.muon(1e-2)),
    }[word]


def program_of(model: str, rule: str, dtype: str) -> tuple[ow.Program, Any, tuple[Any, ...]]:
    """The Program on one device, what its State begins with, and a batch."""
    ours, theirs = optimizers(rule)
    if model in ("flax", "equinox"):
        step, state, data = of_type(dtype, MODELS[model](theirs))
        return ow.adopt(step, *state, *data), state, data
    loss, params, data = of_type(dtype, MODELS[model]())
    return ours.minimize(loss, params, *data), params, data


def of_type(dtype: str, given: Any) -> Any:
    """The same with its arrays of float64 in this dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x, given)


def trained(program: ow.Program | ow.Pipeline, begun: Any, data: tuple[Any, ...]) -> tuple[list[float], Any]:
    step = ow.compile(program)
    state, losses = step.init(begun), []
    for _ in range(STEPS):
        state, out = step(state, *data)
        losses.append(float(out.loss))
    return losses, jax.tree.leaves(jax.device_get(state.parameters))


def layout(program: ow.Program, model: str, word: str) -> tuple[ow.Program, ow.Program | ow.Pipeline]:
    """The Program on one device, and on the mesh or in stages."""
    if word in STAGES:
        return program, ow.pipeline(program, **STAGES[word])
    mesh = MESHES[word]
    if "accumulated" in word:
        program = ow.accumulate(program, 2)
    if "bfloat16" in word:
        program = ow.mixed_precision(program)
    table: Any = TENSOR[model] if "model" in mesh else {"*": "data"}
    batch = ("copies", "data") if "copies" in mesh else None
    return program, ow.partition(program, mesh, table, batch=batch)


def distance(a: Any, b: Any) -> float:
    return max(
        float(np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-30)) for x, y in zip(a, b, strict=True)
    )


def cases() -> Iterator[tuple[str, str, str]]:
    for model in MODELS:
        for word in (*MESHES, *STAGES):
            for rule in ("sgd", "adamw", "muon"):
                if all(w in f"{model} {word} {rule}" for w in sys.argv[1:]):
                    yield model, word, rule


def compared(model: str, word: str, rule: str) -> tuple[float, float]:
    """How far the mesh is from one device, and how far it may be."""
    is_low = "bfloat16" in word
    program, begun, data = program_of(model, rule, "float32" if is_low else "float64")
    one, many = layout(program, model, word)
    alone, split = trained(one, begun, data), trained(many, begun, data)
    return apart(alone, split), 2 * apart(trained(program, begun, data), alone) if is_low else 1e-9


def apart(a: Any, b: Any) -> float:
    """The largest distance of two trainings, of their losses and parameters."""
    return max(distance([np.array(a[0])], [np.array(b[0])]), distance(a[1], b[1]))


def main() -> None:
    """Run the table."""
    jax.config.update("jax_enable_x64", True)
    wrong = 0
    for case in cases():
        try:
            far, bound = compared(*case)
            told = f"{'equal' if far <= bound else 'WRONG'} {far:.1e} of {bound:.1e}"
        except ow.OnwardError as error:
            told = f"refused: {str(error)[:150]}"
        wrong += told.startswith("WRONG")
        print(*case, told, flush=True)
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
