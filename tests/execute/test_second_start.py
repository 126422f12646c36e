"""A script that is started again compiles nothing: each Program has the same text and HLO as the first time.

So JAX's persistent cache holds it, whatever the seed of Python's hashes.
"""

import json
import os
import subprocess
import sys

SCRIPT = """
import hashlib, json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jax.numpy as jnp, numpy as np
import onward as ow

told, counts = {}, {"hits": 0, "misses": 0}
def heard(event, **_):
    kind = event.rpartition("cache_")[2]
    if event.startswith("/jax/compilation_cache/cache_") and kind in counts:
        counts[kind] += 1
jax.monitoring.register_event_listener(heard)
def tell(what):
    told[what] = dict(counts)
    counts.update(hits=0, misses=0)

def loss(p, x):
    for w in p["layers"]:
        x = x + jnp.tanh(x @ w) * p["scale"]
    return jnp.mean(x**2)
def layered(q, y):
    x = y
    for layer in q["layers"]:
        x = jax.nn.softmax(jax.nn.relu(x @ layer["w"] + layer["b"]))
    return jnp.mean((x - y) ** 2)
def declared():
    hidden = ow.layer.dropout(ow.layer.fc(ow.data("images", (None, 4)), 4, act="relu"), 0.5)
    return jnp.mean(ow.layer.batch_norm(hidden) ** 2)
def adopted(p, x):
    value, g = jax.value_and_grad(loss)(p, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), value
p = {"layers": [np.eye(2, dtype="f")] * 3, "scale": np.ones(2, "f")}
x = np.ones((4, 2), "f")
q = {"layers": [{"w": np.ones((4, 4), "f"), "b": np.zeros(4, "f")}] * 2}
y = np.ones((8, 4), "f")
text = hashlib.sha256()
base = ow.Momentum(0.1, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(loss, p, x)
step = ow.compile(base)
state, out = step(step.init(p), x)
out.loss, state.parameters
tell("a step")
slopes = ow.append_backward(ow.trace(layered, q, y))
cut = ow.split(ow.Adam(0.1).minimize(loss, p, x), servers=2)
kinds = {
    "layers": ow.AdamW(1e-3).minimize(layered, q, y),
    "replicate": ow.replicate(ow.Momentum(1e-3).minimize(layered, q, y), 2, ow.merge.Bucketed()),
    "accumulate": ow.accumulate(ow.Muon(1e-3).minimize(layered, q, y), 2),
    "mixed precision": ow.mixed_precision(ow.Momentum(1e-3).minimize(layered, q, y), "bfloat16"),
    "declared": ow.Momentum(0.1).minimize(declared),
    "roll": ow.roll(base),
    "guard": ow.guard(ow.AdamW(1e-3).create_optimization_pass(ow.clip_by_global_norm(slopes, 1.0)), "skip"),
    "trainer": cut.trainer,
    "server": cut.servers[1],
    "adopt": ow.adopt(adopted, p, x),
}
for kind, program in kinds.items():
    text.update(str(program).encode())
    ow.compile(program)
    tell(kind)
ow.compile(base, cores=2)
tell("cores")
print(json.dumps([text.hexdigest(), told]))
"""


def started(folder, seed):
    environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_second_start_of_a_script_compiles_nothing(tmp_path):
    (text, first), (again, second) = (started(str(tmp_path), seed) for seed in "12")
    assert again == text
    assert all(counts["misses"] for counts in first.values()), first
    assert not any(counts["misses"] for counts in second.values()), second
    assert all(counts["hits"] for counts in second.values()), second
