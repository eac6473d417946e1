"""Requests: their forms, errors and limits, and the queue and thread that run them in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

#: OpenAI's types of errors by status; the default is "invalid_request_error".
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


@dataclass(eq=False)
class RefusedError(Exception):
    """Error of one request.

    Args:
        status: HTTP status.
        message: Message with the value, the allowed values and a remedy.
        param: Field of the request.
        code: OpenAI's code of the error.
        retry_after: Seconds before the next attempt.
    """

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """Body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, for retries and authentication."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def shorten(value: object, length: int = 60) -> str:
    """Return the beginning of a value, for a message."""
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _has_text(document: dict[str, Any]) -> str:
    """Return the text of a document in Jina's format."""
    if not isinstance(text := document.get("text"), str):
        raise ValueError("a document without a text")
    return text


# An empty text has no vector.
Text = Annotated[str, Field(min_length=1)]


class Form(BaseModel):
    """Base of the bodies of requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EmbeddingsForm(Form):
    """Body of ``/v1/embeddings``."""

    model: str
    # fail_fast: a list may have a million wrong elements.
    input: Text | Annotated[list[Text], Field(fail_fast=True, min_length=1)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class RerankForm(Form):
    """Body of ``/rerank``, in the format of Cohere and Jina."""

    model: str
    query: Text
    documents: Annotated[
        list[str | Annotated[dict[str, Any], AfterValidator(_has_text)]], Field(fail_fast=True, min_length=1)
    ]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


FormT = TypeVar("FormT", bound=Form)

#: Messages that replace pydantic's, which are about Python types.
_ALLOWED = {
    "input": "give a text, or a list of texts; token ids are not read (LangChain: check_embedding_ctx_length=False)",
    "documents": "give a list of texts, or of objects with a text",
    "messages": "give a list of objects with a role and a content",
}


def parse(form: type[FormT], body: bytes) -> FormT:
    """Parse and check the body of a request.

    Raises:
        RefusedError: If it is not a JSON object with the fields of the form.
    """
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    # Unknown fields come last, but may be misspelt known fields, which would be reported as missing.
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    kind, param = first["type"], shorten(first["loc"][0]) if first["loc"] else None
    if param is None:
        raise RefusedError(400, f"The body is not a JSON object: {shorten(first['msg'], 200)}.")
    if kind == "extra_forbidden":
        raise RefusedError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        raise RefusedError(400, message, param=param, code="missing_required_parameter")
    if empty := next((entry["loc"] for entry in errors if entry["type"] == "string_too_short"), None):
        index = f"[{empty[-1]}]" if isinstance(empty[-1], int) else ""
        raise RefusedError(400, f"'{param}'{index} is empty: give a text of at least one character.", param=param)
    raise RefusedError(400, f"'{param}': {_ALLOWED.get(param, first['msg'].lower())}.", param=param)


# Queue

#: Function that runs a batch of items and returns one result for each.
Run = Callable[[list[Any]], Sequence[Any]]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(4**power for power in range(1, 11))
_TEXTS = tuple(2**power for power in range(11))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits of requests, batches and the queue.

    Args:
        body_bytes: Maximum bytes per request.
        inputs: Maximum texts, or documents to rerank, per request.
        batch_tokens: Maximum tokens per batch, padding included: number of texts times tokens of the longest. A longer
            text runs alone.
        batch_texts: Maximum texts per batch.
        queue_tokens: Maximum tokens waiting or running. Further requests are refused, unless the queue is empty.
    """

    body_bytes: int = 8 * 2**20
    inputs: int = 2048
    batch_tokens: int = 8192
    batch_texts: int = 256
    queue_tokens: int = 2**20


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        store = self.registry = CollectorRegistry()
        self.requests = Counter("st_reba_requests", "Answers by path and status.", ["path", "status"], registry=store)
        self.seconds = Histogram(
            "st_reba_request_seconds", "Seconds from request to answer.", ["path"], buckets=_SECONDS, registry=store
        )
        self.tokens = Counter("st_reba_tokens", "Tokens processed.", registry=store)
        self.left = Counter("st_reba_requests_left", "Requests whose client disconnected early.", registry=store)
        self.batch_texts = Histogram("st_reba_batch_texts", "Texts per batch.", buckets=_TEXTS, registry=store)
        self.batch_tokens = Histogram("st_reba_batch_tokens", "Tokens per batch.", buckets=_TOKENS, registry=store)
        self.batch_seconds = Histogram("st_reba_batch_seconds", "Seconds per batch.", buckets=_SECONDS, registry=store)
        self.waiting_texts = Gauge("st_reba_waiting_texts", "Texts waiting.", registry=store)
        self.waiting_tokens = Gauge("st_reba_waiting_tokens", "Tokens waiting or running.", registry=store)


class QueuedRequest:
    """Items of one request.

    Attributes:
        result: Results in the order of the items. Cancelling it removes the remaining items from the queue.
        remaining: Indices of the items that have not run, the longest first, so that batches have similar lengths.
    """

    def __init__(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> None:
        self.run, self.items, self.tokens = run, items, tokens
        self.result: Future[list[Any]] = Future()
        self.remaining = deque(sorted(range(len(items)), key=lambda index: -tokens[index]))
        self._results: dict[int, Any] = {}

    def set_result(self, index: int, result: Any) -> None:
        """Set the result of an item, or its error; the last result answers the request."""
        self._results[index] = result
        # A client may have disconnected meanwhile.
        with suppress(InvalidStateError):
            if isinstance(result, RefusedError):
                self.result.set_exception(result)
            elif len(self._results) == len(self.items):
                self.result.set_result([self._results[index] for index in range(len(self.items))])


class Batches:
    """Queue of requests, and the thread that runs them.

    A batch has items with the same function, taken from requests in turn, so that small requests do not wait for large
    ones. A batch starts as soon as the last one has ended, even if it is not full.

    Args:
        limits: Limits of the queue and of batches.
        metrics: Metrics of batches.
        may_start: Event without which no batch starts; None: batches always start.
    """

    def __init__(self, limits: Limits, metrics: Metrics, may_start: threading.Event | None = None) -> None:
        self._limits, self._metrics, self._may_start = limits, metrics, may_start
        #: Requests in the order of their turns.
        self._queue: list[QueuedRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._reserved = 0
        self._thread = threading.Thread(target=self._work, name="st_reba-model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread runs new items."""
        return self._thread.is_alive() and not self._closed

    def waiting(self) -> tuple[int, int]:
        """Return the number of texts waiting, and of tokens waiting or running."""
        with self._changed:
            return sum(len(request.remaining) for request in self._requests()), self._reserved

    def _requests(self) -> list[QueuedRequest]:
        """Return the requests with items to run, after removing those that failed or were cancelled."""
        self._queue = [request for request in self._queue if request.remaining and not request.result.done()]
        return self._queue

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Reserve room in the queue for a request, from before its texts are tokenized to its end.

        Args:
            tokens: Estimated number of tokens.

        Raises:
            RefusedError: If there is no room.
        """
        with self._changed:
            if self._reserved and self._reserved + tokens > self._limits.queue_tokens:
                message = "The server's queue is full: try again in a second."
                raise RefusedError(429, message, code="rate_limit_exceeded", retry_after=1)
            self._reserved += tokens
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= tokens

    def submit(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> Future[list[Any]]:
        """Queue items.

        Args:
            run: Function of the items, called in the thread.
            items: One or more items; items with the same function may share a batch.
            tokens: Number of tokens of each item.

        Returns:
            Future of the results, in the order of the items. If items fail, it has the error of one of them.

        Raises:
            RefusedError: After :meth:`close`.
        """
        request = QueuedRequest(run, items, tokens)
        with self._changed:
            if self._closed:
                raise RefusedError(503, "The server is stopping: try another one, or later.", retry_after=5)
            self._queue.append(request)
            self._changed.notify()
        return request.result

    def close(self) -> None:
        """Close the queue, and wait until all queued items have run."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            if self._may_start is not None:
                self._may_start.wait()
            start = time.perf_counter()
            results = self._run(batch)
            self._metrics.batch_seconds.observe(time.perf_counter() - start)
            self._metrics.batch_texts.observe(len(batch))
            self._metrics.batch_tokens.observe(max(request.tokens[index] for request, index in batch) * len(batch))
            # Metrics are updated first, so that a client with an answer finds its batch counted.
            for (request, index), result in zip(batch, results, strict=True):
                request.set_result(index, result)

    def _next(self) -> list[tuple[QueuedRequest, int]]:
        """Wait for the next batch and return it; it is empty after :meth:`close`."""
        batch: list[tuple[QueuedRequest, int]] = []
        longest = 0
        with self._changed:
            self._changed.wait_for(lambda: self._requests() or self._closed)
            turns = deque(request for request in self._queue if request.run == self._queue[0].run)
            while turns and len(batch) < self._limits.batch_texts:
                request = turns.popleft()
                length = max(longest, request.tokens[request.remaining[0]])
                if batch and length * (len(batch) + 1) > self._limits.batch_tokens:
                    continue
                batch.append((request, request.remaining.popleft()))
                longest = length
                if request.remaining:
                    turns.append(request)
            # Requests without a text in this batch come first in the next one, so that functions take turns, too.
            in_batch = {id(request) for request, _ in batch}
            self._queue.sort(key=lambda request: id(request) in in_batch)
        return batch

    def _run(self, batch: list[tuple[QueuedRequest, int]]) -> list[Any]:
        """Run a batch; if it fails, run its halves, so that a failing item affects its own request alone.

        Returns:
            The result or the error of each item.
        """
        try:
            results = list(batch[0][0].run([request.items[index] for request, index in batch]))
            if len(results) != len(batch):
                raise ValueError(f"The model returned {len(results)} results for {len(batch)} texts.")
        # A panic in tokenizers is a BaseException. The thread must survive any error.
        except BaseException as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                return [*self._run(batch[:middle]), *self._run(batch[middle:])]
            if isinstance(error, RefusedError):
                return [error]
            _log.exception("A text could not be run")
            return [RefusedError(500, f"The model could not run this ({type(error).__name__}).")]
        return results
