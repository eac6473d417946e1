"""What ``/v1/embeddings`` and ``/rerank`` answer, and how much of a long text is tokenised for it."""

from __future__ import annotations

import base64
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from st_reba.modules import AttentionReranker, AttentionRerankModule, EndpointTransformer
from st_reba.serve import models as served_models
from st_reba.serve.models import Embedder, ListReranker, Reranker, TokenizerCopy, check_kind, load_reranker
from st_reba.serve.requests import RefusedError
from st_reba.settings import NO_LIMIT

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


def test_texts(embed, model):
    answer = embed(TEXTS)
    assert np.array_equal(vectors(answer), model.encode(TEXTS))
    assert {key: answer.json()[key] for key in ("object", "model")} == {"object": "list", "model": "my-model"}
    assert np.array_equal(vectors(embed(TEXTS[1])), model.encode(TEXTS[1:2]))
    (row,) = embed(TEXTS[1], encoding_format="base64").json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), model.encode(TEXTS[1]))


def test_dimensions_queries_documents_and_prompts(embed, model, client_of, monkeypatch):
    expected = model.encode(TEXTS, truncate_dim=7, normalize_embeddings=True)
    np.testing.assert_allclose(vectors(embed(TEXTS, dimensions=7)), expected, rtol=0, atol=1e-7)
    expected = {"query": model.encode_query(TEXTS), "document": model.encode_document(TEXTS)}
    assert not np.allclose(expected["query"], expected["document"])
    for way, own in expected.items():
        assert np.array_equal(vectors(embed(TEXTS, model=f"my-model:{way}")), own)
    monkeypatch.setitem(model.prompts, "topic", "What is this about? ")
    answer = client_of(Embedder("m", model)).post("/v1/embeddings", json={"model": "m:topic", "input": TEXTS})
    assert np.array_equal(vectors(answer), model.encode(TEXTS, prompt_name="topic"))


@pytest.mark.parametrize(
    ("value", "said"), [(None, "could not run this (TypeError)."), (np.nan, "has values that are not finite.")]
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


def test_a_model_of_another_module(client_of, encoder_paths):
    model = SentenceTransformer(encoder_paths()[0], device="cpu")
    client = client_of(Embedder("m", model))
    answer = client.post("/v1/embeddings", json={"model": "m", "input": [*TEXTS, " ".join(TEXTS * 99)]})
    np.testing.assert_allclose(vectors(answer)[:-1], model.encode(TEXTS), atol=1e-6)
    ids = model.tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert answer.json()["usage"]["total_tokens"] == sum(map(len, ids)) + model.max_seq_length - 2


def watched(served):
    """The items that a model will run."""
    ran, mode = [], served.modes[""]
    served.modes[""] = mode._replace(run=lambda items: (ran.extend(items), mode.run(items))[1])
    return ran


def test_of_a_long_text_no_more_is_tokenised_than_is_read(client_of, model, token_ids):
    embedder = Embedder("m", model)
    client, ran = client_of(embedder), watched(embedder)
    text = " ".join(f"{TEXTS[2]} {number}" for number in range(4_000))
    ids, given = token_ids(text), ["a", text]
    answer = client.post("/v1/embeddings", json={"model": "m", "input": given})
    read = model[0].max_seq_length
    assert len(ids) > 100 * read
    assert max(map(len, ran)) < 10 * (read + 256)
    assert np.array_equal(vectors(answer)[-1:], model.encode([text]))
    tokens = read + len(token_ids("a"))
    assert answer.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    whole = client_of(Embedder("m", model, truncate=False))
    refused = whole.post("/v1/embeddings", json={"model": "m", "input": given})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    said = f"'input'[1] has {len(ids)} tokens, and the model reads {read}: send it in parts."
    assert refused.json()["error"]["message"] == said


def test_the_scores_are_predicts(client, reranker):
    answer = client.post("/rerank", json={"model": "my-reranker", "query": QUERY, "documents": [*TEXTS, TEXTS[0]]})
    results = answer.json()["results"]
    expected = reranker.predict([(QUERY, text) for text in [*TEXTS, TEXTS[0]]])
    # Of equal scores the first stays the first.
    assert [row["index"] for row in results] == [*np.argsort(-expected, kind="stable")]
    np.testing.assert_allclose([row["relevance_score"] for row in results], -np.sort(-expected), atol=1e-6)
    assert np.ptp(expected) > 1e-4
    given = {"documents": [{"text": text, "id": 1} for text in TEXTS], "top_n": 2, "return_documents": True}
    best = client.post("/v2/rerank", json={"model": "my-reranker", "query": QUERY, **given}).json()["results"]
    order = np.argsort(-expected[: len(TEXTS)], kind="stable")[:2]
    assert [(row["index"], row["document"]) for row in best] == [(index, {"text": TEXTS[index]}) for index in order]
    assert answer.json()["usage"]["total_tokens"] > len(TEXTS)


def test_what_is_not_served(saved, reranker_path, tmp_path):
    """The kind of model is told before it is loaded."""
    with pytest.raises(ValueError, match="is a saved SentenceTransformer. Give it as MODEL"):
        load_reranker("m", saved, "cpu", "float32", True)
    saved_as = {"model_type": "SparseEncoder"}
    file = Path(shutil.copytree(saved, tmp_path / "sparse")) / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **saved_as}))
    with pytest.raises(ValueError, match="is a saved SparseEncoder. Give a CrossEncoder or a SentenceTransformer"):
        check_kind(str(file.parent), "SentenceTransformer")
    asks = EndpointTransformer("http://127.0.0.1:9", dimension=2, fingerprint=[1.0, 0.0])
    with pytest.raises(ValueError, match="sends texts to http://127.0.0.1:9.*, and cannot be served"):
        Embedder("m", SentenceTransformer(modules=[asks], device="cpu"))
    model = load_reranker("m", reranker_path, "cpu", "float32", True).model
    with pytest.raises(ValueError, match="does not return one vector per text"):
        Embedder("m", model)
    model.model.config.num_labels = 3
    with pytest.raises(ValueError, match="returns 3 scores per pair"):
        Reranker("m", model)


def test_long_queries_and_documents_are_tokenised_no_further_than_read(client_of, reranker):
    own = Reranker("r", reranker)
    ran = watched(own)
    long = " ".join(f"{TEXTS[2]} {number}" for number in range(2_000))
    for query, documents in ((QUERY, [long, "a"]), (f"Who? {long}", [TEXTS[0], TEXTS[1]])):
        answer = client_of(reranker=own).post("/rerank", json={"model": "r", "query": query, "documents": documents})
        scores = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
        expected = reranker.predict([(query, document) for document in documents])
        np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-6)
    assert max(len(text) for pair in ran for text in pair) < 10 * (reranker.max_seq_length + 256)


@pytest.fixture(scope="module")
def lists(backbone_path, tmp_path_factory):
    """A reranker that reads all documents of a request together, saved and loaded."""
    directory = str(tmp_path_factory.mktemp("lists") / "my-lists")
    module = AttentionRerankModule(backbone_path(), rotations=2, max_seq_length=12)
    AttentionReranker(modules=[module], device="cpu").save_pretrained(directory)
    return load_reranker("r", directory, "cpu", "float32", True)


def asked(client, query, documents):
    return client.post("/rerank", json={"model": "r", "query": query, "documents": documents})


def test_documents_that_are_read_together_whatever_else_runs(client_of, lists):
    """Long documents are cut; requests that run at the same time have lists of their own."""
    client = client_of(reranker=lists)
    documents = [*TEXTS[:3], " ".join(TEXTS * 40)]
    given = [(query, documents[: 2 + number]) for query in (QUERY, "river bank", "a") for number in range(3)]
    with ThreadPoolExecutor(len(given)) as pool:
        answers = [*pool.map(lambda one: asked(client, *one), given)]
    for (query, own), answer in zip(given, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected = lists.model.predict([(query, document) for document in own])
        results = answer.json()["results"]
        assert [row["index"] for row in results] == [*np.argsort(-expected, kind="stable")]
        np.testing.assert_allclose([row["relevance_score"] for row in results], -np.sort(-expected), atol=1e-5)
        ids = lists.model.tokenizer([query, *own], add_special_tokens=False)["input_ids"]
        assert answer.json()["usage"]["total_tokens"] == len(ids[0]) + sum(min(12, len(each)) for each in ids[1:])


def test_documents_that_are_too_long_to_be_read_together(client_of, lists, monkeypatch):
    """A query is not cut. A document is, if the server may cut."""
    model, room = lists.model, lists.model[0].model.config.max_position_embeddings

    def said(client, query, documents, param):
        refused = asked(client, query, documents)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        return refused.json()["error"]["message"]

    client = client_of(reranker=lists)
    assert asked(client, "a " * (room // 8), TEXTS).status_code == 200
    for words in (room, 5_000):
        told = said(client, "a " * words, TEXTS, "query")
        assert f"no room for a document in the model's {room} positions: give a shorter one" in told
    whole = client_of(reranker=ListReranker("r", model, truncate=False))
    told = said(whole, QUERY, ["a", " ".join(TEXTS)], "documents")
    assert re.fullmatch(r"'documents'\[1\] has \d+ tokens, and the model reads 12: send it in parts\.", told)
    monkeypatch.setattr(served_models, "MAX_CACHED_VALUES", 1_000)
    told = said(client_of(reranker=ListReranker("r", model)), "a", TEXTS * 5, "documents")
    assert "tokens; the limit is " in told


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
    tokens = TokenizerCopy(made())
    whole = tokens.ids(text)
    assert TokenizerCopy(made(), count_all=True).cut(text, 2, "'input'") == (text, len(whole))
    for limit in (1, 100, 1000):
        part, count = tokens.cut(text, limit, "'input'")
        own = tokens.ids(part)
        read = slice(-limit, None) if made is from_end else slice(limit)
        assert own[read] == whole[read]
        assert count == len(own)


@pytest.mark.parametrize(("limit", "whole"), [(NO_LIMIT, False), (16, False), (16, True)])
def test_a_text_that_would_be_tokenised_without_end(monkeypatch, limit, whole):
    monkeypatch.setattr(served_models, "MAX_CHARACTERS", 5_000)
    tokens = TokenizerCopy(word_piece(), count_all=whole)
    assert tokens.cut("a" * 5_000, limit, "'input'[0]") == ("a" * 5_000, 1)
    with pytest.raises(RefusedError, match=r"^'input'\[0\] has 90,000 characters, of which 5,000 are .* in parts\.$"):
        tokens.cut("a" * 90_000, limit, "'input'[0]")
