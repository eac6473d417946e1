from __future__ import annotations

import gzip
import io
import json
import os
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from st_reba.encoding.texts import Index, open_texts

from ..conftest import examples

LINES = ["one", "", "  zwei ", "三\u2028\x85", "last\r"]


def all_rows(texts, size=2, order=None):
    index = texts.index(size)
    chunks = {number: texts.read(index[number]).texts for number in order or range(len(index))}
    return [text for number in range(len(index)) for text in chunks[number]]


def write(path, data: bytes):
    """In the compression that the suffix asks for."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
class TestLines:
    def test_plain_text(self, suffix, tmp_path):
        """An empty line is a row; only line feeds, and a carriage return before one, end a line."""
        path = write(tmp_path / f"t.txt{suffix}", "\ufeffone\r\n\n  zwei \n三\u2028\x85\nlast\r\r\n".encode())
        assert all_rows(open_texts(path)) == LINES

    def test_the_last_line_need_not_end(self, suffix, tmp_path):
        assert all_rows(open_texts(write(tmp_path / f"t.txt{suffix}", b"a\nb"))) == ["a", "b"]

    def test_json_lines(self, suffix, tmp_path):
        data = "".join(json.dumps({"body": text, "id": number}) + "\n\n" for number, text in enumerate(LINES))
        texts = open_texts(write(tmp_path / f"t.jsonl{suffix}", data.encode()), "body", keep=["id", "none"])
        index = texts.index(2)
        assert (index.rows, len(index), index[1].row, index[1].line) == (5, 3, 2, 5)
        assert all_rows(texts) == LINES
        assert texts.read(index[1]).kept == {"id": [2, 3], "none": [None, None]}

    def test_chunks_in_any_order(self, suffix, tmp_path):
        path = write(tmp_path / f"t.txt{suffix}", "\n".join(str(number) for number in range(9)).encode())
        assert all_rows(open_texts(path), size=2, order=[3, 4, 0, 2, 1]) == [str(number) for number in range(9)]

    @pytest.mark.parametrize(
        ("name", "data", "message"),
        [
            ("t.txt", b"a\n\xff\n", "t.txt{}, line 2: not UTF-8 (invalid start byte). Save the file as UTF-8."),
            ("t.txt", b"", "t.txt{} holds no texts."),
            ("t.jsonl", b"\n\n", "t.jsonl{} holds no texts."),
            ("t.jsonl", b'{"text": "a"}\n\n{"text": \n', "t.jsonl{}, line 3: not JSON (Expecting value"),
            ("t.jsonl", b"[1]\n", "line 1: a list, but a line is a JSON object."),
            ("t.jsonl", b'{"body": "a", "id": 1}\n', 'line 1: no "text", but "body", "id". Name the text\'s column'),
            ("t.jsonl", b'{"text": null}\n', 'line 1: "text" is null, but a text is a string.'),
            ("t.jsonl", b'{"text": 3}\n', 'line 1: "text" is a number, but a text is a string.'),
            ("t.jsonl", b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
            ("t.jsonl", b"[" * 100_000, "line 1: not JSON ("),
        ],
    )
    def test_bad_rows_are_named(self, name, data, message, suffix, tmp_path):
        path = write(tmp_path / f"{name}{suffix}", data)
        with pytest.raises(ValueError, match=re.escape(message.format(suffix))):
            open_texts(path).index(2)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read(texts, size, seed, tmp_path):
    texts[0] = "first" + texts[0]
    plain, lines, parquet = (tmp_path / name for name in ("t.txt", "t.jsonl", "t.parquet"))
    plain.write_bytes("".join(text + "\n" for text in texts).encode())
    lines.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode())
    pq.write_table(pa.table({"text": texts}), parquet, row_group_size=seed % 4 + 1)
    order = list(range(-(-len(texts) // size)))
    random.Random(seed).shuffle(order)
    for path in (plain, lines, parquet):
        assert all_rows(open_texts(path), size, order) == texts


def test_an_index_outlives_its_file(tmp_path):
    path = write(tmp_path / "t.txt", b"a\nb\nc\n")
    stream = io.BytesIO()
    index = open_texts(path).index(2)
    index.save(stream)
    (tmp_path / "index.npy").write_bytes(stream.getvalue())
    assert [Index.load(tmp_path / "index.npy")[i] for i in range(2)] == [index[0], index[1]]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_cut_short(suffix, tmp_path):
    path = write(tmp_path / f"t.txt{suffix}", b"".join(b"%d\n" % number for number in range(9999)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        open_texts(path).index(2)


class TestParquet:
    def write(self, path, texts, **options):
        pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path, **options)
        return path

    def test_kept_columns_have_their_types(self, tmp_path):
        path = self.write(tmp_path / "t.parquet", pa.array(["a", "b", "a"]).dictionary_encode(), row_group_size=2)
        texts = open_texts(path, keep=["id"])
        index = texts.index(3)
        assert texts.read(index[0]).texts == ["a", "b", "a"]
        assert texts.read(index[0]).kept["id"].type == pa.int64()

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (["a", None], 't.parquet, row 2: "text" is null, but a text is a string.'),
            ([1, 2], 'column "text" is int64, but texts are strings.'),
            (pa.array([b"a", b"\xff"]).view(pa.string()), 'rows 1 to 2: "text" is not UTF-8'),
            (pa.array([], pa.string()), "holds no texts"),
        ],
    )
    def test_bad_columns_are_named(self, values, message, tmp_path):
        path = self.write(tmp_path / "t.parquet", values)
        with pytest.raises(ValueError, match=re.escape(message)):
            open_texts(path).index(2)

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
    def test_every_kind_of_string(self, kind, tmp_path):
        """Polars writes views."""
        path = self.write(tmp_path / "t.parquet", pa.array(["a", "b" * 20, ""], kind), row_group_size=2)
        assert all_rows(open_texts(path)) == ["a", "b" * 20, ""]

    @pytest.mark.parametrize("options", [{}, {"column": "body", "keep": ["text"]}])
    def test_columns_of_one_name(self, options, tmp_path):
        columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
        pq.write_table(pa.table(columns, names=["text", "text", "body"]), tmp_path / "t.parquet")
        with pytest.raises(ValueError, match='t.parquet: 2 columns are called "text": give each a name of its own'):
            open_texts(tmp_path / "t.parquet", **options)
        assert all_rows(open_texts(tmp_path / "t.parquet", "body")) == ["c"], "others may be called alike"

    def test_a_page_that_is_damaged(self, tmp_path):
        """Also one of a kept column: it is found before the first row is encoded."""
        path = self.write(tmp_path / "t.parquet", ["a", "b"], compression="none", write_page_checksum=True)
        place = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes(16))
        with pytest.raises(ValueError, match="t.parquet cannot be read to its end"):
            open_texts(path, keep=["id"]).index(2)

    def test_what_is_no_parquet(self, tmp_path):
        with pytest.raises(ValueError, match="is not a Parquet file"):
            open_texts(write(tmp_path / "t.parquet", b"PAR1"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t.csv", {}, "t.csv: of no known format. Give plain text (.txt, one text a line), JSON lines"),
        ("t.parquet.gz", {}, "of no known format"),
        ("t", {}, "of no known format"),
        ("t.txt", {"column": "body"}, 'plain text has no column "body". Leave out --column'),
        ("t.txt", {"keep": ["id"]}, 'plain text has no columns to keep but "text" itself, not "id".'),
    ],
)
def test_refusals(name, options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        open_texts(write(tmp_path / name, b"a"), **options)


def test_what_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="is a directory: give a file"):
        open_texts(tmp_path)
    os.mkfifo(tmp_path / "t.txt")
    with pytest.raises(ValueError, match="is a pipe or a device, but texts are read more than once"):
        open_texts(tmp_path / "t.txt")


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no.txt: there is no such file"):
        open_texts(tmp_path / "no.txt")
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match='no column "text", but "a", "b"'):
        open_texts(tmp_path / "t.parquet")
