"""A run goes on with the files that it began with, and its output destroys nothing that its user has not given up; also
an output at a URL: whole or not there, resumed, and refused where a local one is."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub.errors import LocalEntryNotFoundError

from st_reba.encode import Encoder, destination_of, encode_file, workspace
from st_reba.encode import encoder as of_a_model
from st_reba.encode.encoder import model_files
from st_reba.encode.workspace import SUCCESS, Workspace

from .conftest import Fake, contents, interrupted, names, written

MEGABYTE = 1 << 20


@pytest.fixture
def few(tmp_path):
    return written(tmp_path, *"abc")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("suffix", ["txt", "csv.gz", "jsonl", "parquet"])
def test_a_name_that_is_not_utf8(suffix, fake, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    data = {"txt": b"a\nb\n", "csv.gz": gzip.compress(b"text\na\nb\n"), "jsonl": b'{"text": "a"}\n{"text": "b"}\n'}
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "parquet")
    (folder / f"texts.{suffix}").write_bytes(data.get(suffix) or (tmp_path / "parquet").read_bytes())
    for number, source in enumerate((folder / f"texts.{suffix}", folder, f"{folder}/*.{suffix}")):
        for out in (f"{number}.npy", f"{number}.parquet", f"{number}"):
            assert encode_file(fake, source, tmp_path / os.fsdecode(b"\xfe") / out).rows == 2


class TestWhatIsRead:
    @pytest.fixture
    def model(self, tmp_path):
        """Larger than the header and the embeddings that such a file begins with."""
        directory = tmp_path / "model"
        (directory / "0_Transformer").mkdir(parents=True)
        (directory / "modules.json").write_text("[]")
        (directory / "0_Transformer" / "model.safetensors").write_bytes(bytes(3 * MEGABYTE))
        return directory

    def change_last_byte(self, path: Path) -> None:
        """Size and time of writing stay."""
        times, content = path.stat(), path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    @pytest.mark.parametrize("changed", ["weights", "base", "input"])
    def test_a_byte_behind_the_first_megabyte(self, changed, model, tmp_path):
        """Of the weights, of those under an adapter, or of the texts."""
        texts = written(tmp_path, *["a" * MEGABYTE] * 4, "last")
        adapted = tmp_path / "adapted"
        adapted.mkdir()
        (adapted / "modules.json").write_text("[]")
        (adapted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
        fake = Fake(str(adapted if changed == "base" else model))
        file = texts if changed == "input" else model / "0_Transformer" / "model.safetensors"
        interrupted(fake, texts, tmp_path / "a.npy", at=4, chunk_size=2)
        self.change_last_byte(file)
        name = "input" if changed == "input" else "weights"
        with pytest.raises(ValueError, match=rf"with other settings: {name} '\w+' \(now '\w+'\). Use those"):
            encode_file(fake, texts, tmp_path / "a.npy", chunk_size=2)
        self.change_last_byte(file)
        # Only touched, they are the same.
        os.utime(file)
        assert encode_file(fake, texts, tmp_path / "a.npy", chunk_size=2).resumed == 2

    def test_a_model_that_changes_before_it_is_loaded(self, model, few, tmp_path):
        """Between the digest and the loading, as when a worker starts late."""

        class Changing(Fake):
            def load(self, device):
                with (model / "0_Transformer" / "model.safetensors").open("ab") as stream:
                    stream.write(b"more")

        with pytest.raises(ValueError, match="model.safetensors was changed during the run"):
            encode_file(Changing(str(model)), few, tmp_path / "a.npy")
        assert not (tmp_path / "a.npy").exists()

    def test_what_belongs_to_a_model(self, model, tmp_path):
        expected = ["0_Transformer/model.safetensors", "modules.json"]
        (model / "README.md").write_text("a card")
        (model / ".gitattributes").write_text("hidden")
        elsewhere = (model / "0_Transformer").rename(tmp_path / "elsewhere")
        (model / "0_Transformer").symlink_to(elsewhere)
        assert sorted(model_files(str(model), None)[1]) == expected, "a link to a directory is followed"
        adapter = elsewhere / "adapter_config.json"
        adapter.write_text('{"base_model_name_or_path": "no/such-model"}')
        with pytest.raises(ValueError, match="adapter_config.json names a base model that does not exist: no/such"):
            model_files(str(model), None)
        (elsewhere / "config.json").write_text("{}")
        assert "0_Transformer/config.json" in model_files(str(model), None)[1], "the whole model lies next to it"

    def test_on_the_hub(self, tmp_path, monkeypatch):
        def load(repository, name, revision=None):
            path = tmp_path / repository / f"commit-of-{repository[4:]}" / name
            return str(path) if path.is_file() else None

        def download(repository, name, revision=None):
            if (path := load(repository, name)) is None:
                raise LocalEntryNotFoundError(f"no {name} in {repository}")
            return path

        monkeypatch.setattr(of_a_model, "load_file_path", load)
        monkeypatch.setattr(of_a_model, "hf_hub_download", download)
        for name, file, content in [
            ("lm", "config.json", "{}"), ("own", "modules.json", '[{"type": "", "path": "", "name": ""}]'),
            ("adapted", "modules.json", '[{"type": "", "path": "", "name": ""}]'),
            ("adapted", "adapter_config.json", '{"base_model_name_or_path": "org/lm"}'),
        ]:  # fmt: skip
            path = tmp_path / "org" / name / f"commit-of-{name}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        with pytest.raises(ValueError, match="org/lm has no modules.json: .* st-reba build --model org/lm --out"):
            Encoder("org/lm").pinned()
        with pytest.raises(ValueError, match="no/such is neither a directory nor a model on the Hub"):
            Encoder("no/such").pinned()
        for name, base in (("own", []), ("adapted", ["org/lm@commit-of-lm"])):
            pinned = Encoder(f"org/{name}").pinned()
            assert pinned.revision == f"commit-of-{name}"
            assert model_files(f"org/{name}", pinned.revision) == ([f"org/{name}@commit-of-{name}", *base], {})


def test_what_is_read_is_not_written(fake, few, tmp_path):
    shards, link = tmp_path / "shards", tmp_path / "elsewhere"
    shards.mkdir()
    source = shards / "part-00000000.parquet"
    pq.write_table(pa.table({"text": ["a"]}), source)
    (tmp_path / "link.parquet").symlink_to(source)
    link.symlink_to(shards)
    (tmp_path / "b.npy.partial").mkdir()
    inside = few.rename(tmp_path / "b.npy.partial" / "few.txt")
    for read, out in [
        (source, shards), (source, source), (source, link), (tmp_path / "link.parquet", shards),
        (inside, tmp_path / "b.npy"), (shards, Path(fake.model) / "a.npy"), (shards, shards / "a.npy"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="--out .* and the input .* overlap: choose another --out"):
            encode_file(fake, read, out, overwrite=True)
    with pytest.raises(ValueError, match="is not the folder of a run"):
        encode_file(fake, source, tmp_path / "b.npy", overwrite=True)
    assert pq.read_table(source).num_rows == 1
    assert inside.read_text() == "a\nb\nc\n"


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """Where the work on this machine lies."""
    directory = tmp_path / "assets"
    directory.mkdir()
    monkeypatch.setattr(workspace, "cached_assets_path", lambda *names: directory)
    return directory


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
    with pytest.raises(OSError, match=rf"{url} cannot be written \(no route to host\)\. Finished work is kept on this"):
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


@pytest.mark.parametrize("out", ["a.npy", "shards", "memory://a.npy", "memory://shards"])
def test_overwrite_and_what_appears_meanwhile(out, fake, few, memory, assets, tmp_path):
    """With --overwrite, too: nobody has said that about a file that was not there. The same command goes on."""
    url = out if "://" in out else str(tmp_path / out)
    place, path = fsspec.url_to_fs(url)
    mine = f"{path}/part-00000000.parquet" if "shards" in out else path
    encode_file(fake, few, url)
    with pytest.raises(ValueError, match=rf"{url} exists: choose another --out, or replace it with --overwrite\.$"):
        encode_file(fake, few, url, chunk_size=1)
    assert encode_file(fake, few, url, chunk_size=1, overwrite=True).rows == 3

    def appear(stage, done, total):
        if (stage, done) == ("Encoding", total):
            place.makedirs(place._parent(mine), exist_ok=True)
            place.pipe_file(mine, b"mine")

    for overwrite in (True, False):
        if not overwrite:
            place.rm(path, recursive=True)
        given = {"chunk_size": 2, "overwrite": overwrite}
        with pytest.raises(FileExistsError, match="was written by another program during the run: it is left as it is"):
            encode_file(fake, few, url, on_progress=appear, **given)
        assert place.cat_file(mine) == b"mine"
        # The same run has not begun to write there: what lies there is somebody's.
        with pytest.raises(ValueError, match="exists: choose another --out"):
            encode_file(fake, few, url, chunk_size=2)
    place.rm(path, recursive=True)
    made = encode_file(fake, few, url, chunk_size=2)
    assert (made.rows, made.resumed) == (3, 3)


def test_refusals_of_a_url(fake, texts, memory, assets, monkeypatch):
    memory.pipe(before := {"/in/a.txt": b"a"})
    table = texts.with_name("t.parquet")
    pq.write_table(pa.table({"text": ["a", "b"]}), table)
    for out, said in {
        "https://host/a.npy": "--out https://host/a.npy cannot be written",
        "memory://in/a.npy": "--out memory://in/a.npy and the input memory://in overlap",
        f"file://{table}": f"--out file://{table} and the input {table} overlap",
    }.items():
        source = "memory://in" if "/in/" in out else table if "file" in out else texts
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            encode_file(fake, source, out, overwrite="file" in out)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"^s3://b/a.npy: Install s3fs"):
        destination_of("s3://b/a.npy")
    with pytest.raises(OSError, match=r"^nonsense://a.npy cannot be written \(Protocol not known: nonsense"):
        destination_of("nonsense://a.npy")
    assert (found(memory), names(assets)) == (before, [])
