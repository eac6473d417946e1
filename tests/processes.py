"""Fresh processes in the time of a fork.

On Linux, the standard library's fork server imports sentence-transformers once for each worker of pytest, and forks
one for each test that asks. A process that must import the Hub's client under another address is a plain subprocess.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.platform == "linux":
    from multiprocessing.context import ForkServerProcess as Process

    SERVER = multiprocessing.get_context("forkserver")
    SERVER.set_forkserver_preload(["sentence_transformers"])
else:
    # Libraries of macOS do not survive a fork, and Windows has none: each process imports what it needs.
    from multiprocessing.context import SpawnProcess as Process

    SERVER = multiprocessing.get_context("spawn")


class Python(Process):
    """A run of Python, with the methods of :class:`subprocess.Popen`."""

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
    """Run Python in a process that has imported sentence-transformers and nothing of st_reba.

    Args:
        *arguments: As on the command line: a script, or ``-c`` and code; and its arguments.
        out: A file to which the process adds all that it prints.
        env: Its environment; None: this process's.
        cwd: Its working directory; None: this process's.
    """
    words, environment = [str(argument) for argument in arguments], dict(os.environ if env is None else env)
    process = Python(target=_main, args=(words, environment, str(out), str(cwd or Path.cwd())))
    process.start()
    return process


def run(*arguments: object, out: Path, timeout: float = 300, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The same, to its end; ``stdout`` has all that it printed."""
    process = start(*arguments, out=out, **settings)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, code, stdout=out.read_text(encoding="utf-8"))


def _main(words: list[str], env: dict[str, str], out: str, directory: str) -> None:
    """What Python does with a command line."""
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(descriptor, number)
        stream.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    first, *rest = words
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        runpy.run_path(first, run_name="__main__")
