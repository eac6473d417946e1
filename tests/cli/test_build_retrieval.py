"""``st-reba build`` for other families of models than SentenceTransformer."""

from __future__ import annotations

from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

from ..backbones import DEMO_MODEL
from .test_commands import typed

TEXTS = ["A dog chases a cat.", "It rains in the mountains."]


def build(out, *options, expect=0):
    return typed("build", "--model", DEMO_MODEL, "--out", out, "--dtype", "float32", *options, expect=expect)


def test_sparse(tmp_path):
    output = build(tmp_path / "m", "--sparse", "--recipe", "promptreps", "--expansion", 2, "--top-k", 50)
    assert "from sentence_transformers import SparseEncoder; SparseEncoder(" in output
    model = SparseEncoder(str(tmp_path / "m"), device="cpu")
    assert {name: model.prompts[name] for name in ("query", "document")} == {
        "query": "Query: ", "document": "Passage: ",
    }  # fmt: skip
    assert (model[0].expansion, model[0].top_k) == (2, 50)
    assert model.encode_query(TEXTS).shape == (2, model.get_embedding_dimension())


def test_the_dense_half_has_the_same_prompts(tmp_path):
    build(tmp_path / "m", "--recipe", "promptreps")
    assert SentenceTransformer(str(tmp_path / "m"), device="cpu").prompts["query"] == "Query: "


def test_of_another_prompt(tmp_path):
    build(tmp_path / "m", "--sparse", "--recipe", "prompteol", "--query-prompt", "find ")
    model = SparseEncoder(str(tmp_path / "m"), device="cpu")
    assert model[0].template.startswith("This sentence")
    assert model[0].normalize_text
    assert model.prompts["query"] == "find "


def test_rerank(tmp_path):
    output = build(tmp_path / "m", "--rerank", "--max-seq-length", 32)
    assert "from sentence_transformers import CrossEncoder; CrossEncoder(" in output
    model = CrossEncoder(str(tmp_path / "m"), device="cpu")
    assert model[0].max_seq_length == 32
    assert len(model.rank("what chases a cat", TEXTS)) == 2
