"""Who tests a network that goes on as in training is told so, once, where it is first tested."""

import warnings
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)).astype("float32"), RNG.normal(size=8).astype("float32")
BATCHES = [(X, Y)]
PARAMS = {"w": jnp.ones(3)}
CARRIED = (PARAMS, jax.random.key(0))
AS_IN_TRAINING = "draws random numbers"


def forward(params, key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape) @ params["w"]


def dropped(params, key, x, y):
    """A loss that drops inputs, and knows no test."""
    return jnp.mean((forward(params, key, x) - y) ** 2)


def foreign(params, key, x, y):
    key, own = jax.random.split(key)
    value, gradients = jax.value_and_grad(dropped)(params, own, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), key, value


def normalizing(params, mean, x, y):
    """A step whose loss normalizes by its batch, beside an average that nothing reads."""

    def loss(w):
        centre = x.mean(0)
        return jnp.mean(((x - centre) @ w - y) ** 2), centre

    (value, centre), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return params - 0.1 * gradient, 0.9 * mean + 0.1 * centre, value


def asking(params, x, y):
    found = forward(params, ow.key(), x) if ow.is_training() else x @ params["w"]
    return jnp.mean((found - y) ** 2)


@cache
def programs():
    own = ow.SGD(0.1).minimize(lambda p, x, y: dropped(p, ow.key(), x, y), PARAMS, X, Y)
    return {"adopted": ow.adopt(foreign, *CARRIED, X, Y, carried=["params", "key"]), "minimized": own}


def made(which):
    return ow.Model(programs()[which], CARRIED if which == "adopted" else PARAMS)


TESTED = {
    "trainer.test": lambda which: ow.Trainer(made(which), programs()[which]).test(BATCHES),
    "train(test=)": lambda which: ow.Trainer(made(which), programs()[which]).train(
        BATCHES, test=BATCHES, progress=False
    ),
    "Evaluator.test": lambda which: ow.Evaluator(made(which)).test(BATCHES),
    "Evaluator.forward": lambda which: ow.Evaluator(made(which)).forward(X, Y),
    "Endpoint": lambda which: ow.Endpoint(made(which), outputs=["sub"]),
}


@pytest.mark.parametrize("which", ["adopted", "minimized"])
@pytest.mark.parametrize("tested", TESTED.values(), ids=TESTED)
def test_a_test_that_drops_is_told_where_it_is_made(tested, which):
    with pytest.warns(UserWarning, match=AS_IN_TRAINING) as told:
        tested(which)
    assert [w.filename for w in told] == [__file__]


def test_it_is_told_once_for_a_model_and_never_without_a_test():
    model = made("minimized")
    trainer = ow.Trainer(model, programs()["minimized"])
    trainer.train(BATCHES, progress=False)
    evaluator, other = ow.Evaluator(model), ow.Evaluator(model.copy())
    with pytest.warns(UserWarning, match=AS_IN_TRAINING):
        first = evaluator.test(BATCHES)
    assert evaluator.test(BATCHES).keys() == other.test(BATCHES).keys() == first.keys()
    assert trainer.test(BATCHES).keys() == first.keys()


def test_a_warning_that_is_an_error_is_told_again():
    evaluator = ow.Evaluator(made("minimized"))
    for _ in range(2):
        with pytest.raises(UserWarning, match=AS_IN_TRAINING):
            evaluator.test(BATCHES)


def test_one_that_normalizes_by_its_batch_is_told_so():
    given = jnp.ones(3), jnp.zeros(3)
    program = ow.adopt(normalizing, *given, X, Y, carried=["params", "mean"])
    evaluator = ow.Evaluator(ow.Model(program, given))
    with pytest.warns(
        UserWarning, match="normalizes by the batch that it is given, and does not read 'mean'"
    ):
        found = evaluator.test(BATCHES)
    np.testing.assert_allclose(found["loss"], normalizing(*given, X, Y)[2], rtol=1e-5)


def test_a_file_is_told_where_it_is_written(tmp_path: Path):
    program = ow.trace(lambda p, x: forward(p, ow.key(), x), PARAMS, X)
    model = ow.Model(program, PARAMS)
    with pytest.warns(UserWarning, match=AS_IN_TRAINING) as told:
        ow.save(model, tmp_path / "a.model")
    assert {w.filename for w in told} == {__file__}
    ow.Evaluator(ow.load(tmp_path / "a.model")).forward(X)


def test_a_network_that_asks_or_was_traced_for_no_training_is_tested_in_silence():
    program = ow.SGD(0.1).minimize(asking, PARAMS, X, Y)
    loss = ow.Evaluator(ow.Model(program, PARAMS)).test(BATCHES)["loss"]
    np.testing.assert_allclose(loss, np.mean((X @ np.ones(3) - Y) ** 2), rtol=1e-5)
    sampling = ow.trace(lambda p, x: forward(p, ow.key(), x), PARAMS, X, training=False)
    with warnings.catch_warnings(record=True) as told:
        ow.Evaluator(ow.Model(sampling, PARAMS)).forward(X)
    assert not told
