"""The server: its paths, OpenAI's embeddings and ordering texts, what operators ask for, and its process."""

from __future__ import annotations

import asyncio
import base64
import hmac
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..version import __version__
from .batches import Batches, ClosedError, FullError, Limits, Metrics
from .connections import HEAD_SECONDS, Connection, raise_file_limit
from .forms import EmbeddingsForm, FormT, RefusedError, RerankForm, read, shortened
from .models import DOCUMENT, QUERY, Embedder, NotFiniteError, Reranker, Sized

T = TypeVar("T")

#: So many times the limit is read of a body that is too large, so that its sender reads the answer.
_DROPPED = 8
#: Bytes of a body, and characters of a request's texts, that are read at a time: some 0.1 s at most.
_AT_A_TIME = 2**16
_CLIENT_LEFT = 499


class Server:
    """Models, their queue, and what the paths do with them.

    Args:
        embedder: Of ``/v1/embeddings``; and of ``/rerank``, where there is no reranker.
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

    async def embeddings(self, body: bytes) -> Response:
        """``/v1/embeddings``."""
        form = await _form(EmbeddingsForm, body)
        embedder, way = self._model(form.model, Embedder, "gives vectors")
        way = embedder.way(way, form.input_type)
        items = form.items
        self._check_count(len(items), "input")
        if form.dimensions is not None:
            embedder.check_dimensions(form.dimensions)
        vectors, tokens = await self._run(embedder, way, items)
        return await asyncio.to_thread(_embeddings_answer, form, embedder, vectors, tokens)

    async def rerank(self, body: bytes) -> Response:
        """``/rerank``."""
        form = await _form(RerankForm, body)
        # The form's own check has made texts of objects.
        texts: list[Any] = list(form.documents)
        self._check_count(len(texts), "documents")
        if self.reranker is not None:
            reranker, _ = self._model(form.model, Reranker, "orders texts")
            scores, tokens = await self._run(reranker, "", [(form.query, text) for text in texts])
            return _rerank_answer(form, texts, scores, tokens)
        embedder, way = self._model(form.model, Embedder, "gives vectors")
        if way:
            raise RefusedError(
                400, f"'model': /rerank reads queries and documents by itself: give \"{embedder.name}\"."
            )
        (query, asked), (documents, searched) = await asyncio.gather(
            self._run(embedder, QUERY, [form.query]), self._run(embedder, DOCUMENT, texts)
        )
        scores = await asyncio.to_thread(embedder.similarities, query[0], documents)
        return _rerank_answer(form, texts, scores, asked + searched)

    def listed(self) -> dict[str, Any]:
        """``/v1/models``."""
        return {"object": "list", "data": [self._shown(name) for name in self.models]}

    def one(self, name: str) -> dict[str, Any]:
        """``/v1/models/NAME``.

        Raises:
            RefusedError: If there is none.
        """
        if name not in self.models:
            self._refuse_model(name, [*self.models], "is served")
        return self._shown(name)

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

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "st_reba"}

    def _model(self, name: str, kind: type[T], does: str) -> tuple[T, str]:
        own, way = self.models.get(name, (None, ""))
        if not isinstance(own, kind):
            self._refuse_model(name, [other for other, (its, _) in self.models.items() if isinstance(its, kind)], does)
        return own, way

    def _refuse_model(self, name: str, others: list[str], does: str) -> NoReturn:
        there = ", ".join(f'"{other}"' for other in others) or "none"
        raise RefusedError(
            404,
            f'There is no model "{shortened(name)}" here that {does}; there is {there}.',
            param="model",
            code="model_not_found",
        )

    def _check_count(self, count: int, param: str) -> None:
        if count > self.limits.inputs:
            raise RefusedError(
                400, f"'{param}' has {count}, and a request may have {self.limits.inputs}: send several.", param=param
            )

    async def answer(self, request: Request, path: Callable[[bytes], Coroutine[Any, Any, Response]]) -> Response:
        """What a path answers to a request's body; its work is cancelled when its client goes away.

        Raises:
            ClientDisconnect: If it does.
            RefusedError: If the body does not arrive in time, or is too large; or as the path has it.
        """
        try:
            body = await asyncio.wait_for(self._body(request), self.limits.body_seconds)
        except TimeoutError:
            raise RefusedError(
                408, f"The request's body did not arrive within {self.limits.body_seconds} s: send it again."
            ) from None
        result = asyncio.ensure_future(path(body))
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
        limit, parts, size = self.limits.body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            else:
                parts.clear()
            if size > _DROPPED * limit:
                break
        if size > limit:
            raise RefusedError(
                413, f"The request's body is larger than the {limit:,} bytes that it may have: send several requests."
            )
        return b"".join(parts)

    async def _run(self, served: Embedder | Reranker, way: str, items: Sequence[Any]) -> tuple[list[Any], int]:
        """Tokenise items a few at a time, so that requests take turns, and have them run; also how many tokens."""
        sized: list[Sized] = []
        try:
            with self.batches.reserved(served.guess(way, items)):
                for part in _parts(items):
                    sized += await asyncio.to_thread(served.measure, way, part, len(sized))
            result = self.batches.submit(
                served.ways[way].run, [each.item for each in sized], [each.cost for each in sized]
            )
        except FullError as error:
            raise RefusedError(
                429,
                f"The server has as much work as it takes: try again in {error.seconds} s.",
                code="rate_limit_exceeded",
                retry_after=error.seconds,
            ) from None
        except ClosedError:
            raise RefusedError(503, "The server is being stopped: try another, or later.", retry_after=5) from None
        try:
            found = await asyncio.wrap_future(result)
        except NotFiniteError as error:
            raise RefusedError(500, str(error)) from None
        except Exception as error:
            raise RefusedError(500, f"The model could not run this ({type(error).__name__}).") from error
        tokens = sum(each.read for each in sized)
        self.metrics.tokens.inc(tokens)
        return found, tokens

    def shown_metrics(self) -> Response:
        """``/metrics``, in Prometheus' text format."""
        texts, tokens = self.batches.waiting()
        self.metrics.waiting_texts.set(texts)
        self.metrics.waiting_tokens.set(tokens)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _form(form: type[FormT], body: bytes) -> FormT:
    """What a body says. A large one is read in a thread: the server's own answers everyone."""
    return read(form, body) if len(body) <= _AT_A_TIME else await asyncio.to_thread(read, form, body)


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Texts, token ids or pairs, a few at a time by how long they are."""
    first = size = 0
    for index, item in enumerate(items):
        size += 1 + sum(map(len, item)) if isinstance(item, tuple) else 1 + len(item)
        if size >= _AT_A_TIME:
            yield items[first : index + 1]
            first, size = index + 1, 0
    if first < len(items):
        yield items[first:]


def _embeddings_answer(
    form: EmbeddingsForm, embedder: Embedder, vectors: Sequence[np.ndarray], tokens: int
) -> Response:
    def shown(vector: np.ndarray) -> Any:
        if form.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()

    data = [
        {"object": "embedding", "index": index, "embedding": shown(embedder.first(vector, form.dimensions))}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": form.model, "usage": usage})


def _rerank_answer(form: RerankForm, texts: Sequence[str], scores: Sequence[float], tokens: int) -> Response:
    # Of equal scores the first stays the first.
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: form.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if form.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return _json({"model": form.model, "results": results, "usage": {"total_tokens": tokens}})


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


class _Measuring:
    """Counts answers, around everything else."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        begun = time.perf_counter()
        started = False

        def note(status: int) -> None:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - begun)

        async def noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except BaseException:
            # Starlette answers 500 outside of all middleware.
            if not started:
                note(500)
            raise


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
        return await server.answer(request, server.embeddings)

    async def rerank(request: Request) -> Response:
        return await server.answer(request, server.rerank)

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, **guarded, openapi_extra=_takes(RerankForm), operation_id=path)(rerank)

    @app.get("/v1/models", **guarded)
    async def models() -> dict[str, Any]:
        return server.listed()

    @app.get("/v1/models/{name:path}", **guarded)
    async def model(name: str) -> dict[str, Any]:
        return server.one(name)

    @app.get("/metrics", **guarded)
    async def metrics() -> Response:
        return server.shown_metrics()

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
    """For the page of the paths, as bodies are read here and not by FastAPI."""
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
        make_app(server),
        log_level="warning",
        access_log=False,
        server_header=False,
        http=Connection,
        timeout_keep_alive=HEAD_SECONDS,
        lifespan="on",
        ws="none",
    )
    # Uvicorn ends in order and then raises the signal once more, for whoever had it before: that is nobody.
    before: dict[int, Any] = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        # Whoever connects from here on is answered.
        own.listen(config.backlog)
        started()
        uvicorn.Server(config).run(sockets=[own])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
