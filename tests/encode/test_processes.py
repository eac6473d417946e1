"""Runs that are killed (SIGKILL: nothing is tidied up) at every stage, and the same command afterwards; several devices
have a process each, and a cluster an actor for each."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from st_reba.encode import Encoder, LocalEngine, RayEngine, encode_file
from st_reba.encode.workspace import Workspace

from .. import processes
from ..processes import die, forked, killed_in
from .conftest import TEXTS, Fake, contents, names, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked, to be killed")

#: Where a run is killed, and how many texts need not be encoded again.
POINTS = {
    "Hashing 0": 0, "Checking 0": 0, "Encoding 24": 16, "Writing 0": 50, "Writing 24": 50, "noted": 50, "in place": 50,
    "being removed": 50,
}  # fmt: skip


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
        if point in steps:
            patch.setattr(*steps[point])
        encode_file(encoder, texts, out, chunk_size=8, on_progress=on_progress, **options)

    killed_in(run)


@pytest.mark.parametrize("out", ["a.npy", "a.parquet", "shards"])
@pytest.mark.parametrize("point", POINTS)
def test_the_same_command_ends_with_the_same_bytes_and_leaves_nothing(point, out, fake, texts, tmp_path):
    if out == "shards" and point == "Writing 24":
        pytest.skip("shards are moved, with their folder")
    encode_file(fake, texts, tmp_path / "whole" / out, chunk_size=8)
    path = tmp_path / out
    killed(point, fake, texts, path)
    made = encode_file(fake, texts, path, chunk_size=8)
    assert (made.rows, made.texts, made.resumed) == (50, 50, POINTS[point])
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


class Acting(Fake):
    """Does what a text says: goes wrong, or waits."""

    def encode(self, model, texts, on_texts):
        if "refuse" in texts:
            raise ValueError("There is no such thing.")
        if "die" in texts:
            die()
        if "wait" in texts:
            Path(self.model, str(os.getpid())).touch()
            time.sleep(600)
        return super().encode(model, texts, on_texts)


FAILURES = [
    ("refuse", ValueError, r"^There is no such thing\.$"),
    ("die", ChildProcessError, "A process on cpu has died; it may have run out of memory. Finished chunks are"),
]


@pytest.mark.parametrize(("text", "error", "said"), FAILURES)
def test_what_goes_wrong_in_a_process_is_told_in_its_parent(text, error, said, fake, tmp_path, spawned_by_fork):
    texts, engine = written(tmp_path, *["a"] * 3, text), LocalEngine(["cpu", "cpu"])
    with pytest.raises(error, match=said):
        encode_file(Acting(fake.model), texts, tmp_path / "a.npy", chunk_size=1, engine=engine)
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_ends_with_its_parent_whatever_it_is_at(end, fake, tmp_path, spawned_by_fork):
    """Killed, the parent can end nobody; interrupted, it does not wait for what a worker is at."""
    texts = written(tmp_path, "wait", "wait")
    # The server that forks the workers is there before their parent, which is not the server's.
    processes.SERVER.Process(target=int).start()

    def run(patch):
        patch.setattr(multiprocessing.forkserver._forkserver, "ensure_running", lambda: None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = LocalEngine(["cpu", "cpu"])
        encode_file(Acting(fake.model), texts, tmp_path / "a.npy", chunk_size=1, engine=engine)

    parent = forked(run)
    deadline = time.monotonic() + 60
    # Both are at it: a process that is forked while the signal comes would be interrupted in its parent's place.
    while len(workers := [path.name for path in Path(fake.model).iterdir() if path.name.isdecimal()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running = [psutil.Process(int(pid)) for pid in workers]
    os.kill(parent, end)
    os.waitpid(parent, 0)
    _, alive = psutil.wait_procs(running, timeout=60)
    for process in alive:
        process.kill()
    assert not alive


@dataclass(frozen=True)
class Dying(Encoder):
    """Kills its worker's process, once, when a text comes up."""

    at: str = ""
    killed: str = ""

    def encode(self, model, texts, on_texts):
        if any(text.startswith(self.at) for text in texts) and not Path(self.killed).exists():
            Path(self.killed).touch()
            die()
        return super().encode(model, texts, on_texts)


@pytest.mark.ray
class TestRay:
    @pytest.fixture(autouse=True, scope="class")
    def cluster(self):
        ray = pytest.importorskip("ray")
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        yield
        ray.shutdown()

    def test_a_worker_that_is_killed_loses_and_doubles_nothing(self, model_directory, texts, tmp_path):
        told = []
        dying = Dying(str(model_directory), batch_size=4, at="33 ", killed=str(tmp_path / "killed"))
        made = encode_file(
            dying, texts, tmp_path / "ray.npy", engine=RayEngine(workers=2), on_progress=lambda *at: told.append(at),
            chunk_size=8,
        )  # fmt: skip
        assert (tmp_path / "killed").exists()
        assert (made.rows, made.resumed) == (len(TEXTS), 0)
        assert ("Encoding", 50, 50) in told
        encode_file(Encoder(str(model_directory), batch_size=4), texts, tmp_path / "local.npy", chunk_size=8)
        # A worker has one thread, this process may have more.
        np.testing.assert_allclose(np.load(tmp_path / "ray.npy"), np.load(tmp_path / "local.npy"), atol=1e-5)
        assert not (tmp_path / "ray.npy.partial").exists()

    def test_a_workers_refusal_is_the_users(self, model_directory, texts, tmp_path):
        encoder = replace(Encoder(str(model_directory)), truncate_dim=33)
        with pytest.raises(ValueError, match=r"^truncate_dim=33: the model's vectors have 32 values\.$"):
            encode_file(encoder, texts, tmp_path / "a.npy", engine=RayEngine(2))
        assert not (tmp_path / "a.npy.partial").exists()


def test_engines_that_cannot_be(monkeypatch):
    for devices in ([], ["cpu", "cuda:0"], [""]):
        with pytest.raises(ValueError, match="give one or more of one kind"):
            LocalEngine(devices)
    with pytest.raises(ValueError, match="workers=0: give a whole number of 1 or more"):
        RayEngine(workers=0)
    with pytest.raises(ValueError, match='device=.cuda:1.: give "cpu" or "cuda" for a Ray cluster'):
        RayEngine(device="cuda:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match='needs ray: pip install "st-reba\\[ray\\]"'):
        RayEngine()
