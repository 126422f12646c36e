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
# # The early designs
#
# When PaddlePaddle moved from layers to a graph of operators, its authors first wrote down what programs should
# look like. Onward began from those pages. Here their programs run, nearly letter for letter, and the graph
# is drawn as it grows: forward, backward, update.

# %%
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow
from onward import Adagrad as AdagradOptimizer
from onward import Evaluator, GradientMachine, Model, Pass, Trainer, layer, optimize, train

digits = load_digits()
pictures = (digits.data / 16).astype(np.float32)
one_hot = np.eye(10, dtype=np.float32)[digits.target]

# %% [markdown]
# ## Computations as graphs
#
# The shortest program of the designs: four lines describe, one asks for derivation, one trains. No shape is
# written anywhere; the first batch shows the width of `x`, and `l` tells `fc` how many outputs it has.


# %%
def mnist():
    return ow.batches((pictures, one_hot), 64, shuffle=True)


x = layer.data("images")
l = layer.data("label")  # noqa: E741
y = layer.fc(x)
cost = layer.mse(y, l)
optimize(cost)
trainer = train(cost, reader=mnist(), progress=False)
trainer.history

# %% [markdown]
# ## One pass at a time
#
# The same thing step by step, with the names of the optimizer design. Outside of a function a layer returns a
# description of what will be computed.

# %%
images = layer.data("images")
labels = layer.data("labels")
w1 = ow.var("w1")
b1 = ow.var("b1")
hidden = layer.fc(images, w=w1, b=b1)
cost = layer.mse(hidden, labels)
cost

# %% [markdown]
# **Forward.** A batch to look at turns the description into a Program: data is fed, parameters have
# initializers, every line is an operator. The initializers stand apart from the operators: they run once
# for each parameter, however often the Program does.

# %%
feed = {"images": pictures[:64], "labels": one_hot[:64]}
forward = ow.trace(cost, feed=feed)
print(forward, *forward.initializers, sep="\n")

# %% [markdown]
# **Backward.** Every operator between a parameter and the cost gets one gradient operator. It reads from its
# operator's inputs and outputs, and from the gradients of those outputs, what its rule needs, and makes the
# gradients of the inputs that have one. Images and labels have none.

# %%
optimizer = AdagradOptimizer(learning_rate=0.1)
backward = optimizer.create_backward_pass(forward, parameter_list=[w1, b1])
print(*(op for op in backward.ops if op.made_by is Pass.BACKWARD), sep="\n")

# %% [markdown]
# **Update.** Every pair of a parameter and its gradient gets one update operator. Here is the complete
# graph; the margin tells the passes apart.

# %%
complete = optimizer.create_optimization_pass(backward)
print(complete)

# %% [markdown]
# ## A Session runs targets
#
# `minimize` takes the two steps at once; the operators of its update are what a Session is asked to run. A
# target brings along what it needs and nothing else.

# %%
opt_op_list = optimizer.minimize(forward, parameter_list=[w1, b1]).updates
session = ow.Session()
losses = [session.run(target=opt_op_list, feed=feed, fetch=[cost])[0] for _ in range(100)]
print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")

for name, target in {"all updates": opt_op_list, "b1 alone": opt_op_list[-1], "hidden": "fc_0"}.items():
    print(f"{name:12}{len(session.program(target).ops):3} operators")

# %% [markdown]
# ## Model, Evaluator, GradientMachine
#
# Two texts go through projections that share their parameters, and a cosine compares the results. As the
# parameters are shared, they cannot be part of a layer; so a `Model` is a topology *and* parameters.

# %%
LENGTH, WORDS, TOPICS = 12, 100, 4


def similarity():
    text_a = layer.data("text_a", (None, LENGTH), "int32")
    text_b = layer.data("text_b", (None, LENGTH), "int32")
    alike = layer.data("alike", (None,))
    words = ow.parameter("words", (WORDS, 16), initializer=ow.initializer.normal(0.5))
    projection = ow.parameter("projection", (16, 8))

    def semantic(text, name):
        meaning = layer.embedding(text, WORDS, 16, w=words).mean(1)
        return layer.fc(meaning, w=projection, b=False, act="tanh", name=name)

    output = layer.cosine_similarity(semantic(text_a, "a"), semantic(text_b, "b"), name="output")
    return layer.mse(output, alike)


def texts(count, seed):
    draw = np.random.default_rng(seed)
    topics = draw.integers(TOPICS, size=(2, count))
    topics[1] = np.where(draw.random(count) < 0.5, topics[0], topics[1])
    words = draw.integers(WORDS // TOPICS, size=(2, count, LENGTH)) * TOPICS + topics[..., None]
    return *words.astype(np.int32), (topics[0] == topics[1]).astype(np.float32)


m = Model(similarity)
machine = GradientMachine(m)
machine.backward(*texts(64, seed=0))
print(m, {name: gradient.shape for name, gradient in machine.gradients.items()})

# %% [markdown]
# A server makes an `Evaluator` for each request. It holds the activations of its own request, and reads the
# parameters of the Model, which are there once. Here eight threads ask without a pause whether two texts are
# alike, while a Trainer trains with four more, each with a GradientMachine of its own.


# %%
def handle(req):
    e = Evaluator(m)
    e.forward(**req)
    return e.activation(layer="output")


text_a, text_b, alike = texts(200, seed=1)
trainer = Trainer(m, ow.Adam(0.01))
done = Event()
answers = []


def client(_):
    while not done.is_set():
        for a, b, same in zip(text_a, text_b, alike, strict=True):
            step = trainer.step
            answers.append((step, same, float(handle({"text_a": a[None], "text_b": b[None]})[0])))


with ThreadPoolExecutor(8) as clients:
    serving = clients.map(client, range(8))
    trainer.train(ow.batches(texts(512, seed=0), 64), epochs=10, threads=4, progress=False)
    done.set()
list(serving)
print(f"{len(answers):,} answers; {trainer.history}")

# %% [markdown]
# ## The graph, drawn
#
# A Program is data, so a picture of it is two walks: one finds a place for every operator, one draws. Circles
# are fed, double circles are parameters, boxes are operators; a gradient operator (') stands below the
# operator it belongs to. What a pass has added is coloured; an update gives a parameter its next value. On the right, what the clients were told while
# the model learned.


# %%
def places(program):
    """Where each operator stands, by its first output, and each circle."""
    at, filled, made = {}, Counter(), ow.producers(program)
    for op in program.ops:
        if op.made_by is Pass.FORWARD:
            x = max((at[made[v].outputs[0]][0] + 1 for v in op.inputs if v in made), default=0)
            at[op.outputs[0]] = x, 2.3 - 0.5 * filled[x]
            filled[x] += 1
        elif op.made_by is Pass.BACKWARD:
            x, y = at[op.of] if op.of else (x + 1, 2.3)
            at[op.outputs[0]] = x, y - 1.6
        elif op.type == optimizer.name:
            at[op.outputs[0]] = -2, at[made[op.inputs[1]].outputs[0]][1]
    for v in (*program.inputs, *program.parameters):
        x = min(at[op.outputs[0]][0] for op in ow.consumers(forward)[v]) - 1
        at[v] = x, 2.8 - 0.5 * filled[v.kind, x] - 0.5 * (v in program.parameters)
        filled[v.kind, x] += 1
    return at


def draw(axis, program, at, colour):
    made, newest = ow.producers(program), program.ops[-1].made_by
    for op in (op for op in program.ops if op.outputs[0] in at):
        ink = colour if op.made_by is newest else "0.7"
        for v in op.inputs:
            begin = made[v].outputs[0] if v in made else v
            if begin in at:
                style = "<|-|>" if program.next_state.get(v) in op.outputs else "-|>"
                arrow = {"arrowstyle": style, "color": ink, "lw": 0.8, "shrinkA": 14, "shrinkB": 17}
                axis.annotate("", at[op.outputs[0]], at[begin], arrowprops=arrow)
        words = op.type.replace("_grad", "'").replace("broadcast_in_dim", "broadcast").replace("_", "\n")
        box = {"facecolor": "white", "edgecolor": ink, "boxstyle": "round"}
        axis.text(*at[op.outputs[0]], words, size=7, ha="center", va="center", bbox=box)
    for v in (*program.inputs, *program.parameters):
        ink = colour if newest is Pass.FORWARD else "0.7"
        for size in (26, 22) if v in program.parameters else (26,):
            axis.plot(*at[v], "o", ms=size, mfc="white", mec=ink)
        axis.text(*at[v], v.name, size=6, ha="center", va="center")
    axis.set(xlim=(-2.6, 6.5), ylim=(1.4 if newest is Pass.FORWARD else -0.2, 3.2))
    axis.axis("off")


figure = plt.figure(figsize=(11, 7.5), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1.9, 1])
panels = left.subplots(3, 1, height_ratios=[1, 1.9, 1.9])
at = places(complete)
for axis, program, colour in zip(panels, (forward, backward, complete), ("C0", "C3", "C2"), strict=True):
    draw(axis, program, at, colour)
axis = right.subplots()
steps, same, told = np.array(answers).T
for value, name in ((1, "alike"), (0, "not alike")):
    axis.plot(steps[same == value], told[same == value], ".", ms=3, alpha=0.3, label=name)
axis.set(xlabel="steps trained when asked", ylabel="similarity answered")
axis.legend(loc="lower left", markerscale=4)
