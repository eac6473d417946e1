"""A chunk's way from the copy of the input to its part of the output: in this process, in several, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from ..data.parquet_copy import ParquetCopy
from ..files import atomic_file
from ..optional import require
from . import outputs
from .encoder import Encoder, Pieces, Precision
from .workspace import Workspace, check_unchanged

#: Called after each batch with how many texts more have been read by the model.
OnTexts = Callable[[int], None]

#: Chunks that travel to a worker at a time, at most: it writes one while the model runs for the next.
_RUN = 16
_POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        model: The model's files on this machine, and how each :func:`~st_reba.encode.places.looks`.
        encoder: What makes the vectors.
        precision: What they are written as.
        kind: How they are written: see :mod:`st_reba.encode.outputs`.
        workspace: Where, and where the texts are.
    """

    model: Mapping[Path, object]
    encoder: Encoder
    precision: Precision
    kind: str
    workspace: Workspace

    def part(self, number: int) -> Path:
        """Where a chunk's vectors are written."""
        return self.workspace.parts / outputs.part_name(self.kind, number)


class Worker:
    """A model on a device, which encodes chunks of a plan.

    Args:
        plan: The job.
        device: Where the model is loaded when it is first used: what goes wrong then is an error of :meth:`encode`.
        on_texts: Told of each batch.
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
        return ParquetCopy(self._plan.workspace.texts)

    def encode(self, numbers: Sequence[int]) -> None:
        """Encode chunks; a thread writes one while the model runs for the next one.

        A chunk that is there already is left as it is, so doing one twice is harmless.

        Raises:
            ValueError: If the model's files are not those that the run began with.
            OSError: If a chunk could not be written.
        """
        with ThreadPoolExecutor(1) as writer:
            writing: Future[None] | None = None
            for number in numbers:
                if self._plan.part(number).exists():
                    continue
                texts, kept = self._copy.read(number)
                pieces = self._plan.encoder.pieces(self._model, texts, self._on_texts)
                if writing is not None:
                    writing.result()
                writing = writer.submit(self._write, number, pieces, kept)
            if writing is not None:
                writing.result()

    def _write(self, number: int, pieces: Pieces, kept: pa.Table) -> None:
        """Write a part; of chunks, each has a row: its text's number in the whole input, and its characters there."""
        if isinstance(pieces.vectors, dict):
            with atomic_file(self._plan.part(number)) as stream:
                outputs.write_lists(stream, pieces.vectors, kept)
            return
        vectors = np.ascontiguousarray(quantize_embeddings(pieces.vectors, self._plan.precision))
        if self._plan.encoder.chunk_tokens is not None:
            columns = [column.take(pa.array(pieces.texts)) for column in kept.columns]
            schema = pa.schema([*kept.schema, *((name, pa.int64()) for name in outputs.OF_CHUNKS)])
            kept = pa.table([*columns, self._copy.starts[number] + pieces.texts, *pieces.spans.T], schema=schema)
        with atomic_file(self._plan.part(number)) as stream:
            outputs.write_part(self._plan.kind, stream, vectors, kept)


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
        devices, told = context.SimpleQueue(), context.SimpleQueue()
        for device in self.devices:
            devices.put(device)
        # Workers end when nobody can write to it any more.
        alive, ours = context.Pipe(duplex=False)
        runs = _runs(todo, len(self.devices))
        pool = ProcessPoolExecutor(min(len(self.devices), len(runs)), context, _begin, (plan, devices, told, alive))
        try:
            futures = {pool.submit(_encode_here, numbers) for numbers in runs}
            while futures:
                done, futures = wait(futures, _POLL_S, FIRST_COMPLETED)
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


def _runs(todo: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Chunks to give away at a time: few where there are few, so that no worker is left without."""
    size = max(1, min(_RUN, len(todo) // (4 * workers)))
    return [todo[start : start + size] for start in range(0, len(todo), size)]


#: That of a worker process.
_worker: Worker


def _begin(plan: Plan, devices: Any, told: Any, alive: connection.Connection) -> None:
    """What a worker process does first."""
    global _worker

    def end_with_parent() -> None:
        alive.poll(None)
        os._exit(1)

    # Ctrl-C reaches every process of a terminal: the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker = Worker(plan, devices.get(), told.put)


def _encode_here(numbers: Sequence[int]) -> None:
    _worker.encode(numbers)


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
        from ray.util import ActorPool
        from ray.util.queue import Queue

        again = {"max_restarts": -1, "max_task_retries": -1}
        told = Queue(actor_options={"num_cpus": 0, **again})
        actor = ray.remote(**{"num_gpus" if self.device == "cuda" else "num_cpus": 1}, **again)(Worker)
        runs = _runs(todo, self.workers)
        actors = [actor.remote(plan, self.device, told.put) for _ in range(min(self.workers, len(runs)))]
        pool = ActorPool(actors)
        try:
            for numbers in runs:
                pool.submit(lambda own, numbers: own.encode.remote(numbers), numbers)
            while pool.has_next():
                with suppress(TimeoutError):
                    pool.get_next_unordered(timeout=1)
                while not told.empty():
                    on_texts(told.get())
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for each in actors:
                ray.kill(each)
            told.shutdown(force=True)
