"""The server: its paths for embedding and ordering texts, what operators ask for, its process and connections.

uvicorn closes a connection that is idle after an answer. One that never sends a request, or never the whole head of
one, it keeps for ever, and counts; it has no setting for that.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..version import __version__
from .batches import Batches, Limits, Metrics
from .forms import EmbeddingsForm, FormT, RefusedError, RerankForm, TextsForm, read, shortened
from .models import DOCUMENT, QUERY, Embedder, MultiVectorEmbedder, Reranker, Sized, SparseEmbedder

if sys.platform != "win32":
    import resource

T = TypeVar("T")

#: Connections open at a time. For a further one, some are closed: those that have been sending their request longest.
CONNECTIONS = 1024
#: Seconds for the head of a request to arrive, after the connection or the last answer.
HEAD_SECONDS = 30
# Files that are no connections. A process that may open too few cannot accept any connection.
_OTHER_FILES = 256
#: So many times the limit is read of a body that is too large, so that its sender reads the answer.
_DROPPED = 8
#: Values that a request's texts may have, of a model that gives each token a vector: 64 MiB, or about 350 MB of JSON.
VALUES = 2**24
#: Texts of a request that are tokenised at a time, so that requests take turns.
_AT_A_TIME = 64
_CLIENT_LEFT = 499


class Server:
    """Models, their queue, and what the paths do with them.

    Args:
        embedder: Of ``/v1/embeddings``, ``/embed_sparse`` or ``/embed_all``, by its kind; and of ``/rerank``, where
            there is no reranker.
        reranker: Of ``/rerank``.
        limits: Of requests and the queue.
        keys: One of which requests have to bring; none: they need none.

    Raises:
        ValueError: If there is neither model, or both have one name, or a key cannot be sent.
    """

    def __init__(
        self,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.embedder, self.reranker = embedder, reranker
        served = [own for own in (embedder, reranker) if own is not None]
        if not served:
            raise ValueError("There is no model to serve: give MODEL, --rerank, or both.")
        self.models = {name: (own, name[len(own.name) + 1 :]) for own in served for name in own.names}
        if len(self.models) < sum(len(own.names) for own in served):
            raise ValueError(f"Two models are called {served[0].name}: give one of them another --name.")
        self.metrics = Metrics()
        self.batches = Batches(self.limits, self.metrics)
        if not all(key.isascii() and key.isprintable() for key in keys):
            raise ValueError(
                "An API key has other characters than printable ASCII, and clients send those in different ways: give "
                "a key of letters, digits and marks."
            )
        self._keys = [key.encode() for key in keys]
        self._since = int(time.time())

    # What the paths do

    async def embeddings(self, form: EmbeddingsForm) -> Response:
        """``/v1/embeddings``."""
        embedder, way = self._model(form.model, Embedder, "gives vectors")
        _check_path(embedder, Embedder)
        way = embedder.way(way, form.input_type)
        if form.dimensions is not None and not 1 <= form.dimensions <= embedder.dimensions:
            said = f"'dimensions' is {shortened(form.dimensions)}: give a number from 1 to {embedder.dimensions}."
            raise RefusedError(400, said, param="dimensions")
        self._check_count(form.items, "input")
        vectors, tokens = await self._run(embedder, way, form.items)
        return await asyncio.to_thread(_embeddings_answer, form, embedder, vectors, tokens)

    async def embed(self, form: TextsForm, kind: type[Embedder]) -> Response:
        """``/embed_sparse`` and ``/embed_all``."""
        embedder = self.embedder
        if embedder is None:
            raise RefusedError(404, f"There is no model here that gives a text {kind.gives}.", code="model_not_found")
        _check_path(embedder, kind)
        way = embedder.way("", form.prompt_name, "prompt_name")
        self._check_count(form.items, "inputs")
        found, _ = await self._run(embedder, way, form.items, field="inputs", truncate=form.truncate)
        return await asyncio.to_thread(lambda: _json([embedder.shown(each) for each in found]))

    async def rerank(self, form: RerankForm) -> Response:
        """``/rerank``."""
        self._check_count(form.documents, "documents")
        if self.reranker is not None:
            reranker, _ = self._model(form.model, Reranker, "orders texts")
            found, tokens = await self._run(reranker, "", reranker.items(form.query, form.documents))
            return _rerank_answer(form, reranker.scores(found), tokens)
        embedder, way = self._model(form.model, Embedder, "gives vectors")
        if way:
            said = f"'model': /rerank reads queries and documents by itself: give \"{embedder.name}\"."
            raise RefusedError(400, said)
        (query, asked), (documents, searched) = await asyncio.gather(
            self._run(embedder, QUERY, [form.query], field="query"),
            self._run(embedder, DOCUMENT, form.documents, field="documents"),
        )
        scores = await asyncio.to_thread(embedder.similarities, query[0], documents)
        return _rerank_answer(form, scores, asked + searched)

    def list_models(self) -> dict[str, Any]:
        """The names that requests may give."""
        return {"object": "list", "data": [self.show_model(name) for name in self.models]}

    def show_model(self, name: str) -> dict[str, Any]:
        """One of these names; an error of status 404 if there is none."""
        self._model(name, object, "is served")
        return {"id": name, "object": "model", "created": self._since, "owned_by": "st_reba"}

    def show_metrics(self) -> Response:
        """What Prometheus asks for, in its text format."""
        texts, tokens = self.batches.waiting()
        self.metrics.waiting_texts.set(texts)
        self.metrics.waiting_tokens.set(tokens)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def check_key(self, request: Request) -> None:
        """Refuse who has none of the keys, in the same time whichever it is; and who came on a connection too many.

        Raises:
            RefusedError: If a request is one of these.
        """
        if getattr(request.state, "too_many", False):
            raise RefusedError(
                503, "The server has as many connections as it takes, all of them at work: try again.", retry_after=1
            )
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if self._keys and not (kind.lower() == "bearer" and any(found)):
            raise RefusedError(
                401,
                "This server asks for an API key, and the request has none that it knows: send "
                "'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )

    # How

    async def answer(
        self, request: Request, form: type[FormT], path: Callable[[FormT], Coroutine[Any, Any, Response]]
    ) -> Response:
        """What a path answers to a request's form; its work is cancelled when its client goes away.

        Raises:
            ClientDisconnect: If it does.
            RefusedError: If the body is too large, or is no such form; or as the path has it.
        """
        body = await self._body(request)
        # In a thread: a large body takes a while, and the server's own thread answers everyone.
        result = asyncio.ensure_future(path(await asyncio.to_thread(read, form, body)))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            self.metrics.left.inc()
            raise ClientDisconnect
        finally:
            result.cancel()
            gone.cancel()

    async def _body(self, request: Request) -> bytes:
        limit, body, size = self.limits.body_bytes, bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                body += part
            elif size > _DROPPED * limit:
                break
        if size > limit:
            raise RefusedError(
                413, f"The request's body is larger than the {limit:,} bytes that it may have: send several requests."
            )
        return bytes(body)

    def _model(self, name: str, kind: type[T], does: str) -> tuple[T, str]:
        """A model by its name, and the way that the name asks for."""
        own, way = self.models.get(name, (None, ""))
        if own is None or not isinstance(own, kind):
            others = [f'"{other}"' for other, (its, _) in self.models.items() if isinstance(its, kind)]
            there = ", ".join(others) or "none"
            said = f'There is no model "{shortened(name)}" here that {does}; there is {there}.'
            raise RefusedError(404, said, param="model", code="model_not_found")
        return own, way

    def _check_count(self, items: Sequence[Any], param: str) -> None:
        if len(items) > self.limits.inputs:
            said = f"'{param}' has {len(items)}, and a request may have {self.limits.inputs}: send several."
            raise RefusedError(400, said, param=param)

    async def _run(
        self, served: Embedder | Reranker, way: str, items: Sequence[Any], **asked: Any
    ) -> tuple[list[Any], int]:
        """Tokenise items and have them run, where ``measure`` is asked more; also how many tokens they have."""
        sized: list[Sized] = []
        measure: Callable[..., list[Sized]] = served.measure
        with self.batches.reserved(served.guess(way, items)):
            for first in range(0, len(items), _AT_A_TIME):
                sized += await asyncio.to_thread(measure, way, items[first : first + _AT_A_TIME], first, **asked)
        tokens = sum(each.read for each in sized)
        if tokens * served.values_per_token > VALUES:
            said = (
                f"The texts have {tokens:,} tokens, and with {served.values_per_token} values for each a request may "
            )
            raise RefusedError(400, f"{said}have {VALUES // served.values_per_token:,}: send several requests.")
        result = self.batches.submit(served.ways[way].run, [each.item for each in sized], [each.cost for each in sized])
        found = await asyncio.wrap_future(result)
        self.metrics.tokens.inc(tokens)
        return found, tokens


def _check_path(embedder: Embedder, kind: type[Embedder]) -> None:
    """Refuse what this path does not give, and name the one that answers."""
    if embedder.path != kind.path:
        raise RefusedError(
            400,
            f'{kind.path} gives a text {kind.gives}, and the model "{embedder.name}" gives it {embedder.gives}: send '
            f"the request to {embedder.path}.",
        )


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _embeddings_answer(
    form: EmbeddingsForm, embedder: Embedder, vectors: Sequence[np.ndarray], tokens: int
) -> Response:
    data = []
    for index, whole in enumerate(vectors):
        vector = embedder.first(whole, form.dimensions)
        is_text = form.encoding_format == "base64"
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": form.model, "usage": usage})


def _rerank_answer(form: RerankForm, scores: Sequence[float], tokens: int) -> Response:
    # Of equal scores the first stays the first.
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: form.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if form.return_documents:
        for result in results:
            result["document"] = {"text": form.documents[result["index"]]}
    return _json({"model": form.model, "results": results, "usage": {"total_tokens": tokens}})


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


class _Measuring:
    """Counts answers, around everything else."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette answers 500 outside of all middleware, where nothing else was sent.
        begun, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(status)).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - begun)


def make_app(server: Server) -> FastAPI:
    """The application of a server, whose thread runs while the application does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.batches.start()
        yield
        await asyncio.to_thread(server.batches.close)

    app = FastAPI(title="st_reba", version=__version__, lifespan=lifespan, redoc_url=None)
    guarded: Any = {"dependencies": [Depends(server.check_key)]}

    @app.post("/v1/embeddings", **guarded, openapi_extra=_takes(EmbeddingsForm))
    async def embeddings(request: Request) -> Response:
        return await server.answer(request, EmbeddingsForm, server.embeddings)

    @app.post(SparseEmbedder.path, **guarded, openapi_extra=_takes(TextsForm))
    async def embed_sparse(request: Request) -> Response:
        return await server.answer(request, TextsForm, partial(server.embed, kind=SparseEmbedder))

    @app.post(MultiVectorEmbedder.path, **guarded, openapi_extra=_takes(TextsForm))
    async def embed_all(request: Request) -> Response:
        return await server.answer(request, TextsForm, partial(server.embed, kind=MultiVectorEmbedder))

    async def rerank(request: Request) -> Response:
        return await server.answer(request, RerankForm, server.rerank)

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, **guarded, openapi_extra=_takes(RerankForm), operation_id=path)(rerank)
    app.get("/v1/models", **guarded)(server.list_models)
    app.get("/v1/models/{name:path}", **guarded)(server.show_model)
    app.get("/metrics", **guarded)(server.show_metrics)

    @app.get("/health")
    async def health() -> Response:
        running = server.batches.running
        return _json({"status": "ok" if running else "stopped"}, 200 if running else 503)

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        return _json(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {shortened(request.url.path)}"
        said = {404: "there is no such path", 405: "the path has another method"}.get(error.status_code, error.detail)
        return _json(RefusedError(error.status_code, f"{what}: {said}; see /docs.").body, error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _json(RefusedError(500, "The server has failed; its log says how.").body, 500)

    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(_Measuring, metrics=server.metrics, paths=paths)
    return app


def _takes(form: Any) -> dict[str, Any]:
    """For the page of the paths, as bodies are read here: FastAPI would read them before it asks for the key."""
    return {"requestBody": {"content": {"application/json": {"schema": form.model_json_schema()}}, "required": True}}


# The process


def bound(host: str, port: int) -> socket.socket:
    """A socket of an address, taken before a model is loaded; nobody is heard there yet.

    Args:
        host: A name or an address.
        port: 0: any that is free.

    Raises:
        OSError: If it is taken, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = socket.socket(family, kind, protocol)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(address)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} cannot be used ({error.strerror or error}): give an address of this machine, "
            "and a port that is free."
        ) from error
    return own


def url_of(own: socket.socket) -> str:
    """Where a socket is to be found."""
    host, port, *_ = own.getsockname()
    return f"http://[{host}]:{port}" if own.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(server: Server, own: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or SIGINT; then answer those that are there, and return.

    Args:
        server: What answers.
        own: From :func:`bound`.
        started: Is called when requests are heard.
    """
    raise_file_limit()
    config = uvicorn.Config(
        make_app(server), log_level="warning", access_log=False, server_header=False, http=Connection,
        timeout_keep_alive=HEAD_SECONDS, lifespan="on", ws="none",
    )  # fmt: skip
    # Uvicorn ends in order and then raises the signal once more, for whoever had it before: that is nobody.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # Whoever connects from here on is answered.
    own.listen(config.backlog)
    started()
    uvicorn.Server(config).run(sockets=[own])


# Connections


def raise_file_limit() -> None:
    """Let this process open as many files as it may: as connections need, and as come before the first is closed."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS calls unlimited what it refuses.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many there may be: as many as the files that this process may open allow."""
    if sys.platform == "win32":
        return CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, files - _OTHER_FILES))


class Connection(H11Protocol):
    """uvicorn's connection, with these limits.

    A connection whose request is here as a whole is never closed for another one. If there are only such, requests of a
    further connection find ``request.state.too_many``.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unsent = 0
        self._wait_for_head()
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._wait_for_head()
        super().on_response_complete()

    def _wait_for_head(self) -> None:
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._is_late)

    def _is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self.transport.close()
        elif unsent != self._unsent:
            # The last answer is large, and its reader slow.
            self._unsent = unsent
            self._wait_for_head()
        else:
            self.transport.abort()

    @property
    def _is_arriving(self) -> bool:
        """Whether it has no request that is here as a whole, and no answer on its way."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        own = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        arriving = sorted((other for other in own if other._is_arriving), key=lambda other: other._since)
        # To look at all takes a millisecond or two: too long for each of thousands that come at once.
        for other in arriving[: 1 + most_connections() // 16]:
            other.transport.abort()
            # As :meth:`connection_lost` does, which comes after others of these connections.
            self.connections.discard(other)
        if not arriving:
            self.app_state = {**self.app_state, "too_many": True}
