"""The wheel in an environment without the source tree, made once for all of pytest's workers, and its script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from filelock import FileLock

ROOT = Path(__file__).parents[2]
#: What takes seconds to import, none of it ours. Whatever a command needs of them it imports again.
LARGE = (
    "sentence_transformers", "datasets", "accelerate", "peft", "scipy.stats", "sklearn.feature_extraction.text",
    "pyarrow.parquet", "matplotlib.figure", "jinja2", "fastapi", "uvicorn", "prometheus_client",
)  # fmt: skip


def make(directory: Path) -> Path:
    """The environment: what is installed here but the source tree, and the wheel; built once. Returns its script."""
    environment = directory / "environment"
    script = environment / "bin" / "st-reba"
    with FileLock(directory / "environment.lock"):
        if not script.exists():
            sources = directory / "sources"
            # What git tracks or would: a wheel of what a clone has, built apart from what lies here.
            listed = subprocess.run(
                ["git", "ls-files", "--cached", "--others", "--exclude-standard", "st_reba", "st_reba_cli"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            for name in ("pyproject.toml", "README.md", "LICENSE", "MODEL_CARD.md", *listed):
                if (ROOT / name).is_file():
                    (sources / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, sources / name)
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            built = directory / "wheel"
            subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, sources], check=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
            (site,) = environment.glob("lib/python*/site-packages")
            # As a plain path: what lies there is found, and its .pth files, which name the source tree, are not read.
            here = [path for path in sys.path if path.endswith("site-packages")]
            (site / "installed.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
            (wheel,) = built.glob("*.whl")
            subprocess.run(
                [*pip, "--python", environment / "bin" / "python", "install", "--no-deps", "--ignore-installed", wheel],
                check=True,
            )
    return script


@dataclass
class Done:
    """A command that has ended.

    Attributes:
        code: Its exit code; negative: the signal that ended it.
        output: What it printed, errors included.
    """

    code: int
    output: str

    @property
    def lines(self) -> str:
        """What it printed, with white space of any length as one blank."""
        return " ".join(self.output.split())


class Running:
    """A command that runs."""

    def __init__(self, pid: int, out: Path, ends: Queue[int]) -> None:
        self.pid, self._out, self._ends = pid, out, ends

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace") if self._out.exists() else ""

    def wait(self, seconds: float = 120) -> Done:
        """To its end; one that takes longer is killed."""
        try:
            code = self._ends.get(timeout=seconds)
        except Exception:
            self.kill()
            raise TimeoutError(f"It ran for more than {seconds} seconds, and said: {self.output}") from None
        return Done(code, self.output)

    def until(self, said: str, seconds: float = 60) -> str:
        """What it has printed when it has said this."""
        deadline = time.monotonic() + seconds
        while said not in self.output:
            assert self._ends.empty(), f"It has ended: {self.output}"
            assert time.monotonic() < deadline, f"It has not said {said!r}: {self.output}"
            time.sleep(0.02)
        return self.output

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


class Script:
    """The installed script ``st-reba``: each call is a fresh process, forked where the large libraries are imported."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.path, self._directory = path, directory
        self._number = 0
        self._server: subprocess.Popen[str] | None = None
        self._started: Queue[int] = Queue()
        self._ends: dict[int, Queue[int]] = {}

    def _ask(self, request: Mapping[str, object]) -> int:
        if self._server is None:
            python = self.path.with_name("python")
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            command = [python, "-P", Path(__file__).with_name("server.py"), self.path, *LARGE]
            self._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=self._directory
            )
            assert self._server.stdout is not None
            self._server.stdout.readline()
            threading.Thread(target=self._listen, daemon=True).start()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._started.get(timeout=60)

    def _listen(self) -> None:
        assert self._server is not None
        assert self._server.stdout is not None
        for line in self._server.stdout:
            told = json.loads(line)
            if "code" in told:
                self._ends[told["pid"]].put(told["code"])
            else:
                self._ends[told["pid"]] = Queue()
                self._started.put(told["pid"])

    def start(self, *words: object, cwd: Path, env: Mapping[str, str] | None = None) -> Running:
        """Type a command, and go on."""
        self._number += 1
        out = self._directory / f"printed-{self._number}.txt"
        environment = {**self._environment(), **(env or {})}
        pid = self._ask({"words": list(map(str, words)), "cwd": str(cwd), "env": environment, "out": str(out)})
        return Running(pid, out, self._ends[pid])

    def run(self, *words: object, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 120) -> Done:
        """Type a command, and wait for its end."""
        return self.start(*words, cwd=cwd, env=env).wait(seconds)

    def run_alone(self, *words: object, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
        """The same in an interpreter of its own, which has nothing imported: it takes seconds."""
        done = subprocess.run(
            [self.path, *map(str, words)], cwd=cwd, env={**self._environment(), **(env or {})}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        return {**kept, "COLUMNS": "300", "HF_HUB_OFFLINE": "1"}

    def close(self) -> None:
        """End what runs."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(timeout=30)


def without(script: Path, file: str, line: str, directory: Path) -> str:
    """Our packages as they are installed, but for a line of one file: the folder to put first on PYTHONPATH."""
    (site,) = script.parents[1].glob("lib/python*/site-packages")
    for package in ("st_reba", "st_reba_cli"):
        shutil.copytree(site / package, directory / package)
    changed = directory / file
    text = changed.read_text(encoding="utf-8")
    assert text.count(line) == 1, (file, line)
    changed.write_text(text.replace(line, ""), encoding="utf-8")
    return str(directory)
