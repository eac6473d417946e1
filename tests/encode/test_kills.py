"""Runs that are killed (SIGKILL: nothing is tidied up) at every stage, and the same command afterwards."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from st_reba.encode import encode_file, job
from st_reba.encode.workspace import Workspace

from .inputs import contents, names

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked, to be killed")

OUTS = ["a.npy", "a.parquet", "shards"]
#: Where a run is killed, and how many texts need not be encoded again; None: that depends on its thread that writes.
POINTS = {
    "Hashing 0": 0, "Checking 0": 0, "Encoding 24": None, "Writing 0": 50, "Writing 24": 50,
    "ranges in place": 50, "in place": 50, "being removed": 50,
}  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{number}\n" for number in range(50)))
    return path


def die(*given, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(run: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Run in a process of its own, which is killed meanwhile."""
    pid = os.fork()
    if pid == 0:
        try:
            run(pytest.MonkeyPatch())
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def killed(point: str, encoder, texts: Path, out: Path, **options) -> None:
    """The same at one of :data:`POINTS`."""

    def on_progress(stage, done, total):
        if point == f"{stage} {done}":
            die()

    def all_but_one_removed(folder, **options):
        if folder == Workspace(out).path:
            die()
        rmtree(folder, **options)

    rmtree = shutil.rmtree
    steps = {
        "ranges in place": (Workspace, "finish", die),
        "in place": (Workspace, "remove", die),
        "being removed": (shutil, "rmtree", all_but_one_removed),
    }

    def run(patch):
        patch.setattr(job, "_A_WHILE", 0)
        if point in steps:
            patch.setattr(*steps[point])
        encode_file(encoder, texts, out, chunk_size=8, on_progress=on_progress, **options)

    killed_in(run)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("point", POINTS)
def test_the_same_command_ends_with_the_same_bytes_and_leaves_nothing(point, out, fake, texts, tmp_path):
    if out == "shards" and point == "Writing 24":
        pytest.skip("shards are moved, with their folder")
    given = {"precision": "int8", "calibration_rows": 20}
    whole = encode_file(fake, texts, tmp_path / "whole" / out, chunk_size=8, **given)
    path = tmp_path / out
    killed(point, fake, texts, path, **given)
    made = encode_file(fake, texts, path, chunk_size=8, **given)
    assert (made.rows, made.texts) == (50, 50)
    assert made.resumed == POINTS[point] or (POINTS[point] is None and made.resumed in (8, 16))
    assert contents(path) == contents(tmp_path / "whole" / out)
    assert contents(made.ranges) == contents(whole.ranges)
    assert names(tmp_path) == sorted([out, made.ranges.name, "texts.txt", "whole"])


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("point", ["Encoding 24", "in place"])
def test_with_overwrite(point, out, fake, texts, tmp_path):
    path = tmp_path / out
    encode_file(fake, texts, path, chunk_size=50)
    killed(point, fake, texts, path, overwrite=True)
    assert encode_file(fake, texts, path, chunk_size=8, overwrite=True).rows == 50
    encode_file(fake, texts, tmp_path / "whole" / out, chunk_size=8)
    assert contents(path) == contents(tmp_path / "whole" / out)
    assert names(tmp_path) == sorted([out, "texts.txt", "whole"])


def test_between_the_two_steps_that_replace_a_folder(fake, texts, tmp_path):
    """The old one is out of its place, and the new one not yet there."""
    path = tmp_path / "shards"
    encode_file(fake, texts, path)
    replace = os.replace

    def run(patch):
        patch.setattr(os, "replace", lambda source, target: die() if Path(target) == path else replace(source, target))
        encode_file(fake, texts, path, chunk_size=8, overwrite=True)

    killed_in(run)
    assert not path.exists()
    assert encode_file(fake, texts, path, chunk_size=8, overwrite=True).rows == 50
    assert names(tmp_path) == ["shards", "texts.txt"]


def test_a_finished_run_and_another_output(fake, texts, tmp_path):
    """What lies there is the output of the run that was killed, or it is not."""
    path = tmp_path / "a.npy"
    killed("in place", fake, texts, path)
    with pytest.raises(ValueError, match="exists: choose another --out"):
        encode_file(fake, texts, path, chunk_size=9)
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists: choose another --out"):
        encode_file(fake, texts, path, chunk_size=8)
    assert path.read_text() == "mine"


def test_while_another_run_is_cleared_away(fake, texts, tmp_path):
    """With --overwrite, for other settings: the folder is still known as a run's."""
    path = tmp_path / "a.npy"
    killed("Encoding 24", fake, texts, path)

    def run(patch):
        patch.setattr(shutil, "rmtree", lambda folder, **how: die() if folder.name == "parts" else None)
        encode_file(fake, texts, path, chunk_size=9, overwrite=True)

    killed_in(run)
    assert encode_file(fake, texts, path, chunk_size=9, overwrite=True).rows == 50
    assert names(tmp_path) == ["a.npy", "texts.txt"]


def test_a_file_of_somebody_among_the_parts_is_told_of_at_once_and_kept(fake, texts, tmp_path):
    mine = tmp_path / "a.npy.partial" / "parts" / "notes.txt"
    stages = []

    def stop(stage, done, total):
        stages.append(stage)
        if (stage, done) == ("Encoding", 0):
            mine.write_text("mine")
            raise KeyboardInterrupt

    # Ctrl-C stays Ctrl-C, though no part is there, and the lock is let go.
    with pytest.raises(KeyboardInterrupt):
        encode_file(fake, texts, tmp_path / "a.npy", chunk_size=8, on_progress=stop)
    stages.clear()
    with pytest.raises(ValueError, match=r"notes.txt is not part of a run: move it elsewhere. What is done is kept"):
        encode_file(fake, texts, tmp_path / "a.npy", chunk_size=8, on_progress=stop)
    assert "Encoding" not in stages
    assert mine.rename(tmp_path / "notes.txt").read_text() == "mine"
    assert encode_file(fake, texts, tmp_path / "a.npy", chunk_size=8).rows == 50
