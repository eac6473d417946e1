"""Texts to encode, an encoder that needs no model, and a run that is stopped."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from st_reba import ReBAModule
from st_reba.encode import Encoder, encode_file

from .. import processes
from ..conftest import pipeline


class Fake(Encoder):
    """Loads nothing, and makes two numbers of each text."""

    def load(self, device):
        return [torch.nn.Identity()]

    def encode(self, model, texts, on_texts):
        on_texts(len(texts))
        return np.array([[len(text), zlib.crc32(text.encode()) % 1000] for text in texts], np.float32)


#: Of several lengths; the file of the fixture ``texts`` has them.
TEXTS = [f"{number} {'我爱 the quick mouse 🥊 Zwölf ' * (number % 5)}" for number in range(50)]


def written(directory: Path, *texts: str) -> Path:
    path = directory / "texts.txt"
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def interrupted(encoder: Encoder, texts, out: Path | str, at: int = 32, chunk_size: int = 8, **options) -> None:
    """A run that is stopped when so many texts have been through the model: the chunk of the last ones is not kept."""

    def stop(stage, done, total):
        if (stage, done) == ("Encoding", at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, texts, out, chunk_size=chunk_size, on_progress=stop, **options)


def contents(path: Path) -> list[bytes]:
    """Of a file, or of all files of a folder."""
    return [file.read_bytes() for file in sorted(path.iterdir())] if path.is_dir() else [path.read_bytes()]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="session")
def model_directory(shallow_path, tmp_path_factory):
    """A small saved model."""
    directory = tmp_path_factory.mktemp("encode") / "model"
    model = pipeline(ReBAModule(shallow_path))
    model.prompts = {"query": "find: "}
    model.save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture(scope="package", autouse=True)
def no_waiting_for_the_disk():
    """No test here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def texts(tmp_path):
    return written(tmp_path, *TEXTS)


@pytest.fixture
def fake(tmp_path_factory):
    """Encodes without a model: its directory is one by name alone."""
    directory = tmp_path_factory.mktemp("fake")
    (directory / "modules.json").write_text("[]")
    return Fake(str(directory))


@pytest.fixture
def spawned_by_fork(monkeypatch):
    """Workers that multiprocessing would spawn import nothing again: the fork server makes them."""
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: processes.SERVER)
