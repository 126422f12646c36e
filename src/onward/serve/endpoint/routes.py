"""The routes and their answers: one ASGI application over one Endpoint."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from onward.core.errors import OnwardError, UnknownNameError, nearest
from onward.core.extras import require
from onward.serve.endpoint.answers import form_of, write
from onward.serve.endpoint.batcher import Job
from onward.serve.endpoint.bodies import NPZ, read, rows_of
from onward.serve.endpoint.openapi import openapi
from onward.serve.endpoint.page import docs
from onward.serve.endpoint.pieces import LARGE
from onward.serve.endpoint.refusal import Refusal, later
from onward.serve.endpoint.room import need_of
from onward.serve.endpoint.served import Ready, Served
from onward.serve.endpoint.server import is_known_host
from onward.serve.endpoint.service import ModelService

LOG = logging.getLogger("onward.serve")
T = TypeVar("T")
_SOON = 0.05  # seconds before it is looked whether the client is still there
_COPIES = 3  # of its arrays that a request has: as read, in the batch, on the device
_FOREIGN = (
    "This server answers on this machine alone, as localhost, and was asked as {host!r}. If it is to be "
    "known under that name too, that of a proxy for instance, start it with hosts=[...] or --allow-host."
)
ROUTES: Mapping[str, tuple[str, str]] = {
    "/predict": ("POST", "what the model gives for the examples that are sent"),
    "/activation/{layer}": ("POST", "what a layer gives for the examples that are sent"),
    "/health": ("GET", "whether it answers, with which model"),
    "/metrics": ("GET", "what was counted, for Prometheus"),
    "/program": ("GET", "the graph of the model as text"),
    "/openapi.json": ("GET", "these routes, described for programs"),
    "/docs": ("GET", "these routes, described for people; also at /"),
    "/reload": ("POST", "exchange the model for what its file holds now; needs the token"),
}
"""Path, method and what is answered."""


class Routes:
    """The handlers; each returns a response or raises a Refusal."""

    def __init__(self, endpoint: ModelService) -> None:
        self.endpoint = endpoint
        self._responses = require("starlette.responses", "serve")

    def application(self) -> Any:
        """The ASGI application."""
        routing = require("starlette.routing", "serve")
        handlers = {
            "/predict": self.predict,
            "/activation/{layer:path}": self.activation,
            "/health": self.health,
            "/metrics": self.metrics,
            "/program": self.program,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
            "/": self.docs,
            "/reload": self.reload,
        }
        methods = {path: method for path, (method, _) in ROUTES.items()}
        routes = [
            routing.Route(path, self._guarded(path, handler), methods=[methods.get(_plain(path), "GET")])
            for path, handler in handlers.items()
        ]
        lost = {404: self._guarded("other", _not_found), 405: self._guarded("other", _not_allowed)}
        return require("starlette.applications", "serve").Starlette(
            routes=routes, exception_handlers=lost, lifespan=self._lifespan
        )

    async def predict(self, request: Any) -> Any:
        """The outputs for some examples, or the names that ``?fetch=`` lists."""
        names = [n for part in request.query_params.getlist("fetch") for n in part.split(",") if n]
        return await self._answer(request, names)

    async def activation(self, request: Any) -> Any:
        """One activation for some examples; nothing is remembered from one request to the next."""
        return await self._answer(request, [request.path_params["layer"]])

    async def health(self, request: Any) -> Any:
        """Whether it answers, and what is known of the model."""
        found = self.endpoint.health()
        return self._json(found, 200 if found["ready"] else 503)

    async def metrics(self, request: Any) -> Any:
        """The metrics, as text for Prometheus."""
        return self._text(self.endpoint.metrics(), "text/plain; version=0.0.4")

    async def program(self, request: Any) -> Any:
        """The listing of the graph."""
        return self._text(f"{self.endpoint.served.source.model.test_program}\n", "text/plain")

    async def openapi(self, request: Any) -> Any:
        """The routes, for programs."""
        return self._json(openapi(self.endpoint.name, self.endpoint.served.plan, ROUTES))

    async def docs(self, request: Any) -> Any:
        """The routes, for people."""
        url = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}"
        return self._text(docs(self.endpoint, url, ROUTES), "text/html")

    async def reload(self, request: Any) -> Any:
        """Exchange the model, for those who know the token."""
        token, given = self.endpoint.reload_token, request.headers.get("authorization", "")
        if token is None:
            raise Refusal(403, "This server reloads nothing on request; start it with a reload token.")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refusal(401, "Expected the header 'Authorization: Bearer TOKEN' with the reload token.")
        try:
            await asyncio.to_thread(self.endpoint.reload)
        except (OnwardError, OSError) as error:
            raise Refusal(409, f"The model was not exchanged: {error}") from None
        return self._json(self.endpoint.health())

    async def _answer(self, request: Any, names: Iterable[str]) -> Any:
        served, media_type = self.endpoint.served, request.headers.get("content-type", "")
        with self.endpoint.room.part() as part:
            body = await self._body(request, lambda size: part.need(need_of(size, media_type)))
            ready = await self._ready(served, names)
            form = form_of(request.headers.get("accept", ""), len(ready.plan.fetch))
            if NPZ in media_type:  # it may be packed
                part.need(need_of(min(self.endpoint.max_body, 1032 * len(body)), media_type))
            job = await self._job(body, media_type, served, ready)
            del body
            part.need(_COPIES * sum(x.nbytes for x in job.feed.values()))
            self.endpoint.batcher.put(job)
            arrays = await self._computed(job, request)
        content = write(dict(zip(ready.plan.fetch, arrays, strict=True)), form)
        return self._respond(content, 200, form, {"x-model-version": served.source.version})

    async def _body(self, request: Any, need: Callable[[int], None]) -> bytes:
        """The whole body, within the limits on its size, its memory and the time that it takes to come."""
        most, seconds = self.endpoint.max_body, self.endpoint.timeout
        parts: list[bytes] = []
        size = _announced(request.headers.get("content-length") or "0")
        try:
            async with asyncio.timeout(seconds):
                if size <= most:
                    size, parts = await _read(request.stream(), most, need)
                elif size <= 4 * most:  # a client that still writes would not read the answer
                    await _read(request.stream(), 0)
        except TimeoutError:
            sentence = f"The body did not come within {seconds:g} seconds."
            raise Refusal(408, sentence, {"connection": "close"}) from None
        if size > most:
            sentence = (
                f"The body has more than {most:,} bytes; send fewer examples at once, or npy instead of JSON."
            )
            raise Refusal(413, sentence, {"connection": "close"})
        return b"".join(parts)

    async def _ready(self, served: Served, names: Iterable[str]) -> Ready:
        """The plan for these names; the first time, it is compiled meanwhile."""
        try:
            future = served.ask(names)
        except UnknownNameError:
            raise Refusal(404, _unknown(served, names)) from None
        return await self._awaited(future)

    async def _awaited(self, future: Future[T]) -> T:
        """The outcome of a future that something is compiled for, if it is there in time."""
        try:
            if future.done():
                return future.result()
            waited = asyncio.shield(asyncio.wrap_future(future))
            return await asyncio.wait_for(waited, self.endpoint.timeout)
        except TimeoutError:
            raise later(503, "What is asked for is still being compiled; ask again.", 5) from None
        except OnwardError as error:
            raise Refusal(422, str(error)) from None

    async def _job(self, body: bytes, media_type: str, served: Served, ready: Ready) -> Job:
        plan, arguments = ready.plan, (body, media_type, ready.plan, self.endpoint.max_body)
        feed = read(*arguments) if len(body) < LARGE else await asyncio.to_thread(read, *arguments)
        rows, most = rows_of(feed, plan), ready.joining.most
        if rows > most:
            raise Refusal(
                413, f"There are {rows} examples; a request may hold {most}. Send several requests."
            )
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        joining = await self._awaited(ready.trials.joining(feed, rows, answer, served.tried))
        if why := joining.refused(rows):
            raise Refusal(422, why)
        return Job(plan, joining, feed, rows, loop, answer)

    async def _computed(self, job: Job, request: Any) -> Any:
        """The outcome, unless it takes too long or the client goes away."""
        seconds = self.endpoint.timeout
        await asyncio.wait({job.answer}, timeout=min(_SOON, seconds))
        if job.answer.done():
            return await job.answer
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({job.answer, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if job.answer.done():
                return await job.answer
            if gone.done():
                raise Refusal(499, "The client has gone.")
            raise later(504, f"The answer was not there within {seconds:g} seconds; ask again later.")
        finally:
            gone.cancel()
            job.answer.cancel()

    def _guarded(self, path: str, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The handler, counted, with a sentence for everything that goes wrong."""
        route = _plain(path)

        async def guarded(request: Any, *_: Any) -> Any:
            begun = monotonic()
            try:
                self._expect_host(request.headers.get("host"))
                response = await handler(request)
            except Refusal as refusal:
                response = self._refused(refusal)
            except _disconnect():
                response = self._refused(Refusal(499, "The client has gone."))
            except Exception as error:
                response = self._refused(_fault(route, error))
            if self.endpoint.draining:
                response.headers["connection"] = "close"
            self.endpoint.counts.add("onward_requests_total", route=route, status=str(response.status_code))
            self.endpoint.counts.observe("onward_request_seconds", monotonic() - begun)
            return response

        return guarded

    def _expect_host(self, host: str | None) -> None:
        """Refuse what a page of another name sends, once that name leads to this machine."""
        names = self.endpoint.names
        if names is not None and host is not None and not is_known_host(host, names):
            raise Refusal(421, _FOREIGN.format(host=host[:80]), {"connection": "close"})

    def _refused(self, refusal: Refusal) -> Any:
        if refusal.status in (429, 503, 504):
            self.endpoint.counts.add("onward_refused_total", status=str(refusal.status))
        response = self._json({"error": refusal.sentence}, refusal.status)
        response.headers.update(refusal.headers)
        return response

    def _json(self, value: Any, status: int = 200) -> Any:
        return self._responses.JSONResponse(value, status)

    def _text(self, value: str, media_type: str) -> Any:
        return self._responses.Response(value, media_type=media_type)

    def _respond(self, content: bytes, status: int, media_type: str, headers: dict[str, str]) -> Any:
        return self._responses.Response(content, status, headers, media_type)

    @asynccontextmanager
    async def _lifespan(self, application: Any) -> AsyncIterator[None]:
        await asyncio.to_thread(self.endpoint.warm_up)
        yield
        await asyncio.to_thread(self.endpoint.close)


async def _not_found(request: Any) -> Any:
    raise Refusal(404, f"There is nothing at {request.url.path[:80]}. The routes are {', '.join(ROUTES)}.")


async def _not_allowed(request: Any) -> Any:
    path = request.url.path
    method = "POST" if path.startswith(("/predict", "/activation", "/reload")) else "GET"
    why = " Nothing is remembered between requests, so the data comes with each." * path.startswith(
        "/activation"
    )
    sentence = f"{request.method[:20]} is not answered at {path[:80]}; send {method}.{why}"
    raise Refusal(405, sentence, {"allow": method})


def _unknown(served: Served, names: Iterable[str]) -> str:
    known = served.source.model.test_program.variables
    name = next(name for name in names if name not in known)[:80]
    return f"No layer or other Variable is named {name!r}. {nearest(name, known)} GET /program lists them."


def _announced(length: str) -> int:
    """How many bytes a request says that its body has."""
    if not (length.isascii() and length.isdigit() and len(length) < 20):
        raise Refusal(400, f"The content-length is {length[:40]!r}; expected a number of bytes.")
    return int(length)


async def _read(
    stream: Any, most: int, need: Callable[[int], None] = lambda size: None
) -> tuple[int, list[bytes]]:
    """How many bytes came, and what they were up to the limit; far beyond it no more is read.

    ``need`` is told how many are kept. What it refuses is raised once the body has come: a client that still
    writes would not read the answer.
    """
    size, parts, refused = 0, [], None
    async for part in stream:
        size += len(part)
        if size > most:
            if most and size > 4 * most:
                break
        elif refused is None:
            try:
                need(size)
                parts.append(part)
            except Refusal as refusal:
                refused = refusal
                parts.clear()
                need(0)
    if refused is not None and size <= most:
        raise refused
    return size, parts


def _plain(path: str) -> str:
    return path.replace(":path", "")


def _disconnect() -> Any:
    return require("starlette.requests", "serve").ClientDisconnect


def _fault(route: str, error: Exception) -> Refusal:
    """A fault of ours or of the model: told in the log, under a number that the client gets."""
    number = uuid4().hex[:12]
    LOG.error("%s: fault %s", route, number, exc_info=error)
    return Refusal(500, f"The model failed on this request. The server's log tells why, under {number}.")
