"""Scripts turn what they measure into rows, and do not run again what is kept."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

import cost
import grid
import one_process
import real_models
import records
import reranking
import retrieval
import runs
from real.cosines import by_seed
from real.kept import Kept
from real.models import RealModel
from real.sets import COLLECTIONS, Sets
from st_reba import CausalTransformer, EchoModule, ReBAModule, ReverseEOLModule
from st_reba.data.tables import read_pairs

from ..backbones import TEXTS, language_model


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Pairs, and a collection."""
    directory = tmp_path_factory.mktemp("sets")
    pairs = [f"{text}\t{other}\t{5 - place}\n" for place, text in enumerate(TEXTS) for other in TEXTS]
    for part in ("train", "dev", "test"):
        (directory / f"stsb_en_{part}.tsv").write_text("".join(pairs), encoding="utf-8")
    folder = directory / "retrieval" / "cranfield"
    folder.mkdir(parents=True)
    documents = [f"{first} {second}" for first in TEXTS for second in TEXTS]
    for file, texts in (("corpus", documents), ("queries-test", TEXTS[:3])):
        lines = [json.dumps({"_id": str(number), "title": "", "text": text}) for number, text in enumerate(texts)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    judged = "".join(f"{number}\t{6 * number}\t1\n" for number in range(3))
    (folder / "qrels-test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A language model with its head, and room for prompts."""
    directory = tmp_path_factory.mktemp("model")
    language_model(directory, max_position_embeddings=1024)
    return Path(directory)


@pytest.fixture
def model(path, monkeypatch) -> RealModel:
    monkeypatch.setattr(RealModel, "located", lambda self, directory: path)
    return RealModel("A tiny model", ("none",), ("en",), "none", "")


def test_contenders_take_turns_and_ratios_are_of_a_round():
    order: list[tuple[str, int]] = []
    runs.interleaved({name: lambda number, name=name: order.append((name, number)) for name in "ab"}, range(2))
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    # The median of each round's ratio, 2, 4 and 1.5; not the ratio of medians.
    assert runs.ratio([2, 8, 3], [1, 2, 2]) == {"value": 2, "low": 1.5, "high": 4}
    contenders = {name.rpartition(", ")[0] for table in cost.RATIOS.values() for pair in table for name in pair}
    assert contenders <= runs.ROWS.keys() | {"Classical, mean", "sentence-transformers"}


def test_a_model_in_parts_is_joined_and_must_be_the_one_that_was_measured(tmp_path):
    whole = b"GGUF" + bytes(range(100))
    for number, own in (("02", whole[50:]), ("01", whole[:50])):
        (tmp_path / "some" / number).mkdir(parents=True)
        (tmp_path / "some" / number / f"part{number}.bin").write_bytes(own)
    with pytest.raises(ValueError, match="clear pip's cache and fetch them again"):
        RealModel("a model", ("some==1",), ("en",), "**/part*.bin", "0" * 64, "a.gguf")._join(tmp_path / "some")
    model = RealModel("a", ("some==1",), ("en",), "**/part*.bin", hashlib.sha256(whole).hexdigest(), "a.gguf")
    model._join(tmp_path / "some")
    assert model.located(tmp_path).read_bytes() == whole


def test_recipes_are_kept_and_scored(data, path, model, tmp_path, monkeypatch):
    kept = Kept(tmp_path, Sets(data), lambda: CausalTransformer(str(path), model_kwargs={"dtype": "float32"}))
    names = ("Classical", "Echo-2", "ReBA-2", "Early and late")
    lists = ("stsb-en-test", "stsb-en-dev", "fit-en")
    real_models.embed(kept, lists, ("en",), names)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npz")}
    real_models.embed(kept, lists, ("en",), names)
    assert {file: file.stat().st_mtime_ns for file in times} == times
    for name, kind in (("Echo-2", EchoModule), ("ReBA-2", ReBAModule)):
        module = kind(str(path), model_kwargs={"dtype": "float32"})
        expected = runs.pooled(module, "mean").encode(Sets(data).texts("stsb-en-test"))
        found = np.split(kept.vectors("stsb-en-test", name), 2, axis=1)[0]
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    shared = {"model": model.name, "precision": "float32", "weights": "trained", "date": "2026-11-22"}
    real_models.score(kept, kept.load, model, shared, tmp_path)
    rows = records.read("scores", tmp_path).filter(set="STS-B en test", pooling="mean", filter="")
    ends = {row["recipe"]: row["score"] for row in rows.to_dicts()}
    assert ends.keys() == {"Classical", "Echo-2", "ReBA-2"}


def test_rankings_are_kept_scored_and_reranked(data, model, tmp_path, monkeypatch):
    for script in (retrieval, reranking):
        monkeypatch.setattr(script, "bm25", lambda queries, *more: [[(0, 1.0), (1, 0.5)]] * len(queries))
    given = argparse.Namespace(
        data=data, out=tmp_path, packages=tmp_path, precision="float32", max_tokens=64, threads=1, queries=2, depth=2,
        contenders=["Classical", "Topic", "PromptReps, sparse"], readings=reranking.READINGS,
    )  # fmt: skip
    rows = list(retrieval.measure(model, COLLECTIONS["Cranfield"], given))
    assert all(0 <= row["low"] <= row["score"] <= row["high"] <= 1 for row in rows)
    recipes = {(row["recipe"], row["filter"]) for row in rows}
    assert recipes == {
        ("BM25", ""), ("tf-idf", ""), ("Classical", ""), ("Classical", "whitened"), ("Topic", "standardised sum"),
        ("PromptReps, sparse", ""),
    }  # fmt: skip
    bm25, *others = reranking.measure(model, COLLECTIONS["Cranfield"], given)
    assert (bm25["set"], bm25["reading"]) == ("Cranfield test, 2 queries", "BM25")
    assert [row["ahead"] for row in others] == pytest.approx([row["score"] - bm25["score"] for row in others])
    monkeypatch.setattr(reranking, "scored", lambda *given: pytest.fail("it was there"))
    assert len(list(reranking.measure(model, COLLECTIONS["Cranfield"], given))) == 3


def test_a_grid_is_kept_resumed_and_scored_by_each_fit(model, path, tmp_path, monkeypatch):
    for part, count in (("train", 30), ("dev", 6), ("test", 6)):
        pairs = (f"{part} {number} goes\tso {part} {number * number} went\t{number % 5}\n" for number in range(count))
        (tmp_path / f"stsb_en_{part}.tsv").write_text("".join(pairs), encoding="utf-8")
    some = {"MODELS": {model.name: model}, "LABELLED": {"en": ()}, "COUNTS": (2, 8, 12), "CAPTION_PAIRS": 10}
    for name, value in {**some, "USUAL": "8 texts of the set", "BLOCK": 5, "demo_sentences": lambda: TEXTS}.items():
        monkeypatch.setattr(grid, name, value)
    arguments = [
        "--data", tmp_path, "--labelled", tmp_path, "--models", tmp_path, "--out", tmp_path, "--results", tmp_path,
        "--precision", "float32", "--pairs", 6, "--test-pairs", 6, "--recipes", "prompteol", "reverse-eol",
    ]  # fmt: skip
    grid.main([*map(str, arguments)])
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npz")}
    rows = records.read("grid", tmp_path)
    next(iter(times)).unlink()
    grid.main([*map(str, arguments)])
    again = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npz")}
    assert len([file for file in times if again[file] != times[file]]) == 1
    assert records.read("grid", tmp_path).equals(rows)
    alone = {(row["set"], row["recipe"], row["fitted_on"]): row for row in rows.filter(against="").to_dicts()}
    own, name = "8 texts of the set", "STS-B en dev, 6 pairs"
    pairs = read_pairs(tmp_path / "stsb_en_dev.tsv")
    module = ReverseEOLModule(str(path), model_kwargs={"dtype": "float32"})
    items = grid.items_of(pairs, {"": runs.pooled(module, "last").encode(pairs.texts())})[1]
    assert alone[name, "ReverseEOL", ""]["score"] == pytest.approx(items.scores[0], abs=1e-4)
    fits = {fitted for set_, recipe, fitted in alone if (set_, recipe) == (name, "ReverseEOL")}
    numbers = {"texts of the set": (2, 8, 12), "sentences of the package": (2,), "captions": (2, 8, 12)}
    assert fits == {"", *(f"{count} {kind}" for kind, counts in numbers.items() for count in counts)}
    [found] = rows.filter(set=name, recipe="ReverseEOL", against="PromptEOL").to_dicts()
    difference = alone[name, "ReverseEOL", own]["score"] - alone[name, "PromptEOL", own]["score"]
    assert found["ahead"] == pytest.approx(difference, abs=2e-4)
    assert found["ahead_low"] <= found["ahead"] <= found["ahead_high"]


def test_means_are_of_the_seeds_that_both_have():
    draw, labels = np.random.default_rng(0), list(range(30))
    found = {key: draw.random(30) for key in (("a", 0), ("a", 1), ("b", 1), ("b", 2), ("untrained", None))}
    rows = [*by_seed(found, labels, "a")]
    assert rows[2]["score"] == pytest.approx(spearmanr(found["b", 1], labels).statistic)
    means = {row["method"]: row for row in rows if "seeds" in row}
    assert means.keys() == {"a", "b"}
    assert (means["b"]["seeds"], means["b"]["ahead_seeds"]) == (2, 1)
    assert means["b"]["ahead"] == pytest.approx(rows[2]["score"] - rows[1]["score"])
    [*_, last] = by_seed(found, labels, "untrained")
    assert last["ahead"] == pytest.approx((rows[2]["score"] + rows[3]["score"]) / 2 - rows[4]["score"])


def test_each_question_of_a_conversation_is_about_the_one_who_is_told_of():
    texts, questions = one_process.conversation(0)
    assert (len(texts), len({index for _, index in questions})) == (37, 32)
    for question, index in questions:
        [who] = [person for person in one_process.PEOPLE if person in question]
        assert who in texts[index].lower()
    assert len({question for question, _ in questions}) == 32
    assert texts != one_process.conversation(1)[0]
