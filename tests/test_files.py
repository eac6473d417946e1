"""Whole files or none, and a full disk is called so."""

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

#: More than any buffer holds.
MANY = 1 << 17
NO_ROOM = "could not be written: there is no room left on the disk .* Make room"


def refuse(path):
    """safetensors writes elsewhere and moves, so that no device catches it: its own words."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


WRITERS = {
    "write": lambda path: path.write_bytes(bytes(8 * MANY)),
    "numpy": lambda path: np.save(path.open("wb"), np.zeros(MANY)),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": np.random.rand(MANY)}), path.open("wb")),
    "torch": lambda path: torch.save(torch.zeros(MANY), path),
    "safetensors": refuse,
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
class TestAFullDisk:
    @pytest.mark.parametrize("writer", WRITERS)
    def test_every_writer_says_so_and_nothing_is_left(self, writer, tmp_path):
        (tmp_path / "full").symlink_to("/dev/full")

        def write():
            with atomic_directory(tmp_path / "out") as scratch:
                (scratch / "started").touch()
                WRITERS[writer](tmp_path / "full")

        with pytest.raises(NoRoomError, match=NO_ROOM):
            write()
        assert [path.name for path in tmp_path.iterdir()] == ["full"]

    def test_what_was_there_is_as_it_was(self, tmp_path, monkeypatch):
        (tmp_path / "a").write_text("before")
        monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="0"))
        (tmp_path / ".writing-0").symlink_to("/dev/full")
        with pytest.raises(NoRoomError, match=f"{tmp_path / 'a'} {NO_ROOM}"), atomic_file(tmp_path / "a") as stream:
            np.save(stream, np.zeros(MANY))
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a").read_text() == "before"


def test_a_file_of_text(tmp_path):
    with atomic_file(tmp_path / "a", "w") as text:
        text.write("ä\r\nb\n")
    assert (tmp_path / "a").read_bytes() == "ä\r\nb\n".encode()


def test_a_quota_is_room_and_told_once(tmp_path):
    with pytest.raises(NoRoomError) as told, atomic_directory(tmp_path / "out"), atomic_file(tmp_path / "file"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert str(told.value).startswith(f"{tmp_path / 'file'} could not be written: there is no room")
    assert str(told.value).count("no room") == 1
    assert isinstance(told.value.__cause__, OSError)


#: What the system says is stronger than what PyTorch makes of it.
OF_PYTORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
OF_PYTORCH.__context__ = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "not yours"),
        ValueError("tokenizer.json: an iostream error in line 3"),
        RuntimeError("unexpected pos 64 vs 0 in the shard's header"),
        OSError(errno.EIO, "PytorchStreamWriter failed"),
        OF_PYTORCH,
    ],
    ids=str,
)
def test_an_error_with_like_words_is_no_full_disk(error, tmp_path):
    with pytest.raises(type(error)) as raised, atomic_file(tmp_path / "a"):
        raise error
    assert raised.value is error
