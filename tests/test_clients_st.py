"""sentence-transformers' own tools, given one of our models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import cos_sim, mine_hard_negatives

from .backbones import TEXTS
from .conftest import PROMPTS

QUERIES = ["What is language processing?", "Who chased the mouse?", "Wer jagt Viktor?"]


@pytest.fixture(scope="module")
def model(prompted_path):
    return SentenceTransformer(prompted_path, device="cpu")


@pytest.fixture(scope="module")
def similarities(model):
    """(queries, documents), by the model's own two sides."""
    return cos_sim(model.encode_query(QUERIES), model.encode_document(TEXTS))


class TestPrompts:
    @pytest.mark.parametrize("side", ["query", "document"])
    def test_each_side_has_its_own(self, model, side):
        vectors = getattr(model, f"encode_{side}")(TEXTS)
        assert np.array_equal(vectors, model.encode(TEXTS, prompt=PROMPTS[side]))
        assert np.array_equal(vectors, model.encode(TEXTS, prompt_name=side))
        assert not np.allclose(vectors, model.encode(TEXTS), atol=1e-2)

    def test_a_prompt_is_read_once_in_front_of_both_copies(self, model, token_ids, monkeypatch):
        # What stands before all texts is otherwise run on its own, and kept.
        monkeypatch.setattr(model[0], "prefix_caching", False)
        seen = []
        embeddings = model[0].model.get_input_embeddings()
        handle = embeddings.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
        try:
            model.encode_query(QUERIES[:1])
        finally:
            handle.remove()
        assert seen == [token_ids(PROMPTS["query"]) + 2 * token_ids(QUERIES[0])]

    def test_a_prompt_is_not_pooled(self, model, token_ids):
        words = model.encode_query(QUERIES, output_value="token_embeddings")
        assert [len(vectors) for vectors in words] == [len(token_ids(query)) for query in QUERIES]
        pooled = model.encode_query(QUERIES, convert_to_tensor=True)
        assert torch.allclose(torch.stack([vectors.mean(dim=0) for vectors in words]), pooled, atol=1e-5)


def test_mine_hard_negatives(model, similarities):
    """By the prompts that it is told."""
    datasets = pytest.importorskip("datasets")
    right = [0, 2, 4]
    pairs = datasets.Dataset.from_dict({"anchor": QUERIES, "positive": [TEXTS[index] for index in right]})
    prompts = {"query_prompt_name": "query", "corpus_prompt_name": "document"}
    mined = mine_hard_negatives(
        pairs, model, corpus=TEXTS, num_negatives=1, output_format="triplet", verbose=False, **prompts
    )
    wrong = similarities.clone()
    wrong[range(3), right] = -1
    hardest = {query: TEXTS[index] for query, index in zip(QUERIES, wrong.argmax(dim=1).tolist(), strict=True)}
    assert {row["anchor"]: row["negative"] for row in mined} == hardest


@pytest.mark.parametrize(("relevant", "accuracy"), [("argmax", 1.0), ("argmin", 0.0)])
def test_information_retrieval_evaluator(model, similarities, relevant, accuracy):
    """The evaluator ranks as the model's two sides do: with prompts, where there are prompts."""
    names = [str(index) for index in getattr(similarities, relevant)(dim=1).tolist()]
    evaluator = InformationRetrievalEvaluator(
        queries={f"q{index}": query for index, query in enumerate(QUERIES)},
        corpus={str(index): text for index, text in enumerate(TEXTS)},
        relevant_docs={f"q{index}": {name} for index, name in enumerate(names)},
        accuracy_at_k=[1],
        write_csv=False,
        name="tiny",
    )
    assert evaluator(model)["tiny_cosine_accuracy@1"] == accuracy
