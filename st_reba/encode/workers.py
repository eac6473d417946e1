"""Processes of this machine that hold a model each, and none of which outlives the process that started it."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from operator import methodcaller
from types import TracebackType
from typing import Any, NamedTuple

from .work import ChunkWorker, OnTexts, Plan

_PATIENCE_S = 5.0

# What a worker process runs first. Nothing of this package may be imported before: that takes seconds, and a process
# whose parent is killed meanwhile would live on for as long.
_BEGIN = """
import os, pickle, signal, threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

def end_with_parent():
    wait([parent_process().sentinel])
    os._exit(1)

# Ctrl-C reaches every process of a terminal: the parent ends its workers itself.
signal.signal(signal.SIGINT, signal.SIG_IGN)
threading.Thread(target=end_with_parent, daemon=True).start()

from st_reba.encode.workers import serve

serve(*pickle.loads(job), connection)
"""


class Told(NamedTuple):
    """What a worker tells while it is at something: see :data:`~st_reba.encode.work.OnTexts`."""

    stage: str
    texts: int


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
        # Pickled beforehand, for to read the plan is to import this package.
        known = {"job": pickle.dumps((plan, device)), "connection": theirs}
        self._process = context.Process(target=exec, args=(_BEGIN, known), daemon=True)
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

    def begin(self, task: Callable[[ChunkWorker], object]) -> None:
        """Give it something to do; it must be picklable."""
        try:
            self.connection.send(task)
        except OSError:
            raise self._gone() from None

    def finish(self, on_texts: OnTexts = lambda stage, texts: None) -> Any:
        """Wait until that is done, for what it returned.

        Raises:
            ChildProcessError: If the process has died.
            Exception: What was raised there.
        """
        while isinstance(answer := self.receive(), Told):
            on_texts(*answer)
        return answer

    def receive(self) -> Any:
        """Wait for what it says next: something :class:`Told`, or what was returned.

        Raises:
            ChildProcessError: If the process has died.
            Exception: What was raised there.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _gone(self) -> ChildProcessError:
        self._process.join(_PATIENCE_S)
        return ChildProcessError(
            f"The process on {self._device} has died (exit code {self._process.exitcode}); it may have run out of "
            "memory. What is done is kept, and the same command goes on."
        )


def share(workers: Sequence[WorkerProcess], numbers: Sequence[int], on_texts: OnTexts) -> Iterator[int]:
    """Each chunk by whichever worker is free, which also knows the one after it; yields the number of each that is
    done."""
    left = iter(numbers)
    coming = {worker: next(left, None) for worker in workers}
    busy: dict[object, WorkerProcess] = {}

    def go_on(worker: WorkerProcess) -> None:
        number = coming[worker]
        if number is None:
            worker.begin(methodcaller("finish"))
            del coming[worker]
        else:
            coming[worker] = next(left, None)
            worker.begin(methodcaller("encode", number, coming[worker]))
        busy[worker.connection] = worker

    for worker in workers:
        go_on(worker)
    while busy:
        for connection in wait([worker.connection for worker in busy.values()]):
            worker = busy[connection]
            answer = worker.receive()
            if isinstance(answer, Told):
                on_texts(*answer)
                continue
            del busy[connection]
            if worker in coming:
                go_on(worker)
            yield from answer


def serve(plan: Plan, device: str, connection: Connection) -> None:
    """What a worker process does: one task after another, until nobody is left to give any."""
    worker: ChunkWorker | None = None

    def tell(stage: str, texts: int) -> None:
        connection.send(Told(stage, texts))

    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if worker is None:
                worker = ChunkWorker(plan, plan.encoder.load(device), tell)
            answer = task(worker)
        except Exception as error:
            answer = _portable(error)
        connection.send(answer)


def _portable(error: Exception) -> Exception:
    """The same for another process: what a user can act on is a sentence; anything else keeps its trace, as text."""
    for kind in (ValueError, ImportError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError("".join(traceback.format_exception(type(error), error, error.__traceback__)))
