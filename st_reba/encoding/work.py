"""One chunk's way from the input file to its part of the output; the same wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers.util import quantize_embeddings

from .durable import durable
from .encoder import SCALED, Encoder, Precision
from .extras import require_pyarrow
from .outputs import Output
from .texts import Chunk, Index, Rows, TextFile, open_texts
from .workspace import Workspace

#: ``(texts) -> (len(texts), values)``.
Encode = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know. Plain data, for worker processes.

    Attributes:
        input: The file of texts.
        column: Its column, as :func:`open_texts` takes it.
        keep: Columns to write beside the vectors.
        schema: Their Arrow types; None if there are none.
        encoder: What makes the vectors.
        precision: What they are written as.
        calibration_rows: How many rows from the first on give the ranges for int8 and uint8.
        output: How they are written.
        workspace: Where.
    """

    input: Path
    column: str | None
    keep: tuple[str, ...]
    schema: Any
    encoder: Encoder
    precision: Precision
    calibration_rows: int
    output: Output
    workspace: Workspace

    @property
    def needs_ranges(self) -> bool:
        """Whether :func:`calibrate` has something to do."""
        return self.precision in SCALED and not self.workspace.ranges.exists()

    def open(self) -> TextFile:
        return open_texts(self.input, self.column, self.keep)


class ChunkWorker:
    """Encodes chunks by their number. A chunk that is there already is left as it is, so doing one twice is harmless.

    Args:
        plan: The job.
        encode: The loaded model.
    """

    def __init__(self, plan: Plan, encode: Encode) -> None:
        self.plan = plan
        self.encode = encode
        self.texts = plan.open()
        self.index = Index.load(plan.workspace.index)
        self.ranges = np.load(plan.workspace.ranges) if plan.precision in SCALED else None

    def __call__(self, number: int) -> None:
        """Encode one chunk.

        Raises:
            ValueError: If the input has changed meanwhile, or a value does not fit its column.
        """
        part = self.plan.workspace.parts / self.plan.output.part(number)
        if part.exists():
            return
        chunk = self.index[number]
        rows = self.texts.read(chunk)
        vectors = self._quantized(self.encode(rows.texts))
        kept = kept_table(rows, chunk, self.plan)
        with durable(part) as stream:
            self.plan.output.write_part(stream, vectors, kept)

    def _quantized(self, vectors: np.ndarray) -> np.ndarray:
        if self.ranges is not None and self.ranges.shape[1] != vectors.shape[1]:
            raise ValueError(
                f"The ranges are for vectors of {self.ranges.shape[1]} values, but these have {vectors.shape[1]}."
            )
        return np.ascontiguousarray(quantize_embeddings(vectors, self.plan.precision, ranges=self.ranges))


def calibrate(plan: Plan, encode: Encode) -> None:
    """Fix each dimension's range once, so that what a text becomes does not depend on the texts beside it.

    Writes ``ranges (2, values)``, the minimum and the maximum over the first ``calibration_rows`` rows.
    """
    texts, index = plan.open(), Index.load(plan.workspace.index)
    low, high = np.inf, -np.inf
    left = min(plan.calibration_rows, index.rows)
    for number in range(len(index)):
        batch = texts.read(index[number]).texts[:left]
        vectors = np.asarray(encode(batch), dtype=np.float32)
        low, high = np.minimum(low, vectors.min(axis=0)), np.maximum(high, vectors.max(axis=0))
        left -= len(batch)
        if not left:
            break
    with durable(plan.workspace.ranges) as stream:
        np.save(stream, np.stack([low, high]).astype(np.float32))


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
        where = f"{plan.input}, rows {chunk.row + 1} to {chunk.row + chunk.rows}"
        raise ValueError(f"{where}: a kept column is of another type than in the first rows ({error}).") from None
