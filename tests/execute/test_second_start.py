"""A script that is started again compiles nothing: JAX's persistent cache holds each kind of Program."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
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
def adopted(p, x):
    value, g = jax.value_and_grad(loss)(p, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), value
p = {"layers": [np.eye(2, dtype="f")] * 3, "scale": np.ones(2, "f")}
x = np.ones((4, 2), "f")
base = ow.Momentum(0.1, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(loss, p, x)
step = ow.compile(base)
state, out = step(step.init(p), x)
out.loss, state.parameters
tell("a step")
cut = ow.split(ow.Adam(0.1).minimize(loss, p, x), servers=2)
kinds = {
    "replicate": ow.replicate(base, 2),
    "accumulate": ow.accumulate(base, 2),
    "roll": ow.roll(base),
    "guard": ow.guard(base, "skip"),
    "trainer": cut.trainer,
    "server": cut.servers[1],
    "adopt": ow.adopt(adopted, p, x),
}
for kind, program in kinds.items():
    ow.compile(program)
    tell(kind)
ow.compile(base, cores=2)
tell("cores")
print(json.dumps(told))
"""


def started(folder, seed):
    environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_ENABLE_COMPILATION_CACHE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_second_start_of_a_script_compiles_nothing(tmp_path):
    first, second = (started(str(tmp_path), seed) for seed in "12")
    assert all(counts["misses"] for counts in first.values()), first
    assert not any(counts["misses"] for counts in second.values()), second
    assert all(counts["hits"] for counts in second.values()), second
