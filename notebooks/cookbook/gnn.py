"""Split a karate club with a graph network.

Trained:  two graph convolutions, on a graph of which two nodes have a label: the instructor and the president.
Data:     Zachary's karate club: 34 members, 78 friendships, and which side each took when the club split. The
          friendships come inside igraph; the sides are those of the paper.
You see:  how many of the 32 members without a label are put on the side that they took: 31 or more.
Source:   Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, 2017; Zachary,
          An Information Flow Model for Conflict and Fission in Small Groups, 1977.
Time:     8 CPU seconds.
"""

import igraph
import jax
import jax.numpy as jnp
import numpy as np

import onward as ow

INSTRUCTOR, PRESIDENT = 0, 33
WITH_THE_INSTRUCTOR = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21]


def read_club():
    """The friendships, each in both directions and one of each member with itself, and the side of each."""
    friends = np.array(igraph.Graph.Famous("Zachary").get_edgelist(), np.int32)
    members = np.arange(34, dtype=np.int32)
    edges = np.concatenate([friends, friends[:, ::-1], np.stack([members, members], 1)])
    return edges.T, np.where(np.isin(members, WITH_THE_INSTRUCTOR), 0, 1).astype(np.int32)


def convolution(layer, nodes, edges):
    """Each node gets a weighted sum of its neighbours: D^-1/2 A D^-1/2 X W, by gathering and adding."""
    source, target = edges
    degree = jax.ops.segment_sum(jnp.ones(len(target)), target, 34)
    weight = jax.lax.rsqrt(degree[source] * degree[target])
    messages = (nodes @ layer["w"])[source] * weight[:, None]
    return jax.ops.segment_sum(messages, target, 34) + layer["b"]


def logits(params, edges):
    """Nodes know nothing but who they are: their features are the identity matrix."""
    with jax.named_scope("first"):
        hidden = jnp.tanh(convolution(params["first"], jnp.eye(34), edges))
    with jax.named_scope("second"):
        return convolution(params["second"], hidden, edges)


def loss(params, edges, labels):
    """Cross entropy of the two members whose side is known."""
    known = jnp.array([INSTRUCTOR, PRESIDENT])
    return ow.layer.cross_entropy(logits(params, edges)[known], labels[known])


def initial(width=4, seed=0):
    """Glorot's weights."""
    rng, sizes = np.random.default_rng(seed), {"first": (34, width), "second": (width, 2)}
    return {
        name: {
            "w": rng.uniform(-1, 1, size).astype(np.float32) * np.sqrt(6 / sum(size)),
            "b": np.zeros(size[1], np.float32),
        }
        for name, size in sizes.items()
    }


def main(steps=200):
    """Train on two labels, and ask for the other 32."""
    edges, sides = read_club()
    params = initial()
    optimizer = ow.Adam(1e-2, rules=[ow.L2(5e-4)])
    step = ow.compile(optimizer.minimize(loss, params, edges, sides))
    state, outs = step.run(step.init(params), [(edges, sides)] * steps)

    guesses = np.asarray(jax.jit(logits)(state.parameters, edges)).argmax(1)
    unknown = np.setdiff1d(np.arange(34), [INSTRUCTOR, PRESIDENT])
    right = int((guesses == sides)[unknown].sum())
    print(f"loss {outs.loss[0]:.3f} -> {outs.loss[-1]:.3f}")
    print(f"{right} of {len(unknown)} members without a label are put on the side that they took")
    for side, name in enumerate(["the instructor", "the president"]):
        print(f"with {name}: {', '.join(str(m + 1) for m in np.flatnonzero(guesses == side))}")
    return {"losses": outs.loss, "right": right}


if __name__ == "__main__":
    main()
