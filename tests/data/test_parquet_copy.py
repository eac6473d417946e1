"""Files of texts as one Parquet copy: the same rows in the same chunks, whatever the files are."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from st_reba.data.parquet_copy import ParquetCopy, TextFiles, chunk_end
from st_reba.data.sources import LONGEST, File, read_rows
from st_reba.data.tables import read_data

from ..conftest import long

#: Bytes that a line may have in these tests.
SHORT = 2**16
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
LINES = ["one", "", "  zwei \x00\x0b\x1c", "三\u2028\x85", "last\r"]


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr("st_reba.data.sources.LONGEST", SHORT)
    before = csv.field_size_limit(SHORT)
    yield
    csv.field_size_limit(before)


def copied(*paths, size=2, column=None, keep=(), separator=None):
    """Files as one Parquet copy."""
    texts = TextFiles([File(path) for path in paths], column, keep, separator)
    texts.check()
    stream = io.BytesIO()
    texts.copy(stream, size, size, lambda rows: None)
    return ParquetCopy(stream)


def all_rows(copy, order=None):
    chunks = {number: copy.read(number)[0] for number in order or range(len(copy))}
    return [text for number in range(len(copy)) for text in chunks[number]]


def write(path, data: bytes):
    """In the compression that the suffix asks for."""
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(data))
    return path


def write_parquet(path, texts, **options):
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path, **options)
    return path


LINES_AND_CELLS = [
    # An empty line is a row; only line feeds, and a carriage return before one, end a line.
    ("t.txt", "\ufeffone\r\n\n  zwei \x00\x0b\x1c\n三\u2028\x85\nlast\r\r\n", LINES),
    ("t.txt", "a\nb", ["a", "b"]),
    ("t.tsv", '\ufeffSentence\tid\n"a\t1\nb"\t2\n', ['"a', 'b"']),
    ("t.csv", '"a, b"\nc\n', ["a, b", "c"]),
    ("t.csv", 'id,text\r\n1,"a ""b"", c"\r\n\r\n2,"d\ne"\r\n3,f\r\n', ['a "b", c', "d\ne", "f"]),
]


@pytest.mark.parametrize("suffix", ["", long(".gz"), long(".bz2"), ".xz", ".zst"])
@pytest.mark.parametrize(("name", "data", "expected"), LINES_AND_CELLS)
def test_lines_and_cells(name, data, expected, suffix, tmp_path):
    copy = copied(write(tmp_path / f"{name}{suffix}", data.encode()))
    (tmp_path / f"{name}{suffix}").unlink()
    assert all_rows(copy) == expected, "the copy needs its files no more"


def test_another_separator(tmp_path):
    copy = copied(write(tmp_path / "t.csv", b'id;text\n1;"a; b"\n2;c\n'), keep=["id"], separator=";")
    assert (all_rows(copy), copy.read(0)[1].to_pydict()) == (["a; b", "c"], {"id": ["1", "2"]})


def test_json_lines(tmp_path):
    rows = [{"body": text, "id": number} for number, text in enumerate(LINES)]
    data = "".join(json.dumps(row) + "\n\n" for row in [*rows[:4], {**rows[4], "once": 1}])
    copy = copied(write(tmp_path / "t.jsonl", data.encode()), column="body", keep=["id", "once"])
    assert copy.starts == [0, 2, 4, 5]
    assert all_rows(copy, order=[2, 0, 1]) == LINES
    assert copy.read(1)[1].to_pydict() == {"id": [2, 3], "once": [None, None]}


REFUSALS = [
    ("t.txt", b"a\n\xff\n", "t.txt, line 2: not UTF-8 (invalid start byte). Save the file as UTF-8."),
    ("t.csv", b"PK\x03\x04", "t.csv is an Excel workbook or another ZIP file. Save a sheet as .csv, in UTF-8."),
    ("t.xls", b"\xd0\xcf\x11\xe0", "t.xls is an Excel workbook. Save a sheet as .csv, in UTF-8."),
    ("t.csv", COMPRESS[".zst"](b"a"), "t.csv is compressed. End its name so, as in table.csv.zst."),
    ("t", b"PAR1", "t is a Parquet file. End its name in .parquet."),
    ("t.txt", "a".encode("utf-16"), "t.txt is UTF-16. Save the file as UTF-8."),
    ("t.tsv", "a\tb\n".encode("utf-16-le"), "t.tsv is UTF-16. Save the file as UTF-8."),
    ("t.csv", b"a;b;c\nd;e;f\n", 't.csv: columns are separated by ";". Give --separator ";", or save it with commas.'),
    ("t.txt.gz", b"", "t.txt.gz holds no texts."),
    ("t.csv", b"text\n", "t.csv holds no texts"),
    ("t.jsonl", b'{"text": "a"}\n\n{"text": \n', "t.jsonl, line 3: not JSON (Expecting value"),
    ("t.jsonl", b"[1]\n", "row 1: 1 is JSON, but a row is a JSON object."),
    ("t.json", b'[\n{"a": 1}\n{"a": 2}]', "t.json, line 1: not JSON (Expecting ',' delimiter: line 3 column 1"),
    ("t.json", b'[\n{"text": "a"},\n', "t.json, line 1: not JSON (Expecting value: line 3 column 1"),
    ("t.json", b'[]\n{"text": "a"}', "t.json, line 1: not JSON (Extra data: line 2 column 1"),
    ("t.json", b"[\n]\n", "t.json holds no texts"),
    ("t.jsonl", b"[" * 100_000, "line 1: not JSON ("),
    ("t.jsonl", b'{"a": 1, "a": 2}\n', 'line 1: not JSON ("a" more than once)'),
    ("t.jsonl", b'{"a": 1e999}\n', "line 1: not JSON (1e999 is a number beyond the range"),
    ("t.jsonl", b'{"body": "a", "id": 1}\n', "line 1 lacks text (texts); its columns are body, id. A row is text"),
    ("t.jsonl", b'{"text": null}\n', "line 1: text: None is not text. A row is text."),
    ("t.csv", b"a,b\n", "t.csv, line 1: 2 columns, and no header that names them. A row is text. If"),
    ("t.csv", b"review,label\na,b\n", "If the first line gives the column another name, give that as --column."),
    ("t.csv.zst", b'text,b\n1,2\n3,"4\n', "t.csv.zst, line 3: unexpected end of data"),
    ("t.parquet", b"PAR1", "is not a Parquet file"),
]


@pytest.mark.parametrize(("name", "data", "message"), REFUSALS)
def test_refusals(name, data, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        copied(write(tmp_path / name, data))


MISSING_COLUMNS = [
    ("t.txt", b"a", {"column": "body"}, 'plain text has no column "body". Leave out --column'),
    ("t.txt", b"a", {"keep": ["id"]}, 'plain text has no columns to keep such as "id". Keep "text"'),
    ("t.csv", b"a,b\n", {"column": "c"}, "line 1 lacks c (texts); its columns are a, b. A row is c. If the first line g"
     "ives the column another"),
    # The kept column has the usual name of the texts.
    ("t.csv", b"sentence\na\n", {"keep": ["text"]}, "line 1 lacks text (texts); its columns are sentence"),
    ("t.jsonl", b'{"sentence": "a"}\n', {"keep": ["text"]}, "line 1 lacks text (texts); its columns are sentence"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "options", "message"), MISSING_COLUMNS)
def test_columns_that_are_not_there(name, data, options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        copied(write(tmp_path / name, data), **options)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_cut_short(suffix, tmp_path):
    path = write(tmp_path / f"t.txt{suffix}", b"".join(b"%d\n" % number for number in range(9999)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot be read to its end"):
        copied(path)


TOO_LONG = [
    ("t.txt", b"a\n", "line 2: longer than 32 MiB. Cut it into several texts."),
    ("t.csv", b'text\n"', "line 2: field larger than field limit (65536). A quotation mark may be missing"),
]


@pytest.mark.parametrize(("name", "before", "message"), TOO_LONG)
def test_a_line_that_is_too_long(name, before, message, short_lines, tmp_path):
    path = write(tmp_path / name, before + (b"a" * 99 + (b"\n" if name == "t.csv" else b"a")) * 1000)
    for read in (copied, read_data):
        with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
            read(path)


def test_no_more_of_a_line_is_read_than_it_may_have():
    stream = io.BytesIO(b"one\n" + b"a" * (2 * LONGEST))

    class Given(File):
        def open(self):
            return stream

    with pytest.raises(ValueError, match="t.txt, line 2: longer than 32 MiB"):
        list(read_rows(Given(Path("t.txt"))))
    assert stream.closed or stream.tell() == LONGEST + 5


@pytest.mark.parametrize(("smallest", "largest"), [(4, 4), (3, 20), (128, 2048), (36, 2048), (64, 8)])
def test_chunks_that_grow(smallest, largest):
    """The end of a chunk is the same for all of its rows; no chunk has more than an eighth of what stands before it,
    but for the first ones."""
    row, sizes = 0, []
    while row < 20 * largest:
        end = chunk_end(row, smallest, largest)
        assert {chunk_end(within, smallest, largest) for within in range(row, end)} == {end}
        sizes.append(end - row)
        row = end
    assert sizes[0] == min(smallest, largest)
    assert max(sizes) == sizes[-1] == largest
    assert all(size <= max(smallest, sum(sizes[:number]) // 4) for number, size in enumerate(sizes) if size < largest)


class TestParquet:
    @pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), None])
    def test_every_kind_of_string(self, kind, tmp_path):
        """Polars writes views; kept columns have their types."""
        texts = pa.array(["a", "b" * 20, "", "a"], kind) if kind else pa.array(["a", "b", "", "a"]).dictionary_encode()
        path = write_parquet(tmp_path / "t.parquet", texts, row_group_size=2)
        copy = copied(path, size=3, keep=["id"])
        assert all_rows(copy) == texts.to_pylist()
        assert copy.read(0)[1]["id"].type == pa.int64()

    BAD_COLUMNS = [
        (["a", None], "t.parquet, row 2: text: None is not text. A row is text."),
        ([1, 2], "t.parquet, row 1: text: 1 is not text."),
        (pa.array([b"\xff"]).view(pa.string()), "cannot be read to its end: in or after row 1, In column 0: "),
        (pa.array([], pa.string()), "holds no texts"),
        (["a", "b" * (SHORT + 1)], "t.parquet, row 2: text: longer than 32 MiB. Cut it into several texts."),
    ]

    @pytest.mark.parametrize(("values", "message"), BAD_COLUMNS)
    def test_bad_columns_are_named(self, values, message, short_lines, tmp_path):
        with pytest.raises(ValueError, match=re.escape(message)):
            copied(write_parquet(tmp_path / "t.parquet", values))

    def test_a_damaged_file_is_named(self, tmp_path):
        """Its texts, and its footer, which a program may read for long before it finds that out; and a page of a kept
        column, before the first row is encoded."""
        path = write_parquet(tmp_path / "t.parquet", ["text a", "text b"], compression="none", write_page_checksum=True)
        whole = path.read_bytes()

        def damage(at):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])

        for at in (*range(0, len(whole), 31), len(whole) - 1):
            damage(at)
            for read in (copied, read_data):
                try:
                    read(path)
                except ValueError as error:
                    assert str(path) in str(error), error  # noqa: PT017
        path.write_bytes(whole)
        damage(pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset + 9)
        with pytest.raises(ValueError, match="t.parquet cannot be read to its end"):
            copied(path, keep=["id"])

    def test_columns_of_one_name(self, tmp_path):
        columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
        pq.write_table(pa.table(columns, names=["text", "text", "body"]), tmp_path / "t.parquet")
        for options in ({}, {"column": "body", "keep": ["text"]}):
            with pytest.raises(ValueError, match='t.parquet, row 1: several columns are called "text"'):
                copied(tmp_path / "t.parquet", **options)
        assert all_rows(copied(tmp_path / "t.parquet", column="body")) == ["c"], "others may be called alike"


class TestSeveralFiles:
    """Shards are read as one file is: chunks begin in one and end in another."""

    @pytest.mark.parametrize("kind", ["txt", "csv", "jsonl.gz", "parquet"])
    @pytest.mark.parametrize("size", [1, 4, 20])
    def test_chunks_are_those_of_one_file(self, kind, size, tmp_path):
        rows = [{"text": f"text {number}", "id": number} for number in range(10)]
        paths = [tmp_path / f"{shard}.{kind}" for shard in range(4)]
        for path, (start, end) in zip(paths, [(0, 3), (3, 3), (3, 4), (4, 10)], strict=True):
            own = rows[start:end]
            if kind == "parquet":
                pq.write_table(pa.Table.from_pylist(own, pa.schema({"text": pa.string(), "id": pa.int64()})), path)
                continue
            header = "text,id\n" if kind == "csv" else ""
            line = {"txt": "{text}", "csv": "{text},{id}"}.get(kind)
            lines = [line.format(**row) if line else json.dumps(row) for row in own]
            write(path, (header + "".join(f"{line}\n" for line in lines)).encode())
        [kept] = keep = ["text" if kind == "txt" else "id"]
        copy = copied(*paths, size=size, keep=keep)
        assert copy.starts == [*range(0, 10, size), 10]
        assert all_rows(copy, order=reversed(range(len(copy)))) == [row["text"] for row in rows]
        values = [value for number in range(len(copy)) for value in copy.read(number)[1][kept].to_pylist()]
        assert [str(value) for value in values] == [str(row[kept]) for row in rows]

    def test_one_type_holds_what_all_keep(self, tmp_path):
        first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
        for path, value in ((first, 1), (second, 0.5)):
            path.write_text(json.dumps({"text": "a", "x": value}))
            pq.write_table(pa.table({"text": ["a"], "x": [value]}), path.with_suffix(".parquet"))
        for kind in (".jsonl", ".parquet"):
            copy = copied(first.with_suffix(kind), second.with_suffix(kind), keep=["x"])
            assert copy.read(0)[1]["x"].to_pylist() == [1.0, 0.5]
        second.write_text('{"text": "b"}\n{"text": "b", "x": "c"}\n')
        with pytest.raises(ValueError, match=r'2.jsonl, lines 1 to 2: .* all values of "x" .* int64 vs string\)'):
            copied(first, second, keep=["x"])
