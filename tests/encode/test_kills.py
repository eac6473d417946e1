"""Runs that are killed (SIGKILL: nothing is tidied up) at every stage, and the same command afterwards."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from st_reba.encode import encode_file, job
from st_reba.encode.workspace import Workspace

from .inputs import Ones

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked, to be killed")

OUTS = ["a.npy", "a.parquet", "shards"]


class Numbers(Ones):
    """Vectors that differ from text to text."""

    def encode(self, model, texts):
        return np.array([[float(text), -float(text)] for text in texts], np.float32)


@pytest.fixture
def numbers(ones):
    return Numbers(ones.model)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{number}\n" for number in range(50)))
    return path


def die(*args):
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
    """The same at a point: a stage and how far it is, or a step at the end."""

    def on_progress(stage, done, total):
        if point == f"{stage} {done}":
            die()

    def linked(source, target):
        link(source, target)
        if Path(target) == out:
            die()

    def renamed(source, target):
        rename(source, target)
        die()

    def partly_removed(self):
        shutil.rmtree(self.parts, ignore_errors=True)
        self.texts.unlink()
        die()

    link, rename = os.link, os.rename
    steps = {
        "in place": [(Workspace, "remove", die)],
        "being removed": [(Workspace, "remove", partly_removed)],
        "linked": [(os, "link", linked), (os, "rename", renamed)],
    }

    def run(patch):
        patch.setattr(job, "_A_WHILE", 0)
        for step in steps.get(point, []):
            patch.setattr(*step)
        encode_file(encoder, texts, out, chunk_size=8, on_progress=on_progress, **options)

    killed_in(run)


def contents(path: Path) -> dict[str, bytes]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def here(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize(
    "point",
    ["Hashing 0", "Checking 0", "Encoding 0", "Encoding 24", "Encoding 50", "Writing 0", "Writing 24", "linked",
     "in place", "being removed"],
)  # fmt: skip
def test_the_same_command_ends_with_the_same_bytes_and_leaves_nothing(point, out, numbers, texts, tmp_path):
    if out == "shards" and point in ("Writing 24", "being removed"):
        pytest.skip("shards are moved, with their folder")
    given = {"precision": "int8", "calibration_rows": 20}
    (tmp_path / "whole").mkdir()
    encode_file(numbers, texts, tmp_path / "whole" / out, chunk_size=8, **given)
    path = tmp_path / out
    killed(point, numbers, texts, path, **given)
    made = encode_file(numbers, texts, path, chunk_size=8, **given)
    assert (made.rows, made.texts) == (50, 50)
    assert (made.resumed == 50) == (point in ("Encoding 50", "Writing 0", "Writing 24", "linked", "in place",
                                              "being removed"))  # fmt: skip
    assert contents(path) == contents(tmp_path / "whole" / out)
    assert contents(made.ranges) == contents(tmp_path / "whole" / made.ranges.name)
    assert here(tmp_path) == sorted([out, made.ranges.name, "texts.txt", "whole"])


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("point", ["Encoding 24", "Writing 0", "in place"])
def test_with_overwrite(point, out, numbers, ones, texts, tmp_path):
    path = tmp_path / out
    encode_file(ones, texts, path)
    killed(point, numbers, texts, path, overwrite=True)
    assert encode_file(numbers, texts, path, chunk_size=8, overwrite=True).rows == 50
    encode_file(numbers, texts, tmp_path / "whole" / out, chunk_size=8)
    assert contents(path) == contents(tmp_path / "whole" / out)
    assert here(tmp_path) == sorted([out, "texts.txt", "whole"])


def test_between_the_two_steps_that_replace_a_folder(numbers, ones, texts, tmp_path):
    """The old one is out of its place, and the new one not yet there."""
    path = tmp_path / "shards"
    encode_file(ones, texts, path)
    replace = os.replace

    def run(patch):
        patch.setattr(os, "replace", lambda source, target: die() if Path(target) == path else replace(source, target))
        encode_file(numbers, texts, path, chunk_size=8, overwrite=True)

    killed_in(run)
    assert not path.exists()
    assert encode_file(numbers, texts, path, chunk_size=8, overwrite=True).rows == 50
    assert here(tmp_path) == ["shards", "texts.txt"]


@pytest.mark.parametrize("out", OUTS)
def test_a_finished_run_and_another_output(out, numbers, texts, tmp_path):
    """What lies there is the output of the run that was killed, or it is not."""
    path = tmp_path / out
    killed("in place", numbers, texts, path)
    with pytest.raises(ValueError, match="exists: choose another --out"):
        encode_file(numbers, texts, path, chunk_size=9)
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_text("mine")
    with pytest.raises(ValueError, match="exists: choose another --out"):
        encode_file(numbers, texts, path, chunk_size=8)
    assert path.is_dir() or path.read_text() == "mine"


@pytest.mark.parametrize("moment", ["parts", "manifest"])
def test_while_another_run_was_being_cleared_away(moment, numbers, texts, tmp_path):
    """With --overwrite, for other settings: the folder is still known as a run's."""
    path = tmp_path / "a.npy"
    killed("Encoding 24", numbers, texts, path)

    def run(patch):
        if moment == "parts":
            patch.setattr(shutil, "rmtree", lambda folder, **how: die() if folder.name == "parts" else None)
        else:
            patch.setattr(os, "replace", die)
        encode_file(numbers, texts, path, chunk_size=9, overwrite=True)

    killed_in(run)
    assert encode_file(numbers, texts, path, chunk_size=9, overwrite=True).rows == 50
    assert here(tmp_path) == ["a.npy", "texts.txt"]


class TestAFileAmongTheParts:
    def test_is_told_at_once_and_kept(self, numbers, texts, tmp_path):
        killed("Encoding 24", numbers, texts, tmp_path / "a.npy")
        mine = tmp_path / "a.npy.partial" / "parts" / "notes.txt"
        mine.write_text("mine")
        stages = []
        with pytest.raises(
            ValueError, match=r"notes.txt is not part of a run: move it elsewhere. What is done is kept"
        ):
            encode_file(numbers, texts, tmp_path / "a.npy", chunk_size=8,
                        on_progress=lambda stage, done, total: stages.append(stage))  # fmt: skip
        assert "Encoding" not in stages
        mine.rename(tmp_path / "notes.txt")
        assert encode_file(numbers, texts, tmp_path / "a.npy", chunk_size=8).resumed >= 16

    def test_does_not_take_the_place_of_what_stopped_the_run(self, numbers, texts, tmp_path):
        def stop(stage, done, total):
            if (stage, done) == ("Encoding", 24):
                (tmp_path / "a.npy.partial" / "parts" / "notes.txt").write_text("mine")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            encode_file(numbers, texts, tmp_path / "a.npy", chunk_size=8, on_progress=stop)
        # Not locked: the refusal is about the file.
        with pytest.raises(ValueError, match=r"notes.txt is not part of a run"):
            encode_file(numbers, texts, tmp_path / "a.npy", chunk_size=8)

    def test_that_alone_is_there_is_not_removed(self, numbers, texts, tmp_path):
        def stop(stage, done, total):
            if stage == "Encoding":
                (tmp_path / "a.npy.partial" / "parts" / "notes.txt").write_text("mine")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            encode_file(numbers, texts, tmp_path / "a.npy", chunk_size=8, on_progress=stop)
        assert (tmp_path / "a.npy.partial" / "parts" / "notes.txt").read_text() == "mine"
