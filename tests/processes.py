"""Fresh processes in the time of a fork: another interpreter would take ten seconds to import what all of them import.

Before a test session imports st_reba, it forks two nurseries, idle processes that fork others when they are asked to:
one that has imported torch, and one that has imported sentence-transformers as well. A process of either has imported
nothing of st_reba. Those that need another Hub than this session's come from the first, since the Hub's client reads
where its Hub is when it is imported. Where there are no nurseries, new interpreters are started.

pytest-xdist's workers are forked, too: its own process imports the libraries once for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tqdm.std

#: What takes most of the time to import, and does not know the Hub's client.
WITHOUT_A_HUB = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "scipy.stats", "sklearn.metrics", "pandas",
    "pyarrow.dataset", "sympy", "PIL.Image", "anyio", "jinja2", "regex", "yaml",
)  # fmt: skip

#: What many tests import beside sentence-transformers, each of which one that runs alone can do without.
BESIDE = ("mteb", "peft", "datasets", "matplotlib.figure", "hypothesis", "typer.testing", "fastapi", "uvicorn")

FORKS = sys.platform == "linux"


class Nursery:
    """A process that forks others."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        self._socket = ours
        self._stream = ours.makefile("rw")
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> int | None:
        with self._lock:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            answer: int | None = json.loads(self._stream.readline())
            return answer

    def close(self) -> None:
        """End it, and what it forked."""
        self.leave()
        # One of an xdist worker is a child of the process that forked the worker.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def leave(self) -> None:
        """Close this process's connection, where it has been forked and another has the nursery."""
        self._stream.close()
        self._socket.close()


class Forked:
    """A process of a nursery, as :class:`subprocess.Popen` has it."""

    def __init__(self, nursery: Nursery, **request: Any) -> None:
        self._nursery = nursery
        pid = nursery.ask(**request)
        assert pid is not None
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Worker:
    """A process of pytest-xdist, as :class:`subprocess.Popen` has it; with what is imported here, and its nurseries."""

    def __init__(self, nursery: Nursery, others: Iterable[Nursery | Worker]) -> None:
        (their_input, our_output), (our_input, their_output) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for other in others:
                other.leave()
            for descriptor, number in ((their_input, 0), (their_output, 1)):
                os.dup2(descriptor, number)
            for descriptor in (their_input, our_output, our_input, their_output):
                os.close(descriptor)
            _nurseries.update({False: nursery, True: Nursery()})
            _with_streams()
            _execute(["-c", "import sys; exec(eval(sys.stdin.readline()))"])
        os.close(their_input)
        os.close(their_output)
        self.stdin, self.stdout = os.fdopen(our_output, "wb"), os.fdopen(our_input, "rb")

    def leave(self) -> None:
        """Close the pipes."""
        self.stdin.close()
        self.stdout.close()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


_nurseries: dict[bool, Nursery] = {}


def prepare() -> None:
    """Import the large libraries, and fork both nurseries on the way."""
    if FORKS and not _nurseries and "st_reba" not in sys.modules:
        (_nurseries[False],) = _imported(1)
        _nurseries[True] = Nursery()


def fork_workers(number: int) -> None:
    """Import the large libraries once, and have execnet take processes that are forked here as xdist's first workers.

    Where one of them crashes, the next is a new interpreter.
    """
    from execnet import gateway_base, gateway_io

    nurseries = _imported(number)
    _import(BESIDE)
    made: list[Worker] = []
    for nursery in nurseries:
        made.append(Worker(nursery, [*made, *(each for each in nurseries if each is not nursery)]))
    for nursery in nurseries:
        nursery.leave()
    # No collection has to look at what is imported.
    gc.freeze()
    gc.enable()
    ready = iter(made)

    class Forks(gateway_io.Popen2IOMaster):
        def __init__(self, args: Any, execmodel: Any) -> None:
            worker = next(ready, None)
            if worker is None:
                super().__init__(args, execmodel)
            else:
                self.popen = worker
                gateway_base.Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel)

    vars(gateway_io)["Popen2IOMaster"] = Forks


def _imported(number: int) -> list[Nursery]:
    """Import the large libraries, and fork nurseries before those that know the Hub.

    Without collections of garbage, since nearly all of it stays: the end of pytest's own collection enables them again.
    """
    gc.disable()
    _bars_of_our_own()
    _import(WITHOUT_A_HUB)
    nurseries = [Nursery() for _ in range(number)]
    importlib.import_module("sentence_transformers")
    return nurseries


def _import(names: Iterable[str]) -> None:
    """Those that are installed."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _bars_of_our_own() -> None:
    """Progress bars wait for each other within a process, not for those of forked ones, which may be killed in one."""
    tqdm.std.tqdm.set_lock(threading.RLock())


def finish() -> None:
    """End the nurseries, at the end of the session."""
    while _nurseries:
        _nurseries.popitem()[1].close()


def start(
    *arguments: str | Path,
    out: Path,
    env: Mapping[str, str] | None = None,
    with_st: bool = True,
    cwd: Path | None = None,
) -> Forked | subprocess.Popen[bytes]:
    """Run Python in a fresh process.

    Args:
        *arguments: As on the command line: a script, or ``-c`` and code; and what it is given.
        out: A file to which what it prints is added.
        env: Its environment; None: this one's.
        with_st: Whether sentence-transformers is imported already. Not so where the environment names another Hub or
            another home of its client, both of which are read at import.
        cwd: Where it runs; None: here.
    """
    words, environment = [str(argument) for argument in arguments], dict(os.environ if env is None else env)
    nursery = _nurseries.get(with_st)
    if nursery is None:
        with out.open("ab") as stream:
            settings: dict[str, Any] = {"cwd": cwd, "env": environment, "stdout": stream, "stderr": subprocess.STDOUT}
            return subprocess.Popen([sys.executable, *words], **settings)
    return Forked(nursery, words=words, env=environment, out=str(out), cwd=str(cwd or Path.cwd()))


def run(*arguments: str | Path, out: Path, timeout: float = 300, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The same, to its end; ``stdout`` has what it printed, errors included."""
    process = start(*arguments, out=out, **settings)
    try:
        code = process.wait(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, code, stdout=out.read_text(encoding="utf-8"))


def spawn(path: str, words: Sequence[bytes | str], descriptors: Iterable[int]) -> int:
    """In place of ``multiprocessing.util.spawnv_passfds``: what it runs, forked from this process.

    The new process has what it would have, its task pickled and these descriptors alone, and what is imported here.
    """
    pid = os.fork()
    if pid == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        kept = {0, 1, 2, nothing, *descriptors}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                # Not closed: a file object that is inherited would later close whatever has got its number.
                with contextlib.suppress(OSError):
                    os.fstat(descriptor)
                    os.dup2(nothing, descriptor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _execute([os.fsdecode(word) for word in words[words.index("-c") :]])
    return pid


def _serve(connection: socket.socket) -> NoReturn:
    """What a nursery does until its session closes the connection, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is imported stays: no collection of a process that is forked has to look at it, and to copy its pages.
    gc.freeze()
    gc.enable()
    _attach(os.devnull)
    own = connection.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, 4096)
    running: set[int] = set()
    stream = connection.makefile("rw")
    for line in stream:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                os.close(own)
                _become(**request)
            running.add(answer)
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _attach(out: str) -> None:
    """Read nothing, and add what is printed to a file."""
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), *[(out, os.O_WRONLY | os.O_APPEND)] * 2]):
        descriptor = os.open(path, flags | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    _with_streams()


def _with_streams() -> None:
    """Python's streams for the descriptors 0 to 2."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)
        for number in (1, 2)
    )


def _become(words: list[str], env: dict[str, str], out: str, cwd: str) -> NoReturn:
    _attach(out)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    here = [] if words[0] == "-c" else [str(Path(words[0]).parent)]
    sys.path[:0] = [*here, *env.get("PYTHONPATH", "").split(os.pathsep)]
    vars(multiprocessing.util)["spawnv_passfds"] = spawn
    _execute(words)


def _execute(words: list[str]) -> NoReturn:
    """What Python does with a command line."""
    _bars_of_our_own()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    code = 1
    try:
        first, *rest = words
        if first == "-c":
            sys.argv = [first, *rest[1:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            # As an interpreter ends: threads first, then what was registered, such as the end of worker processes.
            vars(threading)["_shutdown"]()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                if not stream.closed:
                    stream.flush()
        finally:
            # Never back into the code that forked.
            os._exit(code)
