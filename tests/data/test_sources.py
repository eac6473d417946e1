from __future__ import annotations

import functools
import http.server
import json
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
        path = directory / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("a\tb\t1\nc\td\t2\n", encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.TSV", "tsv", ""), ("a.csv.gz", "csv", ".gz"), ("a.ndjson.zst", "jsonl", ".zst"),
        ("a.b.parquet", "parquet", ""), ("a.parquet.gz", "", ".gz"), ("a", "", ""), ("a.gz", "", ".gz"),
        ("a.xlsx", "", ""),
    ],
)  # fmt: skip
def test_kinds(name, kind, compression, tmp_path):
    file = File.of(tmp_path / name)
    assert (file.kind, file.compression) == (kind, compression)


class TestFolders:
    def test_numbers_in_names_count_and_what_is_no_shard_does_not(self, tmp_path):
        make(
            tmp_path,
            "part-10.tsv",
            "part-9.tsv",
            ".hidden.tsv",
            "_SUCCESS",
            "README.md",
            "more/part-1.tsv",
            "state.json",
        )
        assert names(tmp_path) == ["part-9.tsv", "part-10.tsv"]

    def test_splits(self, tmp_path):
        make(tmp_path, "train-0.tsv", "train-1.tsv", "data_dev.tsv")
        assert names(tmp_path) == ["data_dev.tsv"], "without a test split"
        assert names(tmp_path, TO_TRAIN) == names(f"{tmp_path / 'train-*'}") == ["train-0.tsv", "train-1.tsv"]
        with pytest.raises(
            ValueError,
            match=r'splits, validation \(data_dev.tsv\), train \(train-0.tsv\): give a pattern, .* ".*/\*train\*"',
        ):
            names(tmp_path, ALL)

    def test_a_splits_word_in_some_names_leaves_no_file_out(self, tmp_path):
        """All is what the folder holds; to measure or to train on all of it might mix splits."""
        make(tmp_path, "a.txt", "b.txt", "test.txt", "my-train-notes.txt")
        assert names(tmp_path, ALL) == ["a.txt", "b.txt", "my-train-notes.txt", "test.txt"]
        assert names(f"{tmp_path}/test*", ALL) == names(f"{tmp_path}/test*") == ["test.txt"]
        for splits in (TO_MEASURE, TO_TRAIN):
            with pytest.raises(ValueError, match=r"none in the name \(a.txt\), train \(my-train-notes.txt\), test"):
                names(tmp_path, splits)

    def test_of_one_kind(self, tmp_path):
        make(tmp_path, "a.tsv", "b.csv")
        with pytest.raises(ValueError, match="files of several kinds, csv, tsv: give one file, or a pattern"):
            names(tmp_path)

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

    def test_a_file_and_a_folder(self, memory, tmp_path):
        for name in ("x/part-2.tsv", "x/part-10.tsv", "x/notes.md"):
            memory.pipe(f"/{name}", f"{name}\tb\t1\nc\td\t2\n".encode())
        assert read_data("memory://x/part-2.tsv").first == ["x/part-2.tsv", "c"]
        assert read_data("memory://x").first == ["x/part-2.tsv", "c", "x/part-10.tsv", "c"]
        assert read_data("memory://x/part-*.tsv").first == ["x/part-2.tsv", "c", "x/part-10.tsv", "c"]

    def test_what_was_copied_is_copied_again_if_it_changed(self, memory, tmp_path, monkeypatch):
        fetched = []
        real = type(memory).get_file
        monkeypatch.setattr(type(memory), "get_file", lambda self, *ends: fetched.append(ends) or real(self, *ends))
        memory.pipe("/a.tsv", b"one\tb\t1\n")
        for content in (None, b"two\tb\t1\n"):
            if content:
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

        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Quiet, directory=os.fspath(tmp_path))
        )
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}"
            assert read_data(f"{address}/pairs.tsv") == read_data(f"{address}/pairs.tsv?download=1")
            assert read_data(f"{address}/pairs.tsv").second == ["b", "d"]
            with pytest.raises(FileNotFoundError, match="no.tsv: there is no such file"):
                read_data(f"{address}/no.tsv")
        finally:
            server.shutdown()
            server.server_close()
        # Nobody listens there any more.
        with pytest.raises(OSError, match=r"/pairs.tsv cannot be read \(Cannot connect to host 127.0.0.1"):
            read_data(f"{address}/pairs.tsv")


def test_a_data_set_of_the_hub(monkeypatch):
    rows = datasets.Dataset.from_dict({"text1": ["a", "c"], "text2": ["b", "d"], "label": [1, 0]})
    loaded = []

    def load_dataset(name, subset, split):
        loaded.append((name, subset, split))
        return rows if split else datasets.DatasetDict({"train": rows, "validation": rows.select([1, 0])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    told = []
    assert read_data("org/name", tell=told.append).first == ["c", "a"], "validation before train"
    assert read_data("org/name:en:train").first == ["a", "c"]
    assert loaded == [("org/name", None, None), ("org/name", "en", "train")]
    assert json.dumps(told[0]).startswith('"org/name: 2 pairs in two classes')
