"""A file of texts to a file of vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..version import __version__
from .durable import durable
from .encoder import PRECISIONS, SCALED, Encoder, Precision
from .engines import Engine, LocalEngine
from .extras import require_pyarrow
from .outputs import EMBEDDING, NpyOutput, Output, output_for
from .texts import Index, TextFile, open_texts
from .work import Plan
from .workspace import Settings, Workspace

#: Called with what is being done, how many texts of it are done, and of how many (None while that is unknown).
OnProgress = Callable[[str, int, int | None], None]

#: Those whose version may change a vector's last bits, or a file's bytes.
_PACKAGES = ("sentence-transformers", "transformers", "torch", "numpy")


@dataclass(frozen=True)
class Encoded:
    """What a run gave.

    Attributes:
        rows: Vectors in the output.
        resumed: How many of them were there from an interrupted run.
        ranges: Where the ranges of int8 and uint8 lie: ``(2, values)``, what queries need to be quantised alike.
    """

    rows: int
    resumed: int
    ranges: Path | None


def encode_file(
    encoder: Encoder,
    texts: str | Path,
    out: str | Path,
    *,
    column: str | None = None,
    keep: Sequence[str] = (),
    precision: Precision = "float32",
    calibration_rows: int = 10_000,
    ranges: str | Path | None = None,
    chunk_size: int = 2048,
    engine: Engine | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Encoded:
    """Encode a file of any size; memory does not grow with it.

    The input is read once and every row checked before the first is encoded. Chunks are then encoded one by one and
    kept in ``OUT.partial`` until all are there; a run that was killed goes on from them when it is called again, and
    the output is the same, byte for byte, on the same hardware with the same number of threads.

    Args:
        encoder: The model and how it is used.
        texts: Plain text, JSON lines or Parquet; see :func:`~st_reba.encoding.texts.open_texts`.
        out: ``.npy``: an array (rows, values). ``.parquet``: a file with the column ``embedding`` and the kept ones.
            No suffix: a directory of Parquet shards, a chunk each, which needs no room for a second copy.
        column: Where the texts are in JSON lines or Parquet; ``"text"`` if None.
        keep: Columns to write beside the vectors, to Parquet alone.
        precision: What a vector's values are written as; ``binary`` and ``ubinary`` pack eight in a byte.
        calibration_rows: For int8 and uint8: each dimension's range is that of the first so many rows.
        ranges: For int8 and uint8: a ``.npy`` (2, values) with the minimum and maximum of each dimension, instead.
        chunk_size: Rows that are encoded and kept as one. It decides which texts share a batch.
        engine: Where the model runs; on the CPU in this process if None.
        overwrite: Replace the output, and begin anew where an interrupted run had other settings.
        on_progress: Called as the work goes on.

    Raises:
        ValueError: If a setting or a row of the input cannot be used, or the output is there.
        FileNotFoundError: If the input is missing.
    """
    out = Path(out).absolute()
    _check_numbers(precision, calibration_rows, ranges, chunk_size)
    source = open_texts(texts, column, keep)
    output = output_for(out)
    _check_kept(keep, output)
    sidecar = out.with_suffix(".ranges.npy") if precision in SCALED else None
    workspace = Workspace.beside(out)
    output.check_target(out)
    # An interrupted run may have written the ranges already.
    for path in (out, None if workspace.path.exists() else sidecar):
        if path is not None and path.exists() and not overwrite:
            raise ValueError(f"{path} exists: choose another --out, or replace it with --overwrite.")
    given = None if ranges is None else _load_ranges(Path(ranges))
    engine = LocalEngine() if engine is None else engine
    encoder = encoder.pinned()
    settings = {
        **source.fingerprint(),
        "column": source.column,
        "keep": ", ".join(keep),
        "weights": encoder.identity(),
        **{name: value for name, value in asdict(encoder).items() if name not in ("model", "revision")},
        "device": engine.device,
        "precision": precision,
        "calibration rows": calibration_rows if precision in SCALED and given is None else None,
        "ranges": None if given is None else hashlib.sha256(given.tobytes()).hexdigest(),
        "chunk size": chunk_size,
        "output": output.kind,
        **_versions(),
    }
    with workspace.begun(settings, overwrite):
        index = _index(source, chunk_size, workspace, on_progress)
        if given is not None:
            with durable(workspace.ranges) as stream:
                np.save(stream, given)
        elif precision in SCALED and min(index.rows, calibration_rows) < 2:
            raise ValueError(f"precision={precision} takes its ranges from two texts or more: give --ranges.")
        plan = Plan(
            input=source.path,
            column=column,
            keep=tuple(keep),
            schema=_schema(source, index) if keep else None,
            encoder=encoder,
            precision=precision,
            calibration_rows=calibration_rows,
            output=output,
            workspace=workspace,
        )
        resumed = _encode(plan, index, engine, on_progress)
        on_progress("Writing", index.rows, index.rows)
        if sidecar is not None:
            with durable(sidecar) as stream:
                stream.write(workspace.ranges.read_bytes())
        output.assemble([workspace.parts / output.part(number) for number in range(len(index))], index.rows, out)
    workspace.remove()
    return Encoded(index.rows, resumed, sidecar)


def _encode(plan: Plan, index: Index, engine: Engine, on_progress: OnProgress) -> int:
    """Encode what is not there yet; how many rows were."""
    there = plan.workspace.done()
    todo = [number for number in range(len(index)) if number not in there]
    resumed = done = index.rows - sum(index[number].rows for number in todo)
    on_progress("Encoding", done, index.rows)
    if todo:
        for number in engine.run(plan, todo):
            done += index[number].rows
            on_progress("Encoding", done, index.rows)
    missing = set(range(len(index))) - plan.workspace.done()
    if missing:
        raise RuntimeError(f"{len(missing)} of {len(index)} chunks are missing in {plan.workspace.parts}.")
    return resumed


def _index(source: TextFile, chunk_size: int, workspace: Workspace, on_progress: OnProgress) -> Index:
    if workspace.index.exists():
        return Index.load(workspace.index)
    on_progress("Checking", 0, None)
    index = source.index(chunk_size, lambda rows: on_progress("Checking", rows, None))
    with durable(workspace.index) as stream:
        index.save(stream)
    return index


def _schema(source: TextFile, index: Index) -> object:
    """Types of the kept columns, from the first chunk."""
    arrow, _ = require_pyarrow("Keeping columns")
    try:
        schema = arrow.table(source.read(index[0]).kept).schema
    except arrow.ArrowException as error:
        raise ValueError(f"{source.path}: a column to keep has values of several types ({error}).") from None
    for column in schema:
        if arrow.types.is_null(column.type):
            raise ValueError(f'{source.path}: "{column.name}" has no value in the first {index[0].rows} rows.')
    return schema


def _check_numbers(precision: str, calibration_rows: int, ranges: str | Path | None, chunk_size: int) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f'precision="{precision}": give one of {", ".join(PRECISIONS)}.')
    if ranges is not None and precision not in SCALED:
        raise ValueError(f"Ranges are for precision {' or '.join(SCALED)}; {precision} needs none.")
    for name, value in (("calibration_rows", calibration_rows), ("chunk_size", chunk_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: give a whole number from 1.")


def _check_kept(keep: Sequence[str], output: Output) -> None:
    if keep and isinstance(output, NpyOutput):
        raise ValueError("An .npy holds vectors alone: keep columns with an --out that ends in .parquet.")
    if EMBEDDING in keep or len(set(keep)) < len(keep):
        raise ValueError(f'keep {", ".join(keep)}: name each column once; "{EMBEDDING}" is the vectors\' own.')


def _load_ranges(path: Path) -> np.ndarray:
    ranges = np.load(path)
    if ranges.ndim != 2 or len(ranges) != 2 or not np.all(ranges[0] <= ranges[1]):
        raise ValueError(f"{path}: shape {ranges.shape}; ranges are a (2, values) array, minima before maxima.")
    return np.asarray(ranges, dtype=np.float32)


def _versions() -> Settings:
    return {"st_reba": __version__, **{package: version(package) for package in _PACKAGES}}
