"""What tells data and weights from any other: all of their content, wherever they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from torch import nn

from ..lm.fingerprint import content


def data_digest(dataset: Any) -> str:
    """Of the rows and the names of the columns of a ``datasets.Dataset``."""
    digest = hashlib.sha256(repr(dataset.column_names).encode())
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        for column in batch.columns:
            for part in _vectors(column):
                digest.update(part)
    return digest.hexdigest()


def _vectors(column: Any) -> Iterator[bytes | memoryview]:
    """A column's content: of lists of numbers their bytes, since to write out a number takes a microsecond."""
    values, shape = column.combine_chunks(), [repr(column.type).encode()]
    while _is_list(values.type) and not values.null_count:
        shape.append(values.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        values = values.flatten()
    if len(shape) > 1 and pa.types.is_primitive(values.type) and not values.null_count:
        yield from shape
        yield values.to_numpy(zero_copy_only=False).tobytes()
    else:
        yield repr(column.to_pylist()).encode()


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def weights_digest(module: nn.Module) -> str:
    """Of all parameters and buffers of a module, to the byte."""
    digest = hashlib.blake2b()
    for name, tensor in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(content(tensor))
    return digest.hexdigest()
