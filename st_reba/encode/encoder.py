"""Model and settings of a run: how texts become vectors, and the files that decide it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import glob
from os import fspath
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.util import load_file_path, quantize_embeddings
from torch import Tensor
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from ..data.sources import check_characters
from ..hub.push import ENCODERS, saved_class
from ..hub.saved_files import AdapterConfig, read_modules, read_object
from ..lm.gguf import is_gguf
from ..reading.chunks import check_chunk_tokens, encode_chunks
from ..settings import check_choice, check_int
from .workspace import EMBEDDING, OF_CHUNKS

Precision = Literal["float32", "binary", "ubinary"]


def sparse_columns(weights: Tensor) -> dict[str, pa.Array]:
    """Return sparse weights (texts, vocabulary) as columns of lists: ascending ``indices``, and ``values``."""
    weights = weights.cpu().coalesce()
    nonzero = weights.values() != 0
    texts, entries = weights.indices()[:, nonzero]
    ends = pa.array([0, *texts.bincount(minlength=len(weights)).cumsum(0).tolist()], type=pa.int32())
    columns = {"indices": entries.int().numpy(), "values": weights.values()[nonzero].float().numpy()}
    return {name: pa.ListArray.from_arrays(ends, pa.array(values)) for name, values in columns.items()}


def token_columns(rows: Sequence[Any]) -> dict[str, pa.Array]:
    """Return token vectors, (tokens, values) for each text, as one column of lists, ``vectors``."""
    ends = pa.array(np.cumsum([0, *map(len, rows)]), type=pa.int32())
    values = torch.cat([torch.as_tensor(row) for row in rows]).float().cpu().contiguous().numpy()
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return {"vectors": pa.ListArray.from_arrays(ends, vectors)}


@dataclass(frozen=True)
class Encoder:
    """Model and its settings: plain data, so that each worker process can load the model itself.

    Args:
        model: Directory or Hub id of a saved SentenceTransformer. A bare language model, such as a GGUF file, is
            refused.
        revision: Branch, tag or commit of a Hub id.
        dtype: Precision of the weights. ``"auto"`` keeps the precision in which they were saved.
        batch_size: Texts per batch.
        prompt_name: Name of one of the model's prompts.
        prompt: Prompt in full, in place of ``prompt_name``.
        truncate_dim: Number of leading values of each vector to keep. None uses the model's setting.
        normalize: Whether to scale vectors to length 1, after truncation.
        chunk_tokens: Tokens per chunk: each chunk gets a vector that depends on the whole text, see
            :func:`~st_reba.encode_chunks`. None gives each text one vector.
        chunk_overlap: Number of tokens that a chunk shares with the next one.
        precision: Type of the written numbers; ``binary`` and ``ubinary`` pack eight into a byte.

    Raises:
        ValueError: If a setting is out of range, or settings contradict each other.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    batch_size: int = 32
    prompt_name: str | None = None
    prompt: str | None = None
    truncate_dim: int | None = None
    normalize: bool = False
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", fspath(self.model))
        if self.chunk_tokens is not None:
            check_chunk_tokens(self.chunk_tokens, self.chunk_overlap)
        elif self.chunk_overlap:
            raise ValueError(f"chunk_overlap={self.chunk_overlap} needs chunk_tokens: give both, or neither.")
        for name in ("batch_size", "truncate_dim"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 1)
        check_choice("precision", self.precision, *get_args(Precision))
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("Give prompt or prompt_name, not both.")
        check_characters(self.prompt or "", "The prompt")

    def pinned(self) -> Encoder:
        """Return a copy with an absolute path, or with the revision resolved to its current commit.

        Raises:
            ValueError: If the model does not exist, or is not a saved SentenceTransformer.
        """
        commit = saved_commit(self.model, self.revision)
        model = self.model if commit else str(Path(self.model).absolute())
        return replace(self, model=model, revision=commit)

    def load(self, device: str) -> SentenceTransformer:
        """Load the model on a device."""
        kind = ENCODERS[saved_class(self.model, self.revision) or "SentenceTransformer"]
        return kind(self.model, revision=self.revision, device=device, model_kwargs={"dtype": self.dtype})

    def encode(
        self, model: SentenceTransformer, texts: list[str], on_texts: Callable[[int], None]
    ) -> np.ndarray | dict[str, pa.Array]:
        """Return the vectors of texts, (texts, values).

        Sparse and multi-vector models return columns of lists. They encode texts as documents, or as queries if
        ``prompt_name`` is ``"query"``.

        Args:
            model: Result of :meth:`load`.
            texts: Texts to encode.
            on_texts: Called after each batch with its number of texts.
        """
        left = len(texts)

        def on_batch(*_: object) -> None:
            nonlocal left
            done = min(self.batch_size, left)
            left -= done
            on_texts(done)

        # sentence-transformers has a progress bar for batches, and no callback.
        hook = model[0].register_forward_hook(on_batch)
        try:
            if isinstance(model, SentenceTransformer):
                vectors: np.ndarray = model.encode(texts, show_progress_bar=False, **self._prompt, **self._scale)
                return vectors
            encode = model.encode_query if self.prompt_name == "query" else model.encode_document
            embeddings: Any = encode(texts, show_progress_bar=False, **self._prompt)
        finally:
            hook.remove()
        return sparse_columns(embeddings) if isinstance(model, SparseEncoder) else token_columns(embeddings)

    def table(
        self, model: SentenceTransformer, texts: list[str], kept: pa.Table, first: int, on_texts: Callable[[int], None]
    ) -> pa.Table:
        """Return the kept columns with the vectors of the texts or, with ``chunk_tokens``, of their chunks.

        Args:
            model: Result of :meth:`load`.
            texts: Texts to encode.
            kept: Kept columns, with a row for each text.
            first: Row of the first text in the whole input.
            on_texts: Called as by :meth:`encode`, or once with ``chunk_tokens``.

        Raises:
            ValueError: If the vectors are shorter than ``truncate_dim``, or the model has no token vectors for chunks.
        """
        if self.chunk_tokens is None:
            vectors = self.encode(model, texts, on_texts)
        else:
            size, overlap = self.chunk_tokens, self.chunk_overlap
            chunked = encode_chunks(model, texts, chunk_tokens=size, overlap=overlap, **self._prompt, **self._scale)
            on_texts(len(texts))
            vectors = np.concatenate([text.vectors for text in chunked])
            rows = np.repeat(np.arange(len(texts)), [len(text.spans) for text in chunked])
            spans = np.array([span for text in chunked for span in text.spans], dtype=np.int64).reshape(-1, 2)
            schema = pa.schema([*kept.schema, *((name, pa.int64()) for name in OF_CHUNKS)])
            columns = [column.take(pa.array(rows)) for column in kept.columns]
            kept = pa.table([*columns, first + rows, *spans.T], schema=schema)
        if isinstance(vectors, np.ndarray):
            if self.truncate_dim is not None and (size := vectors.shape[1]) < self.truncate_dim:
                raise ValueError(f"truncate_dim={self.truncate_dim}: the model's vectors have {size} values.")
            packed = np.ascontiguousarray(quantize_embeddings(vectors, self.precision))
            vectors = {EMBEDDING: pa.FixedSizeListArray.from_arrays(pa.array(packed.reshape(-1)), packed.shape[1])}
        for name, values in vectors.items():
            kept = kept.append_column(name, values)
        return kept

    @property
    def _prompt(self) -> dict[str, Any]:
        return {"prompt_name": self.prompt_name, "prompt": self.prompt, "batch_size": self.batch_size}

    @property
    def _scale(self) -> dict[str, Any]:
        return {"normalize_embeddings": self.normalize, "truncate_dim": self.truncate_dim}


_MODULES = "modules.json"
_CONFIG = "config.json"


def model_files(model: str, revision: str | None) -> tuple[list[str], dict[str, Path]]:
    """Return everything that decides a model's vectors, including the base models of its adapters.

    Args:
        model: Directory or Hub id.
        revision: Commit on the Hub.

    Returns:
        Models on the Hub as ``name@commit``, and files on this machine by names that do not depend on where the model
        is stored. Model cards and hidden files are left out.

    Raises:
        ValueError: If a base model does not exist.
    """
    commits, files = [], {}
    if Path(model).is_dir():
        files = _files(Path(model))
        adapters = [path for path in files.values() if path.name == ADAPTER_CONFIG_NAME]
    else:
        commits = [f"{model}@{revision}"]
        modules = read_modules(Path(hf_hub_download(model, _MODULES, revision=revision)))
        name = (PurePosixPath(modules[0]["path"]) / ADAPTER_CONFIG_NAME).as_posix()
        adapters = [Path(path)] if (path := load_file_path(model, name, revision=revision)) else []
    for adapter in adapters:
        settings = read_object(adapter, AdapterConfig)
        base = str(settings.get("base_model_name_or_path"))
        if Path(base).is_dir():
            files.update({f"{base}: {name}": path for name, path in _files(Path(base).absolute()).items()})
        elif config := load_file_path(base, _CONFIG, revision=settings.get("revision")):
            commits.append(f"{base}@{Path(config).parent.name}")
        # A directory with the whole model next to the adapter loads without the base.
        elif not (adapter.parent / _CONFIG).is_file():
            raise ValueError(
                f"{adapter} names a base model that does not exist: {base} is neither a directory nor a model on the "
                "Hub. Correct base_model_name_or_path."
            )
    return commits, files


def saved_commit(model: str, revision: str | None) -> str | None:
    """Return the current commit of a revision, on the Hub or, without a network, in its cache.

    Returns:
        The commit, or None for a directory.

    Raises:
        ValueError: If the model does not exist, is a bare language model, or reads texts in pairs.
    """
    is_here, is_bare = Path(model).is_dir(), is_gguf(model)
    if is_here and revision is not None:
        raise ValueError(f"{model} is a directory: give a revision only for models on the Hub.")
    if not is_bare and (file := load_file_path(model, _MODULES, revision=revision)):
        if (kind := saved_class(model, revision) or "SentenceTransformer") not in ENCODERS:
            raise ValueError(f"{model} is a {kind}, which reads texts in pairs. Give one of {', '.join(ENCODERS)}.")
        return None if is_here else Path(file).parent.name
    if not is_here and not is_bare:
        try:
            hf_hub_download(model, _CONFIG, revision=revision)
        except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{model} is neither a directory nor a model on the Hub ({reason}). Check the name, or give a "
                "directory that `st-reba build` or `save` has written."
            ) from None
    raise ValueError(
        f"{model} has no {_MODULES}: it is not a saved SentenceTransformer. Give a directory that `st-reba build` or "
        f"`save` has written, or build a language model first: st-reba build --model {shlex.quote(model)} "
        "--out my-model"
    )


def _files(root: Path) -> dict[str, Path]:
    # Unlike Path.rglob, glob skips hidden files and follows links: a module's folder may be one.
    paths = [root / name for name in glob("**", root_dir=root, recursive=True) if not name.endswith(".md")]
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
