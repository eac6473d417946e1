from __future__ import annotations

import os
import signal

import pytest

from st_reba.encoding import LocalEngine, encode_file
from st_reba.encoding.workers import WorkerProcess


def refuse(worker):
    raise ValueError("There is no such thing.")


def fail(worker):
    raise ZeroDivisionError


def die(worker):
    os.kill(os.getpid(), signal.SIGKILL)


class TryingOut(LocalEngine):
    """Tries a process out before it works in this one."""

    def run(self, plan, todo):
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
        yield from super().run(plan, todo)


def test_what_goes_wrong_in_a_process_is_told_in_its_parent(ones, tmp_path):
    """A refusal as the sentence it is, anything else with its trace, a death as such; after an error it goes on."""
    (tmp_path / "texts.txt").write_text("a\n" * 5)
    assert encode_file(ones, tmp_path / "texts.txt", tmp_path / "a.npy", engine=TryingOut()).rows == 5
