"""What is kept beside the vectors is what stood in the file, or the run is refused before it begins."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.data.sources import BATCH
from st_reba.encode import encode_file

from .conftest import names

#: Rows of a chunk: every file here has more.
CHUNK = 2


def kept(encoder, directory: Path, values, **options):
    """What comes back of the column ``x``."""
    path = directory / "records.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "x": value}) + "\n" for value in values))
    out = directory / "a.parquet"
    encode_file(encoder, path, out, keep=["x"], chunk_size=CHUNK, **options)
    return pq.read_table(out)["x"]


def same(given, found) -> bool:
    """Equal, where a key that an object lacks is null."""
    if isinstance(given, dict):
        return given.keys() <= found.keys() and all(same(given.get(key), item) for key, item in found.items())
    if isinstance(given, list):
        return len(given) == len(found) and all(map(same, given, found))
    if isinstance(given, float) and math.isnan(given):
        return math.isnan(found)
    # Python compares whole numbers and floats exactly.
    return given == found and isinstance(given, bool) == isinstance(found, bool)


WHOLE = st.integers(-(2**65), 2**65) | st.sampled_from([2**53, 2**53 + 1, 2**63, -(2**63)])
NUMBERS = st.integers(-9, 9) | st.floats(width=64)
SCALARS = [WHOLE, NUMBERS, WHOLE | NUMBERS, st.text(max_size=3), st.booleans() | st.integers(0, 1), st.text() | NUMBERS]
NAMES = st.sampled_from(["a", "b", "a.b", ""])


def nested(kinds):
    lists = kinds.map(lambda kind: st.lists(st.none() | kind, max_size=3))
    return lists | st.dictionaries(NAMES, kinds, max_size=3).map(lambda own: st.fixed_dictionaries({}, optional=own))


#: Kinds of values: of some no two go together.
KINDS = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=4)
COLUMNS = KINDS.flatmap(lambda kind: st.lists(st.none() | kind, min_size=CHUNK + 1, max_size=4 * CHUNK))


@given(values=COLUMNS)
def test_every_value_comes_back_or_none_is_encoded(values, fake):
    with tempfile.TemporaryDirectory() as name:
        stages, refusal, found = [], "", None
        try:
            found = kept(fake, Path(name), values, on_progress=lambda stage, done, total: stages.append(stage))
        except ValueError as error:
            refusal = str(error)
        if found is not None:
            assert same(values, found.to_pylist()), (values, found)
        else:
            assert str(Path(name) / "records.jsonl") in refusal
            assert "Encoding" not in stages
            assert names(Path(name)) == ["records.jsonl"]


MIXED_VALUES = [
    ([1, 2, "a"], r"no single type holds all values of \"x\" unchanged \(Could not convert 'a'.*Write them as"),
    ([1, *[None] * BATCH, "a"], r"lines \d+ to \d+: no single type holds all values of \"x\" unchanged"),
    ([0.5, 2, 2**53 + 1], r"unchanged \(Integer value 9007199254740993 is outside of the range exactly repr"),
    ([{}, {}, None], r"unchanged \(Cannot write struct type 'x' with no child"),
    ([None, None, None], 'records.jsonl: "x" has no value in any row: do not keep it.'),
]


@pytest.mark.parametrize(("values", "message"), MIXED_VALUES)
def test_what_no_type_holds_is_refused(values, message, fake, tmp_path):
    with pytest.raises(ValueError, match=message):
        kept(fake, tmp_path, values)
    assert names(tmp_path) == ["records.jsonl"]


PARQUET_COLUMNS = [
    pa.array([{"url": "u"}, None, {"url": None}]),
    pa.array(["a", "b", None]).dictionary_encode(),
    pa.array([1, None, 2**64 - 1], pa.uint64()),
    pa.array([1, 2, 3], pa.timestamp("ns", tz="UTC")),
]


@pytest.mark.parametrize("column", PARQUET_COLUMNS)
def test_parquet_columns_stay_as_they_are(column, fake, tmp_path):
    pq.write_table(pa.table({"text": ["a", "b", "c"], "x": column}), tmp_path / "t.parquet", row_group_size=2)
    encode_file(fake, tmp_path / "t.parquet", tmp_path / "a.parquet", keep=["x"], chunk_size=CHUNK)
    found = pq.read_table(tmp_path / "a.parquet")["x"]
    assert found.type == column.type
    assert found.to_pylist() == column.to_pylist()
