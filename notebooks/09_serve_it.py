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
# # Serve it
#
# A trained model becomes one file. The file is loaded where the code that made it is not, and answers over HTTP, the
# requests of many clients computed together. The picture at the end shows how long clients wait, and how many of them
# share a batch.

# %%
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.parse import urlsplit

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow
from onward import layer

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.images))
images = (digits.images[order] / 16).astype(np.float32)[..., None]
labels = digits.target[order].astype(np.int32)

# %% [markdown]
# ## Train


# %%
def network():
    images = layer.data("images", (None, 8, 8, 1))
    labels = layer.data("labels", (None,), "int32")
    h = layer.conv(images, 16, 3, act="relu", name="strokes")
    h = layer.dropout(h.reshape(h.shape[0], -1), 0.3)
    logits = layer.fc(h, 10, name="digit")
    return layer.cross_entropy(logits, labels), {"digit": logits}


model = ow.Model(network, seed=0, has_aux=True, batch_size=64)
reader = ow.batches((images[:1536], labels[:1536]), 64, shuffle=True)
ow.Trainer(model, ow.Adam(3e-3)).train(reader, epochs=3, progress=False)

# %% [markdown]
# ## One file
#
# It holds the arithmetic of the test Program, the graph as data, the parameters and a checksum. No pickle, and no code
# that runs when it is read. (A network that writes `h.shape[0]`, not `len(h)`, can be saved for batches of any length.)

# %%
path = ow.save(model, "digits.model", license="Apache-2.0")
print(f"{path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## A process that knows nothing
#
# It imports Onward, and none of the code above. It shows the graph, and answers for 64 digits, as many as the network
# was traced with, and for five, a number that it was not.

# %%
np.savez("held_out.npz", images=images[1600:1664])
stranger = """
import numpy as np, onward as ow
model = ow.load("digits.model")
ow.show(model.topology, depth=1)
images = np.load("held_out.npz")["images"]
evaluator = ow.Evaluator(model)
answers = {}
for count in (64, 5):
    evaluator.forward(images=images[:count])
    answers[str(count)] = evaluator.activation("digit")
np.savez("answers.npz", **answers)
"""
print(subprocess.run([sys.executable, "-c", stranger], check=True, capture_output=True, text=True).stdout)

# %%
evaluator = ow.Evaluator(model)
evaluator.forward(images=images[1600:1664])
here = np.asarray(evaluator.activation("digit"))
there = np.load("answers.npz")
np.testing.assert_array_equal(there["64"], here)
np.testing.assert_allclose(there["5"], here[:5], rtol=1e-5, atol=1e-5)
print("64 images: equal to the bit. 5 images: within rounding")

# %% [markdown]
# ## Over HTTP
#
# `onward serve digits.model --port 8000` starts a server from a shell. `running` does so within a program, at a free
# port of this machine.

# %%
endpoint = ow.Endpoint("digits.model")
serving = ExitStack()
url = serving.enter_context(endpoint.running())


def post(route, **data):
    body = json.dumps({name: array.tolist() for name, array in data.items()}).encode()
    request = urllib.request.Request(url + route, body, {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=30).read())["outputs"]


guesses = np.argmax(post("/predict", images=images[1600:1610])["digit"], 1)
print("guessed", guesses, "labels", labels[1600:1610])

# %% [markdown]
# What any layer gives can be asked for too, for the examples of that request. And who asks wrongly is told what is
# expected.

# %%
strokes = np.array(post("/activation/strokes", images=images[1600:1604])["strokes"])
print("strokes", strokes.shape)
try:
    post("/predict", pictures=images[:1])
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())

# %% [markdown]
# ## Many clients
#
# Each client sends a digit, waits for the answer, sends the next. Requests that arrive while others are computed are
# computed together, and every answer is checked.

# %%
held_out = images[1600:1664]
bodies = [json.dumps({"images": [image.tolist()]}).encode() for image in held_out]


def client(count):
    connection, waited = HTTPConnection(urlsplit(url).netloc, timeout=30), []
    for i in range(count):
        start = time.perf_counter()
        connection.request("POST", "/predict", bodies[i], {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())["outputs"]["digit"][0]
        waited.append(1e3 * (time.perf_counter() - start))
        np.testing.assert_allclose(answer, here[i], rtol=1e-4, atol=1e-4)
    connection.close()
    return waited


def counted(name):
    """A number of the endpoint's metrics, which ``GET /metrics`` shows as well."""
    lines = map(str.split, endpoint.metrics().splitlines())
    return next(float(value) for found, value, *_ in lines if found == name)


latencies, shared = {}, {}
for clients in (1, 8, 32):
    before = counted("onward_batch_requests_count")
    with ThreadPoolExecutor(clients) as pool:
        latencies[clients] = np.concatenate(list(pool.map(client, [10] * clients)))
    batches = counted("onward_batch_requests_count") - before
    shared[clients] = 10 * clients / batches
    print(f"{clients:2} clients: {10 * clients} requests in {batches:.0f} batches, all answered rightly")

serving.close()

# %% [markdown]
# ## How long they waited

# %%
figure = plt.figure(figsize=(10, 3.4), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
for clients, waited in latencies.items():
    share = np.arange(1, len(waited) + 1) / len(waited)
    left.step(np.sort(waited), 100 * share, where="post", label=f"{clients} at once")
left.set(
    xlabel="milliseconds", ylabel="% of requests answered", xscale="log", title="how long clients waited"
)
left.legend()
right.bar([str(clients) for clients in shared], list(shared.values()), color=["C0", "C1", "C2"])
right.set(xlabel="clients", title="requests in a batch")
plt.show()
