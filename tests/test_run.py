"""Tests of ``python -m st_reba.run``, which runs programs that load models by their paths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .backbones import TEXTS
from .hub.server import RunningHub

#: As programs do: a class, an argument and an exit status of their own.
PROGRAM = """
import sys, time
from beside import NAME
from sentence_transformers import SentenceTransformer

print(NAME, sys.argv[1:], type(SentenceTransformer(sys.argv[1], device="cpu")[0]).__name__, __name__, flush=True)
if "wait" in sys.argv:
    time.sleep(300)
sys.exit(3)
"""


def started(*words, cwd, env=None):
    env = env or {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "st_reba.run", *map(str, words)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "beside.py").write_text("NAME = 'own'")
    file = tmp_path / "programs" / "theirs.py"
    file.write_text(PROGRAM)
    return file


def test_a_script_and_a_module(program, prompted_path, tmp_path):
    script = started(program, prompted_path, "-m", "x", cwd=tmp_path)
    module = started("-m", "theirs", prompted_path, "--x", cwd=program.parent)
    for process, rest in ((script, ["-m", "x"]), (module, ["--x"])):
        output = process.communicate(timeout=120)[0]
        assert f"own {[prompted_path, *rest]} ReBAModule __main__" in output
        assert process.returncode == 3


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_signal(program, prompted_path, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        process = started(program, prompted_path, "wait", cwd=tmp_path)
        while "own" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number


def test_what_cannot_be_run(tmp_path):
    cases = {
        ("-m",): "usage: python -m st_reba.run PROGRAM [ARGS], or -m MODULE [ARGS]",
        ("no-such",): "There is no program no-such: give a script, an installed program, or -m and a module.",
    }
    for words, said in cases.items():
        process = started(*words, cwd=tmp_path)
        output = process.communicate(timeout=120)[0]
        assert said in output
        assert (process.returncode, "Traceback" in output) == (1, False)


def test_mteb_run(prompted_path, tmp_path):
    """Run mteb's command on a Hub id, with data in a local directory of their name."""
    pytest.importorskip("mteb")
    data = tmp_path / "mteb" / "stsbenchmark-sts"
    data.mkdir(parents=True)
    rows = [{"sentence1": text, "sentence2": TEXTS[0], "score": score} for score, text in enumerate(TEXTS)]
    (data / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = Path(prompted_path)
    files = {path.relative_to(own).as_posix(): path.read_bytes() for path in own.rglob("*") if path.is_file()}
    with RunningHub({"hf_owner": ("owner", "org")}) as hub:
        hub.put("org/own", files)
        words = ("mteb", "run", "-m", "org/own", "-t", "STSBenchmark", "--output-folder", "results", "--no-co2-tracker")
        process = started(*words, cwd=tmp_path, env=hub.environment(tmp_path / "home"))
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    [found] = (tmp_path / "results").rglob("STSBenchmark.json")
    assert "cosine_spearman" in found.read_text()
