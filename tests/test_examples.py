from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_reba import ReBAModule
from st_reba.data import DEMO_MODEL

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_llama2_zh_reba(tmp_path):
    out = tmp_path / "model"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "llama2_zh_reba.py"), "--base", str(DEMO_MODEL), "--out", str(out)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(3, 256)" in done.stdout
    assert "it gives the same embeddings" in done.stdout
    assert isinstance(SentenceTransformer(str(out))[0], ReBAModule)
