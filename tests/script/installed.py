"""The wheel as it is installed, made once for all of pytest's workers, and its script."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from .. import processes

ROOT = Path(__file__).parents[2]
PACKAGES = ("st_reba", "st_reba_cli")


def make(directory: Path) -> Path:
    """The wheel of what a clone has, in a folder of its own; built once. Returns its script."""
    installed = directory / "installed"
    with FileLock(directory / "installed.lock"):
        if not installed.exists():
            sources = directory / "sources"
            # What git tracks or would: a wheel of what a clone has, built apart from what lies here.
            listed = subprocess.run(
                ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
                cwd=ROOT, capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            for name in ("pyproject.toml", "README.md", "LICENSE", *listed):
                if (ROOT / name).is_file():
                    (sources / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, sources / name)
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
            subprocess.run([*pip, "--no-build-isolation", "--target", installed, sources], check=True)
            # These come before the source tree wherever they are looked for.
            assert all((installed / package / "__init__.py").is_file() for package in PACKAGES)
    return installed / "bin" / "st-reba"


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

    def __init__(self, process: processes.Python, out: Path) -> None:
        self._process, self._out = process, out

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace") if self._out.exists() else ""

    def wait(self) -> Done:
        """To its end; one that takes longer than five minutes is killed."""
        try:
            return Done(self._process.wait(), self.output)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"It did not end, and said: {self.output}") from None

    def until(self, said: str) -> str:
        """What it has printed when it has said this."""
        deadline = time.monotonic() + 60
        while said not in self.output:
            assert self._process.poll() is None, f"It has ended: {self.output}"
            assert time.monotonic() < deadline, f"It has not said {said!r}: {self.output}"
            time.sleep(0.02)
        return self.output

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)


class Script:
    """The installed script ``st-reba``: each call is a fresh process, forked where the large libraries are imported."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.path, self._directory = path, directory
        self._number = 0

    def start(self, *words: object, cwd: Path, env: Mapping[str, str] | None = None) -> Running:
        """Type a command, and go on."""
        self._number += 1
        out = self._directory / f"printed-{self._number}.txt"
        return Running(processes.start(self.path, *map(str, words), out=out, env=self.environment(env), cwd=cwd), out)

    def run(self, *words: object, cwd: Path, env: Mapping[str, str] | None = None) -> Done:
        """Type a command, and wait for its end."""
        return self.start(*words, cwd=cwd, env=env).wait()

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        own = {**kept, "COLUMNS": "300", "HF_HUB_OFFLINE": "1", **(more or {})}
        first = own.get("PYTHONPATH", "")
        return {**own, "PYTHONPATH": os.pathsep.join(filter(None, [first, str(self.path.parents[1])]))}
