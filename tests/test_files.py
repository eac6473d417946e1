from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError

from st_reba.files import NoRoomError, atomic_directory, atomic_file

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")

#: More than any buffer holds.
MANY = 1 << 17

WRITERS = {
    "write": lambda path: path.write_bytes(bytes(8 * MANY)),
    "numpy": lambda path: np.save(path.open("wb"), np.zeros(MANY)),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": np.random.rand(MANY)}), path.open("wb")),
    "torch": lambda path: torch.save(torch.zeros(MANY), path),
    "safetensors": lambda path: _refuse("Error while serializing: I/O error: No space left on device (os error 28)"),
}


def _refuse(message: str) -> None:
    """safetensors writes elsewhere and moves, so that no device catches it: its own words."""
    raise SafetensorError(message)


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_says_that_the_disk_is_full(writer, full, tmp_path):
    sentence = "there is no room left on the disk .* Make room, and run the same again"
    with pytest.raises(NoRoomError, match=sentence), atomic_file(tmp_path / "a"):
        WRITERS[writer](full)


def test_an_atomic_file(tmp_path, monkeypatch):
    """Nothing is left, and what was there is as it was."""
    (tmp_path / "a").write_text("before")
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="0"))
    (tmp_path / ".writing-0").symlink_to("/dev/full")
    sentence = f"{tmp_path / 'a'} could not be written: there is no room left on the disk"
    with pytest.raises(NoRoomError, match=sentence), atomic_file(tmp_path / "a") as stream:
        np.save(stream, np.zeros(MANY))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_an_atomic_file_of_text(tmp_path):
    with atomic_file(tmp_path / "a", "w") as text:
        text.write("ä\r\nb\n")
    assert (tmp_path / "a").read_bytes() == "ä\r\nb\n".encode()


def test_an_atomic_directory(tmp_path):
    def write(scratch):
        (scratch / "started").touch()
        (scratch / "weights").symlink_to("/dev/full")
        WRITERS["torch"](scratch / "weights")

    sentence = "there is no room left on the disk"
    with pytest.raises(NoRoomError, match=sentence), atomic_directory(tmp_path / "out") as scratch:
        write(scratch)
    assert list(tmp_path.iterdir()) == []


def test_a_quota_is_room_and_told_once(tmp_path):
    with pytest.raises(NoRoomError) as told, atomic_directory(tmp_path / "out"), atomic_file(tmp_path / "file"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert str(told.value).startswith(f"{tmp_path / 'file'} could not be written: there is no room")
    assert str(told.value).count("no room") == 1
    cause = told.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EDQUOT


def test_other_errors_are_as_they_were(tmp_path):
    with pytest.raises(PermissionError, match="not yours"), atomic_file(tmp_path / "a"):
        raise PermissionError(errno.EACCES, "not yours")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("tokenizer.json: an iostream error in line 3"),
        RuntimeError("unexpected pos 64 vs 0 in the shard's header"),
        ValueError("3 requested and 2 written in this way"),
        OSError(errno.EIO, "PytorchStreamWriter failed"),
    ],
    ids=str,
)
def test_an_error_with_like_words_is_no_full_disk(error, tmp_path):
    with pytest.raises(type(error)) as raised, atomic_file(tmp_path / "a"):
        raise error
    assert raised.value is error


def test_what_the_system_says_is_stronger_than_what_pytorch_makes_of_it(tmp_path):
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(RuntimeError) as raised, atomic_file(tmp_path / "a"):
        raise error
    assert raised.value is error
