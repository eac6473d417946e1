"""Outputs at a URL: whole or not there, resumed, and refused where a local one is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from st_reba.encode import encode_file, place_of, places
from st_reba.encode.places import SUCCESS
from st_reba.encode.workspace import Workspace

from .conftest import contents, interrupted, names


@pytest.fixture(autouse=True)
def assets(tmp_path, monkeypatch):
    """Where the work on this machine lies."""
    directory = tmp_path / "assets"
    directory.mkdir()
    monkeypatch.setattr(places, "cached_assets_path", lambda *names: directory)
    return directory


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    for each in (filesystem.store, filesystem.pseudo_dirs):
        each.clear()
    yield filesystem
    filesystem.store.clear()


def found(memory: MemoryFileSystem) -> dict[str, bytes]:
    return {name: memory.cat_file(name) for name in memory.find("/")}


def wanted(fake, texts: Path, out: Path, at: str, **options) -> dict[str, bytes]:
    """What a local run writes, by the names at a remote place."""
    encode_file(fake, texts, out, chunk_size=8, **options)
    if not out.is_dir():
        return {at: out.read_bytes()}
    return {f"{at}/{name}": content for name, content in zip(names(out), contents(out), strict=True)}


@pytest.mark.parametrize("scheme", ["memory", "s3"])
@pytest.mark.parametrize("out", ["a.npy", "a.parquet", "shards"])
def test_the_bytes_of_a_local_run_and_nothing_left(out, scheme, fake, texts, memory, assets, tmp_path, monkeypatch):
    """Stopped while it encodes, and again amid the upload: nothing is to be seen under its name until all is there.

    Of an object store, too, for which this file system stands in: no moves, and a folder has its mark last.
    """
    monkeypatch.setattr(MemoryFileSystem, "protocol", (scheme, "memory"))
    url, parts = f"memory://bucket/{out}", set()
    expected = wanted(fake, texts, tmp_path / out, f"/bucket/{out}")
    if scheme == "s3":
        monkeypatch.setattr(MemoryFileSystem, "mv", None)
        if out == "shards":
            expected[f"/bucket/{out}/{SUCCESS}"] = b""
            parts = {f"/bucket/{out}/part-0000000{number}.parquet" for number in range(3)}
    put_file, sent = MemoryFileSystem.put_file, []

    def broken(self, source, target, **options):
        sent.append(target)
        if len(sent) == (4 if out == "shards" else 1):
            raise ConnectionError("no route to host")
        put_file(self, source, target, **options)

    interrupted(fake, texts, url)
    assert found(memory) == {}
    monkeypatch.setattr(MemoryFileSystem, "put_file", broken)
    with pytest.raises(OSError, match=rf"{url} cannot be written \(no route to host\)\. What is done is kept on this"):
        encode_file(fake, texts, url, chunk_size=8)
    assert set(found(memory)) & set(expected) == parts
    made = encode_file(fake, texts, url, chunk_size=8)
    assert (made.rows, made.texts, made.resumed, names(assets)) == (50, 50, 50, [])
    assert found(memory) == expected


def test_one_that_was_killed_at_its_very_end_ends_without_another_upload(fake, texts, memory, assets, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "remove", lambda folder: None)
        encode_file(fake, texts, "memory://a.npy")
    monkeypatch.setattr(MemoryFileSystem, "put_file", None)
    made = encode_file(fake, texts, "memory://a.npy")
    assert (made.rows, made.resumed, names(assets)) == (50, 50, [])


@pytest.mark.parametrize("out", ["a.npy", "shards"])
def test_overwrite_and_what_appears_meanwhile(out, fake, texts, memory, tmp_path):
    url = f"memory://{out}"
    encode_file(fake, texts, url, chunk_size=50)
    with pytest.raises(ValueError, match=rf"^{url} exists: choose another --out, or replace it with --overwrite\.$"):
        encode_file(fake, texts, url, chunk_size=8)
    encode_file(fake, texts, url, chunk_size=8, overwrite=True)
    assert found(memory) == wanted(fake, texts, tmp_path / out, f"/{out}")
    mine = f"/{out}" if out == "a.npy" else f"/{out}/part-00000000.parquet"

    def appear(stage, done, total):
        if (stage, done) == ("Encoding", 50):
            memory.pipe_file(mine, b"mine")

    with pytest.raises(FileExistsError, match="appeared, or was written, while this ran: it is left as it is"):
        encode_file(fake, texts, url, chunk_size=9, overwrite=True, on_progress=appear)
    assert memory.cat_file(mine) == b"mine"
    # The same run has not begun to upload: what lies there is somebody's.
    with pytest.raises(ValueError, match="exists: choose another --out"):
        encode_file(fake, texts, url, chunk_size=9)


def test_refusals(fake, texts, memory, assets, monkeypatch):
    before = {"/folder/notes.txt": b"mine", "/in/a.txt": b"a"}
    memory.pipe(before)
    table = texts.with_name("t.parquet")
    pq.write_table(pa.table({"text": ["a", "b"]}), table)
    for out, said in {
        "memory://folder": "memory://folder holds something other than shards: choose another --out",
        "memory://a.bin": "--out memory://a.bin: end it in .npy or .parquet",
        "https://host/a.npy": "--out https://host/a.npy: nothing is written there",
        "memory://": "--out memory://: nothing is written there",
        "memory://in/a.npy": "--out memory://in/a.npy and memory://in, which is read, lie in one another",
        f"file://{table}": f"--out file://{table} and {table}, which is read, lie in one another",
    }.items():
        source = "memory://in" if "/in/" in out else table if "file" in out else texts
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            encode_file(fake, source, out, overwrite="file" in out)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ImportError, match=r"^s3://b/a.npy: fsspec cannot use it here \(Install s3fs .*\): pip install s3"
    ):
        place_of("s3://b/a.npy")
    with pytest.raises(OSError, match=r"^nonsense://a.npy cannot be written \(Protocol not known: nonsense"):
        place_of("nonsense://a.npy")
    assert (found(memory), names(assets)) == (before, [])
