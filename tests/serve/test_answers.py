"""What ``/v1/embeddings`` and ``/rerank`` answer, and how much of a long text is tokenised for it."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from st_reba.serve import models as served_models
from st_reba.serve.batches import Limits
from st_reba.serve.forms import RefusedError
from st_reba.serve.models import Embedder, OwnTokenizer, Reranker, load_reranker

from ..backbones import DEMO_MODEL, TEXTS

QUERY = "Who chased the mouse?"


def vectors(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [row["index"] for row in data] == [*range(len(data))]
    return np.float32([row["embedding"] for row in data])


@pytest.fixture
def embed(client):
    return lambda given, **more: client.post("/v1/embeddings", json={"model": "my-model", "input": given, **more})


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_texts(embed, model):
    answer = embed([*TEXTS, ""])
    assert np.array_equal(vectors(answer)[:-1], model.encode(TEXTS))
    assert not vectors(answer)[-1].any()
    assert {key: answer.json()[key] for key in ("object", "model")} == {"object": "list", "model": "my-model"}
    assert np.array_equal(vectors(embed(TEXTS[1])), model.encode(TEXTS[1:2]))
    (row,) = embed(TEXTS[1], encoding_format="base64").json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), model.encode(TEXTS[1]))


def test_tokens(embed, model, token_ids):
    """Special tokens at the ends are the model's own to add."""
    given = [token_ids(text) for text in TEXTS]
    assert np.array_equal(vectors(embed(given)), model.encode(TEXTS))
    assert np.array_equal(vectors(embed([*given[0], model.tokenizer.eos_token_id])), model.encode(TEXTS[:1]))


def test_dimensions_queries_documents_and_prompts(embed, model, client_of, monkeypatch):
    expected = model.encode(TEXTS, truncate_dim=7, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(embed(TEXTS, dimensions=7)), expected, rtol=0, atol=1e-7)
    expected = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    assert not np.allclose(expected["query"], expected["document"])
    asked = {"query": ["query", "search_query"], "document": ["document", "search_document", "passage"]}
    for way, names in asked.items():
        assert np.array_equal(vectors(embed(TEXTS, model=f"my-model:{way}")), expected[way])
        for name in names:
            assert np.array_equal(vectors(embed(TEXTS, input_type=name)), expected[way])
    monkeypatch.setitem(model.prompts, "topic", "What is this about? ")
    answer = client_of(Embedder("m", model)).post("/v1/embeddings", json={"model": "m:topic", "input": TEXTS})
    assert np.array_equal(vectors(answer), model.encode(TEXTS, prompt_name="topic"))


@pytest.mark.parametrize(
    ("value", "said"), [(None, "could not run this (TypeError)."), (np.nan, "has values that are no numbers.")]
)
def test_a_text_that_cannot_be_run_is_an_error(client_of, model, monkeypatch, value, said):
    client = client_of(Embedder("m", model))
    forward = type(model[0]).forward

    def fails(features):
        found = forward(model[0], features)
        return {**found, "token_embeddings": found["token_embeddings"] * value}

    with monkeypatch.context() as patched:
        patched.setattr(model[0], "forward", fails)
        answer = client.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"].endswith(said)
    good = client.post("/v1/embeddings", json={"model": "m", "input": ["a"]})
    assert np.array_equal(vectors(good), model.encode(["a"]))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_of_a_long_text_no_more_is_tokenised_than_is_read(client_of, model, monkeypatch, token_ids, kind):
    embedder = Embedder("m", model)
    client = client_of(embedder)
    ran = []
    way = embedder.ways[""]
    monkeypatch.setitem(embedder.ways, "", way._replace(run=lambda texts: (ran.extend(texts), way.run(texts))[1]))
    text = " ".join(f"{TEXTS[2]} {number}" for number in range(4_000))
    ids = token_ids(text)
    given = ["a", text] if kind == "text" else ids
    answer = client.post("/v1/embeddings", json={"model": "m", "input": given})
    read = model[0].max_seq_length
    assert len(ids) > 100 * read
    assert max(map(len, ran)) < 10 * (read + 256)
    assert np.array_equal(vectors(answer)[-1:], model.encode([text]))
    tokens = read + (len(token_ids("a")) if kind == "text" else 0)
    assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    whole = client_of(Embedder("m", model, truncate=False))
    refused = whole.post("/v1/embeddings", json={"model": "m", "input": given})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    where = "'input'[1]" if kind == "text" else "'input'[0]"
    said = f"{where} has {len(ids)} tokens, and the model reads {read}: send it in parts."
    assert refused.json()["error"]["message"] == said


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_scores_are_predicts(client, reranker, path):
    answer = client.post(path, json={"model": "my-reranker", "query": QUERY, "documents": [*TEXTS, TEXTS[0]]})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    expected = reranker.predict([(QUERY, text) for text in [*TEXTS, TEXTS[0]]])
    # Of equal scores the first stays the first.
    assert [row["index"] for row in results] == [*np.argsort(-expected, kind="stable")]
    np.testing.assert_allclose([row["relevance_score"] for row in results], -np.sort(-expected), atol=1e-6)
    assert np.ptp(expected) > 1e-4
    assert all(row.keys() == {"index", "relevance_score"} for row in results)
    given = {"documents": [{"text": text, "id": 1} for text in TEXTS], "top_n": 2, "return_documents": True}
    best = client.post(path, json={"model": "my-reranker", "query": QUERY, **given}).json()["results"]
    order = np.argsort(-expected[: len(TEXTS)], kind="stable")[:2]
    assert [(row["index"], row["document"]) for row in best] == [(index, {"text": TEXTS[index]}) for index in order]
    assert answer.json()["usage"]["total_tokens"] > len(TEXTS)


def test_without_a_cross_encoder_by_similarity(client_of, model):
    client = client_of(Embedder("m", model))
    results = client.post("/rerank", json={"model": "m", "query": QUERY, "documents": TEXTS}).json()["results"]
    expected = model.similarity(model.encode_query(QUERY), model.encode_document(TEXTS))[0]
    assert [row["index"] for row in results] == expected.argsort(descending=True).tolist()
    scores = [row["relevance_score"] for row in results]
    np.testing.assert_allclose(scores, expected.sort(descending=True).values, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"documents": []}, "'documents' is not what"),
        ({"documents": ["a", {"no": 1}]}, "'documents'[1] is not what it should be: give a list of texts"),
        ({"documents": ["a"] * 6}, "'documents' has 6, and a request may have 5"),
        ({"model": "m:query"}, '/rerank reads queries and documents by itself: give "m"'),
        ({"model": "no"}, 'There is no model "no" here'),
    ],
)
def test_what_is_no_request(client_of, model, given, said):
    client = client_of(Embedder("m", model), limits=Limits(inputs=5))
    answer = client.post("/rerank", json={"model": "m", "query": QUERY, "documents": ["a"], **given})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


def test_what_is_no_reranker(saved, reranker_path):
    """The kind of model is told before it is loaded."""
    with pytest.raises(ValueError, match="is a saved SentenceTransformer; it gives vectors: give it as MODEL"):
        load_reranker("m", saved, None, "cpu", "float32", True)
    model = CrossEncoder(reranker_path, num_labels=1, device="cpu")
    model.model.config.num_labels = 3
    with pytest.raises(ValueError, match="gives 3 scores a pair"):
        Reranker("m", model)


def test_long_queries_and_documents_are_tokenised_no_further_than_read(client_of, reranker, monkeypatch):
    own = Reranker("r", reranker)
    ran = []
    way = own.ways[""]
    monkeypatch.setitem(own.ways, "", way._replace(run=lambda pairs: (ran.extend(pairs), way.run(pairs))[1]))
    long = " ".join(f"{TEXTS[2]} {number}" for number in range(2_000))
    for query, documents in ((QUERY, [long, "a"]), (f"Who? {long}", [TEXTS[0], TEXTS[1]])):
        answer = client_of(reranker=own).post("/rerank", json={"model": "r", "query": query, "documents": documents})
        scores = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
        expected = reranker.predict([(query, document) for document in documents])
        np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-6)
    assert max(len(text) for pair in ran for text in pair) < 10 * (reranker.max_seq_length + 256)
    monkeypatch.setattr(served_models, "CHARACTERS", 5_000)
    refused = client_of(reranker=own).post("/rerank", json={"model": "r", "query": " " * 90_000, "documents": ["a"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")
    assert refused.json()["error"]["message"].startswith("'query' has 90,000 characters")


WORDS = "the cat sat on the mat, and 我爱自然语言处理 ran. "


def byte_level():
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def from_end():
    return AutoTokenizer.from_pretrained(DEMO_MODEL, truncation_side="left")


def word_piece():
    """Drops blanks and accents, and takes a word of more than 100 characters for one unknown token."""
    letters = {f"{mark}{letter}" for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz,.我爱自然语言处理"}
    vocabulary = {token: index for index, token in enumerate(["[UNK]", "the", *sorted(letters)])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


LONG = {
    "words": WORDS * 2_000,
    "one word": "a" * 60_000,
    "blanks": f"the{' ' * 20_000}cat{' ' * 20_000}{WORDS * 200}",
    "accents": f"the a{chr(0x301) * 30_000} {WORDS * 200}",
    "a long word where it is cut": "the " * 2_000 + "a" * 40_000,
}
# From its end, the tokens of a long run of one letter depend on where it begins.
CASES = [(made, name) for made in (byte_level, from_end, word_piece) for name in LONG
         if made is not from_end or "word" not in name or name == "words"]  # fmt: skip


@pytest.mark.parametrize(("made", "name"), CASES)
def test_what_is_read_is_that_of_the_whole_text(made, name):
    text = LONG[name]
    tokens = OwnTokenizer(made())
    whole = tokens.ids(text)
    assert tokens.cut(text, 2, "'input'", whole=True) == (text, len(whole))
    for limit in (1, 100, 1000):
        part, count = tokens.cut(text, limit, "'input'")
        own = tokens.ids(part)
        read = slice(-limit, None) if made is from_end else slice(limit)
        assert own[read] == whole[read]
        assert count == len(own)
        # One token of this tokenizer stands for each two characters at least.
        if made in (byte_level, from_end) and name == "words":
            assert len(part) <= 8 * (limit + 256)


@pytest.mark.parametrize(("limit", "whole"), [(None, False), (16, False), (16, True)])
def test_a_text_that_would_be_tokenised_without_end(monkeypatch, limit, whole):
    monkeypatch.setattr(served_models, "CHARACTERS", 5_000)
    tokens = OwnTokenizer(word_piece())
    assert tokens.cut("a" * 5_000, limit, "'input'[0]", whole) == ("a" * 5_000, 1)
    with pytest.raises(RefusedError, match=r"^'input'\[0\] has 90,000 characters, and \d+,\d+ of them, .* in parts\.$"):
        tokens.cut("a" * 90_000, limit, "'input'[0]", whole)


@pytest.mark.parametrize("made", [byte_level, from_end])
def test_tokens_of_a_text_that_is_too_long(made):
    tokens = OwnTokenizer(made())
    ids = tokens.ids(WORDS * 500)
    read = slice(-100, None) if made is from_end else slice(100)
    assert tokens.ids(tokens.text(ids, 100, "'input'"))[read] == ids[read]
    with pytest.raises(RefusedError, match="token 5000 is -1"):
        tokens.text([*ids[:5000], -1], 100, "'input'")
