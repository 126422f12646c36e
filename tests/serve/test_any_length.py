"""An Endpoint of a file whose data may have any length along other axes than that of the examples."""

from __future__ import annotations

import gc
import json
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.serve.endpoint.batcher import Job, choose
from onward.serve.endpoint.bodies import rows_of
from onward.serve.endpoint.openapi import openapi
from onward.serve.endpoint.plan import RequestPlan
from onward.serve.endpoint.probe import Joining, probe
from onward.serve.endpoint.refusal import Refusal
from onward.serve.endpoint.trials import LengthTrials

TABLE = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
TOKENS, MASK = np.ones((4, 7), "int32"), np.ones((4, 7), "float32")


def embedded(params: Any, tokens: Any, mask: Any) -> Any:
    found = jnp.tanh(params["table"][tokens])
    return found, jnp.sum(found * mask[..., None], 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = {"table": jnp.asarray(TABLE)}
    path = tmp_path_factory.mktemp("lengths") / "texts.model"
    ow.save(
        ow.Model(ow.trace(embedded, params, TOKENS, MASK), params),
        path,
        shapes={"tokens": ("b", "t"), "mask": ("b", "t")},
    )
    return path


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    with ow.Endpoint(file, max_batch=4).running() as found:
        yield found


def asked(url: str, path: str, **data: Any) -> tuple[int, Any]:
    body = json.dumps({name: np.asarray(x).tolist() for name, x in data.items()}).encode()
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())["outputs"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def test_texts_of_every_length_are_answered(url: str) -> None:
    random = np.random.default_rng(1)
    for shape in ((2, 7), (1, 3), (4, 12)):
        tokens, mask = random.integers(0, 11, shape), random.integers(0, 2, shape)
        each, total = embedded({"table": TABLE}, tokens, mask)
        status, found = asked(url, "/predict", tokens=tokens, mask=mask)
        assert status == 200
        for answer, expected in zip(found.values(), (each, total), strict=True):
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)


def test_data_that_is_not_asked_for_has_the_length_of_what_is(url: str, file: Path) -> None:
    model = ow.load(file)
    name = model.topology.outputs[0].name
    status, found = asked(url, f"/activation/{name}", tokens=TOKENS[:2, :5])
    assert status == 200
    assert np.shape(found[name]) == (2, 5, 3)
    assert ow.Evaluator(model, [name]).forward(tokens=TOKENS[:2, :5])[name].shape == (2, 5, 3)


@pytest.mark.parametrize(
    ("tokens", "mask", "sentence"),
    [
        ((2, 3), (2, 4), "t is 3 in 'tokens' and 4 in 'mask'; expected one length."),
        ((2, 3), (1, 3), "There are 2 of tokens, 1 of mask; expected one number of examples"),
        ((2, 0), (2, 0), "'tokens' has the shape [2, 0]. Expected: tokens int32[n,t], mask float32[n,t]."),
        ((3,), (2, 3), "It lacks the axis of the examples"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_in_words(
    url: str, tokens: tuple[int, ...], mask: tuple[int, ...], sentence: str
) -> None:
    status, said = asked(url, "/predict", tokens=np.zeros(tokens, int), mask=np.zeros(mask))
    assert status == 422
    assert sentence in said


def test_another_dtype_is_refused_without_the_traced_lengths(url: str) -> None:
    status, said = asked(url, "/predict", tokens=np.full((2, 3), 0.5), mask=np.ones((2, 3)))
    assert status == 422
    assert said == "'tokens' is float64[2, 3]; expected int32[n,t]. Convert it, array.astype('int32')."


def test_only_requests_of_equal_lengths_are_joined(file: Path) -> None:
    plan = RequestPlan.of(ow.load(file), ())
    joining = probe(plan, 4)
    assert not joining.alone

    def job(length: int) -> Job:
        feed = {"tokens": TOKENS[:1, :length], "mask": MASK[:1, :length]}
        return Job(plan, joining, feed, 1, None, None)  # type: ignore[arg-type]

    waiting = [job(3), job(5), job(3)]
    assert choose(waiting) == [waiting[0], waiting[2]]


def late(params: Any, tokens: Any) -> Any:
    """Examples see each other at places past the seventh, which the traced ones do not have."""
    rows = params["table"][tokens]
    seen = (jnp.arange(tokens.shape[1]) >= 7)[:, None] * rows.mean(0, keepdims=True)
    return (rows - seen).sum(1)


@pytest.fixture(scope="module")
def late_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = {"table": jnp.asarray(TABLE)}
    model = ow.Model(ow.trace(late, params, TOKENS), params)
    return ow.save(model, tmp_path_factory.mktemp("late") / "late.model", shapes={"tokens": ("b", "t")})


def test_each_length_is_tried_before_requests_of_it_are_joined(late_file: Path) -> None:
    plan = RequestPlan.of(ow.load(late_file), ())
    traced = probe(plan, 2)
    assert not traced.alone
    trials, submitted = LengthTrials(plan, traced), []

    def submit(trial: Any) -> Any:
        future: Future[Any] = Future()
        submitted.append((trial, future))
        return future

    def asked_for(length: int, answer: Any, rows: int = 1) -> Any:
        feed = {"tokens": np.ones((rows, length), "int32")}
        return trials.joining(feed, rows, answer, submit).result(0)

    assert asked_for(7, Future()) == traced
    for length, found in ((5, ""), (12, "depends on the other examples of its batch")):
        first, second = Future(), Future()
        assert "not tried yet" in asked_for(length, first).alone
        assert not submitted, "who is alone needs no trial"
        assert "not tried yet" in asked_for(length, second).alone, "the first is not answered yet"
        assert "not tried yet" in asked_for(9, second, rows=3).alone
        assert len(submitted) == 1, "another length is being tried"
        trial, future = submitted.pop()
        future.set_result(trial())
        assert found in asked_for(length, Future()).alone
        assert bool(asked_for(length, Future()).alone) == bool(found)
    asked_for(10, Future(), rows=3)
    assert len(submitted) == 1, "a row would be added"


def test_a_length_that_is_not_tried_yet_joins_no_other_request(file: Path) -> None:
    plan = RequestPlan.of(ow.load(file), ())
    feed = {"tokens": TOKENS[:1], "mask": MASK[:1]}
    joinings = Joining((1, 2, 4), "not tried yet"), Joining((1, 2, 4)), Joining((1, 2, 4))
    waiting = [Job(plan, joining, feed, 1, None, None) for joining in joinings]  # type: ignore[arg-type]
    assert choose(waiting) == waiting[:1]
    assert choose(waiting[1:] + waiting[:1]) == waiting[1:]


def test_examples_that_meet_in_long_texts_alone_are_answered_right(late_file: Path) -> None:
    def error(url: str, seed: int, length: int) -> float:
        tokens = np.random.default_rng(seed).integers(0, 11, (1, length))
        status, found = asked(url, "/predict", tokens=tokens)
        assert status == 200
        (answer,) = found.values()
        return float(np.abs(answer - np.asarray(late({"table": TABLE}, tokens))).max())

    with ow.Endpoint(late_file, max_batch=4, latency=0.05).running() as url, ThreadPoolExecutor(8) as pool:
        for length in (5, 12):
            errors = pool.map(partial(error, url, length=length), range(24))
            assert max(errors) < 1e-4


def test_a_file_of_one_batch_size_is_tried_before_it_is_padded(tmp_path: Path) -> None:
    params = {"table": jnp.asarray(TABLE)}
    program = ow.trace(lambda p, tokens: p["table"][tokens].sum(1), params, TOKENS)
    path = ow.save(ow.Model(program, params), tmp_path / "four.model", shapes={"tokens": (4, "t")})
    with ow.Endpoint(path, max_batch=4).running() as url:
        status, found = asked(url, "/predict", tokens=np.ones((1, 9), int))
    assert status == 200
    np.testing.assert_allclose(*found.values(), 9 * TABLE[[1]], rtol=1e-5)


def test_the_document_for_programs_leaves_free_lengths_open(file: Path) -> None:
    plan = RequestPlan.of(ow.load(file), ())
    about = openapi("texts", plan, {"/predict": ("POST", "answer")})["paths"]["/predict"]["post"]
    taken = about["requestBody"]["content"]["application/json"]["schema"]["properties"]["tokens"]
    assert taken["description"] == "tokens int32[n,t]"
    assert "maxItems" not in taken["items"]
    given = about["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["outputs"]
    each = given["properties"][plan.fetch[0]]
    assert "maxItems" not in each["items"]
    assert each["items"]["items"]["maxItems"] == 3


def test_a_length_that_is_the_number_of_examples_is_told_as_such(tmp_path: Path) -> None:
    params = {"w": jnp.ones(3)}
    program = ow.trace(
        lambda p, x, near: near @ (x * p["w"]), params, MASK[:, :3], np.ones((4, 4), "float32")
    )
    path = ow.save(ow.Model(program, params), tmp_path / "graph.model", shapes={"near": ("b", "b")})
    plan = RequestPlan.of(ow.load(path), ())
    assert plan.expected == "x float32[n,3], near float32[n,n]"
    assert probe(plan, 4).alone == "near has the number of examples as another length, too"
    with pytest.raises(Refusal, match="n is 2 in 'x' and 3 in 'near'"):
        rows_of({"x": MASK[:2, :3], "near": MASK[:2, :3]}, plan)


def test_what_was_compiled_for_a_length_long_ago_is_freed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.serve.endpoint.compiled.MOST_LENGTHS", 2)
    plan = RequestPlan.of(ow.load(file), ())
    for length in (1, 2, 1, 3):
        plan.run({"tokens": TOKENS[:1, :length], "mask": MASK[:1, :length]})
    kept = plan._compiled
    assert [((n,), (n,)) in kept for n in (1, 2, 3)] == [True, False, True]


def test_parameters_that_were_replaced_are_freed(file: Path) -> None:
    model = ow.load(file)
    plan = RequestPlan.of(model, ())
    name, seen = model.topology.parameters[0].name, []
    for length in (1, 2, 3):
        model.replace({name: length * TABLE})
        seen.append(weakref.ref(model[name]))
        _, total = plan.run({"tokens": TOKENS[:1, :length], "mask": MASK[:1, :length]})
        np.testing.assert_allclose(total, length * np.tanh(length * TABLE[[1]]), rtol=1e-5)
    gc.collect()
    assert [ref() is None for ref in seen] == [True, True, False]


def test_a_file_traced_where_a_sum_is_over_nothing_is_loaded(tmp_path: Path) -> None:
    params = {"table": jnp.asarray(TABLE)}
    program = ow.trace(lambda p, tokens: p["table"][tokens][:, 1:].sum(1), params, TOKENS[:, :1])
    path = ow.save(ow.Model(program, params), tmp_path / "short.model", shapes={"tokens": ("b", "t")})
    out = ow.Evaluator(ow.load(path)).forward(tokens=TOKENS[:2])
    np.testing.assert_allclose(out.value, 6 * TABLE[[1, 1]], rtol=1e-5)
