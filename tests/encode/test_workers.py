"""Several devices: a process each, whose errors are told as they are, and none of which outlives its parent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from st_reba.encode import LocalEngine, encode_file

from .. import processes
from .inputs import Ones


class Failing(Ones):
    """Fails at a text, in a worker process."""

    def encode(self, model, texts):
        if "refuse" in texts:
            raise ValueError("There is no such thing.")
        if "fail" in texts:
            raise ZeroDivisionError("a fault")
        if "die" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "wait" in texts:
            Path(self.model, f"mark-{os.getpid()}").touch()
            time.sleep(600)
        return super().encode(model, texts)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("refuse", ValueError, r"^There is no such thing\.$"),
        ("fail", ZeroDivisionError, "^a fault$"),
        ("die", ChildProcessError, "A process on cpu has died; it may have run out of memory. What is done is kept"),
    ],
)
def test_what_goes_wrong_in_a_process_is_told_in_its_parent(text, error, said, ones, tmp_path, spawned_by_fork):
    (tmp_path / "texts.txt").write_text("a\n" * 3 + text + "\n")
    engine = LocalEngine(["cpu", "cpu"])
    with pytest.raises(error, match=said):
        encode_file(Failing(ones.model), tmp_path / "texts.txt", tmp_path / "a.npy", chunk_size=1, engine=engine)
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_worker_ends_with_its_parent_whatever_it_is_at(end, ones, tmp_path):
    """Killed, the parent can end nobody; interrupted, it does not wait for what a worker is at."""
    (tmp_path / "texts.txt").write_text("wait\n" * 3)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from st_reba.encode import LocalEngine, encode_file\n"
        "from tests.encode.test_workers import Failing\n"
        "out = Path(sys.argv[2])\n"
        "engine = LocalEngine(['cpu', 'cpu'])\n"
        "encode_file(Failing(sys.argv[1]), out.with_name('texts.txt'), out, chunk_size=1, engine=engine)\n"
    )
    parent = processes.start("-c", code, ones.model, tmp_path / "a.npy", out=tmp_path / "printed")
    # Both are at it: a process that is forked while the signal comes would be interrupted in its parent's place.
    while len(list(Path(ones.model).glob("mark-*"))) < 2:
        assert parent.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    workers = psutil.Process(parent.pid).children(recursive=True)
    os.kill(parent.pid, signal.SIGKILL if end == "killed" else signal.SIGINT)
    _, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    parent.wait(20)
    assert not alive
