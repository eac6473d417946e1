"""One thread that runs models, over batches made of whatever waits."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .forms import RefusedError

#: What is run together: items of one kind to as many results.
Run = Callable[[list[Any]], Sequence[Any]]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(4**power for power in range(1, 11))
_TEXTS = tuple(2**power for power in range(11))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What bounds the memory of a server, and how long a request may wait.

    Args:
        body_bytes: Of a request.
        inputs: Texts, or documents to order, of a request.
        batch_tokens: Of a batch, padding included: its texts times the longest one's tokens. A longer text runs alone.
        batch_texts: Of a batch.
        queue_tokens: That may wait. A request beyond that is refused, unless nothing waits.

    Raises:
        ValueError: If one is below 1.
    """

    body_bytes: int = 8 * 2**20
    inputs: int = 2048
    batch_tokens: int = 8192
    batch_texts: int = 256
    queue_tokens: int = 2**20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value}: give a whole number from 1.")


class Metrics:
    """What Prometheus is told of one server, in a registry of its own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("st_reba_requests", "Answers, by path and status.", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "st_reba_request_seconds", "From a request's head to its answer.", ["path"], buckets=_SECONDS, registry=own
        )
        self.tokens = Counter("st_reba_tokens", "Of texts that were read.", registry=own)
        self.left = Counter("st_reba_requests_left", "Requests whose client went away while they waited.", registry=own)
        self.batch_texts = Histogram("st_reba_batch_texts", "Of a batch.", buckets=_TEXTS, registry=own)
        self.batch_tokens = Histogram("st_reba_batch_tokens", "With padding.", buckets=_TOKENS, registry=own)
        self.batch_seconds = Histogram("st_reba_batch_seconds", "Of a batch.", buckets=_SECONDS, registry=own)
        self.waiting_texts = Gauge("st_reba_waiting_texts", "In the queue.", registry=own)
        self.waiting_tokens = Gauge("st_reba_waiting_tokens", "In the queue.", registry=own)


class Waiting:
    """Items that arrived together, of which some may have run.

    Attributes:
        result: Their results, in their order. To cancel it takes those that have not run out of the queue.
        left: Places of those that have not run, the longest first, so that neighbours are alike in length.
    """

    def __init__(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> None:
        self.run, self.items, self.tokens = run, items, tokens
        self.result: Future[list[Any]] = Future()
        self.left = deque(sorted(range(len(items)), key=lambda index: -tokens[index]))
        self.left_tokens = sum(tokens)
        self._found: dict[int, Any] = {}

    def take(self) -> tuple[Waiting, int]:
        """The next one's place."""
        index = self.left.popleft()
        self.left_tokens -= self.tokens[index]
        return self, index

    def put(self, index: int, found: Any) -> None:
        """One result; with the last one, the request is answered."""
        self._found[index] = found
        if len(self._found) == len(self.items):
            # A client may have gone in this moment.
            with suppress(InvalidStateError):
                self.result.set_result([self._found[place] for place in range(len(self.items))])

    def fail(self, error: RefusedError) -> None:
        """There is no result: what has not run need not."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)


class Batches:
    """A queue and the thread that empties it.

    A batch holds items of one kind, one of each request in turn, so that a request of few texts does not wait for one
    of many. While a batch runs, the next ones gather: nothing waits for a batch to fill.

    Args:
        limits: Of the queue and of a batch.
        metrics: Are told of each batch.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        #: The one whose turn it is first.
        self._queue: list[Waiting] = []
        self._changed = threading.Condition()
        self._closed = False
        self._reserved = 0
        self._tokens_per_second: float | None = None
        self._thread = threading.Thread(target=self._work, name="st_reba-model", daemon=True)

    def start(self) -> None:
        """Begin to run what waits."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether what is given is going to run."""
        return self._thread.is_alive() and not self._closed

    def waiting(self) -> tuple[int, int]:
        """Texts and tokens in the queue."""
        with self._changed:
            queue = self._waiting()
            return sum(len(own.left) for own in queue), self._reserved + sum(own.left_tokens for own in queue)

    def _waiting(self) -> list[Waiting]:
        """Requests with something to run, which have not failed and whose clients have not gone."""
        self._queue = [own for own in self._queue if own.left and not own.result.done()]
        return self._queue

    def submit(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> Future[list[Any]]:
        """Have items run.

        Args:
            run: What items are given to that may share a batch, in the model's thread.
            items: One or more.
            tokens: What each costs.

        Returns:
            Their results, in their order. If some fail, the refusal of one of them.

        Raises:
            RefusedError: If there is no room, or after :meth:`close`.
        """
        own = Waiting(run, items, tokens)
        with self._changed:
            if self._closed:
                raise RefusedError(503, "The server is being stopped: try another, or later.", retry_after=5)
            self._check_room(own.left_tokens)
            self._queue.append(own)
            self._changed.notify()
        return own.result

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Keep room in the queue for a request whose texts are being tokenised.

        Args:
            tokens: About how many it will have.

        Raises:
            RefusedError: If there is no room.
        """
        with self._changed:
            self._check_room(tokens)
            self._reserved += tokens
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= tokens

    def _check_room(self, tokens: int) -> None:
        """Refuse what is too much, unless nothing waits, and say when the work is done at the last batches' rate."""
        _, waiting = self.waiting()
        if waiting and waiting + tokens > self._limits.queue_tokens:
            rate = self._tokens_per_second
            seconds = 1 if not rate else min(60, max(1, math.ceil(waiting / rate)))
            said = f"The server has as much work as it takes: try again in {seconds} s."
            raise RefusedError(429, said, code="rate_limit_exceeded", retry_after=seconds)

    def close(self) -> None:
        """Close the queue, and wait until all that was taken has run."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            tokens = max(own.tokens[index] for own, index in batch) * len(batch)
            begun = time.perf_counter()
            found = self._run(batch)
            seconds = time.perf_counter() - begun
            rate, last = tokens / max(seconds, 1e-6), self._tokens_per_second
            self._tokens_per_second = rate if last is None else 0.8 * last + 0.2 * rate
            self._metrics.batch_texts.observe(len(batch))
            self._metrics.batch_tokens.observe(tokens)
            self._metrics.batch_seconds.observe(seconds)
            # Who has an answer finds its batch counted.
            for (own, index), result in zip(batch, found, strict=True):
                own.fail(result) if isinstance(result, RefusedError) else own.put(index, result)

    def _next(self) -> list[tuple[Waiting, int]]:
        """The next batch, when there is one; empty: there will be none."""
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
                batch.append(own.take())
                longest = together
                if own.left:
                    turns.append(own)
            # Who had no text in this batch comes first in the next one, so that kinds take turns, too.
            took = {id(own) for own, _ in batch}
            self._queue.sort(key=lambda own: id(own) in took)
        return batch

    def _run(self, batch: list[tuple[Waiting, int]]) -> list[Any]:
        """What a batch gives; if it fails, what its halves give, so that one item's failure is its own request's alone.

        Returns:
            Of each item its result, or why there is none.
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
            _log.exception("A text could not be run")
            said = f"The model could not run this ({type(error).__name__})."
            return [error if isinstance(error, RefusedError) else RefusedError(500, said)]
        return found
