"""Sparse models and those that give each token a vector, in Parquet: a list a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from st_reba import AttentionRerankModule, CausalTransformer, PromptRepsModule
from st_reba.encode import Encoder, encode_file
from st_reba.modules.attention_reranking import attention_reranker
from st_reba.modules.multi_vector import multi_vector_encoder

from ..backbones import DEMO_MODEL

TEXTS = [f"{number} {words}" for number in range(9) for words in ("a cat sat", "the dog, it ran.", "ice")]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("lists")
    (made / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def models(place):
    """Saved models, by the name of their class."""
    sparse = SparseEncoder(modules=[PromptRepsModule(str(DEMO_MODEL), top_k=6)], device="cpu")
    each = multi_vector_encoder(CausalTransformer(str(DEMO_MODEL)), dimension=8, fit_texts=TEXTS)
    for model in (sparse, each):
        model.save_pretrained(str(place / type(model).__name__), create_model_card=False)
    return {"SparseEncoder": sparse, "MultiVectorEncoder": each}


@pytest.mark.parametrize("out", ["found.parquet", "shards"])
@pytest.mark.parametrize("kind", ["SparseEncoder", "MultiVectorEncoder"])
def test_lists_are_what_the_model_gives_and_a_stopped_run_goes_on(kind, out, models, place, tmp_path):
    loaded = {"SparseEncoder": SparseEncoder, "MultiVectorEncoder": MultiVectorEncoder}[kind](
        str(place / kind), model_kwargs={"dtype": "float32"}
    )
    encoder = Encoder(str(place / kind), batch_size=4, dtype="float32")

    def stop(stage, done, total):
        if stage == "Encoding" and done > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, place / "texts.txt", tmp_path / out, chunk_size=5, on_progress=stop)
    assert not (tmp_path / out).exists()
    made = encode_file(encoder, place / "texts.txt", tmp_path / out, chunk_size=5)
    assert (made.rows, made.texts, made.resumed > 0) == (len(TEXTS), len(TEXTS), True)
    table = pq.read_table(tmp_path / out)
    if kind == "SparseEncoder":
        expected = loaded.encode_document(TEXTS).to_dense().numpy()
        found = np.zeros_like(expected)
        for row, (places, values) in enumerate(
            zip(table["indices"].to_pylist(), table["values"].to_pylist(), strict=True)
        ):
            assert places == sorted(places)
            found[row, places] = values
        np.testing.assert_allclose(found, expected, atol=1e-5)
    else:
        expected = loaded.encode_document(TEXTS)
        for row, vectors in zip(table["vectors"].to_pylist(), expected, strict=True):
            np.testing.assert_allclose(row, np.asarray(vectors), atol=1e-5)
    whole = encode_file(encoder, place / "texts.txt", tmp_path / f"again-{out}", chunk_size=5)
    assert whole.resumed == 0
    assert pq.read_table(tmp_path / f"again-{out}").equals(table)


def test_under_the_name_query_texts_are_queries(models, place, tmp_path):
    model = SparseEncoder(
        str(place / "SparseEncoder"), model_kwargs={"dtype": "float32"}, prompts={"query": "Query: ", "document": ""}
    )
    model.save_pretrained(str(tmp_path / "asked"), create_model_card=False)
    encode_file(
        Encoder(str(tmp_path / "asked"), prompt_name="query", dtype="float32"),
        place / "texts.txt",
        tmp_path / "found.parquet",
    )
    values = pq.read_table(tmp_path / "found.parquet")["values"].to_pylist()
    expected = model.encode_query(TEXTS).to_dense().numpy()
    np.testing.assert_allclose([sum(row) for row in values], expected.sum(axis=1), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "options", "out", "says"),
    [
        ({}, {}, "a.npy", "gives lists: give an --out that ends in .parquet"),
        ({}, {"precision": "binary"}, "a.parquet", "is written as float32. Leave it out"),
        ({"normalize": True}, {}, "a.parquet", "normalize: for one vector a text"),
        ({"truncate_dim": 4}, {}, "a.parquet", "truncate_dim: for one vector a text"),
        ({"chunk_tokens": 20}, {}, "a.parquet", "chunk_tokens: for one vector a text"),
    ],
)
def test_what_lists_have_no_place_for_is_refused_before_a_model_is_loaded(
    settings, options, out, says, models, place, tmp_path, monkeypatch
):
    monkeypatch.setattr(Encoder, "load", lambda self, device: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=says):
        encode_file(Encoder(str(place / "SparseEncoder"), **settings), place / "texts.txt", tmp_path / out, **options)
    assert not list(tmp_path.iterdir())


def test_a_model_that_reads_pairs_is_refused(place, tmp_path):
    attention_reranker(AttentionRerankModule(str(DEMO_MODEL))).save_pretrained(str(tmp_path / "pairs"))
    with pytest.raises(ValueError, match="is a CrossEncoder, which reads texts in pairs"):
        encode_file(Encoder(str(tmp_path / "pairs")), place / "texts.txt", tmp_path / "a.parquet")
