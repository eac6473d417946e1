from __future__ import annotations

import threading

import numpy as np
import pytest

from st_reba.data.parquet_copy import ParquetCopy
from st_reba.encode import encode_file, outputs

from .inputs import Ones


@pytest.fixture
def when_encoding(monkeypatch):
    """Do something when a chunk that begins with a text is encoded."""

    def set_up(text, act):
        encode = Ones.encode

        def acting(self, model, texts):
            if texts[0] == text:
                act()
            return encode(self, model, texts)

        monkeypatch.setattr(Ones, "encode", acting)

    return set_up


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text("a\na\nb\nb\nc\nc\n")
    return path


def test_the_next_chunk_is_read_and_the_last_one_written_while_the_model_runs(
    ones, letters, tmp_path, when_encoding, monkeypatch
):
    """All three meet: one after another, none of them would get to the end."""
    meeting = threading.Barrier(3, timeout=20)
    read, write_part = ParquetCopy.read, outputs.write_part
    parts = iter(range(3))

    def reading(self, number):
        if number == 2:
            meeting.wait()
        return read(self, number)

    def writing(*given):
        if next(parts) == 0:
            meeting.wait()
        write_part(*given)

    monkeypatch.setattr(ParquetCopy, "read", reading)
    monkeypatch.setattr(outputs, "write_part", writing)
    when_encoding("b", meeting.wait)
    out = tmp_path / "a.npy"
    assert encode_file(ones, letters, out, chunk_size=2).rows == 6
    assert np.load(out).shape == (6, 2)


class OwnError(Exception):
    pass


def fail():
    raise OwnError


def test_what_was_encoded_before_an_error_is_kept(ones, letters, tmp_path, when_encoding):
    when_encoding("b", fail)
    with pytest.raises(OwnError):
        encode_file(ones, letters, tmp_path / "a.npy", chunk_size=2)
    assert [path.name for path in (tmp_path / "a.npy.partial" / "parts").iterdir()] == ["part-00000000.npy"]


def test_a_chunk_that_cannot_be_written_stops_the_run(ones, letters, tmp_path, monkeypatch):
    """And no chunk is taken for written that is not."""

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_part", full)
    told = []
    with pytest.raises(OSError, match="No space left"):
        encode_file(
            ones, letters, tmp_path / "a.npy", chunk_size=2, on_progress=lambda stage, done, total: told.append(done)
        )
    assert told[-1] == 0
    assert not (tmp_path / "a.npy").exists()
