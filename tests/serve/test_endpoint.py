"""An Endpoint over HTTP: every route, every way to ask wrongly, faults, limits, reloads."""

from __future__ import annotations

import asyncio
import gc
import http.client
import io
import json
import logging
import re
import socket
import threading
import time
import tracemalloc
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.load import Sent, drive, garbage_of, post

import onward as ow
from onward.serve.endpoint import pieces
from onward.serve.endpoint.bodies import JSON, read, rows_of
from onward.serve.endpoint.endpoint import Endpoint
from onward.serve.endpoint.pieces import LARGE
from onward.serve.endpoint.plan import RequestPlan
from onward.serve.endpoint.probe import probe
from onward.serve.endpoint.refusal import Refusal
from onward.serve.endpoint.room import need_of
from onward.serve.endpoint.routes import _announced, _read
from onward.serve.endpoint.served import Served
from onward.serve.endpoint.source import OpenedModel
from onward.serve.endpoint.watch import FileWatch, mark_of

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


def network() -> Any:
    x, y = ow.data("x", (None, 4)), ow.data("y", (None,), "int32")
    hidden = ow.layer.fc(x, 6, act="tanh", name="hidden")
    return ow.layer.cross_entropy(ow.layer.fc(hidden, 3, name="head"), y)


def two_inputs() -> Any:
    a, b = ow.data("a", (None, 2)), ow.data("b", (None,), "int32")
    return a * b[:, None] + 1


def mixing() -> Any:
    x = ow.data("x", (None, 4))
    return ow.layer.fc(x - x.mean(0), 3)


class Asked:
    """A connection to a server."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url).hostname or "", urlsplit(url).port or 0

    def __call__(
        self, path: str, body: Any = None, method: str = "", **headers: str
    ) -> tuple[int, Any, Mapping[str, str]]:
        if isinstance(body, dict | list):
            body, headers = json.dumps(body).encode(), {"content_type": "application/json", **headers}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, named)
            response = connection.getresponse()
            content: Any = response.read()
            if response.headers.get_content_type() == "application/json":
                content = json.loads(content)
            return response.status, content, response.headers
        finally:
            connection.close()


@contextmanager
def asked(endpoint: Endpoint) -> Iterator[Asked]:
    with endpoint.running() as url:
        yield Asked(url)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.fixture(scope="module")
def model() -> ow.Model:
    return ow.Model(network, seed=3)


@pytest.fixture(scope="module")
def ask(model: ow.Model) -> Iterator[Asked]:
    endpoint = Endpoint(model, outputs=["head"], name="digits", max_batch=4, max_body=200_000, timeout=10)
    with asked(endpoint) as ask:
        yield ask


def alone(model: ow.Model, name: str, **data: Any) -> np.ndarray:
    return np.asarray(ow.Evaluator(model, [name]).forward(**data)[name])


# ---------------------------------------------------------------------------- answers


def test_rows_are_those_of_an_evaluator(ask: Asked, model: ow.Model) -> None:
    parts = [X[i : i + 1 + i % 3] for i in range(12)]
    sent = [
        Sent(post("/predict", json.dumps({"x": p.tolist()}).encode()), alone(model, "head", x=p))
        for p in parts
    ]
    tally = drive(ask.address, sent * 5, clients=12)
    assert (tally.good, tally.lost, tally.wrong) == (60, 0, [])


@pytest.mark.parametrize("path", ["/activation/hidden", "/predict?fetch=hidden", "/activation/hidden/w"])
def test_activations(ask: Asked, model: ow.Model, path: str) -> None:
    reads = not path.endswith("w")
    status, answer, _ = ask(path, {"x": X[:2].tolist()} if reads else {})
    [(name, found)] = answer["outputs"].items()
    expected = alone(model, "hidden", x=X[:2]) if reads else model["hidden/w"]
    assert (status, name) == (200, "hidden" if reads else "hidden/w")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_mixes_examples_is_computed_for_each_request(ask: Asked, model: ow.Model) -> None:
    sent = []
    for i in range(6):
        data = {"x": X[i : i + 2], "y": np.array([0, i % 3], "int32")}
        body = json.dumps({name: a.tolist() for name, a in data.items()}).encode()
        expected = np.asarray(ow.Evaluator(model).forward(**data).value)
        sent.append(Sent(post("/predict?fetch=loss", body), expected))
    tally = drive(ask.address, sent, clients=6)
    assert (tally.good, tally.wrong) == (6, [])


def test_a_network_that_mixes_its_batch_is_not_batched() -> None:
    model = ow.Model(mixing)
    with asked(Endpoint(model, max_batch=4)) as ask:
        health = ask("/health")[1]
        expected = alone(model, "fc_0", x=X[:3])
        body = json.dumps({"x": X[:3].tolist()}).encode()
        tally = drive(ask.address, [Sent(post("/predict", body), expected)] * 20, clients=5)
    assert health["joined"] is False
    assert "depends on the other examples" in health["alone_because"]
    assert (tally.good, tally.wrong) == (20, [])


@pytest.mark.parametrize(
    "accept", ["application/x-npy", "application/x-npz", "*/*", "text/html, application/*;q=0.5"]
)
def test_npy_in_and_out(ask: Asked, model: ow.Model, accept: str) -> None:
    for array in (X[:3], np.asfortranarray(X[:3])):
        status, answer, headers = ask("/predict", npy(array), content_type="application/x-npy", accept=accept)
        assert status == 200
        if accept.endswith("npy"):
            found = np.load(io.BytesIO(answer))
        elif accept.endswith("npz"):
            found = np.load(io.BytesIO(answer))["head"]
        else:
            found = answer["outputs"]["head"]
        np.testing.assert_allclose(found, alone(model, "head", x=X[:3]), rtol=1e-5)
        assert headers["x-model-version"] == "memory"


def test_several_inputs_and_outputs() -> None:
    program = ow.trace(two_inputs)
    endpoint = Endpoint(ow.Model(program), outputs=[program.outputs[0].name, "mul"], max_batch=2)
    a, b = X[:2, :2], np.array([3, 4], "int32")
    with asked(endpoint) as ask:
        for body, kind in (
            (npz(a=a, b=b), "application/x-npz"),
            ({"a": a.tolist(), "b": [3, 4]}, "application/json"),
        ):
            status, answer, _ = ask("/predict", body, content_type=kind, accept="application/x-npz")
            assert status == 200
            np.testing.assert_allclose(np.load(io.BytesIO(answer))["mul"], a * b[:, None], rtol=1e-6)
        status, answer, _ = ask("/predict", npy(a), content_type="application/x-npy")
        assert (status, "application/x-npz" in answer["error"]) == (415, True)
        status, answer, _ = ask(
            "/predict", npz(a=a, b=b), content_type="application/x-npz", accept="application/x-npy"
        )
        assert status == 406
        status, answer, _ = ask("/predict", {"a": [[1, 2]], "b": [1, 2]})
        assert (status, answer["error"]) == (
            422,
            "There are 1 of a, 2 of b; expected one number of examples for all of them.",
        )


def test_numbers_that_json_cannot_hold_are_null() -> None:
    with asked(Endpoint(ow.Model(lambda: jax.numpy.log(ow.data("x", (None,)))), max_batch=1)) as ask:
        [found] = ask("/predict", {"x": [0]})[1]["outputs"].values()
        exact = np.load(io.BytesIO(ask("/predict", {"x": [0]}, accept="application/x-npy")[1]))
    assert found == [None]
    assert exact.tolist() == [-np.inf]


# ---------------------------------------------------------------------------- pages


def test_health_program_and_openapi(ask: Asked, model: ow.Model) -> None:
    status, health, _ = ask("/health")
    assert (status, health["ready"], health["joined"], health["batch_sizes"]) == (200, True, True, [1, 2, 4])
    assert health["inputs"] == ["x float32[n,4]"]
    assert ask("/program")[1].decode() == f"{model.topology}\n"
    document = ask("/openapi.json")[1]
    predict = document["paths"]["/predict"]["post"]
    rows = predict["requestBody"]["content"]["application/json"]["schema"]["properties"]["x"]
    assert rows["items"] == {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    assert set(predict["responses"]) >= {"200", "400", "413", "415", "422", "500", "503"}


def test_the_page_shows_how_to_ask_and_fetches_nothing(ask: Asked) -> None:
    page = ask("/")[1].decode()
    assert page == ask("/docs")[1].decode()
    assert not re.search(r"(src|href|@import|url\()", page)
    host, port = ask.address
    [command] = re.findall(
        r"curl -s (\S+)/predict -H &#x27;content-type: application/json&#x27; -d &#x27;(.+?)&#x27;", page
    )
    assert command[0] == f"http://{host}:{port}"
    body = command[1].replace("&quot;", '"').encode()
    assert ask("/predict", body, content_type="application/json")[0] == 200
    assert "x.npy" in page


def test_metrics_count_what_was_asked(model: ow.Model) -> None:
    with asked(Endpoint(model, outputs="head", max_batch=4)) as ask:
        for _ in range(3):
            ask("/predict", {"x": X[:3].tolist()})
        ask("/predict", b"{", content_type="application/json")
        text = ask("/metrics")[1].decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['onward_requests_total{route="/predict",status="200"}'] == "3"
    assert samples['onward_requests_total{route="/predict",status="400"}'] == "1"
    assert (samples["onward_rows_total"], samples["onward_padding_total"]) == ("9", "3")
    assert (samples['onward_batch_rows_bucket{le="2"}'], samples['onward_batch_rows_bucket{le="4"}']) == (
        "0",
        "3",
    )
    assert samples["onward_batch_rows_count"] == samples['onward_batch_rows_bucket{le="+Inf"}'] == "3"
    assert samples["onward_waiting"] == "0"


# ---------------------------------------------------------------------------- wrong requests

WRONG: dict[str, tuple[int, Any, str]] = {
    "another name": (
        422,
        {"z": [[1, 2, 3, 4]]},
        "There is no data named 'z'. The names are 'x'. Expected: x float32[n,4].",
    ),
    "no name": (422, {}, "'x' was not given. Expected: x float32[n,4]."),
    "not needed": (422, {"x": [[1, 2, 3, 4]], "y": [0]}, "head does not depend on 'y'."),
    "a short row": (422, {"x": [[1, 2]]}, "'x' has the shape [1, 2]. Expected: x float32[n,4]."),
    "one example": (422, {"x": [1, 2, 3, 4]}, "It lacks the axis of the examples"),
    "no example": (422, {"x": []}, "'x' has the shape [0]. Expected: x float32[n,4]."),
    "ragged": (422, {"x": [[1, 2, 3, 4], [1]]}, "'x' has lists of different lengths or depths."),
    "text": (422, {"x": [["a", "b", "c", "d"]]}, "'x' holds a string; expected numbers: x float32[n,4]."),
    "text and numbers": (422, {"x": [[1, 2, 3, "4"]]}, "'x' holds a string"),
    "true for a number": (
        422,
        {"x": [[1, 2, True, 4]]},
        "'x' holds true or false where numbers are expected: x float32[n,4]. Write 1 or 0.",
    ),
    "nothing in a row": (422, {"x": [[1, 2, 3, None]]}, "'x' holds null"),
    "too large among fractions": (422, {"x": [[10**400, 0.5, 0, 0]]}, "no array can hold"),
    "too large": (422, {"x": [[10**400] * 4]}, "which no array can hold"),
    "beyond float32": (422, {"x": [[1e39] * 4]}, "float32 cannot hold"),
    "too many": (
        413,
        {"x": [[0] * 4] * 5},
        "There are 5 examples; a request may hold 4. Send several requests.",
    ),
    "NaN": (400, b'{"x": [[NaN, 0, 0, 0]]}', "NaN is not a number that JSON can hold"),
    "twice": (400, b'{"x": 1, "x": 2}', "an object holds the same name twice"),
    "broken": (400, b'{"x": [[1', "The body is not JSON"),
    "no UTF-8": (400, b'{"x": "\xff"}', "byte 7 is not UTF-8"),
    "deep": (400, b"[" * 100_000, "nested too deep"),
    "a list": (422, [1], "The JSON is a list; expected an object by name: x float32[n,4]."),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_json_is_answered_by_a_sentence(ask: Asked, case: str) -> None:
    status, body, sentence = WRONG[case]
    found, answer, _ = ask("/predict", body, content_type="application/json")
    assert found == status
    assert sentence in answer["error"]


def _claims(shape: str, descr: str = "<f4", payload: bytes = b"\0" * 16) -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + payload


BROKEN: dict[str, tuple[int, bytes, str]] = {
    "an absurd size": (400, _claims("(10000000000, 4)"), "and 16 bytes follow"),
    "an absurd length": (400, _claims(f"({'9' * 30}, 0)"), "announces"),
    "a negative length": (400, _claims("(-1, -4)"), "announces"),
    "too short": (400, npy(X[:1])[:-1], "and 15 bytes follow"),
    "too long": (400, npy(X[:1]) + b"1", "and 17 bytes follow"),
    "objects": (422, _claims("(1, 4)", "|O"), "expected real numbers"),
    "a pickle": (400, b"\x80\x04K\x01.", "is not an npy file"),
    "nothing": (400, b"", "is not an npy file"),
    "a deep header": (400, b"\x93NUMPY\x01\x00\xa0\x0f" + b"(" * 4000, "is not an npy file"),
    "complex": (422, npy(X[:1] + 1j), "expected real numbers"),
    "double": (422, npy(X[:1].astype(int)), "Convert it"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_npy_is_answered_by_a_sentence(ask: Asked, case: str) -> None:
    status, body, sentence = BROKEN[case]
    found, answer, _ = ask("/predict", body, content_type="application/x-npy")
    assert found == status
    assert sentence in answer["error"]


def test_every_truncation_of_an_npz_is_refused(ask: Asked) -> None:
    whole = npz(x=X[:1])
    for length in range(0, len(whole), 7):
        status, answer, _ = ask("/predict", whole[:length], content_type="application/x-npz")
        assert (status, "npz" in answer["error"]) == (400, True)


def test_an_npz_that_unpacks_to_too_much_is_refused(ask: Asked) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, x=np.zeros((100_000, 4), "float32"))
    assert len(file.getvalue()) < 200_000
    status, answer, _ = ask("/predict", file.getvalue(), content_type="application/x-npz")
    assert (status, "unpacks" in answer["error"]) == (413, True)


def test_labels_out_of_range_are_refused(ask: Asked) -> None:
    status, answer, _ = ask("/predict?fetch=loss", {"x": X[:1].tolist(), "y": [3]})
    assert (status, "labels must lie from 0 to 2" in answer["error"]) == (422, True)


@pytest.mark.parametrize(
    ("path", "method", "status", "sentence"),
    [
        ("/nowhere", "GET", 404, "The routes are /predict"),
        ("/predict", "GET", 405, "GET is not answered at /predict; send POST."),
        ("/activation/head", "GET", 405, "Nothing is remembered between requests"),
        ("/health", "POST", 405, "send GET"),
        (
            "/activation/heat",
            "POST",
            404,
            "No layer or other Variable is named 'heat'. The nearest names are 'head'",
        ),
        ("/predict?fetch=heat", "POST", 404, "GET /program lists them."),
        ("/predict", "POST", 415, "expected application/json, application/x-npy or application/x-npz"),
        ("/reload", "POST", 403, "start it with a reload token"),
    ],
)
def test_wrong_routes(ask: Asked, path: str, method: str, status: int, sentence: str) -> None:
    found, answer, headers = ask(path, b"" if method == "POST" else None, method)
    assert found == status
    assert sentence in answer["error"]
    assert (status != 405) or headers["allow"] in ("GET", "POST")


def test_all_garbage_is_refused_and_the_server_lives(ask: Asked, model: ow.Model) -> None:
    good = Sent(post("/predict", json.dumps({"x": X[:1].tolist()}).encode()), alone(model, "head", x=X[:1]))
    rubbish = list(garbage_of(good, "x"))
    tally = drive(ask.address, [*rubbish, good], clients=4)
    assert (tally.good, tally.garbage, tally.wrong) == (1, len(rubbish), [])


# ---------------------------------------------------------------------------- limits


def test_a_body_that_is_too_large_is_refused(ask: Asked) -> None:
    assert ask("/predict", b"[" * 300_000, content_type="application/json")[0] == 413
    pieces = iter([b"[" * 100_000] * 3)
    status, answer, headers = ask("/predict", pieces, content_type="application/json")
    assert (status, headers["connection"]) == (413, "close")
    assert "more than 200,000 bytes" in answer["error"]


def test_a_body_that_never_comes_is_given_up(model: ow.Model) -> None:
    with asked(Endpoint(model, outputs="head", max_batch=1, timeout=0.3)) as ask:
        with socket.create_connection(ask.address, timeout=30) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert ask("/predict", {"x": X[:1].tolist()})[0] == 200


def test_a_head_that_never_ends_is_given_up(model: ow.Model) -> None:
    with (
        asked(Endpoint(model, outputs="head", max_batch=1, timeout=0.3)) as ask,
        socket.create_connection(ask.address, timeout=30) as client,
    ):
        client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\n")
        assert client.recv(4096) == b""


REQUEST = (
    b"POST /predict HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


def test_all_requests_in_flight_share_one_bound_on_memory(model: ow.Model) -> None:
    body = json.dumps({"x": [[0.5] * 4]}).encode().ljust(1000)
    endpoint = Endpoint(model, outputs="head", max_batch=4, max_memory=32 * 1500)
    with asked(endpoint) as ask:
        with socket.create_connection(ask.address, timeout=30) as client:
            client.sendall(REQUEST % (b"localhost", 1000) + body[:900])
            deadline = time.monotonic() + 20
            while endpoint.room.taken < 32 * 900 and time.monotonic() < deadline:
                time.sleep(0.01)
            status, refused, headers = ask("/predict", body, content_type="application/json")
            assert (status, headers["retry-after"]) == (503, "1")
            assert refused["error"].startswith("The requests in flight take all of the 46.9 KiB of memory")
            client.sendall(body[900:])
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert ask("/predict", body, content_type="application/json")[0] == 200
        status, refused, _ = ask("/predict", body.ljust(2000), content_type="application/json")
        assert (status, "npy instead of JSON" in refused["error"]) == (413, True)
        assert ask("/predict", npy(X[:1]).ljust(2000), content_type="application/x-npy")[0] == 400
        assert endpoint.room.taken == 0
        assert "onward_memory_bytes 0" in ask("/metrics")[1].decode()


def test_a_client_that_has_closed_its_half_gets_its_answer(model: ow.Model) -> None:
    body, gate = b'{"x": [[7]]}', Gate()
    gate.open.clear()
    with asked(Endpoint(gate.model(), max_batch=1)) as ask:
        with socket.create_connection(ask.address, timeout=30) as client:
            client.sendall(REQUEST % (b"localhost", len(body)) + body)
            client.shutdown(socket.SHUT_WR)
            threading.Timer(0.3, gate.open.set).start()
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200 ")
        with socket.create_connection(ask.address, timeout=30) as client:  # not even a whole request
            client.sendall(REQUEST % (b"localhost", 1000) + body)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(4096) == b""


def test_a_name_that_was_led_to_this_machine_is_refused(model: ow.Model) -> None:
    refused = ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "["]
    known = ["LOCALHOST:80", "127.0.0.1", "[::1]:80", "api.localhost"]
    with asked(Endpoint(model, outputs="head", max_batch=1, hosts="models.example")) as ask:
        for host in refused:
            status, body, _ = ask("/program", host=host)
            assert (status, "start it with hosts=[...]" in body["error"]) == (421, True), host
        for host in (*known, "models.example:443"):
            assert ask("/program", host=host)[0] == 200, host
    with asked(Endpoint(model, outputs="head", max_batch=1, hosts=["*"])) as ask:
        assert ask("/program", host="evil.example")[0] == 200


def test_a_host_is_looked_at_only_where_nobody_else_can_ask(model: ow.Model) -> None:
    endpoint = Endpoint(model, outputs="head", max_batch=1)
    for address, status in (("127.0.0.1", 421), ("0.0.0.0", 200)):
        with endpoint.running(address) as url:
            ask = Asked(url.replace("0.0.0.0", "127.0.0.1"))
            assert ask("/health", host="evil.example")[0] == status
            assert ask("/health")[0] == 200


def spoiled(model: ow.Model, value: float) -> ow.Model:
    other = model.copy()
    other.replace({"head/b": jnp.asarray(other["head/b"]).at[1].set(value)})
    return other


def test_a_model_of_nan_is_neither_served_nor_exchanged_for(model: ow.Model, tmp_path: Path) -> None:
    path = ow.save(model, tmp_path / "trained.model")
    for value in (np.nan, np.inf):
        with pytest.raises(ow.NonFiniteError, match=rf"'head/b' holds {value} at \[1\] \(1 of 3 numbers\)"):
            Endpoint(spoiled(model, value))
    endpoint = Endpoint(path, outputs="head", max_batch=1, reload_token="word")
    ow.save(spoiled(model, np.nan), path, allow_nonfinite=True)
    with asked(endpoint) as ask:
        status, refused, _ = ask("/reload", b"", authorization="Bearer word")
        assert (status, "'head/b' holds nan at [1]" in refused["error"]) == (409, True)
        assert ask("/predict", {"x": X[:1].tolist()})[0] == 200
    assert Endpoint(path, outputs="head", allow_nonfinite=True).name


class Gate:
    """A model that waits while a test wants it to, and fails for a negative number."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()

    def model(self) -> ow.Model:
        def network() -> Any:
            x = ow.data("x", (None, 1))
            return jax.pure_callback(self._pass, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return ow.Model(network)

    def _pass(self, x: Any) -> Any:
        x = np.asarray(x)
        if (x == 7).any():
            self.entered.set()
            assert self.open.wait(30)
        if (x < 0).any():
            raise ValueError("negative: a secret of the model")
        return 2 * x


def test_only_the_guilty_request_of_a_batch_fails(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.open.clear()
    sent = [Sent(post("/predict", b'{"x": [[%d]]}' % i), np.array([[2.0 * i]])) for i in range(1, 6)]
    with asked(Endpoint(gate.model(), max_batch=8, latency=0.5)) as ask:
        holding = threading.Thread(target=ask, args=("/predict", {"x": [[7]]}))
        holding.start()
        assert gate.entered.wait(30)
        threading.Timer(0.3, gate.open.set).start()  # meanwhile the others come and are joined
        tally = drive(ask.address, [*sent, Sent(post("/predict", b'{"x": [[-1]]}'), None)], clients=6)
        holding.join()
        metrics = ask("/metrics")[1].decode()
    assert (tally.good, len(tally.wrong)) == (5, 1)
    assert "log tells why, under" in tally.wrong[0]
    assert "secret" not in tally.wrong[0]
    assert "a secret of the model" in caplog.text
    assert 'route="/predict",status="500"} 1' in metrics


def test_what_waits_is_bounded_in_number_and_time() -> None:
    gate = Gate()
    gate.open.clear()
    with asked(Endpoint(gate.model(), max_batch=1, max_waiting=1, timeout=1.0)) as ask:
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask("/predict", {"x": [[7]]}))) for _ in range(3)
        ]
        threads[0].start()
        assert gate.entered.wait(30)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        gate.open.set()
        lively = ask("/predict", {"x": [[1]]})[:2]
    statuses = sorted(status for status, *_ in answers)
    assert statuses == [503, 504, 504]
    assert all(headers["retry-after"] == "1" for *_, headers in answers)
    assert lively == (200, {"outputs": {"pure_callback": [[2.0]]}})


# ---------------------------------------------------------------------------- reload, start


def test_reload_exchanges_the_model_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "trained.model"
    models = [ow.Model(network, seed=seed) for seed in (1, 2)]
    ow.save(models[0], path)
    endpoint = Endpoint(path, outputs=["head"], max_batch=2, reload_token="word")
    with asked(endpoint) as ask:

        def answer() -> Any:
            return ask("/predict", {"x": X[:2].tolist()})[1]["outputs"]["head"]

        first = ask("/health")[1]["version"]
        np.testing.assert_allclose(answer(), alone(models[0], "head", x=X[:2]), rtol=1e-5)
        path.write_bytes(path.read_bytes()[:-100])
        status, refused, _ = ask("/reload", b"", authorization="Bearer word")
        assert (status, "was not exchanged" in refused["error"]) == (409, True)
        health = ask("/health")[1]
        assert (health["ready"], health["version"]) == (True, first)
        assert health["reload_error"].startswith("ModelFileError")
        np.testing.assert_allclose(answer(), alone(models[0], "head", x=X[:2]), rtol=1e-5)
        assert ask("/reload", b"", authorization="Bearer guess")[0] == 401
        ow.save(models[1], path)
        status, health, _ = ask("/reload", b"", authorization="Bearer word")
        assert (status, health["reload_error"], health["version"] == first) == (200, None, False)
        np.testing.assert_allclose(answer(), alone(models[1], "head", x=X[:2]), rtol=1e-5)
        with pytest.raises(ow.UnknownNameError):
            endpoint.reload(ow.Model(mixing))
        np.testing.assert_allclose(answer(), alone(models[1], "head", x=X[:2]), rtol=1e-5)


def test_a_model_of_another_interface_is_refused() -> None:
    def wide() -> Any:
        return ow.layer.fc(ow.data("x", (None, 5)), 3, name="fc_0")

    endpoint = Endpoint(ow.Model(mixing), max_batch=1)
    with pytest.raises(
        ow.ArgumentError, match=r"takes x float32\[n,5\]; the one that is served takes x float32"
    ):
        endpoint.reload(ow.Model(wide))
    with pytest.raises(ow.ArgumentError, match="made from a Model, not from a file"):
        endpoint.reload()
    assert endpoint.health()["reload_error"].startswith("ArgumentError")


def test_a_busy_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ow.ServeError, match=rf"Port {port} of 127.0.0.1 is taken .* 0 for any free one"):
            Endpoint(ow.Model(mixing), max_batch=1).run(port=port)
    with pytest.raises(ow.ServeError, match="There is no port 70000; expected a number from 0"):
        Endpoint(ow.Model(mixing), max_batch=1).run(port=70000)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {},
            r"returns cross_entropy_0 float32\[\], and nothing with a row for each example .*, 'head'",
        ),
        ({"outputs": ["head"], "max_batch": 0}, "max_batch is 0; expected a whole number, at least 1"),
        ({"max_batch": "8"}, "max_batch is '8'; expected a whole number"),
        ({"max_batch": 2.5}, "max_batch is 2.5; expected a whole number"),
        ({"max_waiting": None}, "max_waiting is None; expected a whole number"),
        ({"max_memory": "much"}, "max_memory is 'much'; expected bytes, a whole number or such as '64MB'"),
        ({"max_body": True}, "max_body is True; expected bytes"),
        ({"timeout": None}, "timeout is None; expected seconds, a number above 0"),
        ({"timeout": 0}, "timeout is 0; expected seconds, a number above 0"),
        ({"latency": "0"}, "latency is '0'; expected seconds from 0"),
        ({"outputs": ["head"], "latency": -1}, "latency is -1; expected seconds from 0"),
    ],
)
def test_an_endpoint_that_cannot_be(model: ow.Model, arguments: Any, sentence: str) -> None:
    with pytest.raises(ow.ArgumentError, match=sentence):
        Endpoint(model, **arguments)


def test_memory_is_given_with_a_unit_or_without(model: ow.Model) -> None:
    endpoint = Endpoint(model, outputs="head", max_batch=4, max_memory="2GB", max_body="1 MiB")
    assert (endpoint.room.most, endpoint.max_body) == (2 * 10**9, 2**20)


def test_other_things_are_no_models() -> None:
    with pytest.raises(ow.ArgumentError, match="Endpoint was given 3; expected a Model, or a path"):
        Endpoint(3)  # type: ignore[arg-type]


def test_the_log_of_the_process_is_left_alone():
    """uvicorn's own configuration of logging would close every handler there is."""

    class Closing(logging.StreamHandler):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    handler = Closing()
    try:
        with Endpoint(ow.Model(two_inputs)).running():
            pass
        assert not handler.closed
    finally:
        handler.close()


def test_small_integers_come_as_json_numbers_and_other_byte_orders_as_npy():
    """Images are bytes as a rule; JSON does not tell an int8 from an int32."""

    def brightness() -> Any:
        return ow.data("pixels", (None, 4), "uint8").astype("float32").sum(1)

    def halves() -> Any:
        return ow.data("x", (None, 2)) / 2

    with asked(Endpoint(ow.Model(brightness), max_batch=2)) as ask:
        status, answer, _ = ask("/predict", {"pixels": [[1, 2, 3, 255]]})
        assert (status, [*answer["outputs"].values()]) == (200, [[261.0]])
        status, answer, _ = ask("/predict", {"pixels": [[1, 2, 3, 256]]})
        assert status == 422
        assert "0 to 255" in answer["error"]
    with asked(Endpoint(ow.Model(halves), max_batch=2)) as ask:
        body = io.BytesIO()
        np.save(body, np.array([[2, 4]], ">f4"))
        status, answer, _ = ask("/predict", body.getvalue(), content_type="application/x-npy")
        assert (status, [*answer["outputs"].values()]) == (200, [[[1.0, 2.0]]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fractions_are_rounded_to_narrow_floats(dtype: str) -> None:
    def network() -> Any:
        return ow.data("x", (None, 2), dtype) * 2

    plan = RequestPlan.of(ow.Model(network), ())
    for size in (0, LARGE):
        found = _read_or_refused(plan, b'{"x": [[0.1, 2.5], [3, 4]]}'.ljust(size))["x"]
        np.testing.assert_array_equal(found, jnp.array([[0.1, 2.5], [3, 4]], dtype))
        assert found.dtype == dtype
        for beyond in (b"1e39", b"1" + b"0" * 300, b"-70000" if dtype == "float16" else b"-1e300"):
            refused = _read_or_refused(plan, (b'{"x": [[%s, 2]]}' % beyond).ljust(size))
            assert re.search("beyond what|no array can hold", refused.sentence)


def test_what_no_npy_file_can_hold_is_rounded_from_what_it_can() -> None:
    plan = RequestPlan.of(ow.Model(lambda: ow.data("x", (None, 2), "bfloat16") * 2), ())
    body = io.BytesIO()
    np.save(body, np.array([[0.1, 2.5]], "float32"))
    found = read(body.getvalue(), "application/x-npy", plan, 2**20)["x"]
    np.testing.assert_array_equal(found, jnp.array([[0.1, 2.5]], "bfloat16"))


# ---------------------------------------------------------------------------- memory, trials, choices


def test_a_long_text_among_short_ones_takes_no_room(model: ow.Model) -> None:
    plan = RequestPlan.of(model, ["head"])
    body = json.dumps({"x": ["a" * 20_000] + ["a"] * 20_000}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="'x' holds a string"):
            read(body, JSON, plan, len(body))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 40 * len(body)


MIXING: dict[str, Any] = {
    "only negative numbers": lambda x: x + jnp.minimum(x, 0).sum(),
    "only large numbers": lambda x: x + jnp.where(x > 50, x, 0).sum(0),
    "a little": lambda x: x + 5e-4 * x.mean(0),
    "almost nothing": lambda x: x + 1e-12 * x.sum(0),
    "the largest": lambda x: x / jnp.maximum(1e3, jnp.abs(x).max()),
    "the first": lambda x: x + 1e-4 * x[0],
    "the last": lambda x: x + 1e-4 * x[-1],
    "order": lambda x: jnp.cumsum(x, 0),
    "how many": lambda x: x / x.shape[0],
}


@pytest.mark.parametrize("case", MIXING)
def test_networks_that_look_at_their_neighbours_are_found(case: str) -> None:
    model = ow.Model(lambda: MIXING[case](ow.data("x", (None, 4))))
    assert "depends on the other examples" in probe(RequestPlan.of(model, ()), 4).alone


def test_whole_numbers_are_compared_exactly() -> None:
    model = ow.Model(
        lambda: ow.data("x", (None, 2), "int32") * 10_000 + (ow.data("x", (None, 2), "int32") < 0).any()
    )
    assert "depends on the other examples" in probe(RequestPlan.of(model, ()), 4).alone


def convolution() -> Any:
    image = ow.data("image", (None, 6, 6, 1))
    return ow.layer.fc(ow.layer.conv(image, 3, 3, act="relu"), 4, act="softmax")


def attention() -> Any:
    words = ow.layer.embedding(ow.data("words", (None, 5), "int32"), 7, 4)
    return ow.layer.layer_norm(jax.nn.softmax(words @ words.swapaxes(1, 2)) @ words)


@pytest.mark.parametrize("network", [convolution, attention, lambda: jnp.log(ow.data("x", (None, 3)) + 1e-3)])
def test_common_networks_are_joined(network: Any) -> None:
    plan = RequestPlan.of(ow.Model(network), ())
    assert probe(plan, 5).alone == ""
    assert probe(plan, 1, join=False).alone == "requests are not to be joined"


def test_a_file_of_fixed_batches_says_which_it_takes(tmp_path: Path) -> None:
    ow.save(ow.Model(mixing), tmp_path / "mixing.model", batch=(1, 3))
    with asked(Endpoint(tmp_path / "mixing.model", max_batch=4)) as ask:
        assert ask("/health")[1]["batch_sizes"] == [1, 3]
        assert ask("/predict", {"x": X[:3].tolist()})[0] == 200
        status, answer, _ = ask("/predict", {"x": X[:2].tolist()})
    assert status == 422
    assert "The number of examples is 2; the model's file takes 1 or 3" in answer["error"]


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_ways_to_compress_are_refused(ask: Asked, packing: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        archive.writestr("x.npy", npy(X[:1]))
    status, answer, _ = ask("/predict", file.getvalue(), content_type="application/x-npz")
    assert (status, "other than deflate" in answer["error"]) == (400, True)


@pytest.mark.parametrize("length", ["-1", "1e3", "4 4", "\u00b2", "9" * 5000])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    with pytest.raises(Refusal, match="expected a number of bytes") as refused:
        _announced(length)
    assert refused.value.status == 400
    assert _announced("12") == 12


def test_the_choice_not_asked_for_the_longest_is_forgotten(
    model: ow.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.serve.endpoint.served._MOST_WAYS", 2)
    served = Served(OpenedModel(model), ["head"], 1)
    default, both = served.ask(), served.ask(["head", "hidden"])
    assert served.ask(["hidden", "head"]) is both
    assert both.result().plan.fetch == ("head", "hidden")
    hidden = served.ask(["hidden"])
    memory = weakref.ref(hidden.result().plan)
    assert served.ask(["head", "hidden"]) is both
    served.ask(["hidden/w"]).result()
    assert served.ask(["head", "hidden"]) is both
    assert served.ask(["hidden"]) is not hidden
    del hidden
    gc.collect()
    assert memory() is None
    assert served.ask(["head"]) is served.ask() is default
    served.close()
    assert served.ask(["head/w"]).result().plan.fetch == ("head/w",)
    served.close()


def test_a_file_exchanged_before_the_watch_began_is_seen(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.model", threading.Event()
    path.write_bytes(b"old")
    before = mark_of(path)
    path.write_bytes(b"newer")
    watch = FileWatch(path, seen.set, before, every=0.01)
    assert seen.wait(30)
    watch.close()


def test_joining_can_be_switched_off_and_parameters_are_those_of_now() -> None:
    model = ow.Model(lambda: ow.layer.fc(ow.data("x", (None, 4)), 2, name="fc"))
    with asked(Endpoint(model, max_batch=2, join=False)) as ask:
        health = ask("/health")[1]
        model.replace({"fc/b": np.array([3, 5], "float32")})
        found = ask("/predict", {"x": [[0, 0, 0, 0]]})[1]["outputs"]["fc"]
    assert (health["joined"], health["alone_because"]) == (False, "requests are not to be joined")
    assert found == [[3, 5]]


def test_a_large_body_is_read_like_a_small_one() -> None:
    rows = np.arange(80_000).reshape(-1, 4) / 8
    with asked(
        Endpoint(ow.Model(lambda: ow.data("x", (None, 4)) * 2), max_batch=len(rows), join=False)
    ) as ask:
        assert ask("/predict", b"[" * 300_000, content_type="application/json")[0] == 400
        status, answer, _ = ask("/predict", {"x": rows.tolist()})
    assert (status, [*answer["outputs"].values()]) == (200, [(rows * 2).tolist()])


@pytest.fixture(scope="module")
def two() -> RequestPlan:
    """Takes numbers for each example and one of its own for all."""

    def network() -> Any:
        x, n, flag = ow.data("x", (None, 2, 2)), ow.data("n", (None,), "int8"), ow.data("b", (None,), "bool")
        return x * 2.0 + n[:, None, None] + flag[:, None, None]

    return RequestPlan.of(ow.Model(network), ())


LARGE_BODIES = {
    "numbers": b'{"x": [[[1, 2.5], [-3e-1, 4E2]]], "n": [5], "b": [true]}',
    "white space": b' {"n" :[ 1\t,2 ] ,"b":[true,\nfalse],\r\n"x": [[[1,2],[3 , 4]],\n[ [5,6],[7,8] ] ] } \n',
    "escaped": b'{"\\u0078": [[[1,2],[3,4]]], "n": [1], "b": [false]}',
    "beyond float32": b'{"x": [[[1e39, 2], [3, 4]]], "n": [5], "b": [true]}',
    "too large": b'{"x": [[[1, 2], [3, 4]]], "n": [128], "b": [true]}',
    "no array": b'{"x": [[[1, 2], [3, 4]]], "n": [%d], "b": [true]}' % 10**400,
    "a fraction": b'{"x": [[[1, 2], [3, 4]]], "n": [1.5], "b": [true]}',
    "true among whole numbers": b'{"x": [[[1, 2], [3, 4]]], "n": [true], "b": [true]}',
    "true among fractions": b'{"x": [[[1.5, 2], [3, true]]], "n": [1], "b": [true]}',
    "no boolean": b'{"x": [[[1, 2], [3, 4]]], "n": [1], "b": [1]}',
    "another name": b'{"x": [[[1, 2], [3, 4]]], "z": [1]}',
    "missing": b'{"x": [[[1, 2], [3, 4]]]}',
    "nothing": b"{ }",
    "twice": b'{"n": [1], "n": [1]}',
    "ragged": b'{"x": [[[1, 2], [3]]]}',
    "depths": b'{"x": [[[1, 2], 3]]}',
    "no rows": b'{"x": [], "n": [], "b": []}',
    "a number": b'{"x": 3, "n": [1], "b": [true]}',
    "a string": b'{"x": "[[[1, 2], [3, 4]]]"}',
    "strings": b'{"x": [[["1", 2], [3, 4]]]}',
    "null": b'{"x": [[[null, 2], [3, 4]]]}',
    "an object": b'{"x": {"n": 1}}',
    "NaN": b'{"x": [[[NaN, 2], [3, 4]]]}',
    "infinity": b'{"x": [[[-Infinity, 2], [3, 4]]]}',
    "a comma more": b'{"x": [[[1, 2], [3, 4]],]}',
    "a comma more after all": b'{"n": [1],}',
    "a comma less": b'{"x": [[[1, 2] [3, 4]]]}',
    "commas": b'{"n": [1,,2]}',
    "two numbers": b'{"n": [1 2]}',
    "a bracket more": b'{"n": [1]]}',
    "a bracket less": b'{"n": [1}',
    "an open bracket behind a number": b'{"x": [[[1[, 2], [3, 4]]]}',
    "a list behind a number": b'{"x": [[1[,2]]]}',
    "a closed list before a number": b'{"x": [[[1,]2]]}',
    "a leading zero": b'{"n": [01]}',
    "a plus": b'{"n": [+1]}',
    "hexadecimal": b'{"n": [0x1]}',
    "no number": b'{"n": [1e]}',
    "no comma": b'{"n": [1] "b": [true]}',
    "no colon": b'{"n" [1]}',
    "no name": b"{[1]}",
    "cut off": b'{"n": [1',
    "more": b'{"n": [1]} x',
    "no UTF-8": b'{"\xff": [1]}',
    "letters": '{"n": [1é]}'.encode(),
    "deep": b'{"n": ' + b"[" * 2000 + b"1" + b"]" * 2000 + b"}",
}


@pytest.mark.parametrize("case", LARGE_BODIES)
def test_a_large_body_is_taken_or_refused_as_a_small_one(two: RequestPlan, case: str) -> None:
    """Where a small one is not JSON or no arrays, a large one may be the other of the two."""
    found = [_read_or_refused(two, LARGE_BODIES[case].ljust(size)) for size in (0, LARGE)]
    if isinstance(found[0], Refusal):
        assert isinstance(found[1], Refusal)
        assert {refusal.status for refusal in found} <= {400, 422}
        assert "xpected" in found[1].sentence
        return
    for name, array in found[0].items():
        assert array.dtype == found[1][name].dtype
        np.testing.assert_array_equal(found[1][name], array)


def _read_or_refused(plan: RequestPlan, body: bytes) -> Any:
    try:
        feed = read(body, "application/json", plan, 2**30)
        return rows_of(feed, plan) and feed
    except Refusal as refusal:
        return refusal


def test_random_large_bodies_are_what_json_says(two: RequestPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 64)
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = int(generator.integers(1, 40))
        x = generator.normal(size=(rows, 2, 2)) * 10.0 ** generator.integers(-30, 30, (rows, 2, 2))
        whole = np.where(generator.random(x.shape) < 0.5, x, 0).astype(object)
        whole[generator.random(x.shape) < 0.5] = int(generator.integers(-(2**24), 2**24))
        given = {"x": whole.tolist(), "n": [int(n) for n in generator.integers(-128, 128, rows)]}
        given["b"] = (generator.random(rows) < 0.5).tolist()
        body = json.dumps(given, indent=generator.choice([None, 1])).encode()
        found = read(body.ljust(LARGE), "application/json", two, 2**30)
        for name, dtype in (("x", "float32"), ("n", "int8"), ("b", "bool")):
            np.testing.assert_array_equal(found[name], np.array(given[name]).astype(dtype))


def test_a_large_body_takes_the_memory_that_is_reckoned_with(two: RequestPlan) -> None:
    numbers = b"[" + b"[[1,1],[1,1]]," * 2**17 + b"[[1,1],[1,1]]]"
    ones = b"[" + b"1," * 2**17 + b"1]"
    for x in (numbers, b"[" + b"[]," * 2**19 + b"[]]", b"[" + b"[1]," * 2**19 + b"1]"):
        body = b'{"n": %s, "b": %s, "x": %s}' % (ones, ones.replace(b"1", b"true"), x)
        tracemalloc.start()
        _read_or_refused(two, body)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most + len(body) < need_of(len(body), "application/json")


def test_too_much_is_read_to_its_end_so_that_the_client_hears_why():
    async def parts(count):
        for _ in range(count):
            yield b"eight by"

    assert asyncio.run(_read(parts(4), 10)) == (32, [b"eight by"])
    assert asyncio.run(_read(parts(99), 10))[0] == 48
