"""Tests of settings, optional packages and atomic files."""

from __future__ import annotations

import errno
import os
import re
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError

from st_reba.files import atomic_directory, atomic_file, is_full
from st_reba.optional import require
from st_reba.settings import check_choice, check_flag, check_int, check_layers, check_tokens, describe

from .conftest import raising

INDICES = "a list of layer indices, such as [-1]."
TOKENS = "give a number of tokens, 1 or more, or None for no limit."
#: A check with its further arguments, allowed values, others, and the end of the message.
CHECKS = {
    "int": ((check_int, 1, 3), [1, 3], [0, 4, 2.0, True, "2", None, [2]], "give a whole number from 1 to 3."),
    "open": ((check_int, 0), [0, 10**12], [-1, 1.5], "give a whole number of 0 or more."),
    "flag": ((check_flag,), [True, False], [1, 0, "yes", None], "use True or False."),
    "choice": ((check_choice, "a", "b", "c"), ["a", "c"], ["d", 1, ["a"], None], "use 'a' or 'b' or 'c'."),
    "layers": ((check_layers,), ["all", [-1], (0, 1)], [[], "lowest", 5, [True], None], f'use "all" or {INDICES}'),
    "tokens": ((check_tokens,), [1, 10**12, None], [0, -1, True, 2.5, "2"], TOKENS),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_says_what_a_setting_may_be(name):
    (check, *arguments), allowed, refused, says = CHECKS[name]
    for value in allowed:
        assert check("it", value, *arguments) is value
    for value in refused:
        with pytest.raises(ValueError, match="^" + re.escape(f"it={value!r}: {says}") + "$"):
            check("it", value, *arguments)


def test_settings_are_described_and_huge_limits_are_none():
    assert describe(SimpleNamespace(count=2, way="a"), ["count", "way"]) == "count=2, way='a'"
    assert check_tokens("it", 1e30) is None


BROKEN = {
    "raise ImportError('libarrow.so.99: cannot open\\nshared object file')": "ImportError('libarrow.so.99",
    "import no_such_package_at_all": "No module named 'no_such_pack",
    "raise RuntimeError": "RuntimeError()",
    "": "No module named 'brittle.other'",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return ``package(code)``, which installs a package that runs the code when imported."""

    def write(code: str) -> None:
        (tmp_path / "brittle").mkdir()
        (tmp_path / "brittle" / "__init__.py").touch()
        (tmp_path / "brittle" / "part.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in ("brittle", "brittle.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_package_is_called_broken_and_its_error_shown(code, package):
    """Check that a missing and a broken package have different hints."""
    package(code)
    with pytest.raises(ImportError) as refused:
        require("brittle.part" if code else "brittle.other", "extra", "A test")
    said = r'A test needs brittle, which is installed and cannot be imported \(.*{}.*pip install "st-reba\[extra\]".*'
    assert re.fullmatch(said.format(re.escape(BROKEN[code])), str(refused.value))


def test_a_package_that_is_missing_or_there(package):
    for name in ("no_such_package_at_all", "no_such_package_at_all.part"):
        with pytest.raises(ImportError, match=r'^A test needs no_such_package_at_all: pip install "st-reba\[extra\]"'):
            require(name, "extra", "A test")
    package("there = True")
    assert require("brittle.part", "extra", "A test").there


#: More than any buffer holds.
MANY = 1 << 17


#: Of safetensors, which cannot be provoked by a full device.
FULL_DISK = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

WRITERS = {
    "write": lambda path: path.write_bytes(bytes(8 * MANY)),
    "numpy": lambda path: np.save(path.open("wb"), np.zeros(MANY)),
    "pyarrow": lambda path: pq.write_table(pa.table({"a": np.random.rand(MANY)}), path.open("wb")),
    "torch": lambda path: torch.save(torch.zeros(MANY), path),
    "safetensors": raising(FULL_DISK),
}
on_a_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")


def test_a_directory_is_written_by_one_at_a_time(tmp_path):
    with atomic_directory(tmp_path / "out") as scratch:
        (scratch / "file").touch()
        message = "out is in use: another process is writing it. Wait, or choose another --static."
        with pytest.raises(ValueError, match=message), atomic_directory(tmp_path / "out", "--static"):
            pass
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/file"]


@on_a_full_disk
@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_says_that_the_disk_is_full_and_leaves_nothing(writer, tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")

    def write():
        with atomic_directory(tmp_path / "out") as scratch:
            (scratch / "started").touch()
            WRITERS[writer](tmp_path / "full")

    with pytest.raises(OSError, match=f"No space left on device, .*: '{tmp_path / 'out'}'") as refused:
        write()
    assert is_full(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@on_a_full_disk
def test_what_was_there_is_as_it_was(tmp_path, monkeypatch):
    with atomic_file(tmp_path / "a", "w") as text:
        text.write("ä\r\nb\n")
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="0"))
    (tmp_path / ".writing-0").symlink_to("/dev/full")
    with (
        pytest.raises(OSError, match=f"No space left on device, .*: '{tmp_path / 'a'}'"),
        atomic_file(tmp_path / "a") as stream,
    ):
        np.save(stream, np.zeros(MANY))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == "ä\r\nb\n".encode()


def test_a_quota_is_room_and_told_once(tmp_path):
    whole, file = atomic_directory(tmp_path / "out"), atomic_file(tmp_path / "file")
    with pytest.raises(OSError, match="quota exceeded") as told, whole, file:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert (told.value.errno, told.value.filename) == (errno.EDQUOT, str(tmp_path / "file"))


def test_an_error_with_like_words_is_no_full_disk(tmp_path):
    # What the system says is stronger than what PyTorch makes of it.
    of_pytorch = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    of_pytorch.__context__ = OSError(errno.EIO, os.strerror(errno.EIO))
    for error in (PermissionError(errno.EACCES, "not yours"), ValueError("an iostream error in line 3"), of_pytorch):
        with pytest.raises(type(error)) as raised, atomic_file(tmp_path / "a"):
            raise error
        assert raised.value is error
