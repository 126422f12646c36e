"""Solve Burgers' equation with a physics-informed network.

Trained:  a network u(x, t) whose derivatives are to satisfy u_t + u u_x = nu u_xx, by Adam, then by L-BFGS.
Data:     none but the equation, with the values at t = 0 and at both ends. The solution is known, a wave front
          that moves to the right at speed c: u = c - a tanh(a (x - c t) / (2 nu)).
You see:  the loss after each of the two optimizers, the error against the solution (below 0.1 %), and the front.
Source:   Raissi, Perdikaris and Karniadakis, Physics-Informed Neural Networks, 2019, section 3.
Time:     26 CPU seconds.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow

NU, SPEED, HEIGHT = 0.1, 0.5, 0.5


def solution(x, t):
    """The travelling wave that solves the equation."""
    return SPEED - HEIGHT * np.tanh(HEIGHT * (x - SPEED * t) / (2 * NU))


def initial(rng, sizes):
    """Weights as Glorot proposes for tanh, and biases, one pair for each layer."""
    return [
        {
            "w": rng.normal(0, np.sqrt(2 / (n + m)), (n, m)).astype(np.float32),
            "b": np.zeros(m, np.float32),
        }
        for n, m in pairwise(sizes)
    ]


def u(params, x, t):
    """The network at one point."""
    hidden = jnp.stack([x, t])
    for layer in params[:-1]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return (hidden @ params[-1]["w"] + params[-1]["b"])[0]


def residual(params, x, t):
    """What is left of the equation at one point: derivatives of the network by its arguments."""
    u_x = jax.grad(u, argnums=1)
    value, slope, curve = u(params, x, t), u_x(params, x, t), jax.grad(u_x, argnums=1)(params, x, t)
    return jax.grad(u, argnums=2)(params, x, t) + value * slope - NU * curve


def loss(params, inside, edge, known):
    """The mean square of the residual inside, and of the error where the solution is given."""
    with jax.named_scope("equation"):
        left = jax.vmap(residual, (None, 0, 0))(params, *inside)
    with jax.named_scope("edge"):
        error = jax.vmap(u, (None, 0, 0))(params, *edge) - known
    return jnp.mean(left**2) + jnp.mean(error**2)


def points(rng, count):
    """Random points of [-1, 1] x [0, 1], and of the three edges where the solution is given."""
    x, t = rng.uniform(-1, 1, count), rng.uniform(0, 1, count)
    start = x[: count // 2], np.zeros(count // 2)
    ends = rng.choice([-1.0, 1.0], count // 2), t[: count // 2]
    edge = [np.concatenate(pair).astype(np.float32) for pair in zip(start, ends, strict=True)]
    return [x.astype(np.float32), t.astype(np.float32)], edge


def trained(optimizer, params, data, steps):
    """The parameters after so many steps, and the losses."""
    step = ow.compile(optimizer.minimize(loss, params, *data))
    state, outs = step.run(step.init(params), [data] * steps)
    return state.parameters, outs.loss


def main(adam_steps=2000, lbfgs_steps=500, hidden=(32, 32, 32)):
    """Solve the equation and compare."""
    rng = np.random.default_rng(0)
    inside, edge = points(rng, 512)
    data = inside, edge, solution(*edge)
    params = initial(rng, (2, *hidden, 1))
    params, first = trained(ow.Adam(ow.schedule.cosine(5e-3, steps=adam_steps)), params, data, adam_steps)
    params, last = trained(ow.LBFGS(), params, data, lbfgs_steps)
    print(f"loss {first[0]:.3f}, after Adam {first[-1]:.1e}, after L-BFGS {last[-1]:.1e}")

    x, t = (a.ravel() for a in np.meshgrid(np.linspace(-1, 1, 101), np.linspace(0, 1, 51)))
    found = np.asarray(jax.jit(jax.vmap(u, (None, 0, 0)))(params, x, t))
    error = float(np.linalg.norm(found - solution(x, t)) / np.linalg.norm(solution(x, t)))
    print(f"relative error in the whole of space and time: {error:.1e}")
    for now, row in zip((0.0, 0.5, 1.0), found.reshape(51, 101)[::25], strict=True):
        print(f"t = {now}  " + "".join(" .:-=+*#%@"[int(v)] for v in np.clip(row[::2] * 10, 0, 9)))
    return {"losses": np.concatenate([first, last]), "error": error}


if __name__ == "__main__":
    main()
