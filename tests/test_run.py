"""Tests of ``python -m st_reba.run``, which runs programs that load models by their paths."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from st_reba.run import main

from .backbones import TEXTS
from .hub.server import RunningHub

#: As programs do: a class, an argument and an exit status of their own.
PROGRAM = """
import signal, sys, time
from beside import NAME
from sentence_transformers import SentenceTransformer

print(NAME, sys.argv[1:], type(SentenceTransformer(sys.argv[1], device="cpu")[0]).__name__, __name__)
print("SIGTERM", signal.getsignal(signal.SIGTERM).name, flush=True)
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


def test_a_script_and_a_module(program, prompted_path, tmp_path, monkeypatch, capsys):
    for cwd, words in (
        (tmp_path, [str(program), prompted_path, "-m", "x"]), (program.parent, ["-m", "theirs", prompted_path, "--x"])
    ):  # fmt: skip
        # Python itself puts the current directory first.
        monkeypatch.setattr(sys, "path", [str(cwd), *sys.path])
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        with pytest.raises(SystemExit, match="^3$"):
            main()
        assert f"own {words[words.index(prompted_path) :]} ReBAModule __main__" in capsys.readouterr().out
        del sys.modules["beside"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_signal(program, prompted_path, tmp_path):
    # Whoever runs the tests in the background may have had it ignored, and a process inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = started(program, prompted_path, "wait", cwd=tmp_path)
    signal.signal(signal.SIGINT, before)
    told = iter(process.stdout.readline, "")
    assert any("own" in line for line in told)
    assert next(told) == "SIGTERM SIG_DFL\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT


CANNOT_BE_RUN = {
    "-m": "usage: python -m st_reba.run PROGRAM [ARGS], or -m MODULE [ARGS]",
    "no-such": "There is no program no-such: give a script, an installed program, or -m and a module.",
}


@pytest.mark.parametrize("word", CANNOT_BE_RUN)
def test_what_cannot_be_run(word, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", word])
    with pytest.raises(SystemExit, match=re.escape(CANNOT_BE_RUN[word])):
        main()


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
