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
# look like. Onward began from five of those pages. Here each program of theirs stands above the one that runs here,
# nearly letter for letter. The last picture shows their server at work: what clients are told while the model learns.

# %%
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow
from onward import Adagrad as AdagradOptimizer
from onward import Evaluator, GradientMachine, Model, Optimizer, Pass, Trainer, layer, optimize, train

digits = load_digits()
pictures = (digits.data / 16).astype(np.float32)
one_hot = np.eye(10, dtype=np.float32)[digits.target]

# %% [markdown]
# ## Computations as graphs
#
# The shortest program of the designs: four lines describe, one asks for derivation, one trains.
#
# ```python
# x = layer.data("images")
# l = layer.data("label")
# y = layer.fc(x)
# cost = layer.mse(y, l)
# optimize(cost)
# train(cost, reader=mnist.train())
# ```
#
# No shape is written anywhere, and none is needed: the first batch shows the width of `x`, and `l` tells `fc` how many
# outputs it has.


# %%
def mnist():
    return ow.batches((pictures, one_hot), 64, shuffle=True, drop_last=True)


x = layer.data("images")
l = layer.data("label")  # noqa: E741
y = layer.fc(x)
cost = layer.mse(y, l)
optimize(cost)
trainer = train(cost, reader=mnist(), progress=False)
trainer.history

# %% [markdown]
# ## A network and an optimizer
#
# Two pages on optimizers describe the same network; one calls the weights `W=w1`.
#
# ```python
# images = layer.data("images")
# labels = layer.data("labels")
# w1 = pd.var("w1")
# b1 = pd.var("b1")
# hidden = layer.fc(images, w=w1, b=b1)
# cost = layer.mse(hidden, labels)
# optimizer = AdagradOptimizer(learing_rate=0.001)
# ```

# %%
images = layer.data("images")
labels = layer.data("labels")
w1 = ow.var("w1")
b1 = ow.var("b1")
hidden = layer.fc(images, w=w1, b=b1)
cost = layer.mse(hidden, labels)
optimizer = AdagradOptimizer(learning_rate=0.1)
cost

# %% [markdown]
# ## Three kinds of work
#
# The pages tell three kinds of operators apart: forward, gradient, optimization. They draw the graph three times, as
# it grows. So do we.
#
# **Forward.** A batch to look at turns the description into a Program: data is fed, parameters have initializers. The
# initializers run once for each parameter, however often the Program does.

# %%
feed = {"images": pictures[:64], "labels": one_hot[:64]}
forward = ow.trace(cost, feed=feed)
print(*forward.initializers, sep="\n")
ow.draw(forward)

# %% [markdown]
# **Backward.** The page has four rules: a gradient operator G for each operator F; inputs, outputs and gradients of
# outputs of F are the inputs of G; gradients for all inputs of F but for those that have none, like the images; these
# are the outputs of G. Here G reads only those of them that its rule needs.

# %%
backward = optimizer.create_backward_pass(forward, parameter_list=[w1, b1])
print(*(op for op in backward.ops if op.made_by is Pass.BACKWARD), sep="\n")
ow.draw(backward)

# %% [markdown]
# **Optimization.** Every pair of a parameter and its gradient gets one update operator. This is the complete graph.

# %%
complete = optimizer.create_optimization_pass(backward)
ow.draw(complete)

# %% [markdown]
# ## Minimize, and run targets
#
# ```python
# opt_op_list = optimizer.minimize(cost, parameter_list=[w1, b1])
# sess.run(target=opt_op_list, ...)
# ```
#
# `minimize` takes the two steps at once. It returns the whole Program, whose `updates` are the list. A target brings
# along what it needs and nothing else.

# %%
opt_op_list = optimizer.minimize(forward, parameter_list=[w1, b1]).updates
sess = ow.Session()
losses = [sess.run(target=opt_op_list, feed=feed, fetch=[cost])[0] for _ in range(100)]
print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")

for name, target in {"all updates": opt_op_list, "b1 alone": opt_op_list[-1], "hidden": "fc_0"}.items():
    print(f"{name:12}{len(sess.program(target).ops):3} operators")

# %% [markdown]
# ## The class Optimizer
#
# ```python
# class Optimizer(object):
#     def create_optimization_pass(self, parameters_and_grads): ...
#     def minimize(self, loss, parameter_list):
#         params_grads = self.create_backward_pass(loss, parameter_list)
#         update_ops = self.create_optimization_pass(params_grads)
#         return update_ops
# ```
#
# Two of the pages call the methods `_backward` and `_update`, and show neither to users. Here they are public, as above,
# and the pairs of parameters and gradients travel within the Program, as `program.gradients`.
#
# "Users can inherit the Optimizer above to create their own." What one writes then is the arithmetic of one parameter,
# here that of Adagrad. It trains as the one that comes along does.


# %%
class MyAdagrad(Optimizer):
    learning_rate: ow.Hyperparameter = 0.1

    def init(self, parameter):
        return {"squares": 0 * parameter}

    def update(self, parameter, gradient, slots):
        squares = slots["squares"] + gradient**2
        return parameter - self.learning_rate * gradient / (squares**0.5 + 1e-7), {"squares": squares}


targets = MyAdagrad(0.1).minimize(forward, parameter_list=[w1, b1]).updates
sess = ow.Session()
mine = [sess.run(target=targets, feed=feed, fetch=[cost])[0] for _ in range(100)]
print(f"loss {float(mine[0]):.3f} -> {float(mine[-1]):.3f}")
np.testing.assert_allclose(mine, losses, rtol=1e-2)

# %% [markdown]
# ## Three situations
#
# One page goes on: one machine with one card, one machine with several, several machines. The optimizer adds the
# operators that send and receive. Here two functions do, and no optimizer knows of them.
#
# With several cards, each reads a part of the batch, gradients are merged by a strategy, "such as average", and every
# card updates:

# %%
cards = ow.replicate(complete, devices=8, merge=ow.Average())
print(*(op for op in cards.ops if op.made_by in (Pass.COLLECTIVE, Pass.UPDATE)), sep="\n")

# %% [markdown]
# With several machines, trainers compute gradients and send them; parameter servers apply them; trainers read the
# parameters back.

# %%
machines = ow.split(complete, servers=2, trainers=2)
print("trainer", *(op for op in machines.trainer.ops if op.made_by is Pass.COLLECTIVE), sep="\n")
print("\nserver 0", *machines.servers[0].ops, sep="\n")

# %% [markdown]
# ## Model, Evaluator, GradientMachine, Optimizer
#
# ```
# Model = {topology, parameters}
# Evaluator = {Model*, activations}            forward, test
# GradientMachine = {Model*, gradients}        backward
# Optimizer = {Model*, Evaluator*, GradientMachine*}    train, update, checkpoint
# ```
#
# The fourth is called `Trainer` here, since the rule that updates took the name Optimizer. The page's example: two
# texts go through projections that share their parameters, and a cosine compares the results. As the
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
# Gradients are apart from the Model, so that many threads can train it, each with a GradientMachine of its own.
# Activations are apart as well, so that many can ask it. Here eight threads ask without a pause whether two texts are
# alike, while a Trainer trains with four more. All of them share the parameters, which are there once.


# %%
def answer(req):
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
            answers.append((step, same, float(answer({"text_a": a[None], "text_b": b[None]})[0])))


with ThreadPoolExecutor(8) as clients:
    serving = clients.map(client, range(8))
    trainer.train(ow.batches(texts(512, seed=0), 64), epochs=10, threads=4, progress=False)
    done.set()
list(serving)
print(f"{len(answers):,} answers; {trainer.history}")

# %% [markdown]
# ## The server
#
# The server of the page, which it calls over-simplified:
#
# ```python
# m = paddle.model.load("trained.model")
#
# http.handle("/",
#             lambda req:
#                 e = paddle.evaluator.create(m)
#                 e.forward(req)
#                 e.activation(layer="output")) # returns activations of layer "output"
# ```
#
# With the server of Python's standard library in place of `http`. What is loaded needs nothing of the code above. (For
# more than a demonstration there is `ow.Endpoint`, which computes the requests of many clients together and stands what
# they send; notebook 9 has it.)

# %%
ow.save(m, "trained.model")
loaded = ow.load("trained.model")


class Handle(BaseHTTPRequestHandler):
    def do_POST(self):
        req = json.loads(self.rfile.read(int(self.headers["content-length"])))
        e = Evaluator(loaded)
        e.forward(**{name: np.array(text, np.int32) for name, text in req.items()})
        body = json.dumps(e.activation(layer="output").tolist()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing is logged."""


def post(url, **req):
    body = json.dumps({name: text.tolist() for name, text in req.items()}).encode()
    with urllib.request.urlopen(url, body, timeout=30) as reply:
        return json.loads(reply.read())


with ThreadingHTTPServer(("127.0.0.1", 0), Handle) as server:
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        pairs = zip(text_a[:, None], text_b[:, None], strict=True)
        over_http = [post(url, text_a=a, text_b=b)[0] for a, b in pairs]
    finally:
        server.shutdown()
        thread.join()

here = answer({"text_a": text_a, "text_b": text_b})
np.testing.assert_allclose(over_http, here, rtol=1e-4, atol=1e-6)
print(f"{len(over_http)} requests, answered as here")

# %% [markdown]
# ## What the clients were told

# %%
figure = plt.figure(figsize=(10, 3.6), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
steps, same, told = np.array(answers).T
for value, name in ((1, "alike"), (0, "not alike")):
    left.plot(steps[same == value], told[same == value], ".", ms=3, alpha=0.3, label=name)
    right.plot(np.flatnonzero(alike == value), np.array(over_http)[alike == value], ".")
left.set(xlabel="steps trained when asked", ylabel="similarity answered", title="while it is trained")
left.legend(loc="lower right", markerscale=4)
right.set(xlabel="request", title="over HTTP, when it is trained")
plt.show()
