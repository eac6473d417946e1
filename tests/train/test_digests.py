from __future__ import annotations

import hashlib

import datasets
import numpy as np
import pyarrow as pa
import pytest

from st_reba.train.fitting import data_digest


def test_texts_and_scores_have_the_digest_that_they_had():
    """A run that an earlier version began on them goes on."""
    columns = {"sentence": ["a", "b"], "score": [0.5, None], "words": [["a"], []]}
    digest = hashlib.sha256(repr(list(columns)).encode())
    for values in columns.values():
        digest.update(repr(values).encode())
    assert data_digest(datasets.Dataset.from_dict(columns)) == digest.hexdigest()


@pytest.mark.parametrize(
    ("rows", "other"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]),
        ([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]),
        ([[[1.0], [2.0]], [[3.0]]], [[[1.0]], [[2.0], [3.0]]]),
        ([[1.0, None]], [[1.0, 0.0]]),
        ([[1.0], None], [[1.0], []]),
        ([[1, 2]], [[1.0, 2.0]]),
    ],
)
def test_vectors_are_told_apart_by_their_numbers(rows, other):
    first, second = (datasets.Dataset.from_dict({"label": each}) for each in (rows, other))
    assert data_digest(first) != data_digest(second)
    assert data_digest(first) == data_digest(datasets.Dataset.from_dict({"label": rows}))


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 4), pa.large_list(pa.float16())])
def test_of_vectors_wherever_they_lie(kind, tmp_path):
    """In memory, on the disk, and as part of a larger table."""
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    rows = datasets.Dataset(pa.table({"label": pa.array(list(values.astype(kind.value_type.to_pandas_dtype())), kind)}))
    rows.save_to_disk(str(tmp_path / "rows"))
    loaded = datasets.load_from_disk(str(tmp_path / "rows"))
    assert data_digest(rows) == data_digest(loaded)
    assert data_digest(loaded.select(range(2, 6))) == data_digest(rows.select(range(2, 6)))
    assert data_digest(loaded.select([2, 3, 4, 5])) == data_digest(rows.select(range(2, 6)))
    assert data_digest(rows.select(range(2, 6))) != data_digest(rows.select(range(3, 7)))


def test_vectors_are_not_written_out(monkeypatch):
    """Which took eight minutes for a million vectors of 1,024 numbers."""

    def written(value):
        assert "0.5" not in str(value)
        return str(value)

    rows = datasets.Dataset.from_dict({"label": [[0.5] * 8] * 10})
    monkeypatch.setattr("builtins.repr", written)
    data_digest(rows)
