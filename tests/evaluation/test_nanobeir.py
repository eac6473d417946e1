"""NanoBEIR's evaluators of sentence-transformers, on a folder in the layout of its data set."""

from __future__ import annotations

import json

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import NanoBEIREvaluator

from ..backbones import TEXTS

SPLIT = "NanoMSMARCO"
QUERIES = ["What is language processing?", "Who chased the mouse?"]


@pytest.mark.parametrize(("right", "score"), [("argmax", 1.0), ("argmin", 0.0)])
def test_a_model_of_ours_is_measured(right, score, prompted_path, tmp_path, monkeypatch):
    model = SentenceTransformer(prompted_path, device="cpu")
    similarities = model.similarity(model.encode_query(QUERIES), model.encode_document(TEXTS))
    places = getattr(similarities, right)(dim=1).tolist()
    rows = {
        "corpus": [{"_id": f"d{place}", "text": text} for place, text in enumerate(TEXTS)],
        "queries": [{"_id": f"q{place}", "text": text} for place, text in enumerate(QUERIES)],
        "qrels": [{"query-id": f"q{query}", "corpus-id": f"d{place}"} for query, place in enumerate(places)],
    }
    listed = ["---", "configs:"]
    data = tmp_path / "nano"
    for name, lines in rows.items():
        (data / name).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (data / name / f"{SPLIT}.jsonl").write_text(text, encoding="utf-8")
        listed += [f"- config_name: {name}", "  data_files:", f"  - split: {SPLIT}", f"    path: {name}/{SPLIT}.jsonl"]
    (data / "README.md").write_text("\n".join([*listed, "---", ""]), encoding="utf-8")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    evaluator = NanoBEIREvaluator(["msmarco"], dataset_id=str(data), accuracy_at_k=[1], ndcg_at_k=[1])
    assert evaluator(model)["NanoBEIR_mean_cosine_ndcg@1"] == score
