"""idf-weighted pooling: IdfWeights between a module and Pooling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import (
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    IdfWeights,
    KVReroutingModule,
)
from st_reba.text.words import DocumentFrequencies

from .. import oracles
from ..backbones import TEXTS, VOCABULARY
from ..conftest import relative_error
from .methods import RECIPES

FIT = [*TEXTS, "the dog and the cat", "I love the cat", "我爱猫。"]


def weighed(module, texts=FIT) -> SentenceTransformer:
    parts = [module, IdfWeights.fit(module, texts), Pooling(module.get_embedding_dimension(), "mean")]
    return SentenceTransformer(modules=parts, device="cpu")


@pytest.fixture(scope="module")
def model(shared):
    return weighed(CausalTransformer(shared()))


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=12), st.integers(0, 12))
def test_document_frequencies(texts, split):
    """Of any texts, in two batches: each token once a text, and texts without tokens do not count."""
    found = DocumentFrequencies(12)
    for batch in (texts[:split], texts[split:]):
        rows = [(row, token) for row, text in enumerate(batch) for token in text]
        found.add(*torch.tensor(rows, dtype=torch.long).reshape(-1, 2).T)
    assert found.texts == sum(map(bool, texts))
    assert found.counts.tolist() == [sum(token in text for text in texts) for token in range(12)]
    expected = np.log((1 + found.texts) / (1 + found.counts.numpy())) + 1
    assert np.allclose(found.idf, expected)
    # What was never seen has the most.
    assert (found.idf[[10, 11]] == found.idf.max()).all()


@pytest.mark.parametrize("recipe", ["classical", "bag", "echo-3 repeated", "reba-2"])
def test_oracle(recipe, shared, token_ids):
    kind, arguments = RECIPES[recipe]
    module = kind(shared(), **arguments)
    plain = SentenceTransformer(modules=[module, Pooling(32, "mean")], device="cpu")
    tokens = plain.encode(TEXTS, output_value="token_embeddings")
    fit_ids = [token_ids(text) for text in FIT]
    expected = [
        oracles.idf_weighted_mean(fit_ids, ids * (len(rows) // len(ids)), rows)
        for ids, rows in zip(map(token_ids, TEXTS), tokens, strict=True)
    ]
    assert np.allclose(weighed(module).encode(TEXTS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("over", ["text", "all", "whole"])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (CausalTransformer, {"template": "the dog: {text} in a word"}),
        (EchoModule, {"template": "the dog: {text} again: {text} in a word"}),
        (EchoModule, {"repetitions": 3, "pool_copies": "repeated"}),
        (HierarchicalTokenPrependingModule, {"block_length": 4}),
        (KVReroutingModule, {"hybrid": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_what_is_handed_on_is_what_counts(kind, arguments, over, shared):
    """Of a template's own words, those behind the text may be handed on, those before it are not, or with all."""
    module = kind(shared(), pool_over=over, **arguments)
    texts = [*FIT, ""]
    with torch.no_grad():
        handed = module.eval()(module.preprocess(texts))
    frequencies = DocumentFrequencies(len(IdfWeights.fit(module, texts).weights))
    real = handed["attention_mask"].bool()
    real[-1] = False  # no tokens, one zero vector
    frequencies.add(real.nonzero()[:, 0], handed["input_ids"][real])
    assert torch.equal(IdfWeights.fit(module, texts).weights, frequencies.idf.float())


def test_the_language_model_is_not_run(shared, monkeypatch):
    module = CausalTransformer(shared())
    monkeypatch.setattr(CausalTransformer, "forward", lambda *_, **__: pytest.fail("the model was run"))
    chunks = IdfWeights.fit(module, iter(FIT), chunk_size=3)
    assert torch.equal(chunks.weights, IdfWeights.fit(module, FIT).weights)
    assert len(chunks.weights) == VOCABULARY


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_a_text_without_tokens_stays_a_zero_vector(model):
    vectors = model.encode(["", TEXTS[0]])
    assert not vectors[0].any()
    assert np.array_equal(vectors[1], model.encode(TEXTS[:1])[0]) or np.allclose(vectors[1], model.encode(TEXTS[0]))
    assert torch.equal(model[1].weights, IdfWeights.fit(model[0], ["", *FIT, ""]).weights)


def test_save_and_load(model, tmp_path):
    whole = SentenceTransformer(modules=[*model, Normalize()], device="cpu")
    whole.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert type(loaded[1]) is IdfWeights
    assert np.array_equal(loaded.encode(TEXTS), whole.encode(TEXTS))
    types = [module["type"] for module in json.loads((tmp_path / "modules.json").read_text())]
    assert types[1] == "st_reba.modules.IdfWeights"
    assert "CausalTransformer → IdfWeights → Pooling" in (tmp_path / "README.md").read_text()


def test_half_precision_and_gradients(backbone_path, model):
    half = CausalTransformer(backbone_path(), model_kwargs={"dtype": "bfloat16"})
    both = SentenceTransformer(modules=[half, model[1], Pooling(32, "mean")], device="cpu")
    vectors = both.encode(TEXTS, convert_to_tensor=True)
    assert vectors.dtype == torch.bfloat16
    assert torch.cosine_similarity(vectors.float(), model.encode(TEXTS, convert_to_tensor=True)).min() > 0.99
    assert not list(model[1].parameters())
    both.train()(both.preprocess(TEXTS))["sentence_embedding"][:, 0].sum().backward()
    assert half.model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_of_early_and_late_they_are_of_the_early_half(shared):
    module = EarlyLateModule(shared())
    plain = SentenceTransformer(modules=[module, Pooling(64, "mean")], device="cpu").encode(TEXTS)
    found = weighed(module).encode(TEXTS)
    assert relative_error(found[:, 32:], plain[:, 32:]) < 1e-5
    assert relative_error(found[:, :32], plain[:, :32]) > 1e-3


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "No texts with tokens were given"),
        (TEXTS, {"chunk_size": 0}, "chunk_size=0: give how many texts are read at a time, 1 or more"),
    ],
)
def test_texts_that_are_refused(model, texts, settings, message):
    with pytest.raises(ValueError, match=message):
        IdfWeights.fit(model[0], texts, **settings)


def test_a_module_that_hands_on_one_token(shared):
    with pytest.raises(ValueError, match='CausalTransformer hands on one token alone, rows="last"'):
        IdfWeights.fit(CausalTransformer(shared(), rows="last"), TEXTS)


def test_a_token_without_a_weight(shared):
    module = CausalTransformer(shared())
    model = SentenceTransformer(modules=[module, IdfWeights(torch.ones(5)), Pooling(32, "mean")], device="cpu")
    with pytest.raises(ValueError, match="IdfWeights has weights for 5 token ids and was given the id"):
        model.encode(TEXTS)
