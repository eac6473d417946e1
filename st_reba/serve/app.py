"""HTTP server: paths for embedding, reranking, health and metrics, and the process."""

from __future__ import annotations

import asyncio
import base64
import hmac
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..version import __version__
from .models import Embedder, Reranker, Served, SizedItem
from .requests import Batches, EmbeddingsForm, FormT, Limits, Metrics, RefusedError, RerankForm, parse, shorten

if TYPE_CHECKING:
    # It needs another extra.
    from .chat import Chat

T = TypeVar("T")

#: Maximum number of open connections; uvicorn answers further ones with 503. Most systems allow 1024 open files.
CONNECTIONS = 768
#: Seconds before an idle connection is closed.
KEEP_ALIVE = 30
#: Factor of the body limit up to which bodies are received and dropped, so that clients can read the error.
_DROP_FACTOR = 8
#: Number of texts to tokenize at a time, so that requests take turns.
_TOKENIZED_TEXTS = 64
_CLIENT_LEFT = 499


class Server:
    """Models, their queue, and the handlers of requests.

    Args:
        embedder: Model of ``/v1/embeddings``.
        reranker: Model of ``/rerank``.
        limits: Limits of requests and the queue.
        keys: API keys, one of which a request must have; empty: no key is needed.
        chat: Chat of the embedder's language model.

    Raises:
        ValueError: If both models have the same name.
    """

    def __init__(
        self,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        chat: Chat | None = None,
    ) -> None:
        self.limits, self.chat = limits or Limits(), chat
        models = [model for model in (embedder, reranker) if model is not None]
        self.models = {name: (model, mode) for model in models for name, mode in model.names.items()}
        if len(self.models) < sum(len(model.names) for model in models):
            raise ValueError(f"Both models have the name {models[0].name}: give another --model-name.")
        self.metrics = Metrics()
        self.batches = Batches(self.limits, self.metrics, None if chat is None else chat.idle)
        self._keys = [key.encode() for key in keys]
        self._created = int(time.time())

    async def embeddings(self, form: EmbeddingsForm) -> Response:
        """Answer ``/v1/embeddings``."""
        embedder, mode = self._model(form.model, Embedder, "embeds texts")
        if form.dimensions is not None and not 1 <= form.dimensions <= embedder.dimensions:
            message = f"'dimensions' is {shorten(form.dimensions)}: give a number from 1 to {embedder.dimensions}."
            raise RefusedError(400, message, param="dimensions")
        texts = [form.input] if isinstance(form.input, str) else form.input
        self._check_count(texts, "input")
        vectors, tokens = await self._run(embedder, mode, texts)
        return await asyncio.to_thread(_embeddings_answer, form, embedder, vectors, tokens)

    async def rerank(self, form: RerankForm) -> Response:
        """Answer ``/rerank``."""
        reranker, _ = self._model(form.model, Reranker, "reranks texts")
        self._check_count(form.documents, "documents")
        items = reranker.items(form.query, form.documents)
        scores_of_items, tokens = await self._run(reranker, "", items)
        # An item has one document or all of them.
        scores = np.ravel(scores_of_items).tolist()
        # Stable: equal scores keep the order of the documents.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: form.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if form.return_documents:
            for result in results:
                result["document"] = {"text": form.documents[result["index"]]}
        return _json({"model": form.model, "results": results, "usage": {"total_tokens": tokens}})

    def list_models(self) -> dict[str, Any]:
        """List the names of models in requests."""
        fields = {"object": "model", "created": self._created, "owned_by": "st_reba"}
        return {"object": "list", "data": [{"id": name, **fields} for name in self.models]}

    def show_metrics(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        texts, tokens = self.batches.waiting()
        self.metrics.waiting_texts.set(texts)
        self.metrics.waiting_tokens.set(tokens)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def check_key(self, request: Request) -> None:
        """Check that a request has one of the keys, in constant time.

        Raises:
            RefusedError: If it has none.
        """
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(sent.strip().encode(), key) for key in self._keys]
        if self._keys and not (kind.lower() == "bearer" and any(matches)):
            message = "The request has no valid API key. Send 'Authorization: Bearer KEY'."
            raise RefusedError(401, message, code="invalid_api_key")

    async def answer(
        self, request: Request, form: type[FormT], path: Callable[[FormT], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Return a path's answer to a request; cancel its work if the client disconnects.

        Raises:
            ClientDisconnect: If the client disconnects.
            RefusedError: If the body is too large, compressed or not of the form, or the path refuses it.
        """
        body = await self._body(request)
        if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            raise RefusedError(415, f"The body has the Content-Encoding {shorten(coding)}: send it uncompressed.")
        # Parsing a large body would block the event loop.
        result = asyncio.ensure_future(path(await asyncio.to_thread(parse, form, body)))
        disconnected = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((result, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            self.metrics.left.inc()
            raise ClientDisconnect
        finally:
            result.cancel()
            disconnected.cancel()

    async def _body(self, request: Request) -> bytes:
        limit, body, size = self.limits.body_bytes, bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                body += part
            elif size > _DROP_FACTOR * limit:
                break
        if size > limit:
            raise RefusedError(413, f"The body is larger than the limit of {limit:,} bytes: send several requests.")
        return bytes(body)

    def _model(self, name: str, kind: type[T], task: str) -> tuple[T, str]:
        """Return a model and a mode by the name in a request."""
        model, mode = self.models.get(name, (None, ""))
        if not isinstance(model, kind):
            names = ", ".join(f'"{other}"' for other, (served, _) in self.models.items() if isinstance(served, kind))
            message = f'There is no model "{shorten(name)}" here that {task}{f": give {names}" if names else ""}.'
            raise RefusedError(404, message, param="model", code="model_not_found")
        return model, mode

    def _check_count(self, items: Sequence[Any], param: str) -> None:
        if len(items) > self.limits.inputs:
            message = f"'{param}' has {len(items)} entries; the limit is {self.limits.inputs}: send several requests."
            raise RefusedError(400, message, param=param)

    async def _run(self, served: Served, mode: str, items: Sequence[Any]) -> tuple[list[Any], int]:
        """Tokenize items and run them; return the results and the number of tokens."""
        sized: list[SizedItem] = []
        with self.batches.reserved(served.estimate(mode, items)):
            for first in range(0, len(items), _TOKENIZED_TEXTS):
                part = items[first : first + _TOKENIZED_TEXTS]
                sized += await asyncio.to_thread(served.measure, mode, part, first)
            cut, costs = [entry.item for entry in sized], [entry.cost for entry in sized]
            results = await asyncio.wrap_future(self.batches.submit(served.modes[mode].run, cut, costs))
        tokens = sum(entry.tokens for entry in sized)
        self.metrics.tokens.inc(tokens)
        return results, tokens


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _embeddings_answer(
    form: EmbeddingsForm, embedder: Embedder, vectors: Sequence[np.ndarray], tokens: int
) -> Response:
    data = []
    for index, full in enumerate(vectors):
        vector = embedder.truncate_vector(full, form.dimensions)
        if form.encoding_format == "base64":
            embedding: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        else:
            embedding = vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": form.model, "usage": usage})


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def make_app(server: Server) -> FastAPI:
    """Return the application of a server, which starts and closes the server's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.batches.start()
        yield
        await asyncio.to_thread(server.batches.close)

    app = FastAPI(title="st_reba", version=__version__, lifespan=lifespan, openapi_url=None)
    guarded: Any = {"dependencies": [Depends(server.check_key)]}

    def post(path: str, form: Any, answer: Callable[[Any], Coroutine[Any, Any, Response]]) -> None:
        @app.post(path, **guarded)
        async def handle(request: Request) -> Response:
            return await server.answer(request, form, answer)

    post("/v1/embeddings", EmbeddingsForm, server.embeddings)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        post(path, RerankForm, server.rerank)
    if server.chat is not None:
        for path, form in server.chat.forms.items():
            post(path, form, server.chat.answer)
    app.get("/v1/models", **guarded)(server.list_models)
    app.get("/metrics", **guarded)(server.show_metrics)

    @app.get("/health")
    async def health() -> Response:
        running = server.batches.running
        return _json({"status": "ok" if running else "stopped"}, 200 if running else 503)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=_CLIENT_LEFT)
        if isinstance(error, HTTPException):
            reasons = {404: "there is no such path", 405: "the path has another method"}
            reason = reasons.get(error.status_code, error.detail)
            error = RefusedError(error.status_code, f"{request.method} {shorten(request.url.path)}: {reason}.")
        if not isinstance(error, RefusedError):
            error = RefusedError(500, "The server failed. See its log.")
        return _json(error.body, error.status, error.headers)

    for kind in (RefusedError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, failed)
    paths = {route.path for route in app.routes if hasattr(route, "path")}

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        # Starlette answers 500 outside of all middleware if a handler fails.
        start, status = time.perf_counter(), 500
        path = request.url.path if request.url.path in paths else "other"
        try:
            response = await call_next(request)
            status = response.status_code
            return response
        finally:
            server.metrics.requests.labels(path, str(status)).inc()
            server.metrics.seconds.labels(path).observe(time.perf_counter() - start)

    return app


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not listening yet, so that an address is checked before a model is loaded.

    Args:
        host: Name or address.
        port: Port; 0: any free port.

    Raises:
        OSError: If the address is in use, or not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} cannot be used ({error.strerror or error}): give an address of this machine "
            "and a free port."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(server: Server, listener: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or SIGINT, and those that have arrived by then.

    Args:
        server: The server.
        listener: Socket from :func:`bind`.
        started: Called when the socket listens.
    """
    running = uvicorn.Server(uvicorn.Config(
        make_app(server), log_level="warning", access_log=False, server_header=False, lifespan="on", ws="none",
        limit_concurrency=CONNECTIONS, timeout_keep_alive=KEEP_ALIVE,
    ))  # fmt: skip
    # A signal may come before uvicorn handles it, and uvicorn raises it again at its end, for the previous handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, running.handle_exit)
    # Clients can connect from here on.
    listener.listen(running.config.backlog)
    started()
    running.run(sockets=[listener])
