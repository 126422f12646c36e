"""Batches without an example, and tests whose data are none: said before they spoil anything."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

X = np.ones((4, 2), "float32")


def mean(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w - 1.0) ** 2)


def trainer(loss: Any = mean, *data: Any) -> ow.Trainer:
    w = jnp.zeros(2)
    return ow.Trainer(ow.Model(ow.trace(loss, w, *(data or (X,))), w), ow.SGD(0.1))


@pytest.mark.parametrize("threads", [1, 2])
def test_an_empty_batch_is_named_and_changes_nothing(threads: int) -> None:
    training = trainer()
    with pytest.raises(ow.ArgumentError, match=r"Batch 1 of epoch 0.*'x' has 0 rows: the batch is empty"):
        training.train([(X,), (X[:0],)], progress=False, threads=threads)
    step = training.step
    assert step <= 1
    assert np.isfinite(training["w"]).all()
    with pytest.raises(ow.ArgumentError, match="if len"):
        training.update(X[:0])
    assert training.step == step


def test_a_sum_of_nothing_is_trained_on_where_it_is_asked_for() -> None:
    training = trainer(lambda w, x: jnp.sum((x @ w - 1.0) ** 2))
    training.train([(X[:0],)], progress=False, check=False)
    np.testing.assert_array_equal(training.history["loss"], [0.0])


def test_empty_lists_and_containers_are_empty_batches() -> None:
    with pytest.raises(ow.ArgumentError, match="has 0 rows"):
        trainer().train([{"x": []}], progress=False)
    training = trainer(lambda w, data: mean(w, data["x"]), {"x": X})
    with pytest.raises(ow.ArgumentError, match="'data/x' has 0 rows"):
        training.train([({"x": X[:0]},)], progress=False)


def test_what_is_no_example_may_be_empty() -> None:
    def loss(w: Any, x: Any, edges: Any) -> Any:
        return mean(w, x) + jnp.sum(edges @ w)

    training = trainer(loss, X, np.ones((3, 2), "float32"))
    training.train([(X, np.ones((0, 2), "float32"))], progress=False)
    assert training.step == 1
    with pytest.raises(ow.ArgumentError, match="'x' has 0 rows"):
        training.update(X[:0], np.ones((0, 2), "float32"))


def of_graph(w: Any, graph: Any) -> Any:
    return mean(w, graph["nodes"]) + jnp.sum(graph["edges"] @ w)


def of_pairs(w: Any, positives: Any, negatives: Any) -> Any:
    return jnp.sum(positives @ w) + mean(w, negatives)


def test_what_comes_first_may_be_empty_where_other_data_has_rows() -> None:
    graph = {"nodes": X, "edges": np.ones((3, 2), "float32")}
    training = trainer(of_graph, graph)
    training.train([({**graph, "edges": graph["edges"][:0]},)], progress=False)
    assert np.isfinite(training.history["loss"]).all()
    with pytest.raises(ow.ArgumentError, match="the batch is empty"):
        training.train([({"nodes": X[:0], "edges": graph["edges"][:0]},)], progress=False)
    training = trainer(of_pairs, X, X)
    assert np.isfinite(training.update(X[:0], X).loss)


def test_a_key_and_data_of_a_declared_length_make_no_batch() -> None:
    def network() -> Any:
        x = ow.data("x", (None, 2))
        return jnp.mean((ow.layer.fc(x, 3) - ow.data("target", (3,))) ** 2)

    training = ow.Trainer(ow.Model(network, seed=0), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match="'x' has 0 rows"):
        training.update(X[:0], np.zeros(3, "float32"))
    key = np.zeros(2, "uint32")
    training = trainer(lambda w, x, key: mean(w, x + jax.random.normal(key, ())), X, key)
    with pytest.raises(ow.ArgumentError, match="'x' has 0 rows"):
        training.update(X[:0], key)


def test_an_empty_test_reader_is_named_before_anything_is_trained() -> None:
    training = trainer()
    with pytest.raises(ow.ArgumentError, match="The test reader has no batch"):
        training.train([(X,)], test=[], progress=False)
    assert training.step == 0
    with pytest.raises(ow.ArgumentError, match=r"The test reader yielded no batch. If .* test=lambda: read"):
        training.train([(X,)], test=iter([]), progress=False)


def test_data_of_a_test_that_are_no_numbers_are_warned_of_once() -> None:
    training = trainer()
    bad = np.full_like(X, np.nan)
    with pytest.warns(UserWarning, match=r"Batch 1 of the test reader .*'x' holds nan at \[0, 0\]") as told:
        training.train([(X,)], test=[(X,), (bad,), (bad,)], epochs=2, progress=False)
    assert len(told) == 1
    assert np.isnan(training.history["test_loss"]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.train([(X,)], test=[(bad,)], progress=False, check=False)
