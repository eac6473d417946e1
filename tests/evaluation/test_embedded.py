from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from st_reba.evaluation.embedded import Embedded, TensorCache, stand_in

WIDTHS = {"narrow": 3, "wide": 12}


def vector(variant: str, text: str, prompt: str | None, dtype=torch.float32) -> torch.Tensor:
    seed = sum(ord(character) * (place + 1) for place, character in enumerate(f"{variant}|{text}|{prompt}"))
    return torch.randn(WIDTHS[variant], generator=torch.Generator().manual_seed(seed)).to(dtype)


class Embedder:
    def __init__(self, dtype=torch.float32):
        self.asked: list[tuple[str | None, str]] = []
        self.dtype = dtype

    def __call__(self, texts, prompt):
        self.asked += [(prompt, text) for text in texts]
        return {
            variant: torch.stack([vector(variant, text, prompt, self.dtype) for text in texts]) for variant in WIDTHS
        }


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
        found = store.of(variant, texts, prompt)
        assert torch.equal(found, torch.stack([vector(variant, text, prompt) for text in texts]))
    assert len(store) == len(embedder.asked) == len(set(embedder.asked))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_are_kept(dtype):
    embedder = Embedder(dtype)
    store = Embedded(embedder)
    found = store.of("wide", ["a", "b", "a"])
    assert found.dtype == dtype
    assert torch.equal(found[1], vector("wide", "b", None, dtype))
    assert torch.equal(store.of("narrow", ["b"])[0], vector("narrow", "b", None, dtype))
    assert [text for _, text in embedder.asked] == ["a", "b"]


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
    store.embed = None
    assert torch.equal(store.of("wide", texts), torch.stack([vector("wide", text, None) for text in texts]))
    with pytest.raises(KeyError, match=r"no variant 'echo'.*\['narrow', 'wide'\]"):
        store.of("echo", ["a"])


def test_a_stand_in_encodes_as_st_does():
    embedder = Embedder()
    settings = {"prompts": {"query": "ask: ", "document": "read: "}, "similarity_fn_name": "dot", "truncate_dim": 8}
    like = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu", **settings)
    texts = ["a long text", "b", "a longer text still"]
    store = Embedded(embedder)
    wide, narrow = (stand_in(store, variant, like=like) for variant in ("wide", "narrow"))
    assert np.allclose(wide.encode_query(texts, batch_size=2), [vector("wide", text, "ask: ")[:8] for text in texts])
    assert [text for _, text in embedder.asked] == [texts[2], texts[0], texts[1]], "longest first, as ST batches them"
    assert np.allclose(narrow.encode_query(texts), [vector("narrow", text, "ask: ") for text in texts])
    assert len(embedder.asked) == 3
    assert np.allclose(np.linalg.norm(narrow.encode_document(texts, normalize_embeddings=True), axis=1), 1)
    assert {prompt for prompt, _ in embedder.asked} == {"ask: ", "read: "}
    assert wide.similarity_fn_name == "dot"


def test_what_depends_on_something_else_is_computed(tmp_path):
    kept, made = TensorCache(tmp_path / "deep" / "kept"), []

    def compute():
        made.append(1)
        return {"a": torch.full((2, 3), len(made)).t()}

    assert kept.get(["model", ["text"]], compute)["a"].tolist() == [[1, 1]] * 3
    assert kept.get(["model", ["text"]], compute)["a"].tolist() == [[1, 1]] * 3
    assert kept.get(["another", ["text"]], compute)["a"].tolist() == [[2, 2]] * 3
    assert kept.get(["model", ["texts"]], compute)["a"].tolist() == [[3, 3]] * 3
    (first, *_) = kept.directory.glob("*.safetensors")
    first.write_bytes(b"\x08\0\0\0")
    assert len({tuple(map(tuple, kept.get(key, compute)["a"].tolist())) for key in (
        ["model", ["text"]], ["another", ["text"]], ["model", ["texts"]])}) == 3  # fmt: skip
    assert len(made) == 4


def test_what_is_kept_nowhere_is_gone_with_the_cache():
    cache = TensorCache()
    directory = cache.directory
    found = cache.get("a", lambda: {"a": torch.arange(6).reshape(3, 2).mT})["a"]
    assert list(directory.glob("*.safetensors"))
    del cache
    assert not directory.exists()
    assert found.tolist() == [[0, 2, 4], [1, 3, 5]]
