"""First values: their distribution, that they are data, and that equal shapes are compiled once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers as theirs
from tests.compiled import compilations

import onward as ow
from onward.define import initializer as ours

KEY = jax.random.key(0)

# (initializer, shape, mean, variance)
DISTRIBUTIONS = {
    "normal": (ours.normal(0.5, mean=2.0), (200, 300), 2.0, 0.25),
    "truncated_normal": (ours.truncated_normal(0.5, mean=2.0), (200, 300), 2.0, 0.25 * 0.8796**2),
    "uniform": (ours.uniform(1.0, 3.0), (200, 300), 2.0, 4 / 12),
    "xavier_uniform": (ours.xavier_uniform(), (200, 300), 0.0, 2 / 500),
    "xavier_normal": (ours.xavier_normal(), (200, 300), 0.0, 2 / 500),
    "he_uniform": (ours.he_uniform(), (200, 300), 0.0, 2 / 200),
    "he_normal": (ours.he_normal(), (200, 300), 0.0, 2 / 200),
    "lecun_uniform": (ours.lecun_uniform(), (200, 300), 0.0, 1 / 200),
    "lecun_normal": (ours.lecun_normal(), (200, 300), 0.0, 1 / 200),
    "he_normal of a convolution": (ours.he_normal(), (3, 3, 64, 96), 0.0, 2 / (9 * 64)),
    "xavier_uniform of a convolution": (ours.xavier_uniform(), (3, 3, 64, 96), 0.0, 2 / (9 * 160)),
    "orthogonal": (ours.orthogonal(2.0), (200, 300), 0.0, 4 / 300),
}
SAME = {
    "xavier_uniform": (ours.xavier_uniform(), theirs.xavier_uniform()),
    "xavier_normal": (ours.xavier_normal(), theirs.xavier_normal()),
    "he_uniform": (ours.he_uniform(), theirs.he_uniform()),
    "he_normal": (ours.he_normal(), theirs.he_normal()),
    "lecun_uniform": (ours.lecun_uniform(), theirs.lecun_uniform()),
    "lecun_normal": (ours.lecun_normal(), theirs.lecun_normal()),
    "normal": (ours.normal(0.1), theirs.normal(0.1)),
    "orthogonal": (ours.orthogonal(), theirs.orthogonal()),
}


def first_values(network, seed=0):
    """The first value of every declared Variable, by name."""
    program = ow.trace(network)
    return {
        op.outputs[0].name: op.body(*[jnp.uint32(seed)] * len(op.inputs))[0] for op in program.initializers
    }


def declaring(*names, shape=(4, 3)):
    return lambda: [ow.parameter(n, shape, initializer=ours.he_normal()) * 1 for n in names]


SMALL = (3, 3, 4, 6)
MATRICES = [(8, 4), (4, 8), SMALL]
DTYPES = ("float32", "bfloat16", "float16")
SCALES = (1.0, 3.0)


@cache
def drawn():
    """All that these tests look at, drawn by one program from one key."""

    def draw(key):
        cases = {name: (initializer, shape) for name, (initializer, shape, *_) in DISTRIBUTIONS.items()}
        return {
            "distribution": {name: make(key, shape, "float32") for name, (make, shape) in cases.items()},
            "same": {
                name: (mine(key, SMALL, "float32"), other(key, SMALL)) for name, (mine, other) in SAME.items()
            },
            "orthogonal": {
                (shape, scale): ours.orthogonal(scale)(key, shape) for shape in MATRICES for scale in SCALES
            },
            "rounded": {
                (name, dtype): make(key, SMALL, dtype)
                for name, (make, _) in cases.items()
                for dtype in DTYPES
            },
        }

    return jax.tree.map(np.asarray, jax.jit(draw)(KEY))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    w, (*_, mean, variance) = drawn()["distribution"][name], DISTRIBUTIONS[name]
    np.testing.assert_allclose(w.mean(), mean, atol=6 * (variance / w.size) ** 0.5)
    np.testing.assert_allclose(w.var(), variance, rtol=0.04)


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_jax(name):
    mine, other = drawn()["same"][name]
    np.testing.assert_allclose(mine, other, rtol=1e-6)


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_orthogonal(shape, scale):
    w = drawn()["orthogonal"][shape, scale].reshape(-1, shape[-1]) / scale
    square = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    np.testing.assert_allclose(square, np.eye(len(square)), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_dtype_holds_the_same_numbers_rounded(name, dtype):
    w, wide = drawn()["rounded"][name, dtype], drawn()["rounded"][name, "float32"]
    assert w.dtype == dtype
    np.testing.assert_array_equal(w, wide.astype(dtype))


def test_initializers_are_data():
    assert ours.normal(0.1) == ours.normal(stddev=0.1) != ours.normal(0.2)
    assert len({ours.he_normal(), ours.kaiming_normal(), ours.lecun_normal()}) == 2
    assert repr(ours.uniform(0.0, 1.0)) == "uniform(low=0.0, high=1.0)"
    assert (ours.glorot_uniform, ours.glorot_normal) == (ours.xavier_uniform, ours.xavier_normal)
    assert (ours.kaiming_uniform, ours.kaiming_normal) == (ours.he_uniform, ours.he_normal)


def test_its_name_is_the_type_of_the_op():
    program = ow.trace(lambda: ow.parameter("w", (4, 3)) @ ow.parameter("b", (3,)))
    assert [(op.type, len(op.inputs)) for op in program.initializers] == [
        ("xavier_uniform", 1),
        ("constant", 0),
    ]


def test_values_depend_on_seed_and_name_alone():
    one, other = first_values(declaring("a", "b")), first_values(declaring("b", "c", "a"))
    np.testing.assert_array_equal(one["a"], other["a"])
    np.testing.assert_array_equal(one["b"], other["b"])
    assert not np.array_equal(one["a"], one["b"])
    assert not np.array_equal(one["a"], first_values(declaring("a"), seed=1)["a"])


def test_equal_shapes_are_compiled_once():
    shape = (7, 11)
    first_values(declaring("a", shape=shape))
    assert compilations(lambda: first_values(declaring(*"bcdefgh", shape=shape))) == 0
    assert compilations(lambda: first_values(declaring("a", shape=(11, 7)))) > 0


@pytest.mark.parametrize(
    ("initializer", "shape", "dtype", "words"),
    [
        (ours.he_normal(), (3,), "float32", ["he_normal()", "test_initializer.py:", "[3]", "constant(0.0)"]),
        (ours.orthogonal(), (), "float32", ["orthogonal(scale=1.0)", "[]"]),
        (ours.normal(), (3,), "int32", ["normal(", "int32", "constant(0)"]),
    ],
    ids=["vector", "scalar", "integers"],
)
def test_refusals(initializer, shape, dtype, words):
    with pytest.raises(ow.ArgumentError) as raised:
        initializer(KEY, shape, dtype)
    assert [w for w in words if w not in str(raised.value)] == []


WRONG = {
    "a negative deviation": (lambda: ours.normal(-0.1), r"normal: stddev is -0\.1; .*at least 0"),
    "a deviation that is NaN": (lambda: ours.truncated_normal(float("nan")), "stddev is nan"),
    "an infinite mean": (lambda: ours.normal(0.1, mean=float("inf")), "mean is inf"),
    "limits in the wrong order": (
        lambda: ours.uniform(1.0, -1.0),
        r"low is 1\.0 .*uniform\(-1\.0, 1\.0\)",
    ),
    "a limit that is NaN": (lambda: ours.uniform(0.0, float("nan")), "high is nan"),
    "a word": (lambda: ours.orthogonal("large"), "scale is"),
    "an array": (lambda: ours.constant(np.zeros(3)), "constant: value is"),
    "half of a whole number": (
        lambda: ours.constant(0.5)(KEY, (2,), "int32"),
        "int32, which cannot hold",
    ),
    "too much for a byte": (lambda: ours.constant(300)(KEY, (2,), "int8"), "from -128 to 127"),
    "NaN as a whole number": (lambda: ours.constant(float("nan"))(KEY, (2,), "int32"), "cannot hold nan"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_numbers_that_no_distribution_has(call, message):
    with pytest.raises(ow.ArgumentError, match=message):
        call()


def test_numbers_at_the_edge():
    assert ours.uniform(2.0, 2.0)(KEY, (2,)).tolist() == ours.normal(0, 2)(KEY, (2,)).tolist() == [2, 2]
    assert ours.constant(-np.inf)(KEY, (1,)).tolist() == [-np.inf]
    assert ours.constant(np.float32(3))(KEY, (1,), "int8").tolist() == [3]
