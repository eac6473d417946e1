"""New Python processes in the time of a fork.

On Linux, the standard library's fork server imports sentence-transformers once per pytest worker, and forks a process
for each test. A test that needs another address of the Hub at import runs a plain subprocess.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "linux":
    from multiprocessing.context import ForkServerProcess as Process

    SERVER = multiprocessing.get_context("forkserver")
    SERVER.set_forkserver_preload(["sentence_transformers"])
else:
    # Libraries of macOS do not survive a fork, and Windows has none: each process imports what it needs.
    from multiprocessing.context import SpawnProcess as Process

    SERVER = multiprocessing.get_context("spawn")


class Python(Process):
    """Python process with the methods of :class:`subprocess.Popen`."""

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float = 300) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.is_alive() and self.pid is not None:
            os.kill(self.pid, number)


def start(*arguments: object, out: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Python:
    """Start Python in a process that has imported sentence-transformers, but not st_reba.

    Args:
        *arguments: Command line: a script, or ``-c`` and code, and its arguments.
        out: File to which the output is appended.
        env: Environment; None: that of this process.
        cwd: Working directory; None: that of this process.
    """
    words, environment = [str(argument) for argument in arguments], dict(os.environ if env is None else env)
    process = Python(target=_main, args=(words, environment, str(out), str(cwd or Path.cwd())))
    process.start()
    return process


def run(*arguments: object, out: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, as :func:`start`; ``stdout`` has all output."""
    process = start(*arguments, out=out, **settings)
    try:
        code = process.wait()
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, code, stdout=out.read_text(encoding="utf-8"))


def forked(run: Callable[[pytest.MonkeyPatch], object]) -> int:
    """Run in a forked process, and return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            run(pytest.MonkeyPatch())
        finally:
            os._exit(1)
    return pid


def killed_in(run: Callable[[pytest.MonkeyPatch], object]) -> None:
    """Run in a forked process that is killed meanwhile."""
    _, status = os.waitpid(forked(run), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def die(*given: object, **options: object) -> None:
    """Kill this process, in place of any function."""
    os.kill(os.getpid(), signal.SIGKILL)


def _main(words: list[str], env: dict[str, str], out: str, directory: str) -> None:
    """Run a script or code as Python does."""
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(descriptor, number)
        stream.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    first, *rest = words
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")
