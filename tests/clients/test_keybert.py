"""A script of KeyBERT, which takes a path, typed with and without ``python -m st_reba.run``."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("keybert")

SCRIPT = """
import sys
from keybert import KeyBERT
print(KeyBERT(sys.argv[1]).extract_keywords("The dog chased the cat; the cat chased the mouse.", top_n=2))
"""


def test_a_script(prompted_path, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for run, code, said in ((["-m", "st_reba.run"], 0, "[('"), ([], 1, "trust_remote_code=True")):
        command = [sys.executable, *run, str(tmp_path / "script.py"), prompted_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
