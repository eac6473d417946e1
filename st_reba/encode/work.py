"""A chunk's way from the copy of the input to its part of the output; the same wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from ..data.parquet_copy import ParquetCopy
from ..files import atomic_file
from .digests import Stamp
from .encoder import SCALED, Encoder, Pieces, Precision, telling_batches
from .outputs import DOCUMENT, END, START, Output
from .workspace import Workspace

#: What a worker is at when it tells of texts.
CALIBRATING = "Calibrating"
ENCODING = "Encoding"
#: Called after each batch with one of these, and how many texts more have been read by the model.
OnTexts = Callable[[str, int], None]


#: The texts of a chunk, and what is kept of them.
Rows: TypeAlias = tuple[list[str], pa.Table]


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        model: The model's files on this machine, as they were when the run was begun.
        encoder: What makes the vectors.
        precision: What they are written as.
        calibration_rows: How many rows from the first on give the ranges for int8 and uint8.
        output: How they are written.
        workspace: Where, and where the texts are.
    """

    model: tuple[Stamp, ...]
    encoder: Encoder
    precision: Precision
    calibration_rows: int
    output: Output
    workspace: Workspace

    @property
    def needs_ranges(self) -> bool:
        """Whether :meth:`ChunkWorker.calibrate` has something to do."""
        return self.precision in SCALED and not self.workspace.ranges.exists()


class ChunkWorker:
    """Encodes chunks by their number. A chunk that is there already is left as it is, so doing one twice is harmless.

    The model runs in the thread that calls. Beside it, one thread reads the chunk that comes next, and one writes the
    chunk before: both mostly wait for a disk. A context: at its end nothing is being read or written.

    Args:
        plan: The job.
        model: The loaded model.
        on_texts: Told of each batch.

    Raises:
        ValueError: If the model's files are not those that the run began with.
    """

    def __init__(self, plan: Plan, model: SentenceTransformer, on_texts: OnTexts = lambda stage, texts: None) -> None:
        for stamp in plan.model:
            stamp.check()
        self.plan = plan
        self.texts = ParquetCopy(plan.workspace.texts)
        self._model = model
        self._on_texts = on_texts
        self._reader = ThreadPoolExecutor(1, "reading")
        self._writer = ThreadPoolExecutor(1, "writing")
        self._coming: tuple[int, Future[Rows | None]] | None = None
        self._leaving: tuple[int, Future[None]] | None = None

    def __enter__(self) -> ChunkWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in (self._reader, self._writer):
            thread.shutdown()

    @cached_property
    def _ranges(self) -> np.ndarray | None:
        return np.load(self.plan.workspace.ranges) if self.plan.precision in SCALED else None

    def calibrate(self) -> None:
        """Fix each dimension's range once, so that what a text becomes does not depend on the texts beside it.

        Writes ``ranges (2, values)``, the minimum and the maximum over the first ``calibration_rows`` rows.
        """
        low, high = np.inf, -np.inf
        left = min(self.plan.calibration_rows, self.texts.starts[-1])
        for number in range(len(self.texts)):
            batch = self.texts.read(number)[0][:left]
            vectors = np.asarray(self._encode(batch, CALIBRATING).vectors, dtype=np.float32)
            if len(vectors):
                low, high = np.minimum(low, vectors.min(axis=0)), np.maximum(high, vectors.max(axis=0))
            left -= len(batch)
            if not left:
                break
        if np.ndim(low) == 0:
            raise ValueError("The texts that the ranges are taken from have no chunks: give --ranges.")
        with atomic_file(self.plan.workspace.ranges) as stream:
            np.save(stream, np.stack([low, high]).astype(np.float32))

    def encode(self, number: int, following: int | None = None) -> list[int]:
        """Encode one chunk, while the one before is written and the one that follows is read.

        Args:
            number: Which.
            following: The next that will be asked for; None if that is not known.

        Returns:
            The chunks that have become whole since the last call: the one before, not yet this one.

        Raises:
            ValueError: If the vectors of the chunk before are not as long as the ranges.
            OSError: If the chunk before could not be written.
        """
        try:
            prepared = self._taken(number)
            if following is not None:
                self._coming = following, self._reader.submit(self._prepare, following)
            pieces = None if prepared is None else self._encode(prepared[0], ENCODING)
        finally:
            # Whatever is wrong with this one.
            done = self.finish()
        if prepared is None or pieces is None:
            return [*done, number]
        self._leaving = number, self._writer.submit(self._write, number, pieces, prepared[1])
        return done

    def finish(self) -> list[int]:
        """Wait until what was encoded is written.

        Returns:
            The chunks that have become whole since the last call.

        Raises:
            OSError: If one cannot be written.
            ValueError: If its vectors are not as long as the ranges.
        """
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return []
        number, writing = leaving
        writing.result()
        return [number]

    def _taken(self, number: int) -> Rows | None:
        """What the reader has of a chunk, which it reads now if nobody said that it would come."""
        coming, self._coming = self._coming, None
        if coming is None or coming[0] != number:
            coming = number, self._reader.submit(self._prepare, number)
        return coming[1].result()

    def _prepare(self, number: int) -> Rows | None:
        """In the reader's thread; None where the chunk is there already."""
        return None if self._part(number).exists() else self.texts.read(number)

    def _encode(self, texts: list[str], stage: str) -> Pieces:
        encoder, on_texts = self.plan.encoder, partial(self._on_texts, stage)
        if encoder.chunk_tokens is not None:
            return encoder.encode_chunks(self._model, texts, on_texts)
        with telling_batches(self._model, len(texts), encoder.batch_size, on_texts):
            vectors = encoder.encode(self._model, texts)
        return Pieces(vectors, np.arange(len(texts)), np.zeros((len(texts), 2), np.int64))

    def _write(self, number: int, pieces: Pieces, kept: pa.Table) -> None:
        """In the writer's thread."""
        if self.plan.encoder.chunk_tokens is not None:
            kept = _of_pieces(kept, pieces, self.texts.starts[number])
        with atomic_file(self._part(number)) as stream:
            self.plan.output.write_part(stream, self._quantized(pieces.vectors), kept)

    def _part(self, number: int) -> Path:
        return self.plan.workspace.parts / self.plan.output.part(number)

    def _quantized(self, vectors: np.ndarray) -> np.ndarray:
        if self._ranges is not None and self._ranges.shape[1] != vectors.shape[1]:
            raise ValueError(
                f"The ranges are for vectors of {self._ranges.shape[1]} values, but these have {vectors.shape[1]}."
            )
        return np.ascontiguousarray(quantize_embeddings(vectors, self.plan.precision, ranges=self._ranges))


def _of_pieces(kept: pa.Table, pieces: Pieces, first: int) -> pa.Table:
    """A row a chunk: its text's number in the whole input and what is kept of it, and the chunk's characters."""
    schema = pa.schema([*kept.schema, *((name, pa.int64()) for name in (DOCUMENT, START, END))])
    columns = [column.take(pa.array(pieces.texts)) for column in kept.columns]
    return pa.table([*columns, first + pieces.texts, pieces.spans[:, 0], pieces.spans[:, 1]], schema=schema)
