"""Runs that are killed (SIGKILL: nothing is tidied up) at every stage, and the same command afterwards; chunks are
written while the model runs; several devices have a process each, and a cluster an actor for each."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from st_reba.encode import Encoder, LocalEngine, RayEngine, encode_file, job, outputs
from st_reba.encode.workspace import Workspace

from .. import processes
from .conftest import Fake, contents, names, sentences

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked, to be killed")

OUTS = ["a.npy", "a.parquet", "shards"]
#: Where a run is killed, and how many texts need not be encoded again; None: that depends on its thread that writes.
POINTS = {
    "Hashing 0": 0, "Checking 0": 0, "Encoding 24": None, "Writing 0": 50, "Writing 24": 50, "noted": 50,
    "in place": 50, "being removed": 50,
}  # fmt: skip


@pytest.fixture
def texts(tmp_path):
    return written(tmp_path, *map(str, range(50)))


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
        "noted": (Workspace, "finish", die),
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
    encode_file(fake, texts, tmp_path / "whole" / out, chunk_size=8)
    path = tmp_path / out
    killed(point, fake, texts, path)
    made = encode_file(fake, texts, path, chunk_size=8)
    assert (made.rows, made.texts) == (50, 50)
    assert made.resumed == POINTS[point] or (POINTS[point] is None and made.resumed in (8, 16))
    assert contents(path) == contents(tmp_path / "whole" / out)
    assert names(tmp_path) == sorted([out, "texts.txt", "whole"])


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


class Acting(Fake):
    """Does what a text says: goes wrong, or waits."""

    def encode(self, model, texts, on_texts=lambda texts: None):
        if "refuse" in texts:
            raise ValueError("There is no such thing.")
        if "die" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "wait" in texts:
            Path(self.model, f"mark-{os.getpid()}").touch()
            time.sleep(600)
        return super().encode(model, texts, on_texts)


def written(directory: Path, *texts: str) -> Path:
    path = directory / "texts.txt"
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def test_a_chunk_is_written_while_the_model_runs(fake, tmp_path, monkeypatch):
    """Both meet: one after the other, neither would get to the end."""
    meeting = threading.Barrier(2, timeout=20)
    write_part = outputs.write_part
    monkeypatch.setattr(outputs, "write_part", lambda *given: (meeting.wait(), write_part(*given)))

    class Meeting(Fake):
        def encode(self, model, texts, on_texts=lambda texts: None):
            if texts != ["a"]:
                meeting.wait()
            # The last one is written alone.
            if texts == ["c"]:
                monkeypatch.setattr(outputs, "write_part", write_part)
            return super().encode(model, texts, on_texts)

    assert encode_file(Meeting(fake.model), written(tmp_path, *"abc"), tmp_path / "a.npy", chunk_size=1).rows == 3


def test_a_chunk_that_cannot_be_written_stops_the_run(fake, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_part", full)
    with pytest.raises(OSError, match="No space left"):
        encode_file(fake, written(tmp_path, *"abc"), tmp_path / "a.npy", chunk_size=1)
    assert names(tmp_path) == ["texts.txt"]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("refuse", ValueError, r"^There is no such thing\.$"),
        ("die", ChildProcessError, "A process on cpu has died; it may have run out of memory. What is done is kept"),
    ],
)
def test_what_goes_wrong_in_a_process_is_told_in_its_parent(text, error, said, fake, tmp_path, spawned_by_fork):
    texts, engine = written(tmp_path, *["a"] * 3, text), LocalEngine(["cpu", "cpu"])
    with pytest.raises(error, match=said):
        encode_file(Acting(fake.model), texts, tmp_path / "a.npy", chunk_size=1, engine=engine)
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_worker_ends_with_its_parent_whatever_it_is_at(end, fake, tmp_path):
    """Killed, the parent can end nobody; interrupted, it does not wait for what a worker is at."""
    written(tmp_path, *["wait"] * 3)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from st_reba.encode import LocalEngine, encode_file\n"
        "from tests.encode.test_processes import Acting\n"
        "out = Path(sys.argv[2])\n"
        "engine = LocalEngine(['cpu', 'cpu'])\n"
        "encode_file(Acting(sys.argv[1]), out.with_name('texts.txt'), out, chunk_size=1, engine=engine)\n"
    )
    parent = processes.start("-c", code, fake.model, tmp_path / "a.npy", out=tmp_path / "printed")
    # Both are at it: a process that is forked while the signal comes would be interrupted in its parent's place.
    while len(list(Path(fake.model).glob("mark-*"))) < 2:
        assert parent.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    workers = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL if end == "killed" else signal.SIGINT)
    _, alive = psutil.wait_procs(workers, timeout=60)
    for process in alive:
        process.kill()
    parent.wait(60)
    assert not alive


@dataclass(frozen=True)
class Dying(Encoder):
    """Kills its worker's process, once, when a text comes up."""

    at: str = ""
    killed: str = ""

    def encode(self, model, texts, on_texts=lambda texts: None):
        if any(text.startswith(self.at) for text in texts) and not Path(self.killed).exists():
            Path(self.killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(model, texts, on_texts)


@pytest.mark.ray
class TestRay:
    @pytest.fixture(autouse=True, scope="class")
    def cluster(self):
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        yield
        ray.shutdown()

    def test_a_worker_that_is_killed_loses_and_doubles_nothing(self, model_directory, tmp_path):
        texts, told = written(tmp_path, *sentences(60)), []
        dying = Dying(str(model_directory), batch_size=4, at="33 ", killed=str(tmp_path / "killed"))
        made = encode_file(
            dying, texts, tmp_path / "ray.npy", engine=RayEngine(workers=2), on_progress=lambda *at: told.append(at),
            chunk_size=8,
        )  # fmt: skip
        assert (tmp_path / "killed").exists()
        assert (made.rows, made.resumed) == (60, 0)
        assert ("Encoding", 60, 60) in told
        encode_file(Encoder(str(model_directory), batch_size=4), texts, tmp_path / "local.npy", chunk_size=8)
        by_ray, locally = (np.load(tmp_path / name) for name in ("ray.npy", "local.npy"))
        # A worker has one thread, this process may have more.
        np.testing.assert_allclose(by_ray, locally, atol=1e-5)
        assert not (tmp_path / "ray.npy.partial").exists()

    def test_a_workers_refusal_is_the_users(self, model_directory, tmp_path):
        encoder, texts = replace(Encoder(str(model_directory)), truncate_dim=33), written(tmp_path, *sentences(60))
        with pytest.raises(ValueError, match=r"^truncate_dim=33: the model's vectors have 32 values\.$"):
            encode_file(encoder, texts, tmp_path / "a.npy", engine=RayEngine(2))
        assert not (tmp_path / "a.npy.partial").exists()


def test_engines_that_cannot_be(monkeypatch):
    for devices in ([], ["cpu", "cuda:0"], [""]):
        with pytest.raises(ValueError, match="give one or more of one kind"):
            LocalEngine(devices)
    with pytest.raises(ValueError, match="workers=0: give a whole number from 1"):
        RayEngine(workers=0)
    with pytest.raises(ValueError, match='device "cuda:1": on a Ray cluster give "cpu" or "cuda"'):
        RayEngine(device="cuda:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match='needs ray: pip install "st-reba\\[ray\\]"'):
        RayEngine()
