"""What tells a loaded language model, weights or settings from others: hashes over all of their content."""

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

from ..version import __version__


def fingerprint(model: PreTrainedModel, tokenizer: Any, max_seq_length: int | None) -> str:
    """Tells this language model, as it would embed, from any other: 16 hexadecimal digits.

    All its weights, configuration, precision, tokenizer and ``max_seq_length``, and the package's version go into it.
    It keeps results of one model from being taken for those of another.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    weights = [_of_weight(name, [weight]) for name, weight in [*model.named_parameters(), *model.named_buffers()]]
    return _hashed([(__version__, max_seq_length, config)], *weights, [_tokenizer(tokenizer)])


def content(weight: Tensor) -> memoryview | bytes:
    """A weight's bytes; of a quantised one, those of the tensors that it is made of."""
    if hasattr(weight, "__tensor_flatten__"):
        names, settings = weight.__tensor_flatten__()
        return b"".join([*(content(getattr(weight, name)) for name in names), repr(settings).encode()])
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def fingerprint_of_weight(name: str, blocks: Iterable[Tensor]) -> str:
    """Tells a weight, which may come in blocks of rows, from any other: 16 hexadecimal digits."""
    return _hashed([()], _of_weight(name, blocks))


def fingerprint_of(*settings: Any) -> str:
    """Tells settings, which JSON or ``str`` can write down, from others: 16 hexadecimal digits."""
    return _hashed([settings])


_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")


def _of_weight(name: str, blocks: Iterable[Tensor]) -> Iterator[Any]:
    """What of a weight, which may come in blocks of rows, is hashed."""
    for block in blocks:
        yield [name, str(block.dtype), list(block.shape)]
        # What accelerate has offloaded is nowhere to be read; its name and shape are.
        if not block.is_meta:
            yield block


def _hashed(*several: Iterable[Any]) -> str:
    """16 hexadecimal digits of settings, written as JSON, and of tensors, to the byte."""
    found = hashlib.sha256()
    for part in chain(*several):
        is_weight = isinstance(part, Tensor)
        found.update(content(part) if is_weight else json.dumps(part, sort_keys=True, default=str).encode() + b"\0")
    return found.hexdigest()[:16]


def _tokenizer(tokenizer: Any) -> Any:
    """All that decides a text's ids; what a call sets (padding, truncation) does not."""
    kind = type(tokenizer).__name__
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        state = json.loads(backend.to_str())
        return kind, special, {key: value for key, value in state.items() if key not in ("padding", "truncation")}
    with TemporaryDirectory() as directory:
        files = sorted(tokenizer.save_vocabulary(directory))
        hashes = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    return kind, special, tokenizer.get_added_vocab(), hashes
