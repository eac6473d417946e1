"""One thread that runs models, over batches of the items that wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .forms import RefusedError

#: Runs items of one kind together, to as many results.
Run = Callable[[list[Any]], Sequence[Any]]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(4**power for power in range(1, 11))
_TEXTS = tuple(2**power for power in range(11))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of a server's memory, and of the time that a request may wait.

    Args:
        body_bytes: Bytes of a request.
        inputs: Texts, or documents to order, of a request.
        batch_tokens: Tokens of a batch, padding included: its texts times the longest one's tokens. A longer text runs
            alone.
        batch_texts: Texts of a batch.
        queue_tokens: Tokens that wait or run. A request beyond that is refused, unless nothing waits.
    """

    body_bytes: int = 8 * 2**20
    inputs: int = 2048
    batch_tokens: int = 8192
    batch_texts: int = 256
    queue_tokens: int = 2**20


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("st_reba_requests", "Answers, by path and status.", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "st_reba_request_seconds", "Seconds from request to answer.", ["path"], buckets=_SECONDS, registry=own
        )
        self.tokens = Counter("st_reba_tokens", "Tokens processed.", registry=own)
        self.left = Counter("st_reba_requests_left", "Requests whose client left while they waited.", registry=own)
        self.batch_texts = Histogram("st_reba_batch_texts", "Texts per batch.", buckets=_TEXTS, registry=own)
        self.batch_tokens = Histogram("st_reba_batch_tokens", "Tokens per batch.", buckets=_TOKENS, registry=own)
        self.batch_seconds = Histogram("st_reba_batch_seconds", "Seconds per batch.", buckets=_SECONDS, registry=own)
        self.waiting_texts = Gauge("st_reba_waiting_texts", "Texts waiting.", registry=own)
        self.waiting_tokens = Gauge("st_reba_waiting_tokens", "Tokens waiting or running.", registry=own)


class Waiting:
    """Items of one request, of which some may have run.

    Attributes:
        result: Results in the order of the items. Cancelling it takes what has not run out of the queue.
        left: Indices of the items that have not run, the longest first, so that neighbours are alike in length.
    """

    def __init__(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> None:
        self.run, self.items, self.tokens = run, items, tokens
        self.result: Future[list[Any]] = Future()
        self.left = deque(sorted(range(len(items)), key=lambda index: -tokens[index]))
        self._found: dict[int, Any] = {}

    def put(self, index: int, found: Any) -> None:
        """Take one item's result, or why there is none; the last result answers the request."""
        self._found[index] = found
        # A client may have left in this moment.
        with suppress(InvalidStateError):
            if isinstance(found, RefusedError):
                self.result.set_exception(found)
            elif len(self._found) == len(self.items):
                self.result.set_result([self._found[place] for place in range(len(self.items))])


class Batches:
    """A queue and the thread that empties it.

    A batch holds items of one kind, one of each request in turn, so that a request of few texts does not wait for one
    of many. While a batch runs, the next ones gather: nothing waits for a batch to fill.

    Args:
        limits: Limits of the queue and of a batch.
        metrics: Metrics of batches.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        #: The request whose turn it is first.
        self._queue: list[Waiting] = []
        self._changed = threading.Condition()
        self._closed = False
        self._reserved = 0
        self._thread = threading.Thread(target=self._work, name="st_reba-model", daemon=True)

    def start(self) -> None:
        """Begin to run what waits."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether new items will run."""
        return self._thread.is_alive() and not self._closed

    def waiting(self) -> tuple[int, int]:
        """Return the numbers of texts that wait, and of tokens that wait or run."""
        with self._changed:
            return sum(len(own.left) for own in self._waiting()), self._reserved

    def _waiting(self) -> list[Waiting]:
        """Return the requests with items to run, which have not failed and whose clients have not left."""
        self._queue = [own for own in self._queue if own.left and not own.result.done()]
        return self._queue

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Keep room in the queue for a request, from before its texts are tokenised to its end.

        Args:
            tokens: Estimated number of its tokens.

        Raises:
            RefusedError: If there is no room.
        """
        with self._changed:
            if self._reserved and self._reserved + tokens > self._limits.queue_tokens:
                message = "The server has as much work as it takes: try again in a second."
                raise RefusedError(429, message, code="rate_limit_exceeded", retry_after=1)
            self._reserved += tokens
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= tokens

    def submit(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> Future[list[Any]]:
        """Have items run.

        Args:
            run: Function of the items, which runs in the model's thread.
            items: One or more; those with the same function may share a batch.
            tokens: Cost of each.

        Returns:
            Their results, in their order. If some fail, the refusal of one of them.

        Raises:
            RefusedError: After :meth:`close`.
        """
        own = Waiting(run, items, tokens)
        with self._changed:
            if self._closed:
                raise RefusedError(503, "The server is being stopped: try another, or later.", retry_after=5)
            self._queue.append(own)
            self._changed.notify()
        return own.result

    def close(self) -> None:
        """Close the queue, and wait until all that was taken has run."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            begun = time.perf_counter()
            found = self._run(batch)
            self._metrics.batch_seconds.observe(time.perf_counter() - begun)
            self._metrics.batch_texts.observe(len(batch))
            self._metrics.batch_tokens.observe(max(own.tokens[index] for own, index in batch) * len(batch))
            # A client that has an answer finds its batch counted.
            for (own, index), result in zip(batch, found, strict=True):
                own.put(index, result)

    def _next(self) -> list[tuple[Waiting, int]]:
        """Wait for the next batch and return it; empty: there will be none."""
        batch: list[tuple[Waiting, int]] = []
        longest = 0
        with self._changed:
            self._changed.wait_for(lambda: self._waiting() or self._closed)
            turns = deque(own for own in self._queue if own.run == self._queue[0].run)
            while turns and len(batch) < self._limits.batch_texts:
                own = turns.popleft()
                together = max(longest, own.tokens[own.left[0]])
                if batch and together * (len(batch) + 1) > self._limits.batch_tokens:
                    continue
                batch.append((own, own.left.popleft()))
                longest = together
                if own.left:
                    turns.append(own)
            # Requests without a text in this batch come first in the next one, so that kinds take turns, too.
            took = {id(own) for own, _ in batch}
            self._queue.sort(key=lambda own: id(own) in took)
        return batch

    def _run(self, batch: list[tuple[Waiting, int]]) -> list[Any]:
        """Run a batch; if it fails, run its halves, so that one item's failure is its own request's alone.

        Returns:
            The result of each item, or why there is none.
        """
        try:
            found = list(batch[0][0].run([own.items[index] for own, index in batch]))
            if len(found) != len(batch):
                raise ValueError(f"The model gave {len(found)} results for {len(batch)} texts.")
        # A panic in tokenizers is no Exception. Whatever it is, the thread goes on: everyone else waits for it.
        except BaseException as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                return [*self._run(batch[:middle]), *self._run(batch[middle:])]
            if isinstance(error, RefusedError):
                return [error]
            _log.exception("A text could not be run")
            return [RefusedError(500, f"The model could not run this ({type(error).__name__}).")]
        return found
