"""A chunk's way from the copy of the input to its part of the output: in this process, in several, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
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
from .encoder import SCALED, Encoder, Pieces, Precision, telling_batches
from .workspace import Stamp, Workspace

#: What is done when texts are told of.
CALIBRATING = "Calibrating"
ENCODING = "Encoding"
#: Called after each batch with one of these, and how many texts more have been read by the model.
OnTexts = Callable[[str, int], None]

#: Chunks that travel to a worker at a time, at most: it reads the next one and writes the last one beside the model.
_RUN = 16
_POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        model: The model's files on this machine, as they were when the run was begun.
        encoder: What makes the vectors.
        precision: What they are written as.
        calibration_rows: How many rows from the first on give the ranges for int8 and uint8.
        kind: How they are written: see :mod:`st_reba.encode.outputs`.
        workspace: Where, and where the texts are.
    """

    model: tuple[Stamp, ...]
    encoder: Encoder
    precision: Precision
    calibration_rows: int
    kind: str
    workspace: Workspace

    @property
    def needs_ranges(self) -> bool:
        """Whether :func:`calibrate` has something to do."""
        return self.precision in SCALED and not self.workspace.ranges.exists()

    def part(self, number: int) -> Path:
        """Where a chunk's vectors are written."""
        return self.workspace.parts / outputs.part_name(self.kind, number)

    def load(self, device: str) -> SentenceTransformer:
        """The model, on a device.

        Raises:
            ValueError: If its files are not those that the run began with.
        """
        model = self.encoder.load(device)
        for stamp in self.model:
            stamp.check()
        return model

    def encode(self, model: SentenceTransformer, texts: list[str], on_texts: Callable[[int], None]) -> Pieces:
        """The vectors of texts, or of their chunks."""
        if self.encoder.chunk_tokens is not None:
            return self.encoder.encode_chunks(model, texts, on_texts)
        with telling_batches(model, len(texts), self.encoder.batch_size, on_texts):
            vectors = self.encoder.encode(model, texts)
        return Pieces(vectors, np.arange(len(texts)), np.zeros((len(texts), 2), np.int64))


def calibrate(plan: Plan, model: SentenceTransformer, on_texts: OnTexts) -> None:
    """Fix each dimension's range once, so that what a text becomes does not depend on the texts beside it.

    Writes ``ranges (2, values)``, the minimum and the maximum over the first ``calibration_rows`` rows.
    """
    copy = ParquetCopy(plan.workspace.texts)
    low, high = np.inf, -np.inf
    left = min(plan.calibration_rows, copy.starts[-1])
    for number in range(len(copy)):
        texts = copy.read(number)[0][:left]
        vectors = np.asarray(plan.encode(model, texts, partial(on_texts, CALIBRATING)).vectors, dtype=np.float32)
        if len(vectors):
            low, high = np.minimum(low, vectors.min(axis=0)), np.maximum(high, vectors.max(axis=0))
        left -= len(texts)
        if not left:
            break
    if np.ndim(low) == 0:
        raise ValueError("The texts that the ranges are taken from have no chunks: give --ranges.")
    with atomic_file(plan.workspace.ranges) as stream:
        np.save(stream, np.stack([low, high]).astype(np.float32))


def encode_parts(plan: Plan, model: SentenceTransformer, numbers: Sequence[int], on_texts: OnTexts) -> Iterator[int]:
    """Encode chunks in this thread, while one thread reads the next one and one writes the last one.

    A chunk that is there already is left as it is, so doing one twice is harmless.

    Yields:
        The number of each chunk that has become whole.

    Raises:
        ValueError: If vectors are not as long as the ranges.
        OSError: If a chunk could not be written.
    """
    copy = ParquetCopy(plan.workspace.texts)
    ranges = np.load(plan.workspace.ranges) if plan.precision in SCALED else None
    todo = [number for number in numbers if not plan.part(number).exists()]
    yield from (number for number in numbers if number not in todo)

    def write(number: int, pieces: Pieces, kept: pa.Table) -> int:
        if ranges is not None and ranges.shape[1] != pieces.vectors.shape[1]:
            raise ValueError(
                f"The ranges are for vectors of {ranges.shape[1]} values, but these have {pieces.vectors.shape[1]}."
            )
        vectors = np.ascontiguousarray(quantize_embeddings(pieces.vectors, plan.precision, ranges=ranges))
        if plan.encoder.chunk_tokens is not None:
            kept = _of_pieces(kept, pieces, copy.starts[number])
        with atomic_file(plan.part(number)) as stream:
            outputs.write_part(plan.kind, stream, vectors, kept)
        return number

    with ThreadPoolExecutor(1, "reading") as reader, ThreadPoolExecutor(1, "writing") as writer:
        coming = [reader.submit(copy.read, number) for number in todo[:1]]
        leaving: list[Future[int]] = []
        for number, following in zip_longest(todo, todo[1:]):
            texts, kept = coming.pop().result()
            if following is not None:
                coming.append(reader.submit(copy.read, following))
            pieces = plan.encode(model, texts, partial(on_texts, ENCODING))
            leaving.append(writer.submit(write, number, pieces, kept))
            if len(leaving) > 1:
                yield leaving.pop(0).result()
        for last in leaving:
            yield last.result()


def _of_pieces(kept: pa.Table, pieces: Pieces, first: int) -> pa.Table:
    """A row a chunk: its text's number in the whole input and what is kept of it, and the chunk's characters."""
    names = (outputs.DOCUMENT, outputs.START, outputs.END)
    schema = pa.schema([*kept.schema, *((name, pa.int64()) for name in names)])
    columns = [column.take(pa.array(pieces.texts)) for column in kept.columns]
    return pa.table([*columns, first + pieces.texts, pieces.spans[:, 0], pieces.spans[:, 1]], schema=schema)


class Engine(Protocol):
    """Encodes chunks somewhere.

    Attributes:
        device: The kind of device, such as ``"cpu"`` or ``"cuda"``: results may differ in their last bits between them.
    """

    device: str

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        """Calibrate if need be, then encode the chunks of these numbers; yields each that is done, in any order.

        What was started for it is ended when it is closed. ``on_texts`` is told of each batch, where that is known.
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

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        if len(self.devices) > 1:
            yield from self._in_processes(plan, todo, on_texts)
            return
        model = plan.load(self.devices[0])
        if plan.needs_ranges:
            calibrate(plan, model, on_texts)
        yield from encode_parts(plan, model, todo, on_texts)

    def _in_processes(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
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
            futures: set[Future[list[int]]] = set()
            if plan.needs_ranges:
                futures = {pool.submit(_calibrate_here)}
            while futures or runs:
                futures = futures or {pool.submit(_encode_here, runs.pop(0)) for _ in range(len(runs))}
                done, futures = wait(futures, _POLL_S, FIRST_COMPLETED)
                while not told.empty():
                    on_texts(*told.get())
                for future in done:
                    yield from future.result()
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


class _Worker:
    """A model in a process of its own, loaded when it is first used: what goes wrong then is a task's error.

    Args:
        plan: The job.
        device: Where the model is.
        tell: Told of each batch.
    """

    def __init__(self, plan: Plan, device: str, tell: OnTexts) -> None:
        self._plan, self._device, self._tell = plan, device, tell

    @cached_property
    def _model(self) -> SentenceTransformer:
        return self._plan.load(self._device)

    def calibrate(self) -> list[int]:
        calibrate(self._plan, self._model, self._tell)
        return []

    def encode(self, numbers: Sequence[int]) -> list[int]:
        return list(encode_parts(self._plan, self._model, numbers, self._tell))


#: That of a worker process.
_worker: _Worker


def _begin(plan: Plan, devices: Any, told: Any, alive: connection.Connection) -> None:
    """What a worker process does first."""
    global _worker

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        connection.wait([alive, *([] if parent is None else [parent.sentinel])])
        os._exit(1)

    # Ctrl-C reaches every process of a terminal: the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker = _Worker(plan, devices.get(), lambda stage, texts: told.put((stage, texts)))


def _calibrate_here() -> list[int]:
    return _worker.calibrate()


def _encode_here(numbers: Sequence[int]) -> list[int]:
    return _worker.encode(numbers)


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
        self._ray = require("ray", "ray", "The ray engine")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self.workers = workers
        self.device = device or ("cuda" if self._ray.cluster_resources().get("GPU") else "cpu")

    def run(self, plan: Plan, todo: Sequence[int], on_texts: OnTexts) -> Generator[int, None, None]:
        ray, kind = self._ray, "num_gpus" if self.device == "cuda" else "num_cpus"
        tally = ray.remote(num_cpus=0, max_restarts=-1)(_Tally).remote()
        again = {"max_restarts": -1, "max_task_retries": -1}
        actor = ray.remote(**{kind: 1}, **again)(_RayWorker)
        runs = _runs(todo, self.workers)
        actors = [actor.remote(plan, self.device, tally) for _ in range(min(self.workers, len(runs)))]
        pool = require("ray.util", "ray", "The ray engine").ActorPool(actors)
        try:
            if plan.needs_ranges:
                ray.get(actors[0].calibrate.remote())
            for numbers in runs:
                pool.submit(lambda own, numbers: own.encode.remote(numbers), numbers)
            while pool.has_next():
                with suppress(TimeoutError):
                    yield from pool.get_next_unordered(timeout=1)
                # Where the tally's node is gone, chunks alone are told of.
                with suppress(ray.exceptions.RayError):
                    for stage, texts in ray.get(tally.taken.remote()).items():
                        on_texts(stage, texts)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for each in (*actors, tally):
                ray.kill(each)


class _Tally:
    """An actor that counts the texts which others have encoded since it was asked."""

    def __init__(self) -> None:
        self._texts: Counter[str] = Counter()

    def add(self, stage: str, texts: int) -> None:
        self._texts[stage] += texts

    def taken(self) -> Counter[str]:
        texts, self._texts = self._texts, Counter()
        return texts


class _RayWorker(_Worker):
    """An actor, on some node."""

    def __init__(self, plan: Plan, device: str, tally: Any) -> None:
        super().__init__(plan, device, lambda stage, texts: tally.add.remote(stage, texts))
