"""What benchmarks/retrieval.py keeps and scores, on a tiny model and a handful of documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import blocks  # noqa: E402
import records  # noqa: E402
import retrieval  # noqa: E402
from pivot import Store  # noqa: E402
from real import contenders  # noqa: E402
from real.collections import COLLECTIONS  # noqa: E402
from real.contenders import CONTENDERS, best, words  # noqa: E402
from real.models import MODELS  # noqa: E402
from st_reba import CausalTransformer  # noqa: E402

from .. import backbones  # noqa: E402
from ..backbones import TEXTS  # noqa: E402


@pytest.fixture
def measured(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "retrieval" / "cranfield"
    folder.mkdir(parents=True)
    texts = [f"{first} {second}" for first in TEXTS for second in TEXTS]
    (folder / "corpus.jsonl").write_text(
        "".join(f'{{"_id": "{number}", "title": "", "text": "{text}"}}\n' for number, text in enumerate(texts))
    )
    for part in ("dev", "test"):
        rows = [f'{{"_id": "{number}", "text": "{TEXTS[number]}"}}\n' for number in range(3)]
        (folder / f"queries-{part}.jsonl").write_text("".join(rows))
        judged = [f"{number}\t{6 * number}\t1\n" for number in range(3)]
        (folder / f"qrels-{part}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    config = backbones.config("llama")
    config.max_position_embeddings = 1024
    torch.manual_seed(1)
    model = backbones.randomize(AutoModelForCausalLM.from_config(config).eval().float())
    path = backbones.save(model, tmp_path / "model", model_max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([" A", " B"])
    tokenizer.save_pretrained(path)
    monkeypatch.setattr(retrieval, "BLOCK", 10)
    monkeypatch.setattr(retrieval, "bm25", lambda queries, documents, language, count: best(
        np.array([[float(query in document) for document in documents] for query in queries]), count))  # fmt: skip
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    options = argparse.Namespace(
        data=tmp_path / "data", out=tmp_path / "kept", precision="float32", max_tokens=64,
        results=tmp_path / "results", contenders=["Classical, mean", "PromptReps, sparse", "Static"],
    )  # fmt: skip
    return retrieval.Measured(MODELS["SmolLM2-135M-Instruct"], Path(path), COLLECTIONS["Cranfield"], options)


def test_what_is_kept_is_scored_and_shown(measured, tmp_path, capsys):
    retrieval.embed(measured)
    blocks_kept = sorted(measured.directory.rglob("*.npz"))
    # Of three contenders each three blocks of documents, and one of queries of each part.
    assert len(blocks_kept) == 3 * (3 + 2)
    # A run that was stopped goes on: what is missing is made again, the same, and nothing else.
    before = {path: dict(np.load(path)) for path in blocks_kept}
    lost = next(path for path in blocks_kept if path.parent.name == "documents")
    lost.unlink()
    capsys.readouterr()
    retrieval.embed(measured)
    assert capsys.readouterr().out.count(".npz: ") == 1
    again = dict(np.load(lost))
    assert all(np.allclose(again[name], array, atol=1e-5) for name, array in before[lost].items() if name != "seconds")
    retrieval.rerank(measured)
    retrieval.score(measured)
    rows = records.read("retrieval", tmp_path / "results")
    recipes = {row["recipe"] for row in rows if row["set"] == "Cranfield test"}
    assert {"Classical", "PromptReps, sparse", "Static", "BM25", "tf-idf"} <= recipes
    assert sum(recipe.startswith("Hybrid: ") for recipe in recipes) == 2
    assert sum(recipe.startswith("Reranked: ") for recipe in recipes) == 1
    assert all(0 <= row["low"] <= row["score"] <= row["high"] <= 1 for row in rows)
    assert {row["seconds"] is not None for row in rows if row["recipe"] == "Classical"} == {True}
    shown = blocks.BLOCKS["retrieval"].render(Store(tmp_path / "results"), tmp_path / "page.md")
    assert shown.startswith("**Cranfield test**, SmolLM2-135M-Instruct; float32; documents cut after 64 tokens; ")
    assert "| recipe | pooling | filter | nDCG@10 | recall@100 | processor seconds for 1,000 |" in shown


def test_documents_stand_as_they_were(measured):
    """Those of a length are embedded together, and kept in their order."""
    retrieval.embed(measured)
    contender = CONTENDERS["Classical, mean"]
    kept = contender.joined(measured.blocks(contender, "documents"))
    model = measured.made(contender)
    assert np.allclose(kept.vectors, model.encode(measured.texts("documents")), atol=1e-4)


def test_words_of_bm25():
    assert words("The Wing's lift", "en") == ["the", "wing", "s", "lift"]
    assert words("自然，语", "zh") == ["自", "然", "自然", "语"]


def test_late_interaction_embeds_each_token(backbone_path, monkeypatch):
    monkeypatch.setattr(contenders, "DIMENSION", 8)
    contender = CONTENDERS["Classical, late interaction"]
    model = contender.make(CausalTransformer(backbone_path()), "en")
    for role in ("query", "document"):
        vectors = contender.joined([contender.embed(model, ["a fox", "a fox sees a river"], role)])
        assert [own.ndim for own in vectors] == [2, 2]
        assert {own.shape[1] for own in vectors} == {8}
        assert len(vectors[0]) < len(vectors[1])


def test_late_interaction_ranks_by_the_best_match_of_each_token():
    contender = CONTENDERS["Classical, late interaction"]
    draw = np.random.default_rng(0)
    queries, documents = ([draw.normal(size=(length, 4)).astype(np.float16) for length in lengths]
                          for lengths in ((2, 3), (5, 0, 1, 4)))  # fmt: skip
    kept = [contender.in_order(documents[:3], np.array([0, 1, 2])), contender.in_order(documents[3:], np.array([0]))]
    assert [len(each) for each in contender.joined(kept)] == [5, 0, 1, 4]
    ranked = contender.rank(queries, contender.joined(kept), 4, queries)[""]
    for query, hits in zip(queries, ranked, strict=True):
        naive = [
            float((query.astype(float) @ own.astype(float).T).max(axis=1).sum()) if len(own) else 0.0
            for own in documents
        ]
        assert [index for index, _ in hits] == sorted(range(4), key=lambda index: -naive[index])
