"""The server: its paths for embedding and ordering texts, health and metrics, and its process."""

from __future__ import annotations

import asyncio
import base64
import hmac
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
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

from ..version import __version__
from .batches import Batches, Limits, Metrics
from .forms import EmbeddingsForm, FormT, RefusedError, RerankForm, read, shortened
from .models import Embedder, Reranker, Sized

T = TypeVar("T")

#: Number of open connections, beyond which uvicorn answers 503: most systems let a process open 1024 files.
CONNECTIONS = 768
#: Seconds for which a connection stays open after an answer.
KEEP_ALIVE = 30
#: Multiple of the limit of a body that is received and dropped, so that the client reads the answer.
_DROPPED = 8
#: Texts of a request that are tokenised at a time, so that requests take turns.
_AT_A_TIME = 64
_CLIENT_LEFT = 499


class Server:
    """Models, their queue, and the work of the paths.

    Args:
        embedder: Model of ``/v1/embeddings``.
        reranker: Model of ``/rerank``.
        limits: Limits of requests and the queue.
        keys: API keys, one of which a request must have; none: requests need none.

    Raises:
        ValueError: If both have one name.
    """

    def __init__(
        self,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        served = [model for model in (embedder, reranker) if model is not None]
        self.models = {name: (model, name[len(model.name) + 1 :]) for model in served for name in model.names}
        if len(self.models) < sum(len(model.names) for model in served):
            raise ValueError(f"Two models are called {served[0].name}: give one of them another --name.")
        self.metrics = Metrics()
        self.batches = Batches(self.limits, self.metrics)
        self._keys = [key.encode() for key in keys]
        self._since = int(time.time())

    async def embeddings(self, form: EmbeddingsForm) -> Response:
        """Answer ``/v1/embeddings``."""
        embedder, way = self._model(form.model, Embedder, "gives vectors")
        if form.dimensions is not None and not 1 <= form.dimensions <= embedder.dimensions:
            said = f"'dimensions' is {shortened(form.dimensions)}: give a number from 1 to {embedder.dimensions}."
            raise RefusedError(400, said, param="dimensions")
        texts = [form.input] if isinstance(form.input, str) else form.input
        self._check_count(texts, "input")
        vectors, tokens = await self._run(embedder, way, texts)
        return await asyncio.to_thread(_embeddings_answer, form, embedder, vectors, tokens)

    async def rerank(self, form: RerankForm) -> Response:
        """Answer ``/rerank``."""
        reranker, _ = self._model(form.model, Reranker, "orders texts")
        self._check_count(form.documents, "documents")
        found, tokens = await self._run(reranker, "", reranker.items(form.query, form.documents))
        scores = reranker.scores(found)
        # Of equal scores the first comes first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: form.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if form.return_documents:
            for result in results:
                result["document"] = {"text": form.documents[result["index"]]}
        return _json({"model": form.model, "results": results, "usage": {"total_tokens": tokens}})

    def list_models(self) -> dict[str, Any]:
        """List the names that requests may give."""
        about = {"object": "model", "created": self._since, "owned_by": "st_reba"}
        return {"object": "list", "data": [{"id": name, **about} for name in self.models]}

    def show_metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        texts, tokens = self.batches.waiting()
        self.metrics.waiting_texts.set(texts)
        self.metrics.waiting_tokens.set(tokens)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def check_key(self, request: Request) -> None:
        """Refuse a request without one of the keys, in the same time for each key.

        Raises:
            RefusedError: If a request has none.
        """
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if self._keys and not (kind.lower() == "bearer" and any(found)):
            raise RefusedError(
                401,
                "This server asks for an API key, and the request has none that it knows: send "
                "'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )

    async def answer(
        self, request: Request, form: type[FormT], path: Callable[[FormT], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Return a path's answer to a request; its work is cancelled when the client leaves.

        Raises:
            ClientDisconnect: If the client leaves.
            RefusedError: If the body is too large, compressed or not of the form, or the path refuses it.
        """
        body = await self._body(request)
        if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            said = f"The request's body is in Content-Encoding {shortened(coding)}: send it as it is."
            raise RefusedError(415, said)
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
        """Return a model by its name, and the way that the name asks for."""
        model, way = self.models.get(name, (None, ""))
        if not isinstance(model, kind):
            there = ", ".join(f'"{other}"' for other, (its, _) in self.models.items() if isinstance(its, kind))
            said = f'There is no model "{shortened(name)}" here that {does}; there is {there or "none"}.'
            raise RefusedError(404, said, param="model", code="model_not_found")
        return model, way

    def _check_count(self, items: Sequence[Any], param: str) -> None:
        if len(items) > self.limits.inputs:
            said = f"'{param}' has {len(items)}, and a request may have {self.limits.inputs}: send several."
            raise RefusedError(400, said, param=param)

    async def _run(self, served: Embedder | Reranker, way: str, items: Sequence[Any]) -> tuple[list[Any], int]:
        """Tokenise items and have them run; return the results and the number of tokens."""
        sized: list[Sized] = []
        measure: Callable[..., list[Sized]] = served.measure
        with self.batches.reserved(served.guess(way, items)):
            for first in range(0, len(items), _AT_A_TIME):
                sized += await asyncio.to_thread(measure, way, items[first : first + _AT_A_TIME], first)
            run, texts, costs = served.ways[way].run, [each.item for each in sized], [each.cost for each in sized]
            found = await asyncio.wrap_future(self.batches.submit(run, texts, costs))
        tokens = sum(each.read for each in sized)
        self.metrics.tokens.inc(tokens)
        return found, tokens


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


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


class _Measuring:
    """Middleware that counts answers, around everything else."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette answers 500 outside of all middleware, if nothing else was sent.
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
    """Return the application of a server, whose thread runs while the application does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.batches.start()
        yield
        await asyncio.to_thread(server.batches.close)

    app = FastAPI(title="st_reba", version=__version__, lifespan=lifespan, openapi_url=None)
    guarded: Any = {"dependencies": [Depends(server.check_key)]}

    @app.post("/v1/embeddings", **guarded)
    async def embeddings(request: Request) -> Response:
        return await server.answer(request, EmbeddingsForm, server.embeddings)

    async def rerank(request: Request) -> Response:
        return await server.answer(request, RerankForm, server.rerank)

    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, **guarded)(rerank)
    app.get("/v1/models", **guarded)(server.list_models)
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
        return _json(RefusedError(error.status_code, f"{what}: {said}.").body, error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _json(RefusedError(500, "The server has failed; its log says how.").body, 500)

    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(_Measuring, metrics=server.metrics, paths=paths)
    return app


def bound(host: str, port: int) -> socket.socket:
    """Return a socket of an address, before a model is loaded; it does not listen yet.

    Args:
        host: A name or an address.
        port: 0: any free one.

    Raises:
        OSError: If the address is taken, or not of this machine.
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
    """Return the URL of a socket."""
    host, port, *_ = own.getsockname()
    return f"http://[{host}]:{port}" if own.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(server: Server, own: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or SIGINT; then answer the requests that have arrived, and return.

    Args:
        server: The server.
        own: Socket from :func:`bound`.
        started: Called when the socket listens.
    """
    config = uvicorn.Config(
        make_app(server), log_level="warning", access_log=False, server_header=False, lifespan="on", ws="none",
        limit_concurrency=CONNECTIONS, timeout_keep_alive=KEEP_ALIVE,
    )  # fmt: skip
    # Uvicorn raises the signal once more at its end, for the handler before: there is none.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # A client that connects from here on is answered.
    own.listen(config.backlog)
    started()
    uvicorn.Server(config).run(sockets=[own])
