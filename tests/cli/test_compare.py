"""``st-reba compare``: what it prints, writes, and leaves where it is stopped."""

from __future__ import annotations

import csv
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_reba.compare.results import Comparison
from st_reba_cli import app

from ..backbones import TEXTS
from ..conftest import raising
from . import typed
from .conftest import written

#: How many layers there are does not matter to what stands around a comparison.
ON = "compare --model shallow --device cpu --dtype float32"
PAIRS = f"{ON} --data pairs.tsv --recipes classical,reba-2"

pytestmark = pytest.mark.usefixtures("desk")


def test_the_answer_comes_first():
    """What is told on the way is no part of the output: the first line of a pipe is the answer."""
    done = CliRunner().invoke(app, f"{PAIRS} --margin 2 --seed 3 --out report".split())
    found = Comparison.load(Path("report/comparison.json"))
    assert done.stdout.splitlines()[0] == found.answer
    assert "tokens at" in done.stderr
    assert found.answer in unescape(Path("report/report.html").read_text(encoding="utf-8"))
    assert bool(found.build) == bool(found.use)
    assert found.build in done.stdout
    shown = CliRunner().invoke(app, ["compare", "--saved", "report/comparison.json", "--json"])
    assert json.loads(shown.stdout) == {"schema": "st-reba/compare/1", **found.as_json()}


def test_a_dry_run_on_the_demo_texts(desk):
    """It writes nothing."""
    before = written(desk)
    told = r"\d+ recipes on 400 texts, with timings and any controls: [\d,]+ tokens at [\d,]+ a second here, about"
    output = typed("compare --dry-run --model shallow --out out")
    assert re.search(rf"{told}.* Memory: about \d+\.\d GB at the peak, .* weights\.", output)
    assert written(desk) == before
    output = typed("compare --dry-run --model shallow --demo pairs-zh --recipes prompteol")
    assert "The texts are in Chinese, and so are the prompts of PromptEOL. --prompt-language en keeps" in output


def test_what_is_shown():
    output = typed(f"{ON} --data pairs.tsv --max-seq-length 9")
    for expected in (
        "on 20 pairs of pairs.tsv (float32, cpu)", "--recipes all compares every recipe.", "Bag of input embeddings",
        "1.0x", "Recipes are compared as they are. To choose their settings each half needs 20 pairs: give more pairs.",
    ):  # fmt: skip
        assert expected in output
    assert "Word" not in output
    assert re.search(r"ReBA-2 mean ≈?−?\d+\.\d (−?\d+\.\d )?\[−?\d+, −?\d+\]", output)
    assert re.search(r"tf-idf +mean", output)


def test_a_stopped_run_goes_on(monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("st_reba_cli.show.show", lambda *given: exec("raise ValueError('stopped')"))
        assert "stopped" in typed(f"{PAIRS} --out out", expect=1)
    assert list(Path("out.partial").glob("*.safetensors"))
    assert not Path("out").exists()
    assert "Going on from out.partial, which a stopped run has left." in typed(f"{PAIRS} --out out")
    assert Path("out/comparison.json").exists()
    assert not Path("out.partial").exists()
    monkeypatch.setattr("st_reba.compare.compare", raising(KeyboardInterrupt()))
    assert "Stopped: the same command goes on from new.partial." in typed(f"{PAIRS} --out new", expect=130)
    assert "Stopped: nothing was kept; --out keeps it." in typed(PAIRS, expect=130)


def test_where_no_recipe_can_be_scored_what_was_found_is_kept(recwarn):
    Path("alike.tsv").write_text("a\ta\t1\na\ta\t2\na\ta\t3\na\ta\t4\n", encoding="utf-8")
    told = "There is no answer: no recipe has a score on STS. Similarities are not numbers, or the same for all: give"
    output = typed(f"{ON} --data alike.tsv --recipes echo-2 --out out")
    assert output.count(told) == 1
    assert {"report.html", "results.csv", "comparison.json"} <= {path.name for path in Path("out").iterdir()}
    assert not Path("out.partial").exists()
    assert not [warning for warning in recwarn if "constant" in str(warning.message)]
    assert told in typed("compare --saved out/comparison.json")
    # What is the best of none is not saved.
    said = typed(f"{ON} --data alike.tsv --recipes echo-2 --save-best best", expect=1)
    assert "No recipe has a score on 'STS'" in said


def test_against_an_older_one():
    typed(f"{PAIRS} --no-controls --out old")
    output = typed(f"{PAIRS} --no-controls --against old/comparison.json --out new --max-seq-length 6")
    assert "The intervals are paired: both comparisons are of the same labelled pairs." in output
    again = typed("compare --saved new/comparison.json --against old/comparison.json")
    assert output[output.index("changed beyond") :].startswith(again[again.index("changed beyond") :])
    assert Comparison.load(Path("new/comparison.json")).answer in again
    # Another kind of task is refused before anything runs.
    refused = typed("compare --dry-run --model shallow --demo retrieval --against old/comparison.json", expect=1)
    assert "The new comparison is by Retrieval (nDCG@10 x 100), the old one by STS (Spearman x 100): compare" in refused


def test_a_report_and_the_best():
    output = typed(f"{ON} --data pairs.tsv --recipes classical,reba-2 --out deep/report --save-best best")
    assert "Report: deep/report/report.html" in output
    recipe, pooling = re.search(r"Wrote (\S+), (mean|last) to best", output).groups()
    found = Comparison.load(Path("deep/report/comparison.json"))
    with Path("deep/report/results.csv").open(encoding="utf-8") as stream:
        [row] = [row for row in csv.DictReader(stream) if (row["recipe"], row["pooling"]) == (recipe, pooling)]
    model = SentenceTransformer("best", device="cpu")
    assert type(model[0]).__name__ == {"Classical": "CausalTransformer", "ReBA-2": "ReBAModule"}[recipe]
    assert np.allclose(np.linalg.norm(model.encode(TEXTS), axis=1), 1, atol=1e-6)
    card = Path("best/README.md").read_text(encoding="utf-8")
    assert "The best one is also corrected for being the best of many" in card
    assert f"**{found.answer}**" in card
    shown, corrected = (f"{100 * float(row[name] or 'nan'):.1f}".replace("-", "−") for name in ("STS", "corrected"))
    both = f", corrected {corrected}" if row["corrected"] else ""
    assert re.search(rf"\| {recipe}, {pooling} \| {shown}≈?{both} \[", card)
    assert f"| Random weights, {recipe}, {pooling} |" in card


def test_retrieval():
    """A task of one's own, prompts, and what is saved: a model with the prompts that it was measured with."""
    output = typed(f"{ON} --data beir --query-prompt 'question: ' --recipes classical --save-best best")
    assert "6 queries, 9 documents, 6 judged relevant." in output
    assert "on 6 queries on 9 documents of beir" in output
    assert "There are no intervals: 6 groups of queries that share no text are too few." in output
    model = SentenceTransformer("best", device="cpu")
    assert np.allclose(model.encode_query("a"), model.encode("a", prompt="question: "))
    assert "model.encode_query" in Path("best/README.md").read_text(encoding="utf-8")
