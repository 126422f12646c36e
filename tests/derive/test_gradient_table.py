"""Gradients derived op by op against ``jax.grad``: families of primitives, one table each, bit by bit.

A case is ``(function, parameters, *data)``. Its result is contracted with fixed weights to a loss, so that
every element has a cotangent of its own. Both sides are compiled, a family at once: XLA sees each derived
Program beside ``jax.grad`` of the same function, and the bytes of the gradients must agree. What may differ
in the last bits is listed in ``NOT_BITWISE``, each with its reason.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from tests.compiled import OPTIMIZED, at_once, expect_no, named

import onward as ow
from onward.core.lower import lower


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def uniform(*shape, low=-0.9, high=0.9, seed=0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def symmetric(n):
    m = normal(n, n)
    return m @ m.T + n * np.eye(n, dtype=np.float32)


X, Y, Z = normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)
U, P = uniform(3, 4), uniform(3, 4, low=0.5, high=2.0)
V, W = normal(6), normal(4, 4, seed=3)
S = symmetric(3)
ROWS = np.array([2, 0, 2, 1], np.int32)
KEY = jax.random.key(7)
WEIGHTS = np.cos(np.arange(128, dtype=np.float32) + np.float32(0.3))

UNARY = {
    "neg": (jnp.negative, X),
    "abs": (jnp.abs, X),
    "sign": (lambda x: jnp.sign(x) * x, X),
    "floor and round": (lambda x: x * jnp.floor(x) + x * jnp.round(x), X),
    "exp": (jnp.exp, X),
    "exp2": (jnp.exp2, X),
    "expm1": (jnp.expm1, X),
    "log": (jnp.log, P),
    "log1p": (jnp.log1p, P),
    "sqrt": (jnp.sqrt, P),
    "rsqrt": (lax.rsqrt, P),
    "cbrt": (jnp.cbrt, P),
    "square": (jnp.square, X),
    "integer_pow": (lambda x: x**3 + x**-2, P),
    "reciprocal": (jnp.reciprocal, P),
    "sin": (jnp.sin, X),
    "cos": (jnp.cos, X),
    "tan": (jnp.tan, U),
    "arcsin": (jnp.arcsin, U),
    "arccos": (jnp.arccos, U),
    "arctan": (jnp.arctan, X),
    "sinh": (jnp.sinh, X),
    "cosh": (jnp.cosh, X),
    "tanh": (jnp.tanh, X),
    "arcsinh": (jnp.arcsinh, X),
    "arccosh": (lambda x: jnp.arccosh(1 + x), P),
    "arctanh": (jnp.arctanh, U),
    "sigmoid": (jax.nn.sigmoid, X),
    "log_sigmoid": (jax.nn.log_sigmoid, X),
    "relu": (jax.nn.relu, X),
    "relu at zero": (jax.nn.relu, np.zeros(4, np.float32)),
    "relu6": (jax.nn.relu6, 8 * X),
    "leaky_relu": (jax.nn.leaky_relu, X),
    "elu": (jax.nn.elu, X),
    "selu": (jax.nn.selu, X),
    "celu": (jax.nn.celu, X),
    "gelu": (jax.nn.gelu, X),
    "gelu exact": (partial(jax.nn.gelu, approximate=False), X),
    "silu": (jax.nn.silu, X),
    "mish": (jax.nn.mish, X),
    "hard_swish": (jax.nn.hard_swish, 3 * X),
    "softplus": (jax.nn.softplus, X),
    "softmax": (jax.nn.softmax, X),
    "log_softmax": (jax.nn.log_softmax, X),
    "glu": (jax.nn.glu, X),
    "standardize": (jax.nn.standardize, X),
    "erf": (jsp.special.erf, X),
    "erfc": (jsp.special.erfc, X),
    "erfinv": (jsp.special.erfinv, U),
    "lgamma": (jsp.special.gammaln, P),
    "digamma": (jsp.special.digamma, P),
    "bessel_i0e": (jsp.special.i0e, X),
    "bessel_i1e": (jsp.special.i1e, X),
    "logit": (lambda x: jsp.special.logit(x / 4), P),
    "entr": (jsp.special.entr, P),
    "sinc": (jnp.sinc, X),
    "sinc at zero": (jnp.sinc, np.zeros(3, np.float32)),
    "nan_to_num": (lambda x: jnp.nan_to_num(jnp.log(x)), X),
}

BINARY = {
    "add, broadcast": (lambda p, y: p["x"] + p["b"] * y, {"x": X, "b": Y[0]}, Y),
    "sub": (lambda p: p["x"] - p["y"], {"x": X, "y": Y}),
    "mul": (lambda p: p["x"] * p["y"], {"x": X, "y": Y}),
    "mul by itself": (lambda x: x * x, X),
    "div": (lambda p: p["x"] / p["y"], {"x": X, "y": P}),
    "power": (lambda p: jnp.power(p["x"], p["y"]), {"x": P, "y": X}),
    "power with an integer exponent": (lambda x, n: jnp.power(x, n), P, ROWS),
    "power of zero": (lambda p: p["x"] ** p["y"], {"x": np.zeros(3, np.float32), "y": V[:3] ** 2}),
    "remainder": (lambda p: jnp.remainder(p["x"], p["y"]), {"x": 3 * X, "y": P}),
    "fmod": (lambda p: jnp.fmod(p["x"], p["y"]), {"x": 3 * X, "y": P}),
    "atan2": (lambda p: jnp.arctan2(p["x"], p["y"]), {"x": X, "y": Y}),
    "hypot": (lambda p: jnp.hypot(p["x"], p["y"]), {"x": X, "y": Y}),
    "logaddexp": (lambda p: jnp.logaddexp(p["x"], p["y"]), {"x": X, "y": Y}),
    "logaddexp2": (lambda p: jnp.logaddexp2(p["x"], p["y"]), {"x": X, "y": Y}),
    "maximum": (lambda p: jnp.maximum(p["x"], p["y"]), {"x": X, "y": Y}),
    "minimum with ties": (lambda p: jnp.minimum(p["x"], p["y"]), {"x": X, "y": X}),
    "where": (lambda p: jnp.where(p["x"] > 0, p["x"], p["y"]), {"x": X, "y": Y}),
    "where, both branches the same": (lambda x: jnp.where(x > 0, x, x * x), X),
    "select_n of three": (lambda p, i: lax.select_n(i, p, p * p, -p), X, ROWS[:3, None] + 0 * X.astype(int)),
    "clip by constants": (lambda x: jnp.clip(x, -0.5, 0.5), X),
    "clip by parameters": (lambda p: jnp.clip(p["x"], p["low"], p["high"]), {"x": X, "low": -P, "high": P}),
    "xlogy": (lambda p: jsp.special.xlogy(p["x"], p["y"]), {"x": X, "y": P}),
    "heaviside": (lambda p: p["x"] * jnp.heaviside(p["x"], p["y"]), {"x": X, "y": Y}),
    "copysign": (jnp.copysign, X, Y),
    "polygamma": (lambda x: jsp.special.polygamma(1, x), P),
    "igamma": (lambda p: jsp.special.gammainc(p["a"], p["x"]), {"a": P, "x": P + 1}),
}

REDUCTIONS = {
    "sum": (lambda x: jnp.sum(x, 0), X),
    "sum over all": (jnp.sum, X),
    "mean": (lambda x: jnp.mean(x, 1), X),
    "mean with where": (lambda x: jnp.mean(x, where=X > 0), X),
    "max": (lambda x: jnp.max(x, 0), X),
    "max with ties": (jnp.max, np.ones((3, 4), np.float32)),
    "min": (lambda x: jnp.min(x, 1), X),
    "prod": (lambda x: jnp.prod(x, 0), X),
    "var": (lambda x: jnp.var(x, 1), X),
    "std": (lambda x: jnp.std(x, 0, ddof=1), X),
    "norm": (jnp.linalg.norm, X),
    "logsumexp": (lambda x: jsp.special.logsumexp(x, 1), X),
    "logsumexp with weights": (lambda p: jsp.special.logsumexp(p["x"], 1, p["b"]), {"x": X, "b": P}),
    "cumsum": (lambda x: jnp.cumsum(x, 1), X),
    "cumsum reversed": (lambda x: lax.cumsum(x, 0, reverse=True), X),
    "cumprod": (lambda x: jnp.cumprod(x, 0), X),
    "cummax": (lambda x: lax.cummax(x, 1), X),
    "cummin": (lambda x: lax.cummin(x, 1), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), X),
    "argmax feeds a gather": (lambda x: x[jnp.arange(3), jnp.argmax(x, 1)], X),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME"), X),
    "average pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 1), "VALID") / 6, X),
    "percentile": (lambda x: jnp.percentile(x, 30.0, axis=1), X),
    "ptp": (lambda x: jnp.ptp(x, 0), X),
    "cov": (jnp.cov, X),
    "trapezoid": (jnp.trapezoid, X),
}

CONTRACTIONS = {
    "matmul": (lambda p: p["x"] @ p["w"], {"x": X, "w": W}),
    "matmul with its own transpose": (lambda x: x @ x.T, X),
    "vector dot": (lambda p: jnp.dot(p["x"], p["y"]), {"x": V, "y": V[::-1].copy()}),
    "outer": (lambda p: jnp.outer(p["x"], p["y"]), {"x": V, "y": X[0]}),
    "batched matmul": (lambda p: p["x"] @ p["y"], {"x": normal(2, 3, 4), "y": normal(2, 4, 2)}),
    "matmul broadcasts a batch": (lambda p: p["x"] @ p["w"], {"x": normal(2, 3, 4), "w": W}),
    "dot_general": (
        lambda p: lax.dot_general(p["x"], p["y"], (((2,), (1,)), ((0,), (0,)))),
        {"x": normal(2, 3, 4), "y": normal(2, 4, 2)},
    ),
    "tensordot": (lambda p: jnp.tensordot(p["x"], p["y"], 2), {"x": normal(2, 3, 4), "y": X}),
    "einsum attention": (
        lambda p: jnp.einsum("bqhd,bkhd->bhqk", p["q"], p["k"]),
        {"q": normal(2, 3, 2, 2), "k": normal(2, 3, 2, 2, seed=1)},
    ),
    "einsum of three": (
        lambda p: jnp.einsum("ij,jk,ki->j", p["x"], p["w"], p["y"]),
        {"x": X, "w": W, "y": Y.T.copy()},
    ),
    "einsum trace": (lambda w: jnp.einsum("ii->i", w), W),
    "preferred_element_type": (
        lambda p: lax.dot(p["x"].astype(jnp.bfloat16), p["w"], preferred_element_type=jnp.float32),
        {"x": X, "w": W.astype(jnp.bfloat16)},
    ),
    "kron": (lambda p: jnp.kron(p["x"], p["w"]), {"x": X[:2, :2], "w": W[:2, :2]}),
    "softmax attention": (
        lambda p: jax.nn.dot_product_attention(p["q"], p["k"], p["v"]),
        {"q": normal(1, 3, 2, 2), "k": normal(1, 3, 2, 2, seed=1), "v": normal(1, 3, 2, 2, seed=2)},
    ),
    "ragged_dot": (
        lambda p, n: lax.ragged_dot(p["x"], p["w"], n),
        {"x": X, "w": normal(2, 4, 2)},
        ROWS[1:3] + 1,
    ),
    "polyval": (lambda p: jnp.polyval(p["c"], p["x"]), {"c": V[:3], "x": X}),
    "cross": (lambda p: jnp.cross(p["x"], p["y"]), {"x": X[:, :3], "y": Y[:, :3]}),
}


def conv(p, **options):
    spatial = "DHW"[-(p["x"].ndim - 2) :]
    numbers = ("N" + spatial + "C", spatial + "IO", "N" + spatial + "C")
    options = {"window_strides": (1,) * len(spatial), "padding": "SAME", **options}
    return lax.conv_general_dilated(p["x"], p["w"], dimension_numbers=numbers, **options)


LINE = {"x": normal(1, 6, 2), "w": normal(3, 2, 2)}
IMAGE = {"x": normal(1, 5, 4, 2), "w": normal(3, 2, 2, 3)}
CUBE = {"x": normal(1, 3, 3, 3, 1), "w": normal(2, 2, 2, 1, 2)}

CONVOLUTIONS = {
    "conv 1d": (conv, LINE),
    "conv 1d, valid": (partial(conv, padding="VALID"), LINE),
    "conv 1d, causal": (partial(conv, padding=[(2, 0)]), LINE),
    "conv 2d": (conv, IMAGE),
    "conv 2d, strides": (partial(conv, window_strides=(2, 1)), IMAGE),
    "conv 2d, kernel dilation": (partial(conv, rhs_dilation=(1, 2)), IMAGE),
    "conv 2d, input dilation": (partial(conv, lhs_dilation=(2, 1), padding=[(1, 0), (0, 1)]), IMAGE),
    "conv 2d, groups": (
        partial(conv, feature_group_count=2),
        {"x": IMAGE["x"], "w": normal(3, 2, 1, 4)},
    ),
    "conv 2d, batch groups": (
        partial(conv, batch_group_count=2),
        {"x": normal(2, 4, 4, 1), "w": normal(2, 2, 1, 2)},
    ),
    "conv 2d and bias and relu": (
        lambda p: jax.nn.relu(conv(p) + p["b"]),
        {**IMAGE, "b": normal(3)},
    ),
    "conv 3d": (conv, CUBE),
    "conv transposed": (
        lambda p: lax.conv_transpose(
            p["x"], p["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        {"x": normal(1, 3, 2, 2), "w": normal(3, 2, 2, 1)},
    ),
    "conv local": (
        lambda p: lax.conv_general_dilated_local(p["x"], p["w"], (1,), "VALID", (2,)),
        {"x": normal(1, 2, 4), "w": normal(2, 4, 3)},
    ),
    "image resize": (lambda x: jax.image.resize(x, (5, 3), "bilinear"), X),
    "conv patches": (
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID"),
        normal(1, 2, 3, 3),
    ),
    "jnp.convolve": (lambda p: jnp.convolve(p["x"], p["w"], "same"), {"x": V, "w": V[:3]}),
}

INDEXING = {
    "static index": (lambda x: x[1], X),
    "negative and strided slice": (lambda x: x[::-1, 1::2], X),
    "gather by data": (lambda x, i: x[i], X, ROWS),
    "gather pairs": (lambda x, i: x[i, (i + 1) % 3], X, ROWS),
    "boolean mask": (lambda x, m: jnp.where(m, x, 0.0).sum(0), X, X > 0),
    "take": (lambda x, i: jnp.take(x, i, axis=1), X, ROWS),
    "take, fill out of bounds": (
        lambda x, i: jnp.take(x, i, axis=0, mode="fill", fill_value=0.0),
        X,
        ROWS + 1,
    ),
    "take, clip": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), X, ROWS + 1),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i[None], 1), X, ROWS),
    "at set": (lambda p, i: p["x"].at[i].set(p["v"]), {"x": X, "v": W[:3]}, np.array([2, 0, 1])),
    "at add, repeated": (lambda p, i: p["x"].at[i].add(p["v"]), {"x": X, "v": W}, ROWS),
    "at mul": (
        lambda p, i: p["x"].at[i].mul(p["v"], unique_indices=True),
        {"x": X, "v": W[:2]},
        np.array([2, 0]),
    ),
    "at min": (lambda p, i: p["x"].at[i].min(p["v"]), {"x": X, "v": W}, ROWS),
    "at max": (lambda p, i: p["x"].at[i].max(p["v"]), {"x": X, "v": W}, ROWS),
    "at divide": (lambda x: x.at[:, 1].divide(2.0), X),
    "at power": (lambda x: x.at[:, 1].power(3.0), X),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 3), W, ROWS),
    "segment_max": (lambda x, i: jax.ops.segment_max(x, i, 3), W, ROWS),
    "one_hot": (lambda w, i: jax.nn.one_hot(i, 3) @ w, X, ROWS),
    "embedding, summed": (lambda w, i: jnp.sum(w[i], 0), X, np.array([[0, 1], [2, 2]])),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 2)), X, ROWS),
    "dynamic_index_in_dim": (lambda x, i: lax.dynamic_index_in_dim(x, i[0], 1), X, ROWS),
    "dynamic_update_slice": (
        lambda p, i: lax.dynamic_update_slice(p["x"], p["v"], (i[0], i[1])),
        {"x": X, "v": W[:2, :2]},
        ROWS,
    ),
    "cross entropy by labels": (
        lambda x, y: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1)),
        W,
        ROWS,
    ),
    "map_coordinates": (lambda p, x: jsp.ndimage.map_coordinates(p, [x[0], x[1]], order=1), X, P),
    "searchsorted and interp": (lambda p, x: jnp.interp(x, jnp.arange(6.0), p), V, P),
}

TRANSFORMS = {
    "fft": (jnp.fft.fft, V),
    "rfft": (jnp.fft.rfft, V),
    "irfft": (lambda x: jnp.fft.irfft(x + 1j * x**2), V[:4]),
    "fft2": (jnp.fft.fft2, X),
    "ifft of fft": (lambda x: jnp.fft.ifft(jnp.fft.fft(x) ** 2), V),
    "complex product": (lambda x: (x + 1j) * jnp.exp(1j * x), X),
    "complex modulus": (lambda p: jnp.abs(lax.complex(p["x"], p["y"])), {"x": X, "y": Y}),
    "complex parts": (lambda x: jnp.real(jnp.conj(jnp.exp(1j * x))) + jnp.imag(x * 1j), X),
    "complex matmul": (lambda p: (p["x"] + 1j * p["y"]) @ (p["w"] * 1j), {"x": X, "y": Y, "w": W}),
    "complex angle": (lambda p: jnp.angle(lax.complex(p["x"], p["y"])), {"x": X, "y": Y}),
}

SORTING = {
    "sort": (lambda x: jnp.sort(x, 1), X),
    "sort descending": (lambda x: jnp.sort(x, 0, descending=True), X),
    "argsort and take": (lambda x: x[jnp.argsort(x[:, 0])], X),
    "sort pairs": (lambda p: lax.sort((p["x"], p["y"]), num_keys=1), {"x": X, "y": Y}),
    "top_k": (lambda x: lax.top_k(x, 2)[0], X),
    "median": (lambda x: jnp.median(x, 1), X),
    "quantile": (lambda x: jnp.quantile(x, jnp.array([0.25, 0.75])), V),
}

LINEAR_ALGEBRA = {
    "cholesky": (jnp.linalg.cholesky, S),
    "qr": (lambda a: jnp.linalg.qr(a), S),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], S),
    "eigh vectors": (lambda a: jnp.square(jnp.linalg.eigh(a)[1]), S),
    "svd": (lambda a: jnp.linalg.svd(a, compute_uv=False), X),
    "svd vectors": (lambda a: [jnp.square(m) for m in jnp.linalg.svd(a, full_matrices=False)], X),
    "solve": (lambda p: jnp.linalg.solve(p["a"], p["b"]), {"a": S, "b": X}),
    "solve_triangular": (
        lambda p: jsp.linalg.solve_triangular(p["a"], p["b"], lower=True),
        {"a": np.tril(S), "b": X},
    ),
    "cho_solve": (lambda p: jsp.linalg.cho_solve((p["a"], True), p["b"]), {"a": np.tril(S), "b": X}),
    "inv": (jnp.linalg.inv, S),
    "det": (jnp.linalg.det, S),
    "slogdet": (lambda a: jnp.linalg.slogdet(a)[1], S),
    "lu": (lambda a: jsp.linalg.lu(a)[1:], S),
    "expm": (lambda a: jsp.linalg.expm(a / 4), S),
    "eigvals": (jnp.linalg.eigvals, W),
    "pinv": (jnp.linalg.pinv, X),
    "lstsq": (lambda p: jnp.linalg.lstsq(p["a"], p["b"])[0], {"a": X.T.copy(), "b": V[:4]}),
    "matrix_power": (lambda a: jnp.linalg.matrix_power(a, 5), S / 4),
    "batched cholesky under vmap": (jax.vmap(jnp.linalg.cholesky), np.stack([S, 2 * S])),
}

SHAPES = {
    "reshape": (lambda x: x.reshape(2, 6), X),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), normal(2, 3, 2)),
    "moveaxis and squeeze": (lambda x: jnp.squeeze(jnp.moveaxis(x[None], 0, 2)), X),
    "broadcast_to": (lambda x: jnp.broadcast_to(x, (3, 6)), V),
    "pad": (lambda x: jnp.pad(x, 1), X),
    "pad with a parameter": (lambda p: lax.pad(p["x"], p["v"], [(1, 0, 1), (-1, 2, 0)]), {"x": X, "v": V[0]}),
    "pad by reflection": (lambda x: jnp.pad(x, ((1, 1), (0, 2)), mode="reflect"), X),
    "concatenate": (lambda p: jnp.concatenate([p["x"], p["y"], p["x"]], 1), {"x": X, "y": Y}),
    "stack": (lambda p: jnp.stack([p["x"], p["y"]], 1), {"x": X, "y": Y}),
    "tile": (lambda x: jnp.tile(x, (2, 1)), X),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), X),
    "roll": (lambda x: jnp.roll(x, (1, 2), (0, 1)), X),
    "flip": (lambda x: jnp.flip(x, 0), X),
    "split": (lambda x: [part * i for i, part in enumerate(jnp.split(x, 3), 1)], X),
    "split, one part unused": (lambda x: jnp.split(x, 2, axis=1)[1], X),
    "tril": (jnp.tril, W),
    "diag": (lambda x: jnp.diag(x, 1), V),
    "trace of a matrix": (jnp.trace, W),
    "meshgrid": (lambda p: jnp.meshgrid(p["x"], p["y"]), {"x": V, "y": X[0]}),
    "copy, the parameter itself": (lambda x: x, X),
    "a parameter returned twice": (lambda x: [x, x], X),
    "rot90 and swapaxes": (lambda x: jnp.rot90(jnp.swapaxes(x, 0, 1)), X),
}


def cell(p, h, x):
    return jnp.tanh(h @ p["w"] + x)


def recurrent(p, xs, **options):
    return lax.scan(lambda h, x: (cell(p, h, x),) * 2, p["h"], xs, **options)


def cond_in_scan_in_scan(p, xs):
    def inner(h, x):
        return lax.cond(x[0] > 0, lambda h: cell(p, h, x), lambda h: h * jnp.sum(p["w"]), h), x

    def outer(h, x):
        h, _ = lax.scan(inner, h, x)
        return h, h.sum()

    return lax.scan(outer, p["h"], xs)


def scan_in_cond_in_scan(p, xs):
    def body(h, x):
        return lax.cond(
            jnp.sum(x) > 0,
            lambda h: recurrent({"w": p["w"], "h": h}, x)[0],
            lambda h: cell(p, h, x[0]),
            h,
        ), jnp.max(h)

    return lax.scan(body, p["h"], xs)


def switch_in_map_in_cond(p, i):
    branches = [jnp.sin, lambda v: v * jnp.sum(p["w"]), lambda v: v**2]
    return lax.cond(
        jnp.sum(i) > 2,
        lambda h: lax.map(lambda k: lax.switch(k, branches, h), i),
        lambda h: jnp.stack([h] * len(i)),
        p["h"],
    )


def newton(x):
    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, 0.5 * (c[1] + 2.0 / c[1])), (0, x))[1]


CELL = {"w": W / 2, "h": normal(4)}
SERIES = normal(5, 4, seed=4)
FILMS = normal(2, 3, 4, seed=5)

CONTROL_FLOW = {
    "scan": (recurrent, CELL, SERIES),
    "scan, reverse": (partial(recurrent, reverse=True), CELL, SERIES),
    "scan, unrolled": (partial(recurrent, unroll=2), CELL, SERIES),
    "scan over parameters": (
        lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p),
        normal(3, 4, 4),
        V[:4],
    ),
    "scan with an integer carry": (
        lambda p, xs: lax.scan(lambda c, x: ((c[0] + 1, c[1] * p["w"][0, 0] + x), c[0]), (0, p["h"]), xs),
        CELL,
        SERIES,
    ),
    "scan, final carry unused": (lambda p, xs: recurrent(p, xs)[1], CELL, SERIES),
    "scan, outputs unused": (lambda p, xs: recurrent(p, xs)[0], CELL, SERIES),
    "scan of length zero": (lambda p, xs: recurrent(p, xs[:0])[0], CELL, SERIES),
    "cond, true": (lambda p, b: lax.cond(b, jnp.sin, jnp.cos, p), X, np.bool_(True)),
    "cond, false": (lambda p, b: lax.cond(b, jnp.sin, jnp.cos, p), X, np.bool_(False)),
    "cond closes over parameters": (
        lambda p, b: lax.cond(b, lambda: p["x"] * p["y"], lambda: p["x"]),
        {"x": X, "y": Y},
        np.bool_(False),
    ),
    "cond decided by a parameter": (lambda p: lax.cond(p[0, 0] > 0, jnp.sin, jnp.square, p), X),
    "switch": (lambda p, i: lax.switch(i[0], [jnp.sin, jnp.exp, lambda x: 0 * x], p), X, ROWS - 1),
    "fori_loop, static": (lambda p: lax.fori_loop(0, 4, lambda i, h: cell(p, h, i * 0.1), p["h"]), CELL),
    "fori_loop, indexing": (
        lambda p: lax.fori_loop(0, 4, lambda i, s: s + p["w"][i] * p["h"][i], p["h"]),
        CELL,
    ),
    "while_loop beside the path": (lambda p, x: p * newton(x), X, P),
    "while_loop of a stopped parameter": (lambda p: p * newton(lax.stop_gradient(p)), P),
    "while_loop of a rounded parameter": (lambda p: p * newton(jnp.ceil(p)), P),
    "map": (lambda p, xs: lax.map(lambda x: cell(p, p["h"], x), xs), CELL, SERIES),
    "map, batches": (lambda p, xs: lax.map(lambda x: cell(p, p["h"], x), xs, batch_size=2), CELL, SERIES),
    "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x), V),
    "associative_scan, linear recurrence": (
        lambda p: lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (p["a"], p["b"]))[1],
        {"a": U, "b": X},
    ),
    "cond in scan": (
        lambda p, xs: lax.scan(
            lambda h, x: (lax.cond(x[0] > 0, lambda h: cell(p, h, x), jnp.sin, h), h), p["h"], xs
        ),
        CELL,
        SERIES,
    ),
    "cond in scan in scan": (cond_in_scan_in_scan, CELL, FILMS),
    "scan in cond in scan": (scan_in_cond_in_scan, CELL, FILMS),
    "switch in map in cond": (switch_in_map_in_cond, CELL, ROWS),
    "vmap of scan": (lambda p, xs: jax.vmap(lambda x: recurrent(p, x)[0])(xs), CELL, FILMS),
    "vmap of cond": (
        lambda p, xs: jax.vmap(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x * p))(xs),
        V[:4],
        SERIES,
    ),
    "vmap over the branch": (
        lambda p, i: jax.vmap(lambda k: lax.switch(k, [jnp.sin, jnp.exp], p))(i),
        X,
        ROWS,
    ),
}


@jax.custom_jvp
def safe_sqrt(x):
    return jnp.sqrt(x)


@safe_sqrt.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    root = safe_sqrt(x)
    return root, t / (2 * root + 0.1)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_vjp
def wrong_product(x, y):
    return x * y


wrong_product.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, g: (3 * g * xy[1], jnp.cos(g) * xy[0]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def powered(n, x, f):
    return f(x) ** n


powered.defvjp(lambda n, x, f: (f(x) ** n, x), lambda n, f, x, g: (n * g * x,))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled(x, factor):
    return factor * jnp.tanh(x)


@scaled.defjvp
def _(factor, primals, tangents):
    return scaled(primals[0], factor), (factor + 1) * tangents[0]


@jax.custom_vjp
def gradient_clipped(tree):
    return tree


gradient_clipped.defvjp(
    lambda tree: (tree, None), lambda _, g: (jax.tree.map(lambda leaf: jnp.clip(leaf, -0.3, 0.3), g),)
)


@jax.custom_vjp
def rounded_in_training(x):
    return x


rounded_in_training.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_vjp
def indexed(x, i):
    return x[i]


indexed.defvjp(lambda x, i: (x[i], (x, i)), lambda r, g: (2 * jnp.zeros_like(r[0]).at[r[1]].add(g), None))


@jax.jit
def wave(x):
    return jnp.sin(x) * x


RULES = {
    "custom_jvp": (safe_sqrt, P),
    "custom_jvp, nondiff_argnums": (lambda x: scaled(x, 3.0), X),
    "custom_jvp in scan": (
        lambda p, xs: lax.scan(lambda h, x: (safe_sqrt(h**2 + x**2), h), p, xs),
        X[0],
        SERIES,
    ),
    "custom_jvp under vmap": (jax.vmap(safe_sqrt), P),
    "custom_vjp, straight through": (straight_through, X),
    "custom_vjp, not the derivative": (lambda p: wrong_product(p["x"], p["y"]), {"x": X, "y": Y}),
    "custom_vjp, one argument is data": (lambda x, y: wrong_product(x, y), X, Y),
    "custom_vjp, nondiff_argnums": (lambda x: powered(2, x, jnp.sin), X),
    "custom_vjp of a tree": (lambda p: gradient_clipped(p)["x"] * p["y"], {"x": X, "y": Y}),
    "custom_vjp with integers": (lambda x, i: indexed(x, i), X, ROWS),
    "custom_vjp, another value when differentiated": (lambda x: rounded_in_training(x) ** 2, X),
    "custom_vjp in scan": (
        lambda p, xs: lax.scan(lambda h, x: (wrong_product(h, x), h), p, xs),
        X[0],
        SERIES,
    ),
    "custom_vjp in cond": (lambda p, b: lax.cond(b, straight_through, jnp.sin, p), X, np.bool_(True)),
    "custom_vjp under vmap": (lambda p: jax.vmap(wrong_product)(p["x"], p["y"]), {"x": X, "y": Y}),
    "custom_vjp in custom_vjp": (lambda x: wrong_product(straight_through(x), gradient_clipped(x)), X),
    "custom_gradient": (jax.custom_gradient(lambda x: (x**2, lambda g: 5 * g * x)), X),
    "custom_root": (
        lambda a: lax.custom_root(
            lambda x: x**3 - a,
            a,
            lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x**2), x),
            lambda g, y: y / g(1.0),
        ),
        P[0, 0],
    ),
    "custom_linear_solve": (
        lambda p: lax.custom_linear_solve(
            partial(jnp.dot, p["a"]), p["b"], lambda mv, b: jnp.linalg.solve(S, b), symmetric=True
        ),
        {"a": S, "b": V[:3]},
    ),
    "stop_gradient": (lambda p: p["x"] * lax.stop_gradient(p["x"]) + p["y"], {"x": X, "y": Y}),
    "stop_gradient in scan": (
        lambda p, xs: lax.scan(lambda h, x: (cell(p, lax.stop_gradient(h), x), h), p["h"], xs),
        CELL,
        SERIES,
    ),
    "zero times": (lambda x: x * 0.0, X),
    "nested jit": (lambda x: jax.jit(lambda y: jnp.sin(jax.jit(jnp.exp)(y)) * y)(x), X),
    "jit called twice": (lambda x: wave(x) + wave(wave(x)), X),
    "jit with an unused result": (lambda x: jax.jit(lambda y: (jnp.exp(y), y * 2))(x)[1], X),
    "jit with a literal": (lambda x: jax.jit(lambda y, s: y * s)(x, 3.0), X),
    "jit returns its argument": (lambda x: jax.jit(lambda y: (y, y * y))(x), X),
    "vmap": (lambda p: jax.vmap(lambda x: jnp.sin(x) @ p["w"])(p["x"]), {"x": X, "w": W}),
    "vmap of vmap": (
        lambda p: jax.vmap(jax.vmap(jnp.multiply, (0, None)), (None, 0))(p["x"], p["y"]),
        {"x": V, "y": X[0]},
    ),
    "vmap with a named axis": (jax.vmap(lambda x: x * lax.psum(jnp.sin(x), "i"), axis_name="i"), X),
    "named_scope": (lambda x: jax.named_scope("inner")(jnp.sin)(x) * x, X),
    "grad inside": (lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * y))(x), X),
    "jvp inside": (lambda x: jax.jvp(jnp.tanh, (x,), (x * x,))[1], X),
    "linearize inside": (lambda x: jax.linearize(jnp.sin, x)[1](x), X),
    "hessian inside": (lambda x: jax.hessian(lambda y: jnp.prod(jnp.sin(y)))(x), V[:3]),
}


def block(p, h):
    h = checkpoint_name(jnp.sin(h @ p["w"]), "hidden")
    return jnp.tanh(h * p["h"])


POLICIES = jax.checkpoint_policies

REMAT = {
    "checkpoint": (jax.checkpoint(block), CELL, SERIES),
    "checkpoint, dots saveable": (jax.checkpoint(block, policy=POLICIES.dots_saveable), CELL, SERIES),
    "checkpoint, nothing saveable": (jax.checkpoint(block, policy=POLICIES.nothing_saveable), CELL, SERIES),
    "checkpoint, everything saveable": (
        jax.checkpoint(block, policy=POLICIES.everything_saveable),
        CELL,
        SERIES,
    ),
    "checkpoint, save by name": (
        jax.checkpoint(block, policy=POLICIES.save_only_these_names("hidden")),
        CELL,
        SERIES,
    ),
    "checkpoint, prevent_cse off": (jax.checkpoint(block, prevent_cse=False), CELL, SERIES),
    "checkpoint twice over": (
        lambda p, x: jax.checkpoint(block)(p, jax.checkpoint(block)(p, x)),
        CELL,
        SERIES,
    ),
    "checkpoint in checkpoint": (
        jax.checkpoint(lambda p, x: jnp.cos(jax.checkpoint(block)(p, x))),
        CELL,
        SERIES,
    ),
    "checkpoint in scan": (
        lambda p, xs: lax.scan(lambda h, x: (jax.checkpoint(cell)(p, h, x), h), p["h"], xs),
        CELL,
        SERIES,
    ),
    "checkpoint in scan, policy": (
        lambda p, xs: lax.scan(
            jax.checkpoint(lambda h, x: (block(p, h) + x, h), policy=POLICIES.dots_saveable), p["h"], xs
        ),
        CELL,
        SERIES,
    ),
    "scan in checkpoint": (jax.checkpoint(recurrent), CELL, SERIES),
    "checkpoint of a custom_vjp": (jax.checkpoint(lambda x: wrong_product(jnp.sin(x), x)), X),
    "checkpoint_name": (lambda x: checkpoint_name(jnp.sin(x), "sine") * x, X),
    "optimization_barrier": (lambda x: lax.optimization_barrier((jnp.sin(x), x)), X),
    "reduce_precision": (lambda x: lax.reduce_precision(jnp.sin(x), 8, 7), X),
}


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)


def reparametrised(p, key):
    return p["x"] + jnp.exp(p["y"]) * jax.random.normal(key, p["x"].shape)


RANDOM = {
    "dropout, key captured": (lambda p: dropout(p["x"] * p["y"], KEY), {"x": X, "y": Y}),
    "dropout, key as data": (dropout, X, KEY),
    "dropout, raw key as data": (dropout, X, np.array([0, 7], np.uint32)),
    "normal, reparametrised": (reparametrised, {"x": X, "y": Y}, KEY),
    "key split and folded": (
        lambda p, key: reparametrised(p, jax.random.fold_in(jax.random.split(key)[1], 3)),
        {"x": X, "y": Y},
        KEY,
    ),
    "key split in scan": (
        lambda p, key: lax.scan(
            lambda h, k: (dropout(jnp.tanh(h @ p["w"]), k), h), p["h"], jax.random.split(key, 3)
        ),
        CELL,
        KEY,
    ),
    "keys under vmap": (lambda p, key: jax.vmap(dropout)(p, jax.random.split(key, 3)), X, KEY),
    "gumbel softmax": (lambda x, key: jax.nn.softmax(x + jax.random.gumbel(key, x.shape)), X, KEY),
    "uniform": (lambda x, key: x * jax.random.uniform(key, x.shape, minval=-x, maxval=x), P, KEY),
    "categorical feeds a gather": (lambda x, key: x[jax.random.categorical(key, x[:, :3])], X, KEY),
    "permutation": (lambda x, key: jnp.cumsum(jax.random.permutation(key, x), 0), X, KEY),
    "gamma": (lambda a, key: jax.random.gamma(key, a), P[0], KEY),
}

HALF, BRAIN = X.astype(np.float16), jnp.bfloat16

DTYPES = {
    "float16": (lambda p: jnp.tanh(p["x"] @ p["w"]), {"x": HALF, "w": W.astype(np.float16)}),
    "bfloat16": (lambda p: jnp.tanh(p["x"] @ p["w"]), {"x": X.astype(BRAIN), "w": W.astype(BRAIN)}),
    "bfloat16 softmax": (jax.nn.softmax, X.astype(BRAIN)),
    "float16 mean and variance": (lambda x: (x - x.mean()) * lax.rsqrt(x.var() + 1), HALF),
    "float32 master, bfloat16 compute": (
        lambda p, x: jax.nn.relu(x.astype(BRAIN) @ p["w"].astype(BRAIN)).astype(jnp.float32) + p["h"],
        CELL,
        SERIES,
    ),
    "bfloat16 scan": (
        lambda p, xs: lax.scan(lambda h, x: (cell(p, h, x), h), p["h"], xs),
        jax.tree.map(lambda leaf: leaf.astype(BRAIN), CELL),
        SERIES.astype(BRAIN),
    ),
    "integers beside the path": (lambda x, n: x * n + n // 2, X, ROWS),
    "booleans beside the path": (lambda x, b: jnp.where(b, x, x * b), X, X > 0),
    "integers among the parameters' uses": (lambda x: x[:, jnp.argmax(x[0])] * jnp.sum(x > 0), X),
    "cast to integer and back": (lambda x: x.astype(jnp.int32).astype(jnp.float32) + x, 3 * X),
    "bitcast beside the path": (lambda x: x * (lax.bitcast_convert_type(x, jnp.int32) & 1), X),
    "weak types": (lambda x: 2 * x + x / 3 - (1 - x) ** 2, X),
    "complex parameter": (lambda z: jnp.abs(z * jnp.exp(z)), X + 1j * Y),
    "integers among the parameters": (
        lambda p: p["x"].T[p["i"]].T * p["b"],
        {"x": X, "i": ROWS, "b": X[0] > 0},
    ),
    "an empty parameter": (lambda p: p["x"].sum() + p["y"], {"x": X[:0], "y": Y}),
    "scalar parameter": (lambda p, x: p["a"] * x + p["b"], {"a": np.float32(2), "b": np.float32(-1)}, X),
    "nested containers": (lambda p: p["l"][0] @ p["l"][1][0] + p["b"], {"l": [X, (W,)], "b": V[0]}),
}


def host_sine(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def shown(message, x):
    jax.debug.print(message, x=jnp.sum(x))
    return x


EFFECTS = {
    "debug.print": (lambda x: shown("{x}", jnp.sin(x)) * x, X),
    "debug.print in jit": (lambda x: jax.jit(lambda y: shown("{x}", y**2))(x), X),
    "debug.print in scan": (
        lambda p, xs: lax.scan(lambda h, x: (shown("{x}", h * x), h), p, xs),
        X[0],
        SERIES,
    ),
    "debug.callback": (lambda x: [jax.debug.callback(lambda _: None, x), jnp.sin(x)][1], X),
    "pure_callback beside the path": (lambda x, y: x * host_sine(y), X, Y),
    "pure_callback of a stopped parameter": (lambda x: x * host_sine(lax.stop_gradient(x)), X),
}

FAMILIES = {
    "unary": UNARY,
    "binary": BINARY,
    "reductions": REDUCTIONS,
    "contractions": CONTRACTIONS,
    "convolutions": CONVOLUTIONS,
    "indexing": INDEXING,
    "transforms": TRANSFORMS,
    "sorting": SORTING,
    "linear algebra": LINEAR_ALGEBRA,
    "shapes": SHAPES,
    "control flow": CONTROL_FLOW,
    "rules": RULES,
    "remat": REMAT,
    "random": RANDOM,
    "dtypes": DTYPES,
    "effects": EFFECTS,
}
CASES = {name: case for family in FAMILIES.values() for name, case in family.items()}

# jax.grad adds every contribution to what it has, one by one: (a + b) + c. An op that reads one Variable
# twice is one op with one gradient, so Onward adds a + (b + c). A jit called inside is one contribution
# for jax.grad, a + (b + c), and its ops are contributions of their own for Onward, (a + b) + c. Both stay
# different when the passes of XLA are switched off, so it is the order of the sum and no fusion.
ONE_OP_READS_TWICE = "mul(x, x) or dot(x, x) beside another use of x: the sum of three is bracketed otherwise"
INLINED_JIT = "a jit called several times with one argument: the sum of its parts is bracketed otherwise"

NOT_BITWISE = {
    "sinc": ONE_OP_READS_TWICE,  # since jax 0.12, whose sinc squares its argument
    "matrix_power": ONE_OP_READS_TWICE,
    "jit returns its argument": ONE_OP_READS_TWICE,
    "jvp inside": ONE_OP_READS_TWICE,
    "jit called twice": INLINED_JIT,
}

# Beside another computation XLA fuses what jax.grad does in another way; each by itself, the bytes are equal.
APART = {"digamma"}


def weighed(result, weights):
    """A scalar of any result: its elements times weights, so that no two cotangents are equal."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(result):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            own = weights[: leaf.size].reshape(leaf.shape)
            parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
            total += sum(jnp.sum(part.astype(jnp.float32) * own) for part in parts)
    return total


def loss_of(function):
    """A loss of any function; the weights are data, so that XLA cannot compute with them in advance."""
    return lambda parameters, weights, *data: weighed(function(parameters, *data), weights)


def backward_of(name):
    """The derived Program of a case, the loss it is derived from, and its arguments."""
    function, parameters, *data = CASES[name]
    loss, arguments = loss_of(function), (parameters, WEIGHTS, *data)
    program = ow.append_backward(ow.trace(loss, *arguments))
    assert [p for p, _ in program.gradients] == list(program.parameters)
    return program, loss, arguments


def by_onward(program, arguments):
    parameters, *data = arguments
    run = lower(program, [g for _, g in program.gradients])
    return run(jax.tree.leaves(parameters), jax.tree.leaves(data))


def by_jax(loss, arguments):
    """What ``jax.grad`` computes, the integers and booleans among the parameters left out."""
    found = jax.tree.leaves(jax.grad(loss, allow_int=True)(*arguments))
    return [g for g in found if g.dtype != jax.dtypes.float0]


def bits(array):
    return np.asarray(array).tobytes()


def expect_equal(name, found, expected):
    assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if name in NOT_BITWISE:
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)
        else:
            assert bits(ours) == bits(theirs), f"differs by {np.max(np.abs(ours - theirs))}"


def both(program, loss, arguments):
    return by_onward(program, arguments), by_jax(loss, arguments)


def each_by_itself(program, loss, arguments, faults):
    found = at_once({"found": (partial(by_onward, program), arguments)}, faults)
    return found["found"], at_once({"expected": (partial(by_jax, loss), arguments)}, faults)["expected"]


@cache
def gradients_of(family):
    """The gradients of each case by Onward and by JAX, and what went wrong with those that have none."""
    derived, faults = {}, {}
    for name in FAMILIES[family]:
        with named(name, faults):
            derived[name] = backward_of(name)
    cases = {n: (partial(both, *case[:2]), case[2]) for n, case in derived.items() if n not in APART}
    pairs = at_once(cases, faults, OPTIMIZED if "max pool" in cases else None)
    for name in APART & derived.keys():
        with named(name, faults):
            pairs[name] = each_by_itself(*derived[name], faults)
    return pairs, faults


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_jax(family):
    pairs, faults = gradients_of(family)
    faults = dict(faults)
    for name, (found, expected) in pairs.items():
        with named(name, faults):
            expect_equal(name, found, expected)
    expect_no(faults)
    assert pairs.keys() == FAMILIES[family].keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_fetches_the_same_gradient(family):
    name = next(iter(FAMILIES[family]))
    program, _, (parameters, *data) = backward_of(name)
    step = ow.compile(program, fetch=[g for _, g in program.gradients], tune=False)
    _, out = step(step.init(parameters), *data)
    _, expected = gradients_of(family)[0][name]
    assert [bits(out[g]) for _, g in program.gradients] == [bits(g) for g in expected]


def test_a_rule_that_is_not_the_derivative_is_told_from_one_that_is():
    found, _ = gradients_of("rules")[0]["custom_vjp, not the derivative"]
    plain = by_jax(loss_of(lambda p: p["x"] * p["y"]), ({"x": X, "y": Y}, WEIGHTS))
    np.testing.assert_allclose(found[0], 3 * plain[0], rtol=1e-6)
    assert np.max(np.abs(found[1] - plain[1])) > 0.1


def test_no_case_hides_another():
    assert len(CASES) == sum(map(len, FAMILIES.values()))
    assert set(NOT_BITWISE) <= set(CASES)
