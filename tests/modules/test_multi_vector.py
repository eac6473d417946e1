"""Models that give a text several vectors: MaxSim by its definition, on the tokens that count and on no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity

from st_reba import CausalTransformer, EchoModule, ReBAModule, TokenProjection
from st_reba.modules.multi_vector import multi_vector_encoder

from ..backbones import TEXTS
from ..conftest import PROMPTS, relative_error

#: Enough tokens for a projection.
FIT = [f"{text} {other}" for text in TEXTS for other in TEXTS]


def words(module, text: str, prompt: str = "") -> tuple[list[int], torch.Tensor]:
    """The ids and the vectors of a text's tokens alone, as ``encode`` gives them to anybody."""
    features = module.preprocess([text], prompt=prompt)
    with torch.inference_mode():
        read = module(features)
    real = read["attention_mask"][0].bool()
    return read["input_ids"][0][real].tolist(), read["token_embeddings"][0][real]


def maxsim(query: torch.Tensor, document: torch.Tensor) -> float:
    """The definition: of each token of the query, the nearest of the document, added up."""
    return float(sum(cosine_similarity(token, document).max() for token in query))


KINDS = [(CausalTransformer, "bytes"), (EchoModule, "sentencepiece"), (ReBAModule, "bert")]


@pytest.mark.parametrize(("kind", "tokenizer"), KINDS)
def test_oracle(kind, tokenizer, shared):
    module = kind(shared("llama", tokenizer))
    model = multi_vector_encoder(module, prompts=PROMPTS)
    expected = []
    for query in TEXTS[:2]:
        _, asked = words(module, query, PROMPTS["query"])
        row = []
        for text in TEXTS[1:]:
            ids, found = words(module, text, PROMPTS["document"])
            [layout] = module.lay_out([text], PROMPTS["document"])
            assert len(ids) == (layout.copy_index == 0).sum(), "of one copy"
            tells = [any(sign.isalnum() or sign in "🥊�" for sign in module.tokenizer.decode([each])) for each in ids]
            row.append(maxsim(asked, found[torch.tensor(tells)]))
        expected.append(row)
    scores = model.similarity(model.encode_query(TEXTS[:2]), model.encode_document(TEXTS[1:]))
    assert relative_error(scores, expected) < 1e-5


@pytest.mark.parametrize(("kind", "dimension"), [(CausalTransformer, None), (ReBAModule, 8)])
def test_a_text_does_not_depend_on_its_batch(kind, dimension, shared):
    for deterministic in (False, True):
        module = kind(shared(), deterministic=deterministic)
        model = multi_vector_encoder(module, dimension=dimension, fit_texts=FIT)
        for together, text in zip(model.encode_document(TEXTS), TEXTS, strict=True):
            alone = model.encode_document([text])[0]
            assert together.equal(alone) if deterministic else relative_error(together, alone) < 1e-5


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_the_projection_is_that_of_principal_components(shared, monkeypatch):
    """By numpy, of the vectors of all tokens that count; whatever the chunks they come in."""
    module = CausalTransformer(shared())
    model = multi_vector_encoder(module)
    vectors = torch.cat(model.encode_document(FIT)).double().numpy()
    _, _, directions = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    fitted = []
    for size in (3, 1024):
        monkeypatch.setattr("st_reba.moments.CHUNK", size)
        fitted.append(TokenProjection.fit(model, iter(["", *FIT]), dimension=8))
    assert relative_error(fitted[0].directions, fitted[1].directions) < 1e-4
    assert relative_error(fitted[1].mean, vectors.mean(axis=0)) < 1e-5
    signs = np.sign((directions[:8] * fitted[1].directions.numpy()).sum(axis=1, keepdims=True))
    assert relative_error(fitted[1].directions, directions[:8] * signs) < 1e-4
    projected = multi_vector_encoder(module, dimension=8, fit_texts=FIT)
    expected = torch.from_numpy((vectors - vectors.mean(axis=0)) @ (directions[:8] * signs).T)
    expected = torch.nn.functional.normalize(expected, dim=1).float()
    assert relative_error(torch.cat(projected.encode_document(FIT)), expected) < 1e-4
    assert projected.get_embedding_dimension() == 8


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_an_empty_document_is_nothing_like_any_query(shared):
    for dimension in (None, 8):
        model = multi_vector_encoder(ReBAModule(shared()), dimension=dimension, fit_texts=FIT)
        empty, other = model.encode_document(["", TEXTS[0]])
        assert not empty.any()
        nothing = model.encode_document("?!")
        assert len(nothing) == 0
        scores = model.similarity(model.encode_query([TEXTS[0], "?!"]), [empty, other, nothing])
        assert scores[0, 0] < scores[0, 1]
        assert torch.isfinite(scores).all()


def test_the_length_of_queries_and_of_documents(backbone_path):
    model = multi_vector_encoder(EchoModule(backbone_path(), query_length=3, document_length=5), skip_punctuation=False)
    text = TEXTS[2]
    assert (len(model.encode_query(text)), len(model.encode_document(text))) == (3, 5)
    assert len(model.encode_query(text, processing_kwargs={"text": {"max_length": 4}})) == 4
    [layout] = SentenceTransformer(modules=[model[0]])[0].lay_out([text])
    assert (layout.copy_index == 0).sum() > 5


REFUSED = [
    ("last", {}, 'ReBAModule returns one token alone, rows="last".* use rows="all"'),
    ("all", {"dimension": 33, "fit_texts": FIT}, "dimension=33: give a whole number from 1 to 32"),
    ("all", {"dimension": 8, "fit_texts": ["a"]}, "1 tokens are too few for 8 directions: give more"),
    ("all", {"dimension": 8, "fit_texts": "a b"}, "texts is one string"),
]


@pytest.mark.parametrize(("rows", "settings", "message"), REFUSED)
def test_what_is_refused(rows, settings, message, shared):
    with pytest.raises(ValueError, match=message):
        multi_vector_encoder(ReBAModule(shared(), rows=rows), **settings)
