# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Optimizers and schedules
#
# An update is a part of the graph: which rule moves which parameter, by which learning rate, after which clip, is
# said by name, planned before anything runs, and changed while it runs. The picture at the end shows eight optimizers on
# their way down a valley, eight schedules, and a sweep over learning rates.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)


def loss(params, images, labels):
    hidden = jax.nn.relu(images @ params["embed"] + params["shift"])
    log_p = jax.nn.log_softmax(hidden @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


rng = np.random.default_rng(0)
params = {
    "embed": rng.normal(0, 0.1, (64, 32)).astype(np.float32),
    "shift": np.zeros(32, np.float32),
    "head": rng.normal(0, 0.1, (32, 10)).astype(np.float32),
}
batch = images[:128], labels[:128]

# %% [markdown]
# ## A plan before anything runs
#
# Rules stand in the order in which they act; a group has parameters that go another way. A pattern that matches
# nothing, or two groups that want the same parameter, is an error here and not a surprise after a week.

# %%
optimizer = ow.AdamW(
    ow.schedule.cosine(3e-3, steps=300, warmup=30),
    weight_decay=0.05,
    rules=[ow.ClipByGlobalNorm(1.0), ow.EMA(0.98)],
    groups=[ow.Group("shift", weight_decay=0.0), ow.Group("head", ow.SGD(0.1))],
)
forward = ow.trace(loss, params, *batch)
print(optimizer.plan(forward))

# %% [markdown]
# In the graph, each of these is an op.

# %%
program = optimizer.minimize(forward)
for target in program.updates:
    print(target.op)

# %% [markdown]
# ## Train, and evaluate the average
#
# `for_evaluation` makes the test Program that reads the averages in place of the parameters: the same State goes in.

# %%
step = ow.compile(program, fetch=["learning_rate"])
test = ow.compile(ow.for_evaluation(program))
plain = ow.compile(ow.for_test(program))
state, rates = step.init(params), []
for _ in range(300):
    chosen = rng.integers(0, 1500, 128)
    state, out = step(state, images[chosen], labels[chosen])
    rates.append(float(out["learning_rate"]))
held_out = images[1500:], labels[1500:]
averaged, trained = (float(t(state, *held_out)[1].loss) for t in (test, plain))
print(f"held-out loss: {trained:.3f} as trained, {averaged:.3f} with the averages")

# %% [markdown]
# ## A hyperparameter is a number in the state
#
# Read it, write it; nothing is compiled again. And a sweep over twelve learning rates is one compiled computation.

# %%
step = ow.compile(ow.Momentum(0.1, 0.9).minimize(loss, params, *batch))
state = step.init(params)
state, _ = step(state, *batch)
state = state.replace({"learning_rate": 0.05})
state, _ = step(state, *batch)
print(f"{step.compilations} compilation, learning rate {float(state['learning_rate']):.2f}")

tried = np.logspace(-3, 0.5, 12).astype(np.float32)
many = jax.jit(jax.vmap(step, (0, None, None)))
states = step.init(params).sweep({"learning_rate": tried})
for _ in range(40):
    states, out = many(states, *batch)
swept = np.asarray(out.loss)

# %% [markdown]
# ## Eight ways down a valley
#
# Rosenbrock's function from (-1.2, 1): the minimum is at the star, a dot is a step. Below, the schedules by their
# names; right, what the sweep found.


# %%
def valley(w):
    return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2


def way(optimizer, steps):
    start = jnp.array([-1.2, 1.0])
    step = ow.compile(optimizer.minimize(valley, start), donate=False)
    state, path = step.init(start), [start]
    for _ in range(steps):
        state, _ = step(state)
        path.append(state.parameters)
    return np.stack(path)


ways = {
    "Momentum": (ow.Momentum(3e-4, 0.9), 400),
    "RMSProp": (ow.RMSProp(0.01), 400),
    "Adam": (ow.Adam(0.03), 400),
    "Lion": (ow.Lion(0.01), 400),
    "AdaBelief": (ow.optimizer.AdaBelief(0.03), 400),
    "Adan": (ow.optimizer.Adan(0.03), 400),
    "Shampoo": (ow.Shampoo(0.03), 400),
    "L-BFGS": (ow.LBFGS(), 40),
}
schedules = {
    "cosine, warm-up": ow.schedule.cosine(1, steps=300, warmup=30),
    "WSD": ow.schedule.wsd(1, steps=300, warmup=30, decay=90),
    "one cycle": ow.schedule.one_cycle(1, steps=300),
    "restarts": ow.schedule.restarts(1, every=75),
    "cyclic": ow.schedule.cyclic(0.1, 1, every=75),
    "exponential": ow.schedule.exponential(1, rate=0.5, every=60),
    "inverse time": ow.schedule.inverse_time(1, rate=1, every=60),
    "piecewise": ow.schedule.piecewise([1, 0.4, 0.1], boundaries=[100, 200]),
}

figure = plt.figure(figsize=(11, 8), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[1.7, 1])
x, y = np.meshgrid(np.linspace(-1.6, 1.4, 200), np.linspace(-0.6, 1.6, 200))
height = np.log10(valley([x, y]) + 1e-3)
for axis, (name, (rule, steps)) in zip(top.subplots(2, 4).flat, ways.items(), strict=True):
    path = way(rule, steps)
    axis.contourf(x, y, height, 24, cmap="bone", alpha=0.6)
    axis.plot(*path.T, ".-", color="C3", lw=0.8, ms=2.5)
    axis.plot(1, 1, "*", color="gold", ms=13)
    axis.set(xlim=(-1.6, 1.4), ylim=(-0.6, 1.6), xticks=[], yticks=[])
    axis.set_title(f"{name}: {valley(path[-1]):.0e} after {steps} steps", fontsize=9)
left, right = bottom.subplots(1, 2, width_ratios=[1.6, 1])
for name, schedule in schedules.items():
    left.plot(schedule(np.arange(300)), label=name)
left.set(xlabel="step", ylabel="share of the learning rate")
left.legend(fontsize=7, ncols=2)
right.semilogx(tried, swept, "o-")
right.set(xlabel="learning rate", ylabel="loss after 40 steps", ylim=(0, 3))
