"""Texts to vectors: a model by name, its files, which must not change meanwhile, and ``encode``'s own settings."""

from __future__ import annotations

import json
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

from ..data.rows import check_characters
from ..hub.push import ENCODERS, model_class, saved_class
from ..lm.gguf import is_gguf
from ..reading.chunks import check_chunk_tokens, encode_chunks
from .workspace import EMBEDDING, OF_CHUNKS

Precision = Literal["float32", "binary", "ubinary"]


def sparse_columns(weights: Tensor) -> dict[str, pa.Array]:
    """The weights of texts, sparse (texts, vocabulary), as lists: ``indices`` of the vocabulary, ascending, and
    ``values``."""
    weights = weights.cpu().coalesce()
    counts = weights.values() != 0
    texts, places = weights.indices()[:, counts]
    ends = pa.array([0, *texts.bincount(minlength=len(weights)).cumsum(0).tolist()], type=pa.int32())
    values = {"indices": places.int().numpy(), "values": weights.values()[counts].float().numpy()}
    return {name: pa.ListArray.from_arrays(ends, pa.array(each)) for name, each in values.items()}


def token_columns(rows: Sequence[Any]) -> dict[str, pa.Array]:
    """The vectors of each text's tokens, (tokens, values) a text, as one column of lists, ``vectors``."""
    ends = pa.array(np.cumsum([0, *map(len, rows)]), type=pa.int32())
    every = torch.cat([torch.as_tensor(row) for row in rows]).float().cpu().contiguous().numpy()
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(every.reshape(-1)), every.shape[1])
    return {"vectors": pa.ListArray.from_arrays(ends, vectors)}


@dataclass(frozen=True)
class Encoder:
    """A model and how it is used. Plain data, for worker processes; each loads the model itself.

    Args:
        model: A saved SentenceTransformer: a directory, or a Hub id. A bare language model, such as a GGUF file, is
            none.
        revision: Branch, tag or commit of a Hub id.
        dtype: Weights' precision, ``"auto"`` for the model's own.
        batch_size: Texts at a time.
        prompt_name: One of the model's prompts, by name.
        prompt: A prompt in full; not beside ``prompt_name``.
        truncate_dim: Keep this many of a vector's first values; the model's own setting if None.
        normalize: Scale vectors to length 1, after truncation.
        chunk_tokens: A vector for each chunk of so many tokens, which knows its text: see
            :func:`~st_reba.encode_chunks`. None: one for each text.
        chunk_overlap: How many tokens a chunk shares with the next one.
        precision: Type of the numbers that are written; ``binary`` and ``ubinary`` pack eight in a byte.

    Raises:
        ValueError: If a setting cannot hold.
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
            raise ValueError(f"chunk_overlap={self.chunk_overlap}: it is between chunks; give chunk_tokens, too.")
        for name in ("batch_size", "truncate_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: give a whole number from 1.")
        if self.precision not in get_args(Precision):
            raise ValueError(f'precision="{self.precision}": give one of {", ".join(get_args(Precision))}.')
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("Give a prompt in full or by its name, not both.")
        check_characters(self.prompt or "", "The prompt")

    def pinned(self) -> Encoder:
        """Return the same with an absolute path, or with the commit that a revision stands for at this moment.

        Raises:
            ValueError: If there is no such directory and no such model, or it is no saved SentenceTransformer.
        """
        commit = saved_commit(self.model, self.revision)
        model = self.model if commit else str(Path(self.model).absolute())
        return replace(self, model=model, revision=commit)

    def load(self, device: str) -> SentenceTransformer:
        """Load the model on a device.

        Raises:
            ValueError: If it has no prompt of that name.
        """
        kind = ENCODERS[saved_class(self.model, self.revision) or "SentenceTransformer"]
        model: SentenceTransformer = kind(
            self.model, revision=self.revision, device=device, model_kwargs={"dtype": self.dtype}
        )
        if self.prompt_name is not None and self.prompt_name not in model.prompts:
            names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
            raise ValueError(f'prompt_name="{self.prompt_name}": the model has {names}. Or give the prompt in full.')
        return model

    def encode(
        self, model: SentenceTransformer, texts: list[str], on_texts: Callable[[int], None]
    ) -> np.ndarray | dict[str, pa.Array]:
        """Return ``(len(texts), values)``, float32 or the model's own precision; of sparse models and of those that
        give each token a vector, columns of lists. These read texts as documents; under the prompt's name ``query``, as
        queries.

        Args:
            model: From :meth:`load`.
            texts: Texts to encode.
            on_texts: Called after each batch with how many texts more have been read.
        """
        left = len(texts)

        def on_batch(*_: object) -> None:
            nonlocal left
            done = min(self.batch_size, left)
            left -= done
            on_texts(done)

        # sentence-transformers has a progress bar for that, and no callback.
        hook = model[0].register_forward_hook(on_batch)
        try:
            if isinstance(model, SentenceTransformer):
                vectors: np.ndarray = model.encode(texts, show_progress_bar=False, **self._asked, **self._scaled)
                return vectors
            read = model.encode_query if self.prompt_name == "query" else model.encode_document
            found: Any = read(texts, show_progress_bar=False, **self._asked)
        finally:
            hook.remove()
        return sparse_columns(found) if isinstance(model, SparseEncoder) else token_columns(found)

    def table(
        self, model: SentenceTransformer, texts: list[str], kept: pa.Table, first: int, on_texts: Callable[[int], None]
    ) -> pa.Table:
        """Return the vectors of texts or, with ``chunk_tokens``, of their chunks, next to what is kept of the texts.

        Args:
            model: From :meth:`load`.
            texts: Texts to encode.
            kept: A row a text.
            first: Row of the first text in the whole input.
            on_texts: As for :meth:`encode`; with ``chunk_tokens`` called once.

        Raises:
            ValueError: If the vectors are shorter than ``truncate_dim``, or the model has no vectors of tokens to make
                chunks of.
        """
        if self.chunk_tokens is None:
            found = self.encode(model, texts, on_texts)
        else:
            size, overlap = self.chunk_tokens, self.chunk_overlap
            chunked = encode_chunks(model, texts, chunk_tokens=size, overlap=overlap, **self._asked, **self._scaled)
            on_texts(len(texts))
            found = np.concatenate([each.vectors for each in chunked])
            rows = np.repeat(np.arange(len(texts)), [len(each.spans) for each in chunked])
            spans = np.array([span for each in chunked for span in each.spans], dtype=np.int64).reshape(-1, 2)
            schema = pa.schema([*kept.schema, *((name, pa.int64()) for name in OF_CHUNKS)])
            columns = [column.take(pa.array(rows)) for column in kept.columns]
            kept = pa.table([*columns, first + rows, *spans.T], schema=schema)
        if isinstance(found, np.ndarray):
            if self.truncate_dim is not None and found.shape[1] < self.truncate_dim:
                raise ValueError(f"truncate_dim={self.truncate_dim}: the model's vectors have {found.shape[1]} values.")
            vectors = np.ascontiguousarray(quantize_embeddings(found, self.precision))
            found = {EMBEDDING: pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])}
        for name, values in found.items():
            kept = kept.append_column(name, values)
        return kept

    @property
    def _asked(self) -> dict[str, Any]:
        return {"prompt_name": self.prompt_name, "prompt": self.prompt, "batch_size": self.batch_size}

    @property
    def _scaled(self) -> dict[str, Any]:
        return {"normalize_embeddings": self.normalize, "truncate_dim": self.truncate_dim}


_MODULES = "modules.json"
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"


def model_files(model: str, revision: str | None) -> tuple[list[str], dict[str, Path]]:
    """Return all that decides what a model gives, with the base models of its adapters.

    Args:
        model: A directory, or a model on the Hub.
        revision: Its commit there.

    Returns:
        Models on the Hub, as ``name@commit``; and files on this machine, by names that do not tell where the model
        lies, without model cards and hidden files.

    Raises:
        ValueError: If a base model is not to be found.
    """
    commits, files = [], {}
    if Path(model).is_dir():
        files = _files(Path(model))
        adapters = [path for path in files.values() if path.name == _ADAPTER]
    else:
        commits = [f"{model}@{revision}"]
        modules = json.loads(Path(hf_hub_download(model, _MODULES, revision=revision)).read_text("utf-8"))
        name = (PurePosixPath(modules[0]["path"]) / _ADAPTER).as_posix()
        adapters = [Path(path)] if (path := load_file_path(model, name, revision=revision)) else []
    for adapter in adapters:
        base = str(json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path"))
        if Path(base).is_dir():
            files.update({f"{base}: {name}": path for name, path in _files(Path(base).absolute()).items()})
        elif config := load_file_path(base, _CONFIG):
            commits.append(f"{base}@{Path(config).parent.name}")
        # The whole model may lie next to its adapter: then its base is not loaded.
        elif not (adapter.parent / _CONFIG).is_file():
            raise ValueError(
                f"{adapter} names a base model that is not to be found: {base} is no directory, and the Hub gives no "
                "such model."
            )
    return commits, files


def saved_commit(model: str, revision: str | None) -> str | None:
    """Return the commit that a revision stands for at this moment, on the Hub or, without a network, in its cache.

    Returns:
        None for a directory.

    Raises:
        ValueError: If there is no such directory and no such model; or it does not say how texts become vectors, as a
            bare language model; or it reads texts in pairs.
    """
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{model} is a directory: a revision is for models of the Hub.")
        if (path / _MODULES).is_file():
            if (kind := model_class(path)) not in ENCODERS:
                raise ValueError(f"{model} is a {kind}, which reads texts in pairs. Give one of {', '.join(ENCODERS)}.")
            return None
    elif not is_gguf(model):
        if found := load_file_path(model, _MODULES, revision=revision):
            return Path(found).parent.name
        try:
            hf_hub_download(model, _CONFIG, revision=revision)
        except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{model}: there is no such directory, and the Hub gives no such model ({said}). Check the name, or "
                "give a directory that `st-reba build` or `save` has written."
            ) from None
    raise ValueError(
        f"{model} has no {_MODULES}: it is not a saved SentenceTransformer, and nothing says how texts become vectors. "
        "Give one that `st-reba build` or `save` has written. Of a language model make one first: "
        f"st-reba build --model {shlex.quote(model)} --out my-model"
    )


def _files(root: Path) -> dict[str, Path]:
    # Unlike Path.rglob, glob passes over hidden files, and follows links: a module's folder may be one.
    paths = [root / name for name in glob("**", root_dir=root, recursive=True) if not name.endswith(".md")]
    return {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
