"""Texts that are embedded once, tensors that are computed once, and the table of an evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from st_reba.evaluation.embedded import Embedded, TensorCache, stand_in
from st_reba.evaluation.evaluators import Evaluator

WIDTHS = {"narrow": 3, "wide": 12}


def vector(variant: str, text: str, prompt: str | None) -> torch.Tensor:
    seed = sum(ord(character) * (place + 1) for place, character in enumerate(f"{variant}|{text}|{prompt}"))
    return torch.randn(WIDTHS[variant], generator=torch.Generator().manual_seed(seed)).bfloat16()


def vectors(variant, texts, prompt=None):
    return torch.stack([vector(variant, text, prompt) for text in texts])


class Embedder:
    def __init__(self):
        self.asked: list[tuple[str | None, str]] = []

    def __call__(self, texts, prompt):
        self.asked += [(prompt, text) for text in texts]
        return {variant: vectors(variant, texts, prompt) for variant in WIDTHS}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(WIDTHS)),
            st.sampled_from([None, "query: "]),
            st.lists(st.text("ab 我", max_size=3), min_size=1, max_size=6),
        ),
        max_size=8,
    )
)
def test_each_text_is_embedded_once(calls):
    embedder = Embedder()
    store = Embedded(embedder)
    for variant, prompt, texts in calls:
        # In its own type.
        assert torch.equal(store.of(variant, texts, prompt), vectors(variant, texts, prompt))
        assert store.has(texts, prompt)
    assert len(embedder.asked) == len(set(embedder.asked))


def test_batches_are_of_neighbours_in_length_and_one_that_fails_leaves_nothing_behind():
    asked, failing = [], [True]

    def embed(texts, prompt):
        if failing:
            failing.pop()
            raise ZeroDivisionError
        asked.append(texts)
        return Embedder()(texts, prompt)

    store = Embedded(embed, 2)
    texts = ["a", "abc", "ab", "abcde", "abcd", "abc"]
    with pytest.raises(ZeroDivisionError):
        store.add(texts)
    store.add(texts)
    assert asked == [["abcde", "abcd"], ["abc", "ab"], ["a"]]
    assert torch.equal(store.of("wide", texts), vectors("wide", texts))
    with pytest.raises(KeyError, match="echo"):
        store.of("echo", ["a"])


def test_a_stand_in_encodes_as_st_does():
    embedder = Embedder()
    settings = {"prompts": {"query": "ask: ", "document": "read: "}, "similarity_fn_name": "dot", "truncate_dim": 8}
    like = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu", **settings)
    texts = ["a long text", "b", "a longer text still"]
    store = Embedded(embedder)
    wide, narrow = (stand_in(store, variant, like=like) for variant in ("wide", "narrow"))
    assert np.allclose(wide.encode_query(texts, batch_size=2), vectors("wide", texts, "ask: ")[:, :8].float())
    assert [text for _, text in embedder.asked] == [texts[2], texts[0], texts[1]], "longest first, as ST batches them"
    assert np.allclose(np.linalg.norm(narrow.encode_document(texts, normalize_embeddings=True), axis=1), 1, atol=0.01)
    assert {prompt for prompt, _ in embedder.asked} == {"ask: ", "read: "}
    assert wide.similarity_fn_name == "dot"


def test_what_depends_on_something_else_is_computed(tmp_path):
    kept, made = TensorCache(tmp_path / "deep" / "kept"), []

    def compute():
        made.append(1)
        return {"a": torch.full((2, 3), len(made)).t()}

    for key, value in (("model", 1), ("model", 1), ("another", 2)):
        assert kept.get([key, ["text"]], compute)["a"].tolist() == [[value, value]] * 3
    for path in kept.directory.glob("*.safetensors"):
        path.write_bytes(b"\x08\0\0\0")
    assert kept.get(["model", ["text"]], compute)["a"][0, 0] == 3
    temporary = TensorCache()
    directory = temporary.directory
    found = temporary.get("a", lambda: {"a": torch.arange(6).reshape(3, 2).mT})["a"]
    assert list(directory.glob("*.safetensors"))
    del temporary
    assert not directory.exists()
    assert found.tolist() == [[0, 2, 4], [1, 3, 5]]


class Half(Evaluator):
    metric = "half"
    file = "halves"
    value = 0.5

    def metrics_of(self, model):
        self.value += 0.25
        return {"half": self.value}


def test_one_line_an_evaluation(tmp_path):
    model = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    evaluator = Half(name="zh")
    evaluator(model, str(tmp_path / "eval"), 1)
    assert evaluator(model, str(tmp_path / "eval"), 2, 10) == {evaluator.primary_metric: 1.0}
    lines = (tmp_path / "eval" / "halves_zh_results.csv").read_text().splitlines()
    assert lines == ["epoch,steps,half", "1,-1,0.75", "2,10,1.0"]
    Half(write_csv=False)(model, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
