"""The equations of the papers in NumPy, written from them alone; see ``reference`` for the contract."""

import numpy as np


def sgd(w, g, s, t, h):
    return w - h.learning_rate * g


def momentum(w, g, s, t, h):
    s["v"] = h.momentum * s.get("v", 0) + g
    return w - h.learning_rate * s["v"]


def nesterov(w, g, s, t, h):
    """Sutskever's form, for the point theta + momentum * v where the gradient is taken."""
    v = s.get("v", 0)
    theta = w - h.momentum * v
    s["v"] = h.momentum * v - h.learning_rate * g
    return theta + s["v"] + h.momentum * s["v"]


def asgd(w, g, s, t, h):
    return w - h.learning_rate * (1 + h.decay * h.learning_rate * (t - 1)) ** -h.power * g


def sign_sgd(w, g, s, t, h):
    return w - h.learning_rate * np.sign(g)


def signum(w, g, s, t, h):
    s["m"] = h.beta * s.get("m", 0) + (1 - h.beta) * g
    return w - h.learning_rate * np.sign(s["m"])


def lion(w, g, s, t, h):
    m = s.get("m", 0)
    c = h.beta1 * m + (1 - h.beta1) * g
    s["m"] = h.beta2 * m + (1 - h.beta2) * g
    return w - h.learning_rate * (np.sign(c) + h.weight_decay * w)


def rprop(w, g, s, t, h):
    w, g = np.array(w), np.array(g)
    size = s.setdefault("size", np.full(w.shape, h.learning_rate))
    before = s.setdefault("g", np.zeros(w.shape))
    for i in np.ndindex(w.shape):
        if g[i] * before[i] > 0:
            size[i] = min(size[i] * h.eta_plus, h.largest)
        elif g[i] * before[i] < 0:
            size[i] = max(size[i] * h.eta_minus, h.smallest)
            g[i] = 0
        w[i] -= np.sign(g[i]) * size[i]
        before[i] = g[i]
    return w


def adagrad(w, g, s, t, h):
    s["s"] = s.get("s", 0.5) + np.abs(g) ** 2
    return w - h.learning_rate * g / (np.sqrt(s["s"]) + h.epsilon)


def decayed_adagrad(w, g, s, t, h):
    s["v"] = h.decay * s.get("v", 0) + (1 - h.decay) * np.abs(g) ** 2
    return w - h.learning_rate * g / (np.sqrt(s["v"]) + h.epsilon)


def adadelta(w, g, s, t, h):
    s["g"] = h.rho * s.get("g", 0) + (1 - h.rho) * np.abs(g) ** 2
    delta = -np.sqrt(s.get("x", 0) + h.epsilon) / np.sqrt(s["g"] + h.epsilon) * g
    s["x"] = h.rho * s.get("x", 0) + (1 - h.rho) * np.abs(delta) ** 2
    return w + h.learning_rate * delta


def rmsprop(w, g, s, t, h):
    s["n"] = h.decay * s.get("n", 0) + (1 - h.decay) * np.abs(g) ** 2
    return w - h.learning_rate * g / np.sqrt(s["n"] + h.epsilon)


def graves(w, g, s, t, h):
    """RMSProp, centered and with momentum."""
    s["n"] = h.decay * s.get("n", 0) + (1 - h.decay) * np.abs(g) ** 2
    s["g"] = h.decay * s.get("g", 0) + (1 - h.decay) * g
    s["d"] = h.momentum * s.get("d", 0) - g / np.sqrt(s["n"] - np.abs(s["g"]) ** 2 + h.epsilon)
    return w + h.learning_rate * s["d"]


def adam(w, g, s, t, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * np.abs(g) ** 2
    m, v = s["m"] / (1 - h.beta1**t), s["v"] / (1 - h.beta2**t)
    return w - h.learning_rate * m / (np.sqrt(v) + h.epsilon)


def adamw(w, g, s, t, h):
    return adam(w, g, s, t, h) - h.learning_rate * h.weight_decay * w


def lazy_adam(w, g, s, t, h):
    """Row by row: the rows of zeros are left alone."""
    rows, gradients = np.atleast_1d(np.array(w)), np.atleast_1d(g)
    for i, row in enumerate(gradients):
        if np.any(row != 0):
            rows[i] = adam(rows[i], row, s.setdefault(i, {}), t, h)
    return rows.reshape(w.shape)


def amsgrad(w, g, s, t, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * np.abs(g) ** 2
    s["u"] = np.maximum(s.get("u", 0), s["v"])
    m, u = s["m"] / (1 - h.beta1**t), s["u"] / (1 - h.beta2**t)
    return w - h.learning_rate * m / (np.sqrt(u) + h.epsilon)


def adamax(w, g, s, t, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["u"] = np.maximum(h.beta2 * s.get("u", 0), np.abs(g) + h.epsilon)
    return w - h.learning_rate / (1 - h.beta1**t) * s["m"] / s["u"]


def nadam(w, g, s, t, h):
    def mu(i):
        return h.beta1 * (1 - 0.5 * 0.96 ** (i * h.momentum_decay))

    until = np.prod([mu(i) for i in range(1, t + 1)])
    s["m"] = mu(t) * s.get("m", 0) + (1 - mu(t)) * g
    s["n"] = h.beta2 * s.get("n", 0) + (1 - h.beta2) * np.abs(g) ** 2
    m = mu(t + 1) * s["m"] / (1 - until * mu(t + 1)) + (1 - mu(t)) * g / (1 - until)
    return w - h.learning_rate * m / (np.sqrt(s["n"] / (1 - h.beta2**t)) + h.epsilon)


def radam(w, g, s, t, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * np.abs(g) ** 2
    m = s["m"] / (1 - h.beta1**t)
    most = 2 / (1 - h.beta2) - 1
    rho = most - 2 * t * h.beta2**t / (1 - h.beta2**t)
    if rho <= h.threshold:
        return w - h.learning_rate * m
    r = np.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    return w - h.learning_rate * r * m / (np.sqrt(s["v"] / (1 - h.beta2**t)) + h.epsilon)


def yogi(w, g, s, t, h):
    square, v = np.abs(g) ** 2, s.get("v", 1e-6)
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["v"] = v - (1 - h.beta2) * np.sign(v - square) * square
    return w - h.learning_rate * s["m"] / (np.sqrt(s["v"]) + h.epsilon)


def adabelief(w, g, s, t, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["s"] = h.beta2 * s.get("s", 0) + (1 - h.beta2) * np.abs(g - s["m"]) ** 2 + h.epsilon
    m, v = s["m"] / (1 - h.beta1**t), s["s"] / (1 - h.beta2**t)
    return w - h.learning_rate * m / (np.sqrt(v) + h.epsilon)


def adopt(w, g, s, t, h):
    """Its step 0 is our t = 1."""
    if t == 1:
        s["v"], s["m"] = np.abs(g) ** 2, 0
        return w
    limit, scaled = (t - 1) ** h.clip_power, g / np.maximum(np.sqrt(s["v"]), h.epsilon)
    size = np.abs(scaled)
    scaled = np.where(size > limit, limit * scaled / np.where(size == 0, 1, size), scaled)
    s["m"] = h.beta1 * s["m"] + (1 - h.beta1) * scaled
    s["v"] = h.beta2 * s["v"] + (1 - h.beta2) * np.abs(g) ** 2
    return w - h.learning_rate * s["m"]


def adan(w, g, s, t, h):
    """In the paper's own betas, each 1 minus ours."""
    b1, b2, b3 = 1 - h.beta1, 1 - h.beta2, 1 - h.beta3
    d = g - s.get("g", g)
    s["g"] = g
    s["m"] = (1 - b1) * s.get("m", 0) + b1 * g
    s["v"] = (1 - b2) * s.get("v", 0) + b2 * d
    s["n"] = (1 - b3) * s.get("n", 0) + b3 * np.abs(g + (1 - b2) * d) ** 2
    m, v, n = (s[k] / (1 - (1 - b) ** t) for k, b in (("m", b1), ("v", b2), ("n", b3)))
    rate = h.learning_rate / (np.sqrt(n) + h.epsilon)
    return (w - rate * (m + (1 - b2) * v)) / (1 + h.weight_decay * h.learning_rate)


def ademamix(w, g, s, t, h):
    s["m1"] = h.beta1 * s.get("m1", 0) + (1 - h.beta1) * g
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * np.abs(g) ** 2
    alpha = min(h.alpha, t * h.alpha / h.warmup)
    x, low, high = min(t / h.warmup, 1), np.log(h.beta1), np.log(h.beta3)
    beta3 = min(h.beta3, np.exp(low * high / ((1 - x) * high + x * low)))
    s["m2"] = beta3 * s.get("m2", 0) + (1 - beta3) * g
    m1, v = s["m1"] / (1 - h.beta1**t), s["v"] / (1 - h.beta2**t)
    step = (m1 + alpha * s["m2"]) / (np.sqrt(v) + h.epsilon)
    return w - h.learning_rate * (step + h.weight_decay * w)


def mars(w, g, s, t, h):
    c = g + h.gamma * h.beta1 / (1 - h.beta1) * (g - s.get("g", g))
    s["g"] = g
    if np.linalg.norm(c) > 1:
        c = c / np.linalg.norm(c)
    return adamw(w, c, s, t, h)
