from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from st_reba import LayerwiseAutoencoder, ReBAModule
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import read_pairs

from . import processes
from .backbones import DEMO_MODEL, TEXTS

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_llama2_zh_reba(tmp_path):
    out = tmp_path / "model"
    done = processes.run(EXAMPLES / "llama2_zh_reba.py", "--base", DEMO_MODEL, "--out", out, out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    assert "(3, 256)" in done.stdout
    assert "it gives the same embeddings" in done.stdout
    assert isinstance(SentenceTransformer(str(out))[0], ReBAModule)


@pytest.fixture
def run(monkeypatch, capsys):
    """What an example prints, run in this process: most of what a process of its own would take is imports."""

    def shown(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return shown


def test_train_bellm(tmp_path, backbone_path, run):
    triplets = tmp_path / "nli.tsv"
    triplets.write_text("a man\ta person\tno one\nice\twater\tfire\nup\tabove\tdown\n")
    out = tmp_path / "model"
    shown = run(
        "train_bellm.py", "--base", backbone_path(), "--triplets", str(triplets), "--out", str(out),
        "--batch-size", "2", "--max-steps", "2",
    )  # fmt: skip
    assert "reloaded, it gives (3, 32)" in shown
    assert (out / "adapter" / "adapter_model.safetensors").is_file()


def test_train_csts(tmp_path, backbone_path, run):
    rows = tmp_path / "csts.csv"
    rows.write_text(
        "sentence1,sentence2,condition,label\na man sits,two men stand,the number of people,1\n"
        "a man sits,two men stand,the sex of the people,5\nice melts,fire burns,the temperature,2\n"
    )
    shown = run(
        "train_csts.py", "--base", backbone_path(), "--train", str(rows), "--dev", str(rows),
        "--out", str(tmp_path / "model"), "--batch-size", "3", "--max-steps", "2",
    )  # fmt: skip
    assert "Before: {'pearson_cosine': " in shown
    assert "After: {'pearson_cosine': " in shown


def test_train_freeze(tmp_path, backbone_path, run):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a man\ta person\t4.5\nice\twater\t3\nup\tdown\t0.5\n")
    out = tmp_path / "model"
    shown = run(
        "train_freeze.py", "--base", backbone_path(), "--pairs", str(pairs), "--out", str(out),
        "--batch-size", "3", "--max-steps", "2",
    )  # fmt: skip
    assert "its embeddings are (2, 32)" in shown
    assert ", 1.0000])" in shown.splitlines()[-1]
    assert isinstance(SentenceTransformer(str(out / "model"))[1], LayerwiseAutoencoder)


def test_distil(tmp_path, roomy_path, run):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(demo_sentences("en")[:50]), encoding="utf-8")
    shown = run(
        "distil.py", "--model", roomy_path, "--texts", str(texts), "--student", "static",
        "--out", str(tmp_path / "out"), "--held-out", "10", "--max-steps", "1",
    )  # fmt: skip
    assert "On texts that were held out: {'held-out_spearman_cosines': " in shown
    assert "tensor([[1.0000" in shown


def test_train_and_distill_jtcse(tmp_path, encoder_paths, run):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    base, second = encoder_paths()
    towers, one = tmp_path / "towers", tmp_path / "one"
    shown = run(
        "train_jtcse.py", "--base", base, "--second", second, "--texts", str(texts), "--out", str(towers),
        "--batch-size", "2", "--max-steps", "2",
    )  # fmt: skip
    assert "reloaded, they give (3, 32)" in shown
    shown = run(
        "distill_jtcse.py", "--teacher", str(towers / "model"), "--student", base, "--texts", str(texts),
        "--out", str(one),
        "--batch-size", "2", "--max-steps", "2",
    )  # fmt: skip
    assert "its mean cosine to the two is" in shown
    # The student is nothing of ours.
    assert "st_reba" not in (one / "modules.json").read_text()


def test_the_tour(monkeypatch, roomy_path):
    """Its cells, one after the other, without a kernel; `make notebook` starts one."""
    monkeypatch.setenv("TOUR_MODEL", roomy_path)
    # Its scores are shown, and none is looked at.
    monkeypatch.setattr("st_reba.data.tables.read_pairs", lambda path: read_pairs(path).head(12))
    monkeypatch.setattr("st_reba.data.demo.demo_sentences", lambda language: demo_sentences(language)[:40])
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    assert set(names["recipes"]) == {"Classical, mean", "Echo-2, mean", "ReBA-2, last", "PromptEOL, last"}
    assert names["words"].shape == (3, 32)
    assert names["loaded"].encode(names["texts"]) == pytest.approx(names["spread"].encode(names["texts"]), abs=1e-5)
