from __future__ import annotations

import functools
import http.server
import os
import threading
from pathlib import Path

import datasets
import fsspec
import pytest

from st_reba.data.sources import ALL, TO_MEASURE, TO_TRAIN, File, files_of
from st_reba.data.tables import read_data


def names(source, splits=TO_MEASURE):
    return [file.path.name for file in files_of(source, splits, Path("nothing/is/copied"))]


def make(directory, *files):
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_text("a\tb\t1\nc\td\t2\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.TSV", "tsv", ""), ("a.csv.gz", "csv", ".gz"), ("a.ndjson.zst", "jsonl", ".zst"),
        ("a.b.parquet", "parquet", ""), ("a.parquet.gz", "", ".gz"), ("a", "", ""), ("a.xlsx", "", ""),
    ],
)  # fmt: skip
def test_kinds(name, kind, compression, tmp_path):
    file = File.of(tmp_path / name)
    assert (file.kind, file.compression) == (kind, compression)


NOT_SHARDS = (".hidden.tsv", "_SUCCESS", "README.md", "more/part-1.tsv", "state.json")
WITHOUT_TEST = ("train-0.tsv", "train-1.tsv", "data_dev.tsv")
#: A split's word in some names leaves no file out of all.
SOME_NAMED = ("a.txt", "b.txt", "test.txt", "my-train-notes.txt")


class TestFolders:
    @pytest.mark.parametrize(
        ("files", "pattern", "splits", "expected"),
        [
            # Numbers in names count.
            (("part-10.tsv", "part-9.tsv", *NOT_SHARDS), "", TO_MEASURE, ["part-9.tsv", "part-10.tsv"]),
            (WITHOUT_TEST, "", TO_MEASURE, ["data_dev.tsv"]),
            (WITHOUT_TEST, "", TO_TRAIN, ["train-0.tsv", "train-1.tsv"]),
            (WITHOUT_TEST, "train-*", TO_MEASURE, ["train-0.tsv", "train-1.tsv"]),
            (SOME_NAMED, "", ALL, ["a.txt", "b.txt", "my-train-notes.txt", "test.txt"]),
            (SOME_NAMED, "test*", TO_MEASURE, ["test.txt"]),
        ],
    )
    def test_what_of_a_folder_is_read(self, files, pattern, splits, expected, tmp_path):
        make(tmp_path, *files)
        assert names(f"{tmp_path}/{pattern}", splits) == expected

    @pytest.mark.parametrize(
        ("files", "splits", "message"),
        [
            (
                WITHOUT_TEST,
                ALL,
                r'splits, validation \(data_dev.tsv\), train \(train-0.tsv\): give a pattern, .* ".*/\*tr',
            ),
            # To measure or to train on all of it might mix splits.
            (SOME_NAMED, TO_MEASURE, r"none in the name \(a.txt\), train \(my-train-notes.txt\), test"),
            (SOME_NAMED, TO_TRAIN, r"none in the name \(a.txt\), train \(my-train-notes.txt\), test"),
            (("a.tsv", "b.csv"), TO_MEASURE, "files of several kinds, csv, tsv: give one file, or a pattern"),
        ],
    )
    def test_what_cannot_be_told(self, files, splits, message, tmp_path):
        make(tmp_path, *files)
        with pytest.raises(ValueError, match=message):
            names(tmp_path, splits)

    @pytest.mark.parametrize(
        "source", ["no.tsv", "./no/such", "no-*.tsv", "a/b/c", "no.csv.gz", "C:\\data\\pairs", "C:/data/pairs"]
    )
    def test_missing(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"there is no such file. Check the name|no file has such a name"):
            names(source)


class TestRemote:
    @pytest.fixture
    def memory(self):
        filesystem = fsspec.filesystem("memory")
        filesystem.store.clear()
        yield filesystem
        filesystem.store.clear()

    def test_a_file_and_a_folder(self, memory):
        for name in ("x/part-2.tsv", "x/part-10.tsv", "x/notes.md"):
            memory.pipe(f"/{name}", f"{name}\tb\t1\nc\td\t2\n".encode())
        assert read_data("memory://x/part-2.tsv").first == ["x/part-2.tsv", "c"]
        for several in ("memory://x", "memory://x/part-*.tsv"):
            assert read_data(several).first == ["x/part-2.tsv", "c", "x/part-10.tsv", "c"]

    def test_what_was_copied_is_copied_again_if_it_changed(self, memory, tmp_path, monkeypatch):
        fetched = []
        real = type(memory).get_file
        monkeypatch.setattr(type(memory), "get_file", lambda self, *ends: fetched.append(ends) or real(self, *ends))
        for content in (b"one\tb\t1\n", b"two\tb\t1\n"):
            memory.pipe("/a.tsv", content)
            for _ in range(2):
                (file,) = files_of("memory://a.tsv", TO_MEASURE, tmp_path / "copy")
        assert len(fetched) == 2
        assert (file.path.read_bytes(), file.name) == (b"two\tb\t1\n", "memory://a.tsv")

    def test_refusals_name_what_the_user_named(self, memory):
        memory.pipe("/x/bad.tsv", b"a\tb\t1\nc\t2\n")
        with pytest.raises(ValueError, match="memory://x/bad.tsv, line 2: 2 columns where 3 are expected"):
            read_data("memory://x/bad.tsv")
        with pytest.raises(FileNotFoundError, match="memory://x/no.tsv: there is no such file"):
            read_data("memory://x/no.tsv")
        with pytest.raises(OSError, match="nonsense://x.tsv cannot be read \\(Protocol not known: nonsense"):
            read_data("nonsense://x.tsv")

    def test_http(self, tmp_path):
        pytest.importorskip("aiohttp", reason='fsspec reads http with it: pip install "st-reba[data]"')
        make(tmp_path, "pairs.tsv")

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                pass

        handler = functools.partial(Quiet, directory=os.fspath(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}"
            assert read_data(f"{address}/pairs.tsv") == read_data(f"{address}/pairs.tsv?download=1")
            assert read_data(f"{address}/pairs.tsv").second == ["b", "d"]
            with pytest.raises(FileNotFoundError, match="no.tsv: there is no such file"):
                read_data(f"{address}/no.tsv")
            server.shutdown()
        # Nobody listens there any more.
        with pytest.raises(OSError, match=r"/pairs.tsv cannot be read \(Cannot connect to host 127.0.0.1"):
            read_data(f"{address}/pairs.tsv")


def test_a_data_set_of_the_hub(monkeypatch):
    rows = datasets.Dataset.from_dict({"text1": ["a", "c"], "text2": ["b", "d"], "label": [1, 0]})
    loaded, told = [], []

    def load_dataset(name, subset, split):
        loaded.append((name, subset, split))
        return rows if split else datasets.DatasetDict({"train": rows, "validation": rows.select([1, 0])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_data("org/name", tell=told.append).first == ["c", "a"], "validation before train"
    assert read_data("org/name:en:train").first == ["a", "c"]
    assert loaded == [("org/name", None, None), ("org/name", "en", "train")]
    assert told[0].startswith("org/name: 2 pairs in two classes")
