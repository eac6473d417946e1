"""A file of texts to a file of vectors."""

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
from ..version import __version__
from .chunks import Engine, LocalEngine, Plan
from .encoder import Encoder, model_files
from .places import Place, Remote, looks, part_of, place_of
from .workspace import (
    EMBEDDING,
    OF_CHUNKS,
    OF_LISTS,
    Settings,
    Workspace,
    assemble,
    check_unchanged,
    file_digests,
    kind_of,
)

#: Called with the stage, how many texts of it are done, and of how many (None while that is unknown).
OnProgress = Callable[[str, int, int | None], None]

#: Stages that are told of in megabytes: fetching an input that is not on this machine, reading model and input for
#: their digests, and sending an output to another machine.
COPYING, HASHING, UPLOADING = "Copying", "Hashing", "Uploading"
_MEGABYTE = 10**6
#: Rows of a chunk, and batches of the first chunks, where nothing else is asked for.
_CHUNK_SIZE = 2048
_FIRST_BATCHES = 4

#: Packages whose version may change a vector's last bits, or a file's bytes.
_PACKAGES = ("sentence-transformers", "transformers", "torch", "numpy")


@dataclass(frozen=True)
class Encoded:
    """What a run gave.

    Attributes:
        rows: Vectors in the output.
        texts: Those of the input; as many, unless they were cut into chunks.
        resumed: How many of them were encoded by an interrupted run.
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
    """Encode a file of any size; memory does not grow with it.

    The input is copied first, to a Parquet file in ``OUT.partial``: so every row is checked before the first is
    encoded, and so is every kept value, since a column's type is the one that holds them all. Chunks are then encoded
    one by one and kept there until all are done; a run that was killed goes on from them when it is called again, and
    the output is the same, byte for byte, on the same hardware with the same number of threads. It goes on with the
    same model and the same input alone, which are known by digests of their whole files.

    Args:
        encoder: The model and how it is used.
        texts: Plain text, TSV, CSV, JSON lines or Parquet; a folder of shards; a remote path, or a data set of the
            Hub, which are copied first: see :func:`~st_reba.data.sources.files_of`.
        out: ``.npy``: an array (rows, values). ``.parquet``: a file with the column ``embedding`` and the kept ones.
            No suffix: a directory of Parquet shards, a chunk each, which needs no room for a second copy. A URL that
            fsspec knows (``s3://``, ``gs://``, ``hf://`` ...): the run works in a folder of this machine, below
            :func:`huggingface_hub.cached_assets_path`, and uploads the whole at its end; that folder is then removed.
        column: Where the texts are, in all but plain text; see :class:`~st_reba.data.parquet_copy.TextFiles`.
        keep: Columns to write beside the vectors, to Parquet alone.
        separator: What separates columns: see :meth:`st_reba.data.sources.File.separate`.
        chunk_size: Rows that are encoded and kept as one. It decides which texts share a batch. None: chunks grow from
            four batches to 2,048 rows, so that a run of few texts has several, too.
        engine: Where the model runs; on the CPU in this process if None.
        overwrite: Replace the output that is there now, and begin anew where an interrupted run had other settings.
        on_progress: Called as the work goes on, after each batch of texts.

    Raises:
        ImportError: If a package is missing that writes to a remote output.
        OSError: If a remote output cannot be written: the same call repeats the upload.
        ValueError: If a setting or a row of the input cannot be used, the output is there, the input is in its place,
            or the model changes during the run, or the input before it is copied.
        FileNotFoundError: If the input is missing.
        FileExistsError: If a file appeared in the output's place meanwhile: it is left, and all that is done is kept.
        ChildProcessError: If the process of one of several devices dies.
    """
    place = place_of(out)
    before = place.looks()
    kind = kind_of(place, before)
    encoder = encoder.pinned()
    _check_settings(encoder, kind, keep, chunk_size)
    here = files_here(texts, ALL)
    if here is not None:
        TextFiles(here, column, keep, separator).check()
    workspace = Workspace(place.work)
    _check_apart(place, workspace.path, [texts, encoder.model, *(file.path for file in here or ())])
    exists = ValueError(f"{place} exists: choose another --out, or replace it with --overwrite.")
    # A run that was ended at its very end has written its output already.
    if before is not None and not overwrite and not workspace.path.exists():
        raise exists
    engine = LocalEngine() if engine is None else engine

    def in_megabytes(stage: str, done: int, total: int) -> None:
        on_progress(stage, done // _MEGABYTE, total // _MEGABYTE)

    with workspace.held():
        if here is None:
            on_progress(COPYING, 0, None)
            here = files_of(texts, ALL, workspace.input)
        source = TextFiles(here, column, keep, separator)
        source.check()
        commits, weights = model_files(encoder.model, encoder.revision)
        read_as = {file.path: looks(file.path) for file in here}
        loaded_as = {path: looks(path) for path in weights.values()}
        digests = file_digests([*read_as, *loaded_as], partial(in_megabytes, HASHING))
        of_files = [_digest(f"{name} {digests[path]}" for name, path in sorted(weights.items()))] if weights else []
        settings: Settings = {
            "input": _digest(digests[path] for path in read_as),
            "weights": ", ".join([*commits, *of_files]),
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
        made = workspace.finished(settings)
        if made and made["looks"] == before:
            workspace.remove()
            return Encoded(made["rows"], made["texts"], resumed=made["texts"])
        # An upload that has begun may go on.
        replacing = overwrite or (isinstance(place, Remote) and bool(made) and part_of(before, made["looks"]))
        if before is not None and not replacing:
            raise exists
        workspace.begin(settings, overwrite)
        if not workspace.texts.exists():
            on_progress("Checking", 0, None)
            sizes = (chunk_size, chunk_size) if chunk_size else (_FIRST_BATCHES * encoder.batch_size, _CHUNK_SIZE)
            with atomic_file(workspace.texts) as stream:
                source.copy(stream, *sizes, lambda rows: on_progress("Checking", rows, None))
                # The copy is of the bytes that the digests are of.
                check_unchanged(read_as)
        copy = ParquetCopy(native_file(workspace.texts))
        count = copy.starts[-1]
        parts = [workspace.part(number) for number in range(len(copy))]
        resumed = _encode(Plan(loaded_as, encoder, workspace), copy, engine, on_progress)
        rows = sum(pq.read_metadata(native_file(part)).num_rows for part in parts)
        on_progress("Writing", 0, rows)
        whole = assemble(kind, parts, rows, workspace.whole, lambda done: on_progress("Writing", done, rows))
        workspace.finish(settings, looks=looks(whole), rows=rows, texts=count)
        place.take(whole, before if replacing else None, workspace.replaced, partial(in_megabytes, UPLOADING))
        if isinstance(place, Remote):
            workspace.finish(settings, looks=place.looks(), rows=rows, texts=count)
    workspace.remove()
    return Encoded(rows, count, resumed)


def _encode(plan: Plan, copy: ParquetCopy, engine: Engine, on_progress: OnProgress) -> int:
    """Encode the chunks that are not there yet, and return how many rows were."""
    todo = [number for number in range(len(copy)) if not plan.workspace.part(number).exists()]
    total = copy.starts[-1]
    done = resumed = total - sum(copy.starts[number + 1] - copy.starts[number] for number in todo)

    def on_texts(count: int) -> None:
        nonlocal done
        # A worker that died, and was started again, tells of some texts twice.
        done = min(done + count, total)
        on_progress("Encoding", done, total)

    on_texts(0)
    if todo:
        engine.run(plan, todo, on_texts)
    return resumed


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _check_settings(encoder: Encoder, kind: str, keep: Sequence[str], chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give a whole number from 1.")
    own = [EMBEDDING] if encoder.chunk_tokens is None else [EMBEDDING, *OF_CHUNKS]
    # Sparse and multi-vector models give a text a list of vectors.
    if (saved := saved_class(encoder.model, encoder.revision) or "SentenceTransformer") != "SentenceTransformer":
        own = list(OF_LISTS)
        names = ("truncate_dim", "normalize", "chunk_tokens", "precision")
        if asked := [name for name in names if getattr(encoder, name) not in (None, False, "float32")]:
            said = f"for one vector a text, and {encoder.model} is a {saved}"
            raise ValueError(f"{', '.join(asked)}: {said}. Leave it out.")
    if kind == ".npy" and (keep or own != [EMBEDDING]):
        raise ValueError("An .npy holds one vector a text, and nothing else: give an --out that ends in .parquet.")
    if set(keep) & set(own) or len(set(keep)) < len(keep):
        said = f"name each column once, and rename those called as the output's own: {', '.join(own)}"
        raise ValueError(f"keep {', '.join(keep)}: {said}.")


def _check_apart(place: Place, work: Path, read: Iterable[str | Path]) -> None:
    """What is read may not lie where the output will, nor the output in a folder that is read."""
    for each in read:
        if place.path is None or is_remote(each):
            one, other = f"{place}/", f"{str(each).rstrip('/')}/"
            apart = not one.startswith(other) and not other.startswith(one)
        else:
            inside = Path(each).is_dir() and _within(place.path, Path(each))
            apart = not (inside or _within(Path(each), place.path) or _within(Path(each), work))
        if not apart:
            raise ValueError(f"--out {place} and {each}, which is read, lie in one another: choose another --out.")


def _within(path: Path, directory: Path) -> bool:
    """Whether a path is, or lies in, another one; links are followed."""
    real, above = os.path.realpath(path), os.path.realpath(directory)
    return Path(real).is_relative_to(above) or (path.exists() and directory.exists() and path.samefile(directory))
