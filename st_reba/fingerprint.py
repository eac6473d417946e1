"""Hashes over all content of models, weights and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .version import __version__

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")


def fingerprint(model: PreTrainedModel, tokenizer: Any, max_seq_length: int | None) -> str:
    """Return 16 hexadecimal digits that differ for language models that embed differently.

    They cover all weights, the configuration, precision, tokenizer, ``max_seq_length``, and the package's version.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    weights = [_of_weight(name, [weight]) for name, weight in chain(model.named_parameters(), model.named_buffers())]
    return _hash([(__version__, max_seq_length, config)], *weights, [_of_tokenizer(tokenizer)])


def fingerprint_of_weight(name: str, blocks: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits of a weight, which may come in blocks of rows."""
    return _hash([()], _of_weight(name, blocks))


def fingerprint_of(*settings: Any) -> str:
    """Return 16 hexadecimal digits of settings that JSON or ``str`` can write."""
    return _hash([settings])


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_weight(name: str, blocks: Iterable[Tensor]) -> Iterator[Any]:
    for block in blocks:
        yield [name, str(block.dtype), list(block.shape)]
        # Weights that accelerate has offloaded cannot be read; their names and shapes count.
        if not block.is_meta:
            yield block


def _hash(*several: Iterable[Any]) -> str:
    """Hash settings, written as JSON, and tensors, to the byte."""
    digest = hashlib.sha256()
    for part in chain(*several):
        if isinstance(part, Tensor):
            digest.update(_content(part))
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode() + b"\0")
    return digest.hexdigest()[:16]


def _content(weight: Tensor) -> memoryview | bytes:
    """Return a weight's bytes; those of the tensors that it is made of, if it is quantised."""
    if hasattr(weight, "__tensor_flatten__"):
        names, settings = weight.__tensor_flatten__()
        return b"".join([*(_content(getattr(weight, name)) for name in names), repr(settings).encode()])
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _of_tokenizer(tokenizer: Any) -> Any:
    """Return all that decides a text's ids. Padding and truncation, which a call sets, do not."""
    kind = type(tokenizer).__name__
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        state = json.loads(backend.to_str())
        return kind, special, {key: value for key, value in state.items() if key not in ("padding", "truncation")}
    with TemporaryDirectory() as directory:
        files = sorted(tokenizer.save_vocabulary(directory))
        hashes = [digest_of_file(Path(file)) for file in files]
    return kind, special, tokenizer.get_added_vocab(), hashes
