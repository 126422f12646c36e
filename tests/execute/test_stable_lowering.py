"""The same program is the same HLO in another process, so that JAX's cache on disk knows it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax import monitoring

import onward as ow

CACHED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}


def loss(params, x, y):
    for layer in params["layers"]:
        x = jax.nn.softmax(jax.nn.relu(x @ layer["w"] + layer["b"]))
    return jnp.mean((x - y) ** 2)


def arguments():
    layers = [{"w": jnp.ones((4, 4)), "b": jnp.zeros(4)} for _ in range(2)]
    return {"layers": layers}, jnp.ones((8, 4)), jnp.ones((8, 4))


def declared():
    images = ow.data("images", (None, 4))
    hidden = ow.layer.dropout(ow.layer.fc(images, 4, act="relu"), 0.5)
    return jnp.mean(ow.layer.batch_norm(hidden) ** 2)


def programs():
    """Programs in which order could depend on chance."""
    adam, momentum = ow.AdamW(1e-3), ow.Momentum(1e-3)
    plain = ow.append_backward(ow.trace(loss, *arguments()))
    yield adam.minimize(loss, *arguments())
    yield ow.guard(adam.create_optimization_pass(ow.clip_by_global_norm(plain, 1.0)))
    yield ow.mixed_precision(momentum.minimize(loss, *arguments()), "bfloat16")
    yield ow.accumulate(ow.Muon(1e-3).minimize(loss, *arguments()), 2)
    yield ow.replicate(momentum.minimize(loss, *arguments()), devices=2, merge=ow.merge.Bucketed())
    yield ow.Momentum(0.1).minimize(declared)


def child():
    """Compile them all; print what they are, and what JAX found in its cache on disk."""
    seen = []
    monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    text = hashlib.sha256()
    for program in programs():
        text.update(str(program).encode())
        ow.compile(program)
    print(text.hexdigest(), seen.count("cache_hits"), seen.count("cache_misses"))


def run(cache, seed):
    environment = {**os.environ, **CACHED, "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONHASHSEED": seed}
    found = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
    )
    text, hits, misses = found.stdout.split()
    return text, int(hits), int(misses)


def test_another_process_compiles_nothing_again(tmp_path):
    first, _, made = run(tmp_path, "1")
    second, hits, misses = run(tmp_path, "2")
    assert first == second
    assert made >= 6
    assert (misses, hits >= 6) == (0, True)


if __name__ == "__main__":
    child()
