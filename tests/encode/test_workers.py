from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from st_reba.encode import LocalEngine, encode_file
from st_reba.encode.workers import WorkerProcess

from .. import processes


def refuse(worker):
    raise ValueError("There is no such thing.")


def fail(worker):
    raise ZeroDivisionError


def die(worker):
    os.kill(os.getpid(), signal.SIGKILL)


class TryingOut(LocalEngine):
    """Tries a process out before it works in this one."""

    def run(self, plan, todo, on_texts):
        with WorkerProcess(plan, "cpu") as worker:
            for _ in range(2):
                worker.begin(refuse)
                with pytest.raises(ValueError, match=r"^There is no such thing\.$"):
                    worker.finish()
            worker.begin(fail)
            with pytest.raises(RuntimeError, match="in fail\n.*ZeroDivisionError"):
                worker.finish()
            worker.begin(die)
            sentence = r"The process on cpu has died \(exit code -9\); it may have run out of memory. What is done is"
            with pytest.raises(ChildProcessError, match=sentence):
                worker.finish()
        yield from super().run(plan, todo, on_texts)


def test_what_goes_wrong_in_a_process_is_told_in_its_parent(ones, tmp_path, spawned_by_fork):
    """A refusal as the sentence it is, anything else with its trace, a death as such; after an error it goes on."""
    (tmp_path / "texts.txt").write_text("a\n" * 5)
    assert encode_file(ones, tmp_path / "texts.txt", tmp_path / "a.npy", engine=TryingOut()).rows == 5


class Stuck:
    """A job whose model is never loaded; it leaves a mark when it begins."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    @property
    def encoder(self):
        Path(self.mark).write_text(str(os.getpid()))
        time.sleep(600)


def test_a_worker_ends_with_its_parent_whatever_it_is_at(tmp_path):
    """Killed, the parent can end nobody; and this worker never gets to see that its connection is gone."""
    mark = tmp_path / "mark"
    code = (
        "import sys, time\n"
        "from st_reba.encode.workers import WorkerProcess\n"
        "from tests.encode.test_workers import Stuck, die\n"
        "worker = WorkerProcess(Stuck(sys.argv[1]), 'cpu')\n"
        "worker.begin(die)\n"
        "time.sleep(600)\n"
    )
    parent = processes.start("-c", code, mark, out=tmp_path / "printed")
    while not (mark.exists() and mark.read_text()):
        assert parent.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    worker = psutil.Process(int(mark.read_text()))
    parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=20)
    for process in alive:
        process.kill()
    assert not alive


def test_a_worker_that_still_imports_ends_with_its_parent(tmp_path):
    """Which takes seconds, and here for ever: the package that it imports is one that waits."""
    package = tmp_path / "path" / "st_reba"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "import os, pathlib, time\n"
        "mark = pathlib.Path(__file__).with_name('mark')\n"
        "mark.with_name('pid').write_text(str(os.getpid()))\n"
        "mark.with_name('pid').rename(mark)\n"
        "time.sleep(600)\n"
    )
    code = (
        "import importlib.util, sys, time\n"
        "from multiprocessing import util\n"
        "from st_reba.encode.workers import WorkerProcess\n"
        # A fresh interpreter: the tests have spawned processes forked.
        "found = importlib.util.spec_from_file_location('multiprocessing.fresh', util.__file__)\n"
        "fresh = importlib.util.module_from_spec(found)\n"
        "found.loader.exec_module(fresh)\n"
        "util.spawnv_passfds = fresh.spawnv_passfds\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "worker = WorkerProcess(None, 'cpu')\n"
        "time.sleep(600)\n"
    )
    mark = package / "mark"
    parent = processes.start("-c", code, package.parent, out=tmp_path / "printed")
    while not mark.exists():
        assert parent.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    worker = psutil.Process(int(mark.read_text()))
    parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=20)
    for process in alive:
        process.kill()
    assert not alive
