"""A file of texts to a file of vectors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from ..data.parquet_copy import ParquetCopy, TextFiles
from ..data.sources import ALL, files_here, files_of
from ..files import atomic_file
from ..hub.push import saved_class
from ..version import __version__
from .chunks import Engine, LocalEngine, Plan
from .encoder import PRECISIONS, Encoder, Precision
from .model_files import model_files
from .outputs import EMBEDDING, OF_CHUNKS, OF_LISTS, assemble, kind_of, rows_of
from .places import Place, Remote, looks, place_of
from .workspace import Settings, Workspace, check_unchanged, file_digests

#: Called with what is being done, how many texts of it are done, and of how many (None while that is unknown).
#: Of :data:`HASHING`, :data:`COPYING` and :data:`UPLOADING` it is megabytes.
OnProgress = Callable[[str, int, int | None], None]

#: Reading the model and the input for their digests; told of where it takes a while.
HASHING = "Hashing"
#: Fetching an input that is not on this machine.
COPYING = "Copying"
#: Sending an output to a place that is not on this machine.
UPLOADING = "Uploading"
_A_WHILE = 10**9
#: Rows of a chunk, and batches of the first chunks, where nothing else is asked for.
_CHUNK_SIZE = 2048
_FIRST_BATCHES = 4
_MEGABYTE = 10**6

#: Those whose version may change a vector's last bits, or a file's bytes.
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
    precision: Precision = "float32",
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
        precision: What a vector's values are written as; ``binary`` and ``ubinary`` pack eight in a byte.
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
    kind = kind_of(place)
    _check_settings(precision, chunk_size)
    _check_kept(keep, kind, encoder.chunk_tokens is not None)
    here = files_here(texts, ALL)
    if here is not None:
        TextFiles(here, column, keep).check()
    workspace = Workspace(place.work)
    encoder = encoder.pinned()
    if (saved := saved_class(encoder.model, encoder.revision) or "SentenceTransformer") != "SentenceTransformer":
        _check_lists(encoder, saved, kind, precision, keep)
    read = [*(file.path for file in here or ()), Path(encoder.model)]
    if place.path is not None:
        _check_apart(place.path, workspace, read, folders=[Path(texts), Path(encoder.model)])
    if isinstance(place, Remote):
        _check_other_url(str(place), str(texts))
    before = place.looks()
    # A run that was ended at its very end has written its output already.
    if before is not None and not overwrite and not workspace.path.exists():
        raise _exists(place)
    engine = LocalEngine() if engine is None else engine
    with workspace.held():
        if here is None:
            on_progress(COPYING, 0, None)
        files = files_of(texts, ALL, workspace.input) if here is None else here
        source = TextFiles(files, column, keep)
        source.check()
        commits, weights = model_files(encoder.model, encoder.revision)
        read_as = {file.path: looks(file.path) for file in files}
        loaded_as = {path: looks(path) for path in weights.values()}

        def on_bytes(done: int, total: int) -> None:
            if total > _A_WHILE:
                on_progress(HASHING, done // _MEGABYTE, total // _MEGABYTE)

        digests = file_digests([*read_as, *loaded_as], workspace.digests, on_bytes)
        of_files = [_digest(f"{name} {digests[path]}" for name, path in sorted(weights.items()))] if weights else []
        settings: Settings = {
            "input": _digest(digests[path] for path in read_as),
            "weights": ", ".join([*commits, *of_files]),
            "column": column,
            "keep": ", ".join(keep),
            **{name: value for name, value in asdict(encoder).items() if name not in ("model", "revision")},
            "device": engine.device,
            "precision": precision,
            "chunk size": chunk_size or "growing",
            "output": kind or "directory",
            "st_reba": __version__,
            **{package: version(package) for package in _PACKAGES},
        }
        if (made := workspace.finished(settings, before)) is not None:
            workspace.remove()
            return Encoded(*made, resumed=made[1])
        replacing = overwrite or (isinstance(place, Remote) and workspace.uploading(settings, before))
        if before is not None and not replacing:
            raise _exists(place)
        workspace.begin(settings, overwrite)
        if not workspace.texts.exists():
            on_progress("Checking", 0, None)
            smallest = None if chunk_size else min(_FIRST_BATCHES * encoder.batch_size, _CHUNK_SIZE)
            with atomic_file(workspace.texts) as stream:
                source.copy(
                    stream, chunk_size or _CHUNK_SIZE, smallest, lambda rows: on_progress("Checking", rows, None)
                )
                # What was copied is what was hashed.
                check_unchanged(read_as)
        copy = ParquetCopy(workspace.texts)
        count = copy.starts[-1]
        plan = Plan(loaded_as, encoder, precision, kind, workspace)
        resumed = _encode(plan, copy, engine, on_progress)
        parts = [plan.part(number) for number in range(len(copy))]
        rows = sum(map(rows_of, parts))
        on_progress("Writing", 0, rows)
        whole = assemble(kind, parts, rows, workspace.whole, lambda done: on_progress("Writing", done, rows))

        def on_upload(done: int, total: int) -> None:
            on_progress(UPLOADING, done // _MEGABYTE, total // _MEGABYTE)

        workspace.finish(settings, looks(whole), rows, count)
        place.take(whole, before if replacing else None, workspace.replaced, on_upload)
        if isinstance(place, Remote):
            workspace.finish(settings, place.looks(), rows, count)
    workspace.remove()
    return Encoded(rows, count, resumed)


def _encode(plan: Plan, copy: ParquetCopy, engine: Engine, on_progress: OnProgress) -> int:
    """Encode what is not there yet; how many rows were."""
    there = plan.workspace.done()
    sizes = [end - start for start, end in pairwise(copy.starts)]
    resumed = sum(sizes[number] for number in there)
    done, total = resumed, copy.starts[-1]

    def on_texts(count: int) -> None:
        nonlocal done
        # A worker that died, and was started again, tells of some texts twice.
        done = min(done + count, total)
        on_progress("Encoding", done, total)

    on_texts(0)
    if todo := [number for number in range(len(copy)) if number not in there]:
        engine.run(plan, todo, on_texts)
    return resumed


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _exists(place: Place) -> ValueError:
    return ValueError(f"{place} exists: choose another --out, or replace it with --overwrite.")


def _check_settings(precision: str, chunk_size: int | None) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f'precision="{precision}": give one of {", ".join(PRECISIONS)}.')
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give a whole number from 1.")


def _check_kept(keep: Sequence[str], kind: str, chunked: bool) -> None:
    if kind == ".npy" and (keep or chunked):
        also = "not where a chunk lies" if chunked else "no kept columns"
        raise ValueError(f"An .npy holds vectors alone, and {also}: give an --out that ends in .parquet.")
    own = [EMBEDDING, *(OF_CHUNKS if chunked else ())]
    if set(keep) & set(own) or len(set(keep)) < len(keep):
        said = f"name each column once, and rename those called as the output's own: {', '.join(own)}"
        raise ValueError(f"keep {', '.join(keep)}: {said}.")


def _check_lists(encoder: Encoder, saved: str, kind: str, precision: str, keep: Sequence[str]) -> None:
    """Refuse what is for one vector a text, where a model of the class ``saved`` gives a text a list."""
    names = ("truncate_dim", "normalize", "chunk_tokens")
    if asked := [name for name in names if getattr(encoder, name)]:
        raise ValueError(f"{', '.join(asked)}: for one vector a text, and {encoder.model} is a {saved}. Leave it out.")
    if kind == ".npy":
        raise ValueError(
            f"An .npy holds one vector a text, and a {saved} gives lists: give an --out that ends in .parquet."
        )
    if precision != "float32":
        raise ValueError(f"precision={precision}: what a {saved} gives is written as float32. Leave it out.")
    if set(keep) & set(OF_LISTS):
        raise ValueError(f"keep {', '.join(keep)}: rename those called as the output's own: {', '.join(OF_LISTS)}.")


def _check_apart(out: Path, workspace: Workspace, read: Sequence[Path], folders: Sequence[Path]) -> None:
    """What is read may not lie where the output will, nor the output in a folder that is read."""
    for path in read:
        if _within(path, out) or _within(path, workspace.path):
            raise ValueError(f"{path} is read, but lies where --out {out} is written: choose another --out.")
    for folder in folders:
        if folder.is_dir() and _within(out, folder):
            raise ValueError(f"--out {out} lies in a folder that is read, {folder}: choose another --out.")


def _check_other_url(out: str, texts: str) -> None:
    """The same of two URLs: neither may be, or lie in, the other one."""
    one, other = f"{out}/", f"{texts.rstrip('/')}/"
    if one.startswith(other) or other.startswith(one):
        raise ValueError(f"--out {out} and the input {texts} lie in one another: choose another --out.")


def _within(path: Path, directory: Path) -> bool:
    """Whether a path is, or lies in, another one; links are followed."""
    real, above = os.path.realpath(path), os.path.realpath(directory)
    return Path(real).is_relative_to(above) or (path.exists() and directory.exists() and path.samefile(directory))
