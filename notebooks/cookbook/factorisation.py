"""Find related words: factorise a matrix whose rows are on parameter servers (GloVe).

Trained:  two tables with a row for each word, so that the products of their rows are the logarithms of how often
          two words stand near each other. Each of two servers keeps one of them; two trainers ask for the rows
          that a batch reads, and send back the gradients of these alone. All are processes on this machine.
Data:     the language reference of Python, inside Python; how often two of its words are at most 5 apart.
You see:  what travels, the loss, how much of the matrix is explained, and the neighbours of some words.
Source:   Pennington, Socher and Manning, GloVe: Global Vectors for Word Representation, 2014, equation 8; Duchi,
          Hazan and Singer, Adaptive Subgradient Methods, 2011; Li et al., Parameter Server, 2014.
Time:     13 CPU seconds, and what Ray takes to start five processes.
"""

import re
from collections import Counter
from pydoc_data.topics import topics

import jax.numpy as jnp
import numpy as np

import onward as ow

WIDTH, NEAR = 32, 5


def read_counts(most):
    """The most frequent words, and (row, column, how often, the nearer the more) of those that meet."""
    text = " ".join(topics[name] for name in sorted(topics)).lower()
    spoken = re.findall(r"[a-z_]+", text)
    words = [word for word, _ in Counter(spoken).most_common(most)]
    place = {word: i for i, word in enumerate(words)}
    ids = np.array([place.get(word, most) for word in spoken])
    counts = np.zeros((most + 1, most + 1), np.float32)
    for apart in range(1, NEAR + 1):
        np.add.at(counts, (ids[:-apart], ids[apart:]), 1 / apart)
    counts = (counts + counts.T)[:-1, :-1]
    rows, columns = np.nonzero(counts)
    return words, (rows.astype(np.int32), columns.astype(np.int32), counts[rows, columns])


def loss(params, rows, columns, counts):
    """The square of what is missed of the logarithms; frequent pairs count more, up to a limit."""
    found = jnp.sum(params["words"][rows] * params["contexts"][columns], 1)
    found = found + params["word_bias"][rows][:, 0] + params["context_bias"][columns][:, 0]
    weights = jnp.minimum(counts / 20, 1.0) ** 0.75
    return jnp.mean(weights * (found - jnp.log(counts)) ** 2)


def initial(count, seed=0):
    """Small random rows, and a bias for each."""
    rng = np.random.default_rng(seed)
    sizes = {"words": WIDTH, "contexts": WIDTH, "word_bias": 1, "context_bias": 1}
    return {name: rng.uniform(-0.5, 0.5, (count, n)).astype(np.float32) / n for name, n in sizes.items()}


def explained(params, data):
    """How much of the variance of the logarithms the products of rows explain."""
    rows, columns, counts = data
    found = np.einsum("ij,ij->i", params["words"][rows], params["contexts"][columns])
    found = found + params["word_bias"][rows][:, 0] + params["context_bias"][columns][:, 0]
    return 1 - float(np.var(found - np.log(counts)) / np.var(np.log(counts)))


def neighbours(params, words, word, count=5):
    """The words whose rows point in the most similar direction."""
    rows = params["words"] + params["contexts"]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.argsort(-(rows @ rows[words.index(word)]))
    return [words[i] for i in order[1 : count + 1]]


def main(most=2000, epochs=10, size=1024, servers=2, trainers=2, engine=None):
    """Count, train on servers, ask for neighbours."""
    words, data = read_counts(most)
    reader = ow.batches(data, size, shuffle=True, drop_last=True)
    params = initial(len(words))
    program = ow.Adagrad(0.1).minimize(loss, params, *next(iter(reader)))
    split = ow.split(program, servers=servers, trainers=trainers, lazy=["*"])
    print(ow.plan(split), end="\n\n")
    run = ow.cluster.train(
        program,
        reader,
        parameters=params,
        servers=servers,
        trainers=trainers,
        lazy=["*"],
        epochs=epochs,
        durability=None,
        progress=False,
        engine=engine,
    )
    trained = {name: np.asarray(table) for name, table in run.model.parameters.items()}
    losses = run.history["loss"]
    print(f"loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} batches")
    print(f"{explained(trained, data):.0%} of the variance of {len(data[0])} logarithms is explained")
    for word in ("list", "true", "class", "import", "integer", "loop"):
        print(f"{word:8} {', '.join(neighbours(trained, words, word))}")
    return {"losses": losses, "explained": explained(trained, data), "params": trained}


if __name__ == "__main__":
    main()
