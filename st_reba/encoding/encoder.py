"""What turns texts into vectors: a model by name and ``encode``'s own settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from sentence_transformers import SentenceTransformer

from .. import gguf

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: Those that need to know each dimension's range.
SCALED: tuple[Precision, ...] = ("int8", "uint8")

_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Encoder:
    """A model and how it is used. Plain data, for worker processes; each loads the model itself.

    Args:
        model: A directory, or a Hub id; or those of a GGUF file, see :func:`st_reba.gguf.as_directory`.
        revision: Branch, tag or commit of a Hub id.
        dtype: Weights' precision, ``"auto"`` for the model's own.
        batch_size: Texts at a time.
        prompt_name: One of the model's prompts, by name.
        prompt: A prompt in full; not beside ``prompt_name``.
        truncate_dim: Keep this many of a vector's first values; the model's own setting if None.
        normalize: Scale vectors to length 1, after truncation.

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

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: give a whole number from 1.")
        if self.truncate_dim is not None and self.truncate_dim < 1:
            raise ValueError(f"truncate_dim={self.truncate_dim}: give a whole number from 1.")
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("Give a prompt in full or by its name, not both.")

    def pinned(self) -> Encoder:
        """The same with an absolute path, or with the commit that a revision stands for at this moment.

        A GGUF file is converted here, once for all workers.

        Raises:
            ValueError: If there is no such directory and no such model.
        """
        if gguf.is_gguf(self.model):
            asked = {"dtype": self.dtype, "revision": self.revision}
            return replace(self, model=gguf.as_directory(self.model, {"model_kwargs": asked})[0], revision=None)
        directory = Path(self.model)
        if directory.is_dir():
            if self.revision is not None:
                raise ValueError(f"{self.model} is a directory: a revision is for models of the Hub.")
            return replace(self, model=str(directory.absolute()))
        return replace(self, revision=_commit(self.model, self.revision))

    def identity(self) -> str:
        """What tells a :meth:`pinned` model's weights and settings from others: a commit, or a digest of the files'
        names, sizes and beginnings (model cards and hidden files apart)."""
        root = Path(self.model)
        if not root.is_dir():
            return f"{self.model}@{self.revision}"
        digest = hashlib.sha256()
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            name = path.relative_to(root)
            if path.suffix == ".md" or any(part.startswith(".") for part in name.parts):
                continue
            with path.open("rb") as stream:
                head = hashlib.sha256(stream.read(_HEAD_BYTES)).hexdigest()
            digest.update(f"{name.as_posix()} {path.stat().st_size} {head}\n".encode())
        return digest.hexdigest()

    def load(self, device: str) -> SentenceTransformer:
        """The model, on a device.

        Raises:
            ValueError: If it has no prompt of that name.
        """
        model = SentenceTransformer(
            self.model, revision=self.revision, device=device, model_kwargs={"dtype": self.dtype}
        )
        if self.prompt_name is not None and self.prompt_name not in model.prompts:
            names = ", ".join(f'"{name}"' for name in model.prompts) or "none"
            raise ValueError(f'prompt_name="{self.prompt_name}": the model has {names}. Or give the prompt in full.')
        return model

    def encode(self, model: SentenceTransformer, texts: list[str], pool: Any = None) -> np.ndarray:
        """``(len(texts), values)``, float32 or the model's own precision; in one piece, wherever it is done.

        Raises:
            ValueError: If the vectors are shorter than ``truncate_dim``.
        """
        vectors = model.encode(
            texts,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            batch_size=self.batch_size,
            show_progress_bar=False,
            normalize_embeddings=self.normalize,
            truncate_dim=self.truncate_dim,
            pool=pool,
            chunk_size=len(texts),
        )
        if self.truncate_dim is not None and vectors.shape[1] < self.truncate_dim:
            raise ValueError(f"truncate_dim={self.truncate_dim}: the model's vectors have {vectors.shape[1]} values.")
        return vectors


def _commit(model: str, revision: str | None) -> str:
    """The commit of a model on the Hub, or in its cache without a network."""
    reason: Exception | None = None
    for name in ("modules.json", "config.json"):
        try:
            return Path(hf_hub_download(model, name, revision=revision)).parent.name
        except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            reason = error
    said = str(reason).strip().splitlines()[0]
    raise ValueError(f"{model}: there is no such directory, and the Hub gives no such model ({said})") from None
