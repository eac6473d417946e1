"""Processes of this machine that hold a model each, and none of which outlives the process that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from operator import methodcaller
from types import TracebackType

from .work import ChunkWorker, Plan

_PATIENCE_S = 5.0


class WorkerProcess:
    """A process with a model on a device; it does one thing at a time. A context: at its end the process is gone.

    Args:
        plan: The job.
        device: Where its model is.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        self._device = device
        # A fresh interpreter: CUDA, and threads that hold locks, do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(plan, device, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()

    def begin(self, task: Callable[[ChunkWorker], None]) -> None:
        """Give it something to do; it must be picklable."""
        try:
            self.connection.send(task)
        except OSError:
            raise self._gone() from None

    def finish(self) -> None:
        """Wait until that is done.

        Raises:
            ChildProcessError: If the process has died.
            Exception: What was raised there.
        """
        try:
            error = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if error is not None:
            raise error

    def _gone(self) -> ChildProcessError:
        self._process.join(_PATIENCE_S)
        return ChildProcessError(
            f"The process on {self._device} has died (exit code {self._process.exitcode}); it may have run out of "
            "memory. What is done is kept, and the same command goes on."
        )


def share(workers: Sequence[WorkerProcess], numbers: Sequence[int]) -> Iterator[int]:
    """Each chunk by whichever worker is free; yields the number of each that is done."""
    left = iter(numbers)
    busy: dict[object, tuple[WorkerProcess, int]] = {}

    def next_for(worker: WorkerProcess) -> None:
        number = next(left, None)
        if number is not None:
            worker.begin(methodcaller("encode", number))
            busy[worker.connection] = worker, number

    for worker in workers:
        next_for(worker)
    while busy:
        for connection in wait([worker.connection for worker, _ in busy.values()]):
            worker, number = busy.pop(connection)
            worker.finish()
            next_for(worker)
            yield number


def _serve(plan: Plan, device: str, connection: Connection) -> None:
    """What a worker process does: one task after another, until nobody is left to give any."""
    _end_with_parent()
    # Ctrl-C reaches every process of a terminal: the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker: ChunkWorker | None = None
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if worker is None:
                worker = ChunkWorker(plan, plan.encoder.load(device))
            task(worker)
        except Exception as error:
            connection.send(_portable(error))
        else:
            connection.send(None)


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that ended, and whatever this one is at."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("This process was started by no other.")

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _portable(error: Exception) -> Exception:
    """The same for another process: what a user can act on is a sentence; anything else keeps its trace, as text."""
    for kind in (ValueError, ImportError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError("".join(traceback.format_exception(type(error), error, error.__traceback__)))
