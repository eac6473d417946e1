"""Run that encodes a file of texts into a file of vectors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq

from ..data.parquet_copy import ParquetCopy, TextFiles
from ..data.sources import ALL, files_here, files_of, is_remote, native_file
from ..files import atomic_file
from ..hub.push import saved_class
from ..settings import check_int
from ..version import __version__
from . import workspace
from .chunks import Engine, LocalEngine, Plan
from .encoder import Encoder, model_files

#: Called with the stage, the number of finished texts, and the number of all texts (None while it is unknown).
OnProgress = Callable[[str, int, int | None], None]

#: Stages measured in megabytes: fetching a remote input, hashing the model and the input, uploading the output.
COPYING, HASHING, UPLOADING = "Copying", "Hashing", "Uploading"
_MEGABYTE = 10**6
#: Default rows of a chunk, and default batches of the first chunks.
_CHUNK_SIZE = 2048
_FIRST_BATCHES = 4

#: Packages whose version may change a vector's last bits, or a file's bytes.
_PACKAGES = ("sentence-transformers", "transformers", "torch", "numpy")


@dataclass(frozen=True)
class Encoded:
    """Result of a run.

    Attributes:
        rows: Number of vectors in the output.
        texts: Number of texts in the input: as many as vectors, unless texts were cut into chunks.
        resumed: Number of texts that an interrupted run had encoded.
    """

    rows: int
    texts: int
    resumed: int


def encode_file(
    encoder: Encoder,
    texts: str | Path,
    out: str | Path,
    *,
    column: str | None = None,
    keep: Sequence[str] = (),
    separator: str | None = None,
    chunk_size: int | None = None,
    engine: Engine | None = None,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Encoded:
    """Encode a file of any size in constant memory.

    The input is first copied to a Parquet file in ``OUT.partial``, so every row and kept value is checked before the
    first text is encoded. Chunks are then encoded one by one and kept there until all are done. An interrupted run
    resumes when it is called again, if the model and the input are unchanged, which digests of their files verify. The
    output is then the same, byte for byte, on the same hardware with the same number of threads.

    Args:
        encoder: Model and settings.
        texts: Plain text, TSV, CSV, JSON lines or Parquet; or a folder of shards. A remote path, or a data set of the
            Hub, is copied first: see :func:`~st_reba.data.sources.files_of`.
        out: Path in ``.npy`` for an array (rows, values), or in ``.parquet`` for a file with the column ``embedding``
            and the kept ones. A path without a suffix is a directory of Parquet shards, one for each chunk, which
            needs no disk space for a second copy. For a URL that fsspec knows (``s3://``, ``gs://``, ``hf://`` ...),
            the run works in a folder below :func:`huggingface_hub.cached_assets_path` and uploads the whole at its end.
        column: Column of the texts, except in plain text: see :class:`~st_reba.data.parquet_copy.TextFiles`.
        keep: Columns to write next to the vectors, in Parquet only.
        separator: Separator of the columns: see :meth:`st_reba.data.sources.File.separate`.
        chunk_size: Rows of a chunk, which decides which texts share a batch. By default, chunks grow from four batches
            to 2,048 rows, so that a run of few texts can be resumed, too.
        engine: Engine that runs the model. None runs it on the CPU in this process.
        overwrite: Whether to replace an existing output, and an interrupted run with other settings.
        on_progress: Called after each batch, and at each stage.

    Raises:
        ImportError: If a package is missing that writes to a remote output.
        OSError: If a remote output cannot be written. The same call repeats the upload.
        ValueError: If a setting or a row of the input is invalid, the output exists or overlaps with the input, or the
            model or the input changes during the run.
        FileNotFoundError: If the input is missing.
        FileExistsError: If another program wrote the output during the run. Its file and the finished work are kept.
        ChildProcessError: If a worker process dies.
    """
    destination = workspace.destination_of(out)
    before = destination.stat()
    kind = workspace.kind_of(destination, before)
    encoder = encoder.pinned()
    _check_settings(encoder, kind, keep, chunk_size)
    files = files_here(texts, ALL)
    folder = workspace.Workspace(destination.work)
    _check_apart(destination, folder.path, [texts, encoder.model, *(file.path for file in files or ())])
    exists = ValueError(f"{destination} exists: choose another --out, or replace it with --overwrite.")
    # A run that was killed at its very end has already written its output.
    if before is not None and not overwrite and not folder.path.exists():
        raise exists
    engine = LocalEngine() if engine is None else engine

    def in_megabytes(stage: str, done: int, total: int) -> None:
        on_progress(stage, done // _MEGABYTE, total // _MEGABYTE)

    with folder.held():
        if files is None:
            on_progress(COPYING, 0, None)
            files = files_of(texts, ALL, folder.input)
        source = TextFiles(files, column, keep, separator)
        source.check()
        commits, weights = model_files(encoder.model, encoder.revision)
        input_stats = {file.path: workspace.stat(file.path) for file in files}
        model_stats = {path: workspace.stat(path) for path in weights.values()}
        digests = workspace.file_digests([*input_stats, *model_stats], partial(in_megabytes, HASHING))
        local = [_digest(f"{name} {digests[path]}" for name, path in sorted(weights.items()))] if weights else []
        settings: workspace.Settings = {
            "input": _digest(digests[path] for path in input_stats),
            "weights": ", ".join([*commits, *local]),
            "column": column,
            "separator": separator,
            "keep": ", ".join(keep),
            **{name: value for name, value in asdict(encoder).items() if name not in ("model", "revision")},
            "device": engine.device,
            "chunk size": chunk_size or "growing",
            "output": kind or "directory",
            "st_reba": __version__,
            **{package: version(package) for package in _PACKAGES},
        }
        finished = folder.finished(settings)
        if finished and finished["stat"] == before:
            folder.remove()
            return Encoded(finished["rows"], finished["texts"], resumed=finished["texts"])
        # An interrupted upload can be resumed.
        uploads = isinstance(destination, workspace.Remote)
        replace = overwrite or (uploads and workspace.has_begun(before, finished.get("stat")))
        if before is not None and not replace:
            raise exists
        folder.begin(settings, overwrite)
        if not folder.texts.exists():
            on_progress("Checking", 0, None)
            sizes = (chunk_size, chunk_size) if chunk_size else (_FIRST_BATCHES * encoder.batch_size, _CHUNK_SIZE)
            with atomic_file(folder.texts) as stream:
                source.copy(stream, *sizes, lambda rows: on_progress("Checking", rows, None))
                # The digests must be those of the copied bytes.
                workspace.check_unchanged(input_stats)
        copy = ParquetCopy(native_file(folder.texts))
        count = copy.starts[-1]
        parts = [folder.part(number) for number in range(len(copy))]
        resumed = _encode(Plan(model_stats, encoder, folder), copy, engine, on_progress)
        rows = sum(pq.read_metadata(native_file(part)).num_rows for part in parts)
        on_progress("Writing", 0, rows)
        whole = workspace.assemble(kind, parts, rows, folder.whole, lambda done: on_progress("Writing", done, rows))
        folder.finish(settings, stat=workspace.stat(whole), rows=rows, texts=count)
        destination.commit(whole, before if replace else None, folder.replaced, partial(in_megabytes, UPLOADING))
        if uploads:
            folder.finish(settings, stat=destination.stat(), rows=rows, texts=count)
    folder.remove()
    return Encoded(rows, count, resumed)


def _encode(plan: Plan, copy: ParquetCopy, engine: Engine, on_progress: OnProgress) -> int:
    """Encode the missing chunks, and return the number of texts in the existing ones."""
    todo = [number for number in range(len(copy)) if not plan.workspace.part(number).exists()]
    total = copy.starts[-1]
    done = resumed = total - sum(copy.starts[number + 1] - copy.starts[number] for number in todo)

    def on_texts(count: int) -> None:
        nonlocal done
        # A restarted worker counts some texts twice.
        done = min(done + count, total)
        on_progress("Encoding", done, total)

    on_texts(0)
    if todo:
        engine.run(plan, todo, on_texts)
    return resumed


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _check_settings(encoder: Encoder, kind: str, keep: Sequence[str], chunk_size: int | None) -> None:
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, 1)
    written = [workspace.EMBEDDING] if encoder.chunk_tokens is None else [workspace.EMBEDDING, *workspace.OF_CHUNKS]
    # Sparse and multi-vector models give a text a list of vectors.
    if (saved := saved_class(encoder.model, encoder.revision) or "SentenceTransformer") != "SentenceTransformer":
        written = list(workspace.OF_LISTS)
        names = ("truncate_dim", "normalize", "chunk_tokens", "precision")
        if unfit := [name for name in names if getattr(encoder, name) not in (None, False, "float32")]:
            raise ValueError(f"{', '.join(unfit)}: not for a {saved} such as {encoder.model}. Leave it out.")
    if kind == ".npy" and (keep or written != [workspace.EMBEDDING]):
        raise ValueError("An .npy holds one vector a text and nothing else: give an --out that ends in .parquet.")
    if set(keep) & set(written) or len(set(keep)) < len(keep):
        taken = f"rename those with a name of the output's columns: {', '.join(written)}"
        raise ValueError(f"keep {', '.join(keep)}: give each column once, and {taken}.")


def _check_apart(destination: workspace.Destination, work: Path, sources: Iterable[str | Path]) -> None:
    """Raise a ValueError if a source is or contains the output, or the other way around."""
    out = _folder(destination.path or str(destination))
    for source in map(_folder, sources):
        if source.startswith((out, _folder(work))) or out.startswith(source):
            raise ValueError(f"--out {destination} and the input {source.rstrip('/')} overlap: choose another --out.")


def _folder(path: str | Path) -> str:
    """Return a URL, or the path with links followed, with a slash at its end."""
    return f"{str(path).rstrip('/') if is_remote(path) else Path(os.path.realpath(path)).as_posix()}/"
