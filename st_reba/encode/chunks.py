"""Engines that encode the chunks of an input: in this process, in several processes, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from sentence_transformers import SentenceTransformer

from ..data.parquet_copy import ParquetCopy
from ..data.sources import native_file
from ..files import atomic_file
from ..optional import require
from ..settings import check, check_int
from .encoder import Encoder
from .workspace import Workspace, check_unchanged, write_part

#: Called after each batch with its number of texts.
OnTexts = Callable[[int], None]

_POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """Job of the workers: plain data, which can be sent to other processes.

    Attributes:
        model: Files of the model on this machine, each with its :func:`~st_reba.encode.workspace.stat`.
        encoder: Model and settings.
        workspace: Folder of the run, with the texts.
    """

    model: Mapping[Path, object]
    encoder: Encoder
    workspace: Workspace


class Worker:
    """Worker that encodes chunks of a plan with one model on one device.

    Args:
        plan: The job.
        device: Device of the model. It is loaded on first use, so :meth:`encode` raises the errors of loading.
        on_texts: Called after each batch.
    """

    def __init__(self, plan: Plan, device: str, on_texts: OnTexts) -> None:
        self._plan, self._device, self._on_texts = plan, device, on_texts

    @cached_property
    def _model(self) -> SentenceTransformer:
        model = self._plan.encoder.load(self._device)
        check_unchanged(self._plan.model)
        return model

    @cached_property
    def _copy(self) -> ParquetCopy:
        return ParquetCopy(native_file(self._plan.workspace.texts))

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode chunks, except those that are already encoded.

        Raises:
            ValueError: If the model's files have changed since the run began.
            OSError: If a chunk cannot be written.
        """
        for number in numbers:
            part = self._plan.workspace.part(number)
            if not part.exists():
                texts, kept = self._copy.read(number)
                first = self._copy.starts[number]
                table = self._plan.encoder.table(self._model, texts, kept, first, self._on_texts)
                with atomic_file(part) as stream:
                    write_part(stream, table)


class Engine(Protocol):
    """Place where workers run.

    Attributes:
        device: Kind of device, such as ``"cpu"`` or ``"cuda"``. Vectors may differ in their last bits between kinds.
    """

    device: str

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> None:
        """Encode the numbered chunks, in any order, with one or more :class:`Worker` objects.

        Processes that it starts have ended when it returns or raises.
        """


class LocalEngine:
    """Engine that runs on this machine.

    Args:
        devices: With one device, the model runs in this process. With several (a name may be repeated), each device
            has a process with its own model, which ends when this process ends. The output is the same.

    Raises:
        ValueError: If no device is given, or the devices are of different kinds.
    """

    def __init__(self, devices: Sequence[str] = ("cpu",)) -> None:
        kinds = {device.split(":")[0] for device in devices}
        if len(kinds) != 1 or "" in kinds:
            raise ValueError(f'devices {list(devices)}: give one or more of one kind, such as "cuda:0" and "cuda:1".')
        self.devices = list(devices)
        self.device = kinds.pop()

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> None:
        if len(self.devices) == 1:
            Worker(plan, self.devices[0], on_texts).encode(todo)
            return
        # CUDA, and threads that hold locks, do not survive a fork.
        context = multiprocessing.get_context("spawn")
        counts = context.SimpleQueue()
        # Workers exit when the write end of this pipe is closed.
        read_end, write_end = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(len(self.devices), context, _begin, (counts, read_end))
        try:
            futures = {
                pool.submit(_encode, plan, device, todo[number :: len(self.devices)])
                for number, device in enumerate(self.devices[: len(todo)])
            }
            while futures:
                done, futures = wait(futures, _POLL_S, FIRST_EXCEPTION)
                while not counts.empty():
                    on_texts(counts.get())
                for future in done:
                    future.result()
        except BrokenProcessPool:
            raise ChildProcessError(
                f"A process on {', '.join(dict.fromkeys(self.devices))} has died; it may have run out of memory. "
                "Finished chunks are kept: run the same command again to resume."
            ) from None
        finally:
            write_end.close()
            pool.shutdown(cancel_futures=True)


#: Callback of a worker process.
_on_texts: OnTexts


def _begin(counts: Any, read_end: connection.Connection) -> None:
    """Initialize a worker process."""
    global _on_texts

    def exit_with_parent() -> None:
        read_end.poll(None)
        os._exit(1)

    # A terminal sends Ctrl-C to every process, and the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _on_texts = counts.put


def _encode(plan: Plan, device: str, numbers: Sequence[int]) -> None:
    Worker(plan, device, _on_texts).encode(numbers)


class RayEngine:
    """Engine that runs on a Ray cluster: the one at ``RAY_ADDRESS``, or a local one.

    Actors read the copied input and write their parts themselves, so every node must see the output's folder at the
    same path. Ray restarts an actor that dies and repeats its task. A part is written whole or not at all, so no row
    is lost or duplicated.

    Args:
        workers: Number of actors, each with its own model and a GPU or a CPU core.
        device: ``"cuda"`` or ``"cpu"``. None uses GPUs if the cluster has any.

    Raises:
        ImportError: If Ray is not installed.
        ValueError: If ``workers`` is not positive, or ``device`` is neither.
    """

    def __init__(self, workers: int = 1, device: str | None = None) -> None:
        check("device", device, device in (None, "cpu", "cuda"), 'give "cpu" or "cuda" for a Ray cluster.')
        self.workers = check_int("workers", workers, 1)
        ray = require("ray", "ray", "The ray engine")
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.device = device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> None:
        import ray
        from ray.util.queue import Queue

        retries = {"max_restarts": -1, "max_task_retries": -1}
        counts = Queue(actor_options={"num_cpus": 0, **retries})
        needs = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        remote = ray.remote(**needs, **retries)(Worker)
        actors = [remote.remote(plan, self.device, counts.put) for _ in range(min(self.workers, len(todo)))]
        tasks = [actor.encode.remote(todo[number :: len(actors)]) for number, actor in enumerate(actors)]
        try:
            while tasks:
                done, tasks = ray.wait(tasks, timeout=1)
                while not counts.empty():
                    on_texts(counts.get())
                ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for actor in actors:
                ray.kill(actor)
            counts.shutdown(force=True)
