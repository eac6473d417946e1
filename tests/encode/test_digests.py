"""A run goes on with the very files that it began with, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from st_reba.encode import HASHING, Encoder, encode_file, job
from st_reba.encode import model_files as of_a_model
from st_reba.encode.model_files import model_files
from st_reba.encode.workspace import Stamp, file_digests

from .inputs import Ones

MEGABYTE = 1 << 20


def interrupted(encoder, texts, out):
    """A run that is stopped after its first chunk of two rows, when the second is being written."""

    def stop(stage, done, total):
        if (stage, done) == ("Encoding", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, texts, out, chunk_size=2, on_progress=stop)


def change_last_byte(path: Path) -> None:
    """Size and time of writing stay."""
    times = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def identity(model: str | Path, memory: Path) -> str:
    made_of = model_files(str(model), None)
    return job._identity(made_of, file_digests(made_of.values(), memory))


@pytest.fixture
def model(tmp_path):
    """Larger than the header and the embeddings that such a file begins with."""
    directory = tmp_path / "model"
    (directory / "0_Transformer").mkdir(parents=True)
    (directory / "modules.json").write_text("[]")
    (directory / "0_Transformer" / "model.safetensors").write_bytes(bytes(3 * MEGABYTE))
    return directory


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(("a" * MEGABYTE + "\n") * 4 + "last")
    return path


def test_other_weights_behind_the_first_megabyte(model, texts, tmp_path):
    interrupted(Ones(str(model)), texts, tmp_path / "a.npy")
    change_last_byte(model / "0_Transformer" / "model.safetensors")
    with pytest.raises(ValueError, match=r"other settings: weights '\w+' \(now '\w+'\). Go on with those"):
        encode_file(Ones(str(model)), texts, tmp_path / "a.npy", chunk_size=2)
    change_last_byte(model / "0_Transformer" / "model.safetensors")
    assert encode_file(Ones(str(model)), texts, tmp_path / "a.npy", chunk_size=2).resumed == 4


def test_another_base_under_the_same_adapter(model, texts, tmp_path):
    adapted = tmp_path / "adapted"
    adapted.mkdir()
    (adapted / "modules.json").write_text("[]")
    (adapted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    interrupted(Ones(str(adapted)), texts, tmp_path / "a.npy")
    change_last_byte(model / "0_Transformer" / "model.safetensors")
    with pytest.raises(ValueError, match="other settings: weights"):
        encode_file(Ones(str(adapted)), texts, tmp_path / "a.npy", chunk_size=2)


def test_a_base_that_is_not_to_be_found(model, tmp_path):
    adapter = model / "0_Transformer" / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "no/such-model"}')
    with pytest.raises(ValueError, match="adapter_config.json names a base model that is not to be found. no/such-mod"):
        model_files(str(model), None)
    (model / "0_Transformer" / "config.json").write_text("{}")
    assert "0_Transformer/config.json" in model_files(str(model), None), "the whole model lies beside its adapter"


def test_another_input_behind_the_first_megabyte(model, texts, tmp_path):
    interrupted(Ones(str(model)), texts, tmp_path / "a.npy")
    change_last_byte(texts)
    with pytest.raises(ValueError, match=r"other settings: input digest"):
        encode_file(Ones(str(model)), texts, tmp_path / "a.npy", chunk_size=2)


def test_an_input_that_was_only_touched_is_the_same(model, texts, tmp_path):
    interrupted(Ones(str(model)), texts, tmp_path / "a.npy")
    os.utime(texts)
    assert encode_file(Ones(str(model)), texts, tmp_path / "a.npy", chunk_size=2).resumed == 4


def test_a_model_that_changes_before_it_is_loaded(model, texts, tmp_path):
    """Between the digest and the loading, as when a worker starts late."""

    class Changing(Ones):
        def load(self, device):
            with (model / "0_Transformer" / "model.safetensors").open("ab") as stream:
                stream.write(b"more")

    with pytest.raises(ValueError, match="model.safetensors was changed during the run"):
        encode_file(Changing(str(model)), texts, tmp_path / "a.npy", chunk_size=2)
    assert not (tmp_path / "a.npy").exists()


def test_what_belongs_to_a_model(model, tmp_path):
    before = identity(model, tmp_path / "memory")
    for name in ("README.md", ".gitattributes"):
        (model / name).write_text("a card")
    assert identity(model, tmp_path / "memory") == before
    moved = model.rename(tmp_path / "moved")
    assert identity(moved, tmp_path / "memory") == before
    elsewhere = (moved / "0_Transformer").rename(tmp_path / "elsewhere")
    (moved / "0_Transformer").symlink_to(elsewhere)
    (moved / "0_Transformer" / "again").symlink_to(moved)
    assert identity(moved, tmp_path / "memory") == before, "a link to a directory is followed, once"
    change_last_byte(elsewhere / "model.safetensors")
    assert identity(moved, tmp_path / "memory") != before


class TestOnTheHub:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        """Repositories as a client has them in its cache: ``hub(repository, file, content)`` adds a file."""

        def place(repository, name, revision=None):
            return tmp_path / "hub" / (revision or f"commit-of-{repository.replace('/', '-')}") / name

        def add(repository, name, content):
            path = place(repository, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

        def download(repository, name, revision=None):
            if not place(repository, name, revision).is_file():
                raise LocalEntryNotFoundError(f"no {name} in {repository}")
            return str(place(repository, name, revision))

        monkeypatch.setattr(of_a_model, "hf_hub_download", download)
        return add

    def test_a_language_model_without_modules(self, hub):
        hub("org/lm", "config.json", "{}")
        with pytest.raises(ValueError, match="org/lm has no modules.json: .* st-reba build --model org/lm --method"):
            Encoder("org/lm").pinned()
        with pytest.raises(ValueError, match="no/such: there is no such directory, and the Hub gives no such model"):
            Encoder("no/such").pinned()

    def test_the_base_of_an_adapter_is_part_of_it(self, hub):
        hub("org/adapted", "modules.json", '[{"path": ""}]')
        hub("org/adapted", "adapter_config.json", '{"base_model_name_or_path": "org/base"}')
        hub("org/base", "config.json", "{}")
        pinned = Encoder("org/adapted").pinned()
        commits = [f"org/adapted@{pinned.revision}", "org/base@commit-of-org-base"]
        made_of = model_files(pinned.model, pinned.revision)
        assert [*made_of] == commits
        assert job._identity(made_of, {}) == ", ".join(commits)


class TestDigests:
    def test_what_is_remembered_is_not_read_again(self, texts, tmp_path, monkeypatch):
        read = []
        first = file_digests([texts], tmp_path / "memory", lambda done, total: read.append((done, total)))
        size = texts.stat().st_size
        assert read[-1] == (size, size)
        again = file_digests([texts], tmp_path / "memory", lambda done, total: pytest.fail("read again"))
        assert again == first
        change_last_byte(texts)
        assert file_digests([texts], tmp_path / "memory") != first

    def test_a_file_that_is_being_written(self, texts, tmp_path):
        def write(done, total):
            with texts.open("ab") as stream:
                stream.write(b"more")

        with pytest.raises(ValueError, match="texts.txt is being written: begin when it is complete"):
            file_digests([texts], tmp_path / "memory", write)

    def test_a_stamp(self, texts):
        stamp = Stamp.of(texts)
        stamp.check()
        os.utime(texts, ns=(0, 0))
        with pytest.raises(ValueError, match="was changed during the run"):
            stamp.check()
        texts.unlink()
        with pytest.raises(ValueError, match="was changed during the run"):
            stamp.check()


@pytest.mark.parametrize(("least", "told"), [(10**9, False), (MEGABYTE, True)])
def test_what_takes_a_while_is_told(least, told, model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_A_WHILE", least)
    stages = []
    encode_file(Ones(str(model)), texts, tmp_path / "a.npy", on_progress=lambda *said: stages.append(said))
    assert ((HASHING, 7, 7) in stages) is told
    assert np.load(tmp_path / "a.npy").shape == (5, 2)
