"""One chunk's way from the input file to its part of the output; the same wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from ..data.sources import File
from ..data.streams import Chunk, Index, Rows, Texts, open_texts
from ..files import durable
from ..optional import require_pyarrow
from .digests import Stamp
from .encoder import SCALED, Encoder, Pieces, Precision
from .outputs import DOCUMENT, END, START, Output
from .workspace import Workspace


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        files: The texts.
        stamps: The same files, as they were checked.
        column: Their column, as :func:`~st_reba.data.streams.open_texts` takes it.
        keep: Columns to write beside the vectors.
        schema: Their Arrow types; None if there are none.
        model: The model's files on this machine, as they were when the run was begun.
        encoder: What makes the vectors.
        precision: What they are written as.
        calibration_rows: How many rows from the first on give the ranges for int8 and uint8.
        output: How they are written.
        workspace: Where.
    """

    files: tuple[File, ...]
    stamps: tuple[Stamp, ...]
    column: str | None
    keep: tuple[str, ...]
    schema: Any
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

    def open(self) -> Texts:
        return open_texts(self.files, self.column, self.keep)


class ChunkWorker:
    """Encodes chunks by their number. A chunk that is there already is left as it is, so doing one twice is harmless.

    Args:
        plan: The job.
        model: The loaded model.

    Raises:
        ValueError: If the model's files are not those that the run began with.
    """

    def __init__(self, plan: Plan, model: SentenceTransformer) -> None:
        for stamp in plan.model:
            stamp.check()
        self.plan = plan
        self.texts = plan.open()
        self.index = Index.load(plan.workspace.index)
        self._model = model

    @cached_property
    def _ranges(self) -> np.ndarray | None:
        return np.load(self.plan.workspace.ranges) if self.plan.precision in SCALED else None

    def calibrate(self) -> None:
        """Fix each dimension's range once, so that what a text becomes does not depend on the texts beside it.

        Writes ``ranges (2, values)``, the minimum and the maximum over the first ``calibration_rows`` rows.
        """
        low, high = np.inf, -np.inf
        left = min(self.plan.calibration_rows, self.index.rows)
        for number in range(len(self.index)):
            batch = self._read(self.index[number]).texts[:left]
            vectors = np.asarray(self._encode(batch).vectors, dtype=np.float32)
            if len(vectors):
                low, high = np.minimum(low, vectors.min(axis=0)), np.maximum(high, vectors.max(axis=0))
            left -= len(batch)
            if not left:
                break
        if np.ndim(low) == 0:
            raise ValueError("The texts that the ranges are taken from have no chunks: give --ranges.")
        with durable(self.plan.workspace.ranges) as stream:
            np.save(stream, np.stack([low, high]).astype(np.float32))

    def encode(self, number: int) -> None:
        """Encode one chunk.

        Raises:
            ValueError: If the input has changed meanwhile, or a value does not fit its column.
        """
        part = self.plan.workspace.parts / self.plan.output.part(number)
        if part.exists():
            return
        chunk = self.index[number]
        rows = self._read(chunk)
        pieces = self._encode(rows.texts)
        kept = kept_table(rows, chunk, self.plan)
        if self.plan.encoder.chunk_tokens is not None:
            kept = _of_pieces(kept, pieces, chunk.row)
        with durable(part) as stream:
            self.plan.output.write_part(stream, self._quantized(pieces.vectors), kept)

    def _encode(self, texts: list[str]) -> Pieces:
        encoder = self.plan.encoder
        if encoder.chunk_tokens is not None:
            return encoder.encode_chunks(self._model, texts)
        vectors = encoder.encode(self._model, texts)
        return Pieces(vectors, np.arange(len(texts)), np.zeros((len(texts), 2), np.int64))

    def _read(self, chunk: Chunk) -> Rows:
        """The rows of a chunk, of the files that were checked and no others."""
        try:
            return self.texts.read(chunk)
        finally:
            # Also instead of what is wrong with the row of another file.
            for piece in chunk.pieces:
                self.plan.stamps[piece.file].check()

    def _quantized(self, vectors: np.ndarray) -> np.ndarray:
        if self._ranges is not None and self._ranges.shape[1] != vectors.shape[1]:
            raise ValueError(
                f"The ranges are for vectors of {self._ranges.shape[1]} values, but these have {vectors.shape[1]}."
            )
        return np.ascontiguousarray(quantize_embeddings(vectors, self.plan.precision, ranges=self._ranges))


def kept_table(rows: Rows, chunk: Chunk, plan: Plan) -> Any:
    """The kept columns as an Arrow table of the plan's types, or None.

    Raises:
        ValueError: If a value does not fit.
    """
    if plan.schema is None:
        return None
    arrow, _ = require_pyarrow("Keeping columns")
    try:
        return arrow.table(rows.kept, schema=plan.schema)
    except arrow.ArrowException as error:
        where = f"{plan.files[chunk.pieces[0].file].name}, rows {chunk.row + 1} to {chunk.row + chunk.rows}"
        raise ValueError(f"{where}: a kept column is of another type than when it was checked ({error}).") from None


def _of_pieces(kept: Any, pieces: Pieces, first: int) -> Any:
    """A row a chunk: its text's number in the whole input and what is kept of it, and the chunk's characters."""
    arrow, _ = require_pyarrow("Chunks")
    table = arrow.table({DOCUMENT: first + pieces.texts}) if kept is None else kept.take(pieces.texts)
    if kept is not None:
        table = table.append_column(DOCUMENT, arrow.array(first + pieces.texts))
    return table.append_column(START, arrow.array(pieces.spans[:, 0])).append_column(
        END, arrow.array(pieces.spans[:, 1])
    )
