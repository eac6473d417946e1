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
from typing import Any

from .limits import Limits
from .metrics import Metrics

#: What is run together: items of one kind to as many results.
Run = Callable[[list[Any]], Sequence[Any]]

_log = logging.getLogger(__name__)


class FullError(Exception):
    """The queue has no room.

    Args:
        seconds: About how long what waits will take.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__(f"about {seconds} s of work wait")
        self.seconds = seconds


class ClosedError(Exception):
    """Nothing is taken any more."""


class Waiting:
    """Items that arrived together, of which some may have run.

    Attributes:
        result: What becomes of them, in their order. To cancel it takes those that have not run out of the queue.
        tokens: Of those that have not run.
    """

    def __init__(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> None:
        self.run = run
        self.result: Future[list[Any]] = Future()
        self.tokens = sum(tokens)
        self._items, self._tokens = items, tokens
        # The longest first, so that neighbours are alike in length.
        self._left = deque(sorted(range(len(items)), key=lambda index: -tokens[index]))
        self._missing = len(items)
        self._found: list[Any] = [None] * len(items)

    def __len__(self) -> int:
        return len(self._left)

    @property
    def next_tokens(self) -> int:
        """Of the next one."""
        return self._tokens[self._left[0]]

    def take(self) -> tuple[Waiting, int]:
        """The next one."""
        index = self._left.popleft()
        self.tokens -= self._tokens[index]
        return self, index

    def item(self, index: int) -> Any:
        """As it was given."""
        return self._items[index]

    def tokens_of(self, index: int) -> int:
        """What it costs."""
        return self._tokens[index]

    def put(self, index: int, found: Any) -> None:
        """One result; with the last, all are told."""
        self._found[index] = found
        self._missing -= 1
        if not self._missing:
            # A client may have gone in this moment.
            with suppress(InvalidStateError):
                self.result.set_result(self._found)

    def fail(self, error: BaseException) -> None:
        """There is no result: what has not run need not."""
        self._left.clear()
        self.tokens = 0
        if not isinstance(error, Exception):
            # SystemExit would end whoever waits for the result.
            error = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(InvalidStateError):
            self.result.set_exception(error)


class Batches:
    """A queue and the thread that empties it.

    A batch holds items of one kind, one of each request in turn, so that a request of few texts does not wait for one
    of many. Kinds take turns, too. While a batch runs, the next ones gather: nothing waits for a batch to fill.

    Args:
        limits: Of the queue and of a batch.
        metrics: Are told of each batch.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics = limits, metrics
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._reserved = 0
        self._tokens_per_second: float | None = None
        self._thread = threading.Thread(target=self._work, name="st_reba-model", daemon=True)
        metrics.watch(lambda: sum(map(len, self._listed())), self._waiting_tokens)

    def start(self) -> None:
        """Begin to run what waits."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether what is given is going to run."""
        return self._thread.is_alive() and not self._closed

    def submit(self, run: Run, items: Sequence[Any], tokens: Sequence[int]) -> Future[list[Any]]:
        """Have items run.

        Args:
            run: What items are given to that may share a batch, in the model's thread.
            items: Any number of them.
            tokens: What each costs.

        Returns:
            Their results, in their order. If some fail, the error of one of them.

        Raises:
            FullError: If there is no room.
            ClosedError: After :meth:`close`.
        """
        own = Waiting(run, items, tokens)
        with self._changed:
            if self._closed:
                raise ClosedError
            self._check_room(own.tokens)
            if not own:
                own.result.set_result([])
                return own.result
            self._waiting.append(own)
            self._changed.notify()
        own.result.add_done_callback(lambda result: self._withdraw(own) if result.cancelled() else None)
        return own.result

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Keep room in the queue for a request whose texts are being tokenised.

        Args:
            tokens: About how many it will have.

        Raises:
            FullError: If there is no room.
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
        """Refuse what is too much, unless nothing waits.

        Raises:
            FullError: So.
        """
        waiting = self._waiting_tokens()
        if waiting and waiting + tokens > self._limits.queue_tokens:
            raise FullError(self._seconds(waiting))

    def _waiting_tokens(self) -> int:
        with self._changed:
            return self._reserved + sum(own.tokens for own in self._waiting)

    def close(self) -> None:
        """Take nothing more, and wait until all that was taken has run."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _listed(self) -> list[Waiting]:
        with self._changed:
            return list(self._waiting)

    def _seconds(self, tokens: int) -> int:
        rate = self._tokens_per_second
        return 1 if not rate else min(60, max(1, math.ceil(tokens / rate)))

    def _withdraw(self, own: Waiting) -> None:
        with self._changed, suppress(ValueError):
            self._waiting.remove(own)

    def _work(self) -> None:
        while batch := self._next():
            # Clients may have gone.
            batch = [(own, index) for own, index in batch if not own.result.done()]
            if not batch:
                continue
            tokens = max(own.tokens_of(index) for own, index in batch) * len(batch)
            begun = time.perf_counter()
            self._run(batch)
            seconds = time.perf_counter() - begun
            rate = tokens / max(seconds, 1e-6)
            last = self._tokens_per_second
            self._tokens_per_second = rate if last is None else 0.8 * last + 0.2 * rate
            self._metrics.batch_texts.observe(len(batch))
            self._metrics.batch_tokens.observe(tokens)
            self._metrics.batch_seconds.observe(seconds)

    def _next(self) -> list[tuple[Waiting, int]]:
        """The next batch, when there is one; empty: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return []
            run = self._waiting[0].run
            chosen = [own for own in self._waiting if own.run is run]
            batch = self._gathered(deque(chosen))
            touched = {id(own) for own, _ in batch}
            rest = [own for own in self._waiting if id(own) not in touched]
            self._waiting = deque([*rest, *(own for own in chosen if id(own) in touched and own)])
            return batch

    def _gathered(self, fellows: deque[Waiting]) -> list[tuple[Waiting, int]]:
        batch: list[tuple[Waiting, int]] = []
        longest = 0
        while fellows and len(batch) < self._limits.batch_texts:
            own = fellows.popleft()
            together = max(longest, own.next_tokens)
            if batch and together * (len(batch) + 1) > self._limits.batch_tokens:
                continue
            batch.append(own.take())
            longest = together
            if own:
                fellows.append(own)
        return batch

    def _run(self, batch: list[tuple[Waiting, int]]) -> None:
        """Run a batch; if that fails, its halves, so that one item's failure is its own request's alone."""
        try:
            found = list(batch[0][0].run([own.item(index) for own, index in batch]))
            if len(found) != len(batch):
                raise ValueError(f"The model gave {len(found)} results for {len(batch)} texts.")
        # A panic in tokenizers is no Exception. Whatever it is, the thread goes on: everyone else waits for it.
        except BaseException as error:
            if len(batch) == 1:
                _log.exception("A text could not be run")
                batch[0][0].fail(error)
                self._withdraw(batch[0][0])
                return
            middle = len(batch) // 2
            self._run(batch[:middle])
            self._run(batch[middle:])
            return
        for (own, index), result in zip(batch, found, strict=True):
            own.put(index, result)
