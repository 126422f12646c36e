"""Meshes and pipelines over two processes of three devices each: equal to six devices of one process."""

import runpy
import sys

import numpy as np
import pytest
from tests.execute.test_processes import launch

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, onward as ow
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import PartitionSpec as P
from onward.execute.processes import gathered

folder, index = sys.argv[1], jax.process_index()
rng = np.random.default_rng(0)

def numbers(*shape):
    return rng.normal(size=shape).astype("float32")

def loss(params, x, y):
    h = x
    for i in range(3):
        h = jnp.tanh(h @ params[f"w{i}"])
    errors = (h @ params["w0"][:, :2] - y) ** 2
    return jnp.mean(errors), {"worst": jnp.max(errors)}

def in_a_loop(params, x, y):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    errors = (h @ params["out"] - y) ** 2
    return jnp.mean(errors), {"worst": jnp.max(errors)}

def dropped(params, x, y, key):
    first, second = jax.random.split(key)
    h = jnp.tanh(x @ params["w0"]) * jax.random.bernoulli(first, 0.8, (6,))
    h = jnp.tanh(h @ params["w1"]) * jax.random.bernoulli(second, 0.8, (6,))
    errors = (h[:, :2] - y) ** 2
    return jnp.mean(errors), jnp.sum(errors, 1)

params = {f"w{i}": numbers(6, 6) for i in range(3)}
x, y = numbers(48, 6), numbers(48, 2)
own = slice(24 * index // jax.process_count(), 24 * (index + 1) // jax.process_count())
program = ow.Momentum(1e-2).minimize(loss, params, x[:24], y[:24], has_aux=True)
two = {name: params[name] for name in ("w0", "w1")}
keyed = ow.Momentum(1e-2).minimize(dropped, two, x[:24], y[:24], jax.random.key(0), has_aux=True)
stacks = {"w": numbers(6, 6, 6) / 2, "out": numbers(6, 2)}
clipped = ow.Adam(1e-2, rules=[ow.ClipByGlobalNorm(0.1)])
looped = clipped.minimize(in_a_loop, stacks, x[:24], y[:24], has_aux=True)
found = {}

# The reader of a mesh whose axis of the batch lies within each process gives every one of them all rows.
for name, layout, parts in (
    ("stages", ow.pipeline(program, 2, micro_batches=4, schedule="zero_bubble"), True),
    ("stages of 3", ow.pipeline(program, 2, micro_batches=4, data=3), True),
    ("in all stages", ow.pipeline(program, 3, micro_batches=4, schedule="gpipe", data=2), True),
    ("fsdp in stages", ow.pipeline(ow.partition(program, {"data": 3}, {"*": "data"}), 2, 4), True),
    ("model in stages", ow.pipeline(ow.partition(program, {"model": 2}, {"*": "model"}), 3, 4), True),
    ("loop in stages", ow.pipeline(looped, 2, micro_batches=4, data=3), True),
    ("loop in all stages", ow.pipeline(ow.partition(looped, {"data": 2}, {"*": "data"}), 3, 4), True),
    ("fsdp", ow.partition(program, {"data": 6}, {"*": "data"}), True),
    ("model first", ow.partition(program, {"model": 2, "data": 3}, {"w0": P(None, "model")}), False),
):
    own_program, first = (looped, stacks) if name.startswith("loop") else (program, params)
    slot = "mean" if own_program is looped else "velocity"
    made = lambda: ow.batches((x, y), 24, shuffle=True, parts=parts)
    checkpoints = ow.Checkpoints(f"{folder}/{name}", every=1)
    trainer = ow.Trainer(ow.Model(own_program, first), layout, checkpoints=checkpoints)
    tested = ow.batches((x[:20], y[:20]), 10)
    trainer.train(made(), epochs=1, progress=False)
    sync_global_devices("written")
    resumed = trainer  # it has compiled its steps
    if name in ("stages", "loop in all stages", "fsdp"):
        resumed = ow.Trainer(ow.Model(own_program, first), layout)
    else:
        trainer.replace({each: first[key] * 0 for key in first for each in (key, f"{key}/{slot}")})
    resumed.restore(f"{folder}/{name}")
    history = resumed.train(made(), epochs=2, test=tested if parts else None, progress=False)
    for key in [key for key in history if "loss" in key or "worst" in key]:
        found[f"{name}: {key}"] = history[key]
    if name == "in all stages":
        lies = [{device.process_index for device in resumed.state[key].devices()} for key in params]
        assert lies == [set(range(jax.process_count()))] * 3, lies
    for key in ("w", "w/mean", "out") if own_program is looped else ("w0", "w0/velocity", "w2"):
        found[f"{name}: {key}"] = np.asarray(gathered(resumed.state[key]))

for name, layout in (
    ("keys in stages", ow.pipeline(keyed, 2, micro_batches=4)),
    ("keys in replicas", ow.replicate(keyed, 6)),
    ("keys in fsdp", ow.partition(keyed, {"data": 6}, {"*": "data"})),
):
    step = ow.compile(layout, fetch=["grad(w0)"] if name == "keys in fsdp" else ())
    state = step.init(two)
    for i in range(3):
        state, out = step(state, x[own], y[own], jax.random.key(i))
    found[f"{name}: loss"] = np.asarray(out.loss)
    if name != "keys in replicas":  # there each process has the rows of its devices
        found[f"{name}: each"] = np.asarray(out.aux)

assert jax.process_count() == 1 or out["grad(w0)"].sharding == state["w0"].sharding
spoilt = np.where(np.arange(48)[:, None] == 43, np.inf, x).astype("float32")
told = ow.find_nonfinite(step, state, (spoilt[24:][own], y[own], jax.random.key(0)))
with open(f"{folder}/{index}.txt", "w") as file:
    file.write(str(told))
np.savez(f"{folder}/{index}.npz", **found)
"""


def test_a_layout_over_two_processes_equals_that_of_one(tmp_path, monkeypatch):
    """Losses, tests, what is resumed from a checkpoint, dropout, examples: on both processes."""
    script, folders = tmp_path / "train.py", [tmp_path / "one", tmp_path / "two"]
    script.write_text(SCRIPT)
    for folder in folders:
        folder.mkdir()
    status, said = launch(script, folders[1], "-n", "2", "--devices", "3")
    assert status == 0, said
    monkeypatch.setattr(sys, "argv", [str(script), str(folders[0])])
    runpy.run_path(str(script))
    alone = dict(np.load(folders[0] / "0.npz"))
    assert len(alone) == 66
    for index in range(2):
        together = dict(np.load(folders[1] / f"{index}.npz"))
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            np.testing.assert_allclose(together[name], value, 2e-5, 1e-6, err_msg=name)
        told = (folders[1] / f"{index}.txt").read_text()
        assert "'x' is not finite: 6 of 144 are infinite, the first at [19, 0]" in told
        assert told == (folders[0] / "0.txt").read_text()


REFUSED = """
import sys, time
import jax, jax.numpy as jnp, numpy as np, onward as ow

def loss(w, x, rate):
    return rate * jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

index, told = jax.process_index(), []
w, x, rate = np.ones((6, 6), "float32"), np.ones((12, 6), "float32"), np.float32(1)
program = ow.SGD(0.1).minimize(loss, w, x, rate)
mine = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("data",))
layers = [np.ones((6, 6), "float32")] * 8

def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)

def attempt(work):
    try:
        work()
    except ow.OnwardError as error:
        told.append(f"{type(error).__name__}: {error}")

def fed(program, *data, w=w):
    step = ow.compile(program)
    return step(step.init(w), *data)

if {more}:
    attempt(lambda: fed(ow.partition(program, mine, {"w": "data"}), x, rate))
    attempt(lambda: fed(ow.partition(program, {"data": 3}, {"w": "data"}), x, rate))
    attempt(lambda: fed(ow.partition(program, {"model": 6}, {"w": "model"}), x, rate, w=w + index))
    attempt(lambda: fed(ow.pipeline(program, 2, micro_batches=2), x[:6], rate, w=w + index))
    attempt(lambda: fed(ow.partition(program, {"data": 3, "model": 2}, {"w": "model"}), x[:8], rate))
    attempt(lambda: fed(ow.partition(program, {"data": 6}, {"w": "data"}), x[:4], rate))
    other = ow.Model(program, w + index)
    attempt(lambda: ow.Trainer(other, ow.pipeline(program, 2, micro_batches=2)).update(x[:6], rate))
    attempt(lambda: ow.compile(ow.pipeline(ow.SGD(0.1).minimize(deep, layers, x), 5, micro_batches=2)))
    split = ow.compile(ow.partition(program, {"data": 6}, {"w": "data"})).init(w)
    attempt(lambda: ow.compile(program)(split, x + index, rate))
attempt(lambda: fed(ow.{layout}, {data}))
time.sleep(2)  # the other one hears why this one takes no part any more
with open(f"{sys.argv[1]}/{index}", "w") as file:
    file.write("\\n".join(told))
"""


REASONS = (
    "the mesh has no device of process 1. Of 2 processes each takes part in every step",
    "is partitioned over data 3, which is 3 devices, which 2 processes cannot share evenly",
    "'w' differs from process to process",
    "'w' differs from process to process",
    "'x' is split P('data',) over {'data': 3, 'model': 2}, so that processes have some",
    "'x' is [4, 6] in this process, split P('data',), and its devices take 3 parts",
    "'w' differs from process to process",
    "deep is cut into 5 stages (data=1), and there are 2 processes. Let each have as many whole",
    "'x' differs from process to process, and the state lies over all of them",
)
COMPARED = "What is not split over the processes each feeds as a whole, with the same numbers"


@pytest.mark.parametrize(
    ("layout", "data", "told_of", "before"),
    [
        ('partition(program, {"data": 6}, {"w": "data"})', "x[:6], rate + index", "rate [] = {}.0", REASONS),
        (
            'partition(program, {"model": 2, "data": 3}, {"w": "model"})',
            "x + index, rate",
            "x [12, 6] = ",
            (),
        ),
        ("pipeline(program, 2, micro_batches=2)", "x[:6], rate + index", "rate [] = {}.0", ()),
        ("replicate(program, 2)", "x, rate + index", "rate [] = {}.0", ()),
    ],
    ids=["rate", "all rows", "pipeline", "replicate"],
)
def test_what_processes_do_not_have_alike_is_refused(tmp_path, layout, data, told_of, before):
    """What all of them have whole, first values and data, is compared; a mesh has devices of all."""
    script = tmp_path / "refused.py"
    script.write_text(
        REFUSED.replace("{layout}", layout).replace("{data}", data).replace("{more}", str(bool(before)))
    )
    status, said = launch(script, tmp_path, "-n", "2", "--devices", "3")
    assert status == 0, said
    for index in range(2):
        told = (tmp_path / str(index)).read_text().splitlines()
        assert len(told) == len(before) + 1, told
        for line, words in zip(told, (*before, COMPARED), strict=True):
            assert words in line
        assert all(told_of.format(rate) in told[-1] for rate in (1, 2))
