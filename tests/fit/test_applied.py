"""A Model as a function: it takes the data that a step takes, and refuses what a step refuses."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

W = {"w": np.ones((4, 1), "float32")}
KINDS = {
    "uint8": np.zeros((2, 4), "uint8"),
    "int32": np.zeros((2, 4), "int32"),
    "bool": np.zeros((2, 4), bool),
    "float32": np.zeros((2, 4), "float32"),
    "bfloat16": jnp.zeros((2, 4), "bfloat16"),
}
REFUSED = {
    "a fraction": ("uint8", np.full((2, 4), 0.9)),
    "more than 255": ("uint8", np.full((2, 4), 300)),
    "less than 0": ("uint8", np.full((2, 4), -1)),
    "floats for ids": ("int32", np.full((2, 4), 1.9)),
    "large ids": ("int32", np.full((2, 4), 2**32 + 1)),
    "floats for bools": ("bool", np.full((2, 4), 0.5)),
    "integers for bools": ("bool", np.zeros((2, 4), int)),
    "too large": ("float32", np.full((2, 4), 1e39)),
    "complex numbers": ("float32", np.full((2, 4), 1j)),
    "texts": ("float32", np.full((2, 4), "a")),
    "texts of numbers": ("float32", np.full((2, 4), "1.5")),
    "objects": ("float32", np.full((2, 4), None)),
    "under a mask": ("float32", np.ma.masked_array(np.ones((2, 4), "float32"))),
}
TAKEN = {
    "float64": ("float32", np.full((2, 4), 0.1)),
    "int64": ("int32", np.full((2, 4), 7)),
    "NaN": ("float32", np.full((2, 4), np.nan)),
    "of JAX": ("float32", jnp.ones((2, 4))),
    "standing for a number": ("float32", jnp.full((2, 4), 3)),
    "another length": ("uint8", np.full((3, 4), 255, "uint8")),
}


def scores(p, x):
    return x.astype("float32") @ p["w"]


@cache
def model_of(kind):
    return ow.Model(ow.trace(scores, W, KINDS[kind]), W)


@cache
def step_of(kind):
    return ow.compile(model_of(kind).topology)


def of_step(kind, x):
    return step_of(kind)(step_of(kind).init(W), x)[1].value


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("applied") / "bytes.model"
    return ow.load(ow.save(model_of("uint8"), path))


@pytest.mark.parametrize(("kind", "x"), REFUSED.values(), ids=REFUSED)
def test_data_that_a_step_refuses_is_refused_in_its_words(kind, x):
    with pytest.raises(ow.ArgumentError, match=f"'x' .*{kind}|masked array") as of_a_step:
        of_step(kind, x)
    with pytest.raises(ow.ArgumentError) as of_a_model:
        model_of(kind)(W, x)
    assert str(of_a_model.value) == str(of_a_step.value)


@pytest.mark.parametrize(("kind", "x"), TAKEN.values(), ids=TAKEN)
def test_data_that_a_step_takes_is_taken(kind, x):
    np.testing.assert_allclose(model_of(kind)(W, x), of_step(kind, x), rtol=1e-6)


def test_a_loaded_model_refuses_them_too(loaded):
    for value in (0.9, 300, -1):
        with pytest.raises(ow.ArgumentError, match=r"'x' is .*; expected uint8"):
            loaded(loaded.parameters, np.full((2, 4), value))
    assert float(loaded(loaded.parameters, np.full((2, 4), 255, "uint8"))[0, 0]) == 4 * 255


def test_under_jit_what_stands_for_a_number_is_one():
    def scaled(p, x, scale, key):
        return scale * x @ p["w"] + jax.random.uniform(key)

    model = ow.Model(ow.trace(scaled, W, KINDS["float32"], 2.0, jax.random.key(0), training=False), W)
    x, key = np.ones((2, 4), "float32"), jax.random.key(1)
    expected = scaled(W, x, 3.0, key)
    for scale in (3, 3.0, np.float64(3), jnp.asarray(3)):
        np.testing.assert_allclose(model(W, x, scale, key), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(model)(W, x, 3, key), expected, rtol=1e-6)
    assert jax.grad(lambda scale: model(W, x, scale, key).sum())(3.0) == 8
    many = jax.vmap(lambda x: model(W, x, 3, key))(np.stack([x, x]))
    np.testing.assert_allclose(many, [expected, expected], rtol=1e-6)


def test_under_jit_other_dtypes_are_refused():
    with pytest.raises(ow.ArgumentError, match=r"'x' is float32\[2, 4\]; expected uint8"):
        jax.jit(model_of("uint8"))(W, np.ones((2, 4), "float32"))
    with pytest.raises(ow.ArgumentError, match=r"'x' is int32\[2, 4\]; expected float32"):
        jax.jit(model_of("float32"))(W, np.ones((2, 4), "int32"))


def test_labels_out_of_range_are_refused():
    def classify():
        label = ow.data("label", (None,), "int32")
        return ow.layer.cross_entropy(ow.layer.fc(ow.data("x", (None, 4)), 3), label)

    model = ow.Model(classify)
    with pytest.raises(ow.ArgumentError, match=r"'label' holds 3 at \[1\]"):
        model(model.parameters, np.array([0, 3]), np.ones((2, 4), "float32"))


def test_a_loaded_model_says_what_takes_the_place_of_vmap(loaded):
    x = np.full((3, 2, 4), 7, "uint8")
    with pytest.raises(ow.GraphError, match=r"bytes.model holds the network as compiled code.*jax\.lax\.map"):
        jax.vmap(loaded, (None, 0))(loaded.parameters, x)
    each = jax.lax.map(lambda x: loaded(loaded.parameters, x), x)
    np.testing.assert_array_equal(each, np.full((3, 2, 1), 28, "float32"))


@pytest.mark.parametrize("empty", [{}, [], (), None, {"a": {}}], ids=str)
def test_a_function_without_parameters_takes_what_it_was_traced_with_and_nothing(empty):
    program = ow.trace(lambda p, x: 2 * x, empty, KINDS["float32"])
    step, x = ow.compile(program), np.ones((2, 4), "float32")
    for given in (empty, None):
        model = ow.Model(program, given)
        assert model.parameters == empty
        np.testing.assert_array_equal(model(given, x), 2 * x)
        np.testing.assert_array_equal(step(step.init(given), x)[1].value, 2 * x)
    for other in ({"w": x}, [x], {"b": {}}):
        with pytest.raises(ow.ArgumentError, match="reads no parameters, so it takes none"):
            step.init(other)
