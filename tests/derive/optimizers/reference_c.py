"""The rules for matrices in float64 NumPy, from their papers, each by another road than the library's.

Orthogonal factors come from the singular value decomposition, roots from that of the statistics, Kronecker
products are formed in full. A reference takes a parameter, its gradients one after the other, and yields
the parameter after each.
"""

import string
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from onward.derive.rule import at_step
from onward.derive.update.loss import Loss

jit = partial(jax.jit)

SHAPES = {"scalar": (), "vector": (4,), "matrix": (3, 4), "kernel": (2, 3, 2, 3)}


def tree(dtype, steps=100, seed=0):
    """Parameters, and for each a row of gradients; numbers that float32 holds."""
    draw = np.random.default_rng(seed)
    params = {k: draw.normal(size=s).astype(np.float32).astype(dtype) for k, s in SHAPES.items()}
    gradients = {k: draw.normal(size=(steps, *s)).astype(np.float32).astype(dtype) for k, s in SHAPES.items()}
    return params, gradients


def numbers(optimizer, dtype, step=0, **changed):
    """The hyperparameters as the framework hands them to a rule, without the step."""
    values = {**optimizer.hyperparameters, **changed}
    now = {k: v(step) if callable(v) else v for k, v in values.items()}
    return {k: jnp.asarray(v, jnp.float32).astype(dtype) for k, v in now.items()}


def trained(optimizer, params, gradients, h):
    """The parameters after the update was applied directly to every gradient, in one compiled loop."""
    slots = {k: optimizer.init(p) for k, p in params.items()}

    def one(carry, at):
        step, gradient = at
        old, slots = carry
        new = {
            k: at_step(optimizer, h | {"step": step}).update(p, gradient[k], slots[k]) for k, p in old.items()
        }
        return ({k: p for k, (p, _) in new.items()}, {k: s for k, (_, s) in new.items()}), None

    count = len(next(iter(gradients.values())))
    return jax.lax.scan(one, (params, slots), (jnp.arange(count, dtype=jnp.int32), gradients))[0]


def f32(number):
    """The float32 number that a hyperparameter is, in float64."""
    return np.float64(np.float32(number))


def unfolded(array, axis):
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def on_axis(matrix, array, axis):
    letters = string.ascii_lowercase[: array.ndim]
    out = letters.replace(letters[axis], "Z")
    return np.einsum(f"Z{letters[axis]},{letters}->{out}", matrix, array)


def muon(w, gradients, learning_rate, momentum, nesterov, scale):
    buffer = np.zeros_like(w)
    n, m = int(np.prod(w.shape[:-1])), w.shape[-1] if w.ndim else 1
    factor = {"original": max(1, m / n) ** 0.5, "match_rms": 0.2 * max(m, n) ** 0.5}[scale]
    for g in gradients:
        buffer = f32(momentum) * buffer + g
        wanted = g + f32(momentum) * buffer if nesterov else buffer
        u, s, v = np.linalg.svd(wanted.reshape(n, m), full_matrices=False)
        s = s / np.sqrt(np.sum(s**2))
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = w - f32(learning_rate) * factor * (u * s @ v).reshape(w.shape)
    return w


def shampoo(w, gradients, learning_rate, momentum, epsilon, every, decay=1.0, grafting="none", max_size=99):
    shape, w = w.shape, np.atleast_1d(w)
    k = w.ndim
    sums = [np.zeros((n, n)) for n in w.shape]
    velocity, squares = np.zeros_like(w), np.zeros_like(w)
    share = 1 - f32(decay) if decay < 1 else 1
    for t, g in enumerate(np.reshape(x, w.shape) for x in gradients):
        direction = g
        for i in range(k):
            seen = unfolded(g, i) @ unfolded(g, i).T
            sums[i] = f32(decay) * sums[i] + share * (
                seen if w.shape[i] <= max_size else np.diag(np.diag(seen))
            )
        if t % every == 0:
            roots = []
            for total in sums:
                u, s, v = np.linalg.svd(total + f32(epsilon) * np.eye(len(total)))
                roots.append(u * s ** (-1 / (2 * k)) @ v)
        for i, root in enumerate(roots):
            direction = on_axis(root, direction, i)
        if grafting != "none":
            squares = squares + g**2
            like = g / np.sqrt(squares + f32(epsilon)) if grafting == "adagrad" else g
            direction = direction * np.linalg.norm(like) / np.linalg.norm(direction)
        velocity = f32(momentum) * velocity + direction
        w = w - f32(learning_rate) * velocity
    return w.reshape(shape)


def soap(w, gradients, learning_rate, beta1, beta2, shampoo_beta, epsilon, every):
    axes = range(w.ndim) if w.ndim > 1 else []
    b1, b2, b3 = f32(beta1), f32(beta2), f32(shampoo_beta)
    mean, variance = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients):
        if t == 0:
            kept = {i: (1 - b3) * unfolded(g, i) @ unfolded(g, i).T for i in axes}
            bases = {i: np.linalg.eigh(kept[i])[1][:, ::-1] for i in axes}
            continue
        mean, turned = b1 * mean + (1 - b1) * g, g
        for i in axes:
            turned = on_axis(bases[i].T, turned, i)
        variance = b2 * variance + (1 - b2) * turned**2
        direction = mean / (1 - b1**t)
        for i in axes:
            direction = on_axis(bases[i].T, direction, i)
        direction = direction / (np.sqrt(variance / (1 - b2**t)) + f32(epsilon))
        for i in axes:
            direction = on_axis(bases[i], direction, i)
            kept[i] = b3 * kept[i] + (1 - b3) * unfolded(g, i) @ unfolded(g, i).T
            if t % every == 0:
                bases[i] = np.linalg.qr(kept[i] @ bases[i])[0]
        w = w - f32(learning_rate) * direction
    return w


def psgd(w, gradients, probes, learning_rate, momentum, fit_rate, damping, clip, due):
    shape, is_dense = w.shape, w.ndim > 1
    w = np.atleast_1d(w)
    factors = [np.eye(n) for n in w.shape]
    mean, beta = np.zeros_like(w), f32(momentum)
    for t, (g, v) in enumerate(zip(gradients, probes, strict=True)):
        mean = beta * mean + (1 - beta) * np.reshape(g, w.shape)
        m = mean / (1 - beta ** (t + 1))
        if due[t]:
            whole = product(factors)
            v = np.reshape(v, w.shape)
            a = (whole @ (m + f32(damping) * v).ravel()).reshape(w.shape)
            b = (np.linalg.inv(whole).T @ v.ravel()).reshape(w.shape)
            factors = [refitted(q, a, b, i, f32(fit_rate), is_dense) for i, q in enumerate(factors)]
            largest = [np.abs(q).max() for q in factors]
            factors = [
                q * np.prod(largest) ** (1 / w.ndim) / size for q, size in zip(factors, largest, strict=True)
            ]
        whole = product(factors)
        direction = (whole.T @ whole @ m.ravel()).reshape(w.shape)
        size = np.sqrt(np.mean(direction**2))
        w = w - f32(learning_rate) * direction * min(1, f32(clip) / size)
    return w.reshape(shape)


def product(factors):
    whole = np.eye(1)
    for q in factors:
        whole = np.kron(whole, q)
    return whole


def refitted(q, a, b, i, rate, is_dense):
    first, second = unfolded(a, i) @ unfolded(a, i).T, unfolded(b, i) @ unfolded(b, i).T
    if not is_dense:
        first, second = np.diag(np.diag(first)), np.diag(np.diag(second))
        return q - rate * (first - second) @ q / np.max(first + second)
    total = first + second
    longest = max(total.T, key=np.linalg.norm)
    bound = np.linalg.norm(total @ longest) / np.linalg.norm(longest)
    return q - rate * np.triu(first - second) @ q / bound


def descended(optimizer, loss, w, steps, **changed):
    """One parameter after steps of descent on a loss, its slots, and the loss before each step."""
    kept = Loss(loss)
    real = jnp.abs(w).dtype

    def one(carry, step):
        w, slots = carry
        value, (gradient,) = kept.value_and_gradient(w)
        now = at_step(optimizer, numbers(optimizer, real, step, **changed) | {"step": step})
        if optimizer.type is ow.UpdateType.ACROSS:
            (w,), (slots,) = now.update((w,), (gradient,), (slots,), kept)
        else:
            w, slots = now.update(w, gradient, slots)
        return (w, slots), value

    (w, slots), values = jax.lax.scan(one, (w, optimizer.init(w)), jnp.arange(steps, dtype=jnp.int32))
    return w, slots, values


def parabola(w):
    """The sum of ``c |w|**2`` with c from 1 to 10."""
    return jnp.sum(jnp.linspace(1, 10, w.size).reshape(w.shape) * (w * w.conj()).real)


def rosenbrock(w):
    return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2
