"""Runs a script again and again, each time in a fresh process that has the large libraries imported already.

``python server.py SCRIPT MODULE...`` runs in the environment of the script. It imports the modules, none of which is
ours; then each line of its input asks for a process: ``{"words": [...], "cwd": ..., "env": {...}, "out": FILE}``. It
answers with ``{"pid": ...}``, and when that process has ended with ``{"pid": ..., "code": ...}``.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn


def run(script: str, words: list[str], cwd: str, env: dict[str, str], out: str) -> NoReturn:
    """What ``SCRIPT WORDS`` does in a shell, with what it prints added to a file."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), *[(out, os.O_WRONLY | os.O_APPEND)] * 2]):
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.closerange(3, 256)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [script, *words]
        sys.path[0] = os.path.dirname(script)
        sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # As an interpreter ends: threads first, then what was registered. Never back into the loop below.
        with contextlib.suppress(BaseException):
            vars(threading)["_shutdown"]()
            importlib.import_module("atexit")._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(script: str, *modules: str) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("st_reba", "st_reba_cli")]
    assert not ours, f"the command has to import these itself: {ours}"

    def say(**told: Any) -> None:
        print(json.dumps(told), flush=True)

    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        say(ready=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj == ended:
                    os.read(ended, 4096)
                    for pid in list(running):
                        found, status = os.waitpid(pid, os.WNOHANG)
                        if found:
                            running.discard(pid)
                            say(pid=pid, code=os.waitstatus_to_exitcode(status))
                    continue
                line = sys.stdin.readline()
                if not line:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    return
                if (pid := os.fork()) == 0:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    run(script, **json.loads(line))
                running.add(pid)
                say(pid=pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
