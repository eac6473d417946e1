"""Chunks of the copied input to parts of the output: in this process, in several, or on Ray."""

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
from .encoder import Encoder
from .workspace import Workspace, check_unchanged, write_part

#: Called after each batch with how many texts more have been read by the model.
OnTexts = Callable[[int], None]

_POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        model: The model's files on this machine, each with what :func:`~st_reba.encode.places.looks` returns for it.
        encoder: Makes the vectors.
        workspace: The run's folder, with the texts.
    """

    model: Mapping[Path, object]
    encoder: Encoder
    workspace: Workspace


class Worker:
    """A model on a device, which encodes chunks of a plan.

    Args:
        plan: The job.
        device: Device on which the model is loaded when it is first used: errors of loading are errors of
            :meth:`encode`.
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
        """Encode chunks. A chunk that is there already is left as it is, so doing one twice is harmless.

        Raises:
            ValueError: If the model's files are not those that the run began with.
            OSError: If a chunk could not be written.
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
    """Encodes chunks somewhere.

    Attributes:
        device: The kind of device, such as ``"cpu"`` or ``"cuda"``: results may differ in their last bits between them.
    """

    device: str

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> None:
        """Encode the chunks of these numbers, in any order, by one :class:`Worker` or several.

        What was started for it is ended on an error, too. ``on_texts`` is told of each batch.
        """


class LocalEngine:
    """This machine.

    Args:
        devices: One device: the model runs in this process. Several (a name may come twice): each has a process with a
            model of its own, which ends when this process ends, however it does. The output is the same.

    Raises:
        ValueError: If no device is given, or they are not of one kind.
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
        # A fresh interpreter: CUDA, and threads that hold locks, do not survive a fork.
        context = multiprocessing.get_context("spawn")
        told = context.SimpleQueue()
        # Workers end when nobody can write to it any more.
        alive, ours = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(len(self.devices), context, _begin, (told, alive))
        try:
            futures = {
                pool.submit(_encode, plan, device, todo[number :: len(self.devices)])
                for number, device in enumerate(self.devices[: len(todo)])
            }
            while futures:
                done, futures = wait(futures, _POLL_S, FIRST_EXCEPTION)
                while not told.empty():
                    on_texts(told.get())
                for future in done:
                    future.result()
        except BrokenProcessPool:
            raise ChildProcessError(
                f"A process on {', '.join(dict.fromkeys(self.devices))} has died; it may have run out of memory. What "
                "is done is kept, and the same command goes on."
            ) from None
        finally:
            ours.close()
            pool.shutdown(cancel_futures=True)


#: Callback of a worker process.
_on_texts: OnTexts


def _begin(told: Any, alive: connection.Connection) -> None:
    """Prepare a worker process."""
    global _on_texts

    def end_with_parent() -> None:
        alive.poll(None)
        os._exit(1)

    # Ctrl-C reaches every process of a terminal: the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _on_texts = told.put


def _encode(plan: Plan, device: str, numbers: Sequence[int]) -> None:
    Worker(plan, device, _on_texts).encode(numbers)


class RayEngine:
    """A Ray cluster: the one that ``RAY_ADDRESS`` names, or one on this machine.

    Actors read the copy of the input and write their parts themselves, so every node must see the output's folder at
    the same path; only chunk numbers travel. Ray starts an actor that died again and repeats what it was doing; as a
    part is written whole or not at all, under its number, no row is lost and none is there twice.

    Args:
        workers: Actors; each holds a model, and a GPU or a CPU core.
        device: ``"cuda"`` or ``"cpu"``; what the cluster has if None.

    Raises:
        ImportError: If Ray is not installed.
        ValueError: If ``workers`` is not positive, or the device is another.
    """

    def __init__(self, workers: int = 1, device: str | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: give a whole number from 1.")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f'device "{device}": on a Ray cluster give "cpu" or "cuda"; Ray picks which.')
        ray = require("ray", "ray", "The ray engine")
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.workers = workers
        self.device = device or ("cuda" if ray.cluster_resources().get("GPU") else "cpu")

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> None:
        import ray
        from ray.util.queue import Queue

        again = {"max_restarts": -1, "max_task_retries": -1}
        told = Queue(actor_options={"num_cpus": 0, **again})
        actor = ray.remote(**{"num_gpus" if self.device == "cuda" else "num_cpus": 1}, **again)(Worker)
        actors = [actor.remote(plan, self.device, told.put) for _ in range(min(self.workers, len(todo)))]
        waiting = [own.encode.remote(todo[number :: len(actors)]) for number, own in enumerate(actors)]
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=1)
                while not told.empty():
                    on_texts(told.get())
                ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for each in actors:
                ray.kill(each)
            told.shutdown(force=True)
