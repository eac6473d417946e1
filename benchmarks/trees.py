"""Other trees of the package beside this one: a process of its own for each, and words for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from records import ROOT


def vocabulary() -> list[str]:
    """The words of the package's own sentences, as often as they stand there: the same ones in every process."""
    lines = (ROOT / "st_reba/assets/demo_pairs_en.tsv").read_text("utf-8").splitlines()
    return " ".join(line.split("\t")[0] for line in lines).split()


def printed_in(tree: Path, script: str, *arguments: str) -> str:
    """What a script prints in a process that imports the package of one tree, on one thread.

    Raises:
        SystemExit: If it fails.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments], env=_environment(tree), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(arguments)}: {done.stderr}")
    return done.stdout


class Contender:
    """A script in a process of one tree, which answers each line that it is given with a line; a context manager."""

    def __init__(self, tree: Path, script: str, *arguments: str) -> None:
        self._command = [sys.executable, script, *arguments]
        self._process = subprocess.Popen(
            self._command, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def asked(self, line: str) -> str:
        """What it answers.

        Raises:
            SystemExit: If it ended instead.
        """
        given, printed = self._process.stdin, self._process.stdout
        assert given is not None
        assert printed is not None
        given.write(f"{line}\n")
        given.flush()
        answer = printed.readline()
        if not answer:
            raise SystemExit(f"{self._command} ended with {self._process.wait()}.")
        return answer.strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
