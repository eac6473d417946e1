"""Other trees of the package beside this one: a process of its own for each, and words for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(arguments)}: {done.stderr}")
    return done.stdout
