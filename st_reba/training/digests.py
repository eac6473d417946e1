"""What tells data, and weights, from any other: all of their content, wherever it lies."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from ..modules.fingerprint import content


def data_digest(dataset: Any) -> str:
    """Of the rows and the names of the columns of a ``datasets.Dataset``."""
    digest = hashlib.sha256(repr(dataset.column_names).encode())
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        for column in batch.columns:
            digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()


def weights_digest(module: nn.Module) -> str:
    """Of all parameters and buffers of a module, to the byte."""
    digest = hashlib.blake2b()
    for name, tensor in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(content(tensor))
    return digest.hexdigest()
