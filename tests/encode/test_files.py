"""A run goes on with the files that it began with, and its output destroys nothing that its user has not given up."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from st_reba.encode import Encoder, encode_file
from st_reba.encode import encoder as of_a_model
from st_reba.encode.encoder import model_files

from .conftest import Fake, interrupted, names, written

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
        with pytest.raises(ValueError, match=rf"other settings: {name} '\w+' \(now '\w+'\). Go on with those"):
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
        with pytest.raises(ValueError, match="adapter_config.json names a base model that is not to be found: no/such"):
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
            ("lm", "config.json", "{}"), ("own", "modules.json", '[{"path": ""}]'),
            ("adapted", "modules.json", '[{"path": ""}]'),
            ("adapted", "adapter_config.json", '{"base_model_name_or_path": "org/lm"}'),
        ]:  # fmt: skip
            path = tmp_path / "org" / name / f"commit-of-{name}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        with pytest.raises(ValueError, match="org/lm has no modules.json: .* st-reba build --model org/lm --out"):
            Encoder("org/lm").pinned()
        with pytest.raises(ValueError, match="no/such: there is no such directory, and the Hub gives no such model"):
            Encoder("no/such").pinned()
        for name, base in (("own", []), ("adapted", ["org/lm@commit-of-lm"])):
            pinned = Encoder(f"org/{name}").pinned()
            assert pinned.revision == f"commit-of-{name}"
            assert model_files(f"org/{name}", pinned.revision) == ([f"org/{name}@commit-of-{name}", *base], {})


class TestWhatIsWritten:
    @pytest.fixture(params=["a.npy", "shards/part-00000000.parquet"])
    def mine(self, request, tmp_path):
        """A file that an output would replace; of shards, in their folder."""
        return tmp_path / request.param

    def write(self, mine: Path) -> Path:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        return mine if mine.suffix == ".npy" else mine.parent

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_what_appears_meanwhile_is_left(self, overwrite, mine, fake, few, tmp_path):
        """With --overwrite, too: nobody has said that about a file that was not there. The same command goes on."""
        out = mine if mine.suffix == ".npy" else mine.parent

        def appear(stage, done, total):
            if (stage, done) == ("Encoding", total):
                self.write(mine)

        with pytest.raises(
            FileExistsError, match=f"{out.name} appeared, or was written, while this ran: it is left as"
        ):
            encode_file(fake, few, out, overwrite=overwrite, on_progress=appear)
        assert mine.read_text() == "mine"
        out.rename(tmp_path / f"mine{out.suffix}")
        made = encode_file(fake, few, out)
        assert (made.rows, made.resumed) == (3, 3)

    def test_what_was_there_is_replaced_where_that_is_asked_for(self, mine, fake, few, tmp_path):
        out = self.write(mine)
        with pytest.raises(ValueError, match="exists: choose another --out, or replace it with --overwrite"):
            encode_file(fake, few, out)
        assert encode_file(fake, few, out, overwrite=True).rows == 3
        assert names(tmp_path) == sorted([out.name, "texts.txt"])
        assert encode_file(fake, few, out, overwrite=True, chunk_size=1).rows == 3

    def test_what_is_read_is_not_written(self, fake, few, tmp_path):
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
            with pytest.raises(ValueError, match="--out .*, which is read, lie in one another: choose another --out"):
                encode_file(fake, read, out, overwrite=True)
        with pytest.raises(ValueError, match="is not an interrupted run's"):
            encode_file(fake, source, tmp_path / "b.npy", overwrite=True)
        assert pq.read_table(source).num_rows == 1
        assert inside.read_text() == "a\nb\nc\n"
