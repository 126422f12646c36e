"""First values: their distribution, that they are data, and that equal shapes are compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers as theirs

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


@pytest.mark.parametrize(
    ("initializer", "shape", "mean", "variance"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS
)
def test_distribution(initializer, shape, mean, variance):
    w = initializer(KEY, shape, "float32")
    np.testing.assert_allclose(w.mean(), mean, atol=6 * (variance / w.size) ** 0.5)
    np.testing.assert_allclose(w.var(), variance, rtol=0.04)


@pytest.mark.parametrize(("mine", "other"), SAME.values(), ids=SAME)
def test_values_are_those_of_jax(mine, other):
    np.testing.assert_allclose(mine(KEY, (3, 3, 4, 6), "float32"), other(KEY, (3, 3, 4, 6)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (3, 3, 2, 7)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_orthogonal(shape, scale):
    w = np.asarray(ours.orthogonal(scale)(KEY, shape)).reshape(-1, shape[-1]) / scale
    square = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    np.testing.assert_allclose(square, np.eye(len(square)), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_dtype_holds_the_same_numbers_rounded(name, dtype):
    initializer = DISTRIBUTIONS[name][0]
    w = initializer(KEY, (6, 5), dtype)
    assert w.dtype == dtype
    np.testing.assert_array_equal(w, initializer(KEY, (6, 5), "float32").astype(dtype))


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


def compiled(run):
    """How often jax compiles while this runs."""
    count = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: count.append(event) if event.endswith("backend_compile_duration") else None
    )
    run()
    return len(count)


def test_equal_shapes_are_compiled_once():
    shape = (7, 11)
    first_values(declaring("a", shape=shape))
    assert compiled(lambda: first_values(declaring(*"bcdefgh", shape=shape))) == 0
    assert compiled(lambda: first_values(declaring("a", shape=(11, 7)))) > 0


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
