from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from st_reba.evaluation.store import EmbeddingStore, stand_in

from ..conftest import examples

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


def test_what_was_added_is_only_looked_up():
    embedder = Embedder()
    with EmbeddingStore(embedder, batch_size=2) as store:
        store.add(["a", "bb", "ccc", "a"])
        assert embedder.asked == [(None, "ccc"), (None, "bb"), (None, "a")]
        store.embed = None
        found = store.look_up("wide", ["bb", "a"])
        assert torch.equal(found, torch.stack([vector("wide", text, None) for text in ("bb", "a")]))


@settings(max_examples=examples(30))
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
    with EmbeddingStore(embedder) as store:
        for variant, prompt, texts in calls:
            found = store.look_up(variant, texts, prompt)
            assert torch.equal(found, torch.stack([vector(variant, text, prompt) for text in texts]))
        assert len(store) == len(embedder.asked) == len(set(embedder.asked))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_are_kept(dtype):
    with EmbeddingStore(Embedder(dtype)) as store:
        found = store.look_up("wide", ["a", "b"])
    assert found.dtype == dtype
    assert torch.equal(found[1], vector("wide", "b", None, dtype))


def test_forgetting_and_the_files(tmp_path):
    embedder, steps = Embedder(), []
    with EmbeddingStore(embedder, on_texts=steps.append, directory=tmp_path) as store:
        store.look_up("wide", ["a", "b", "a"])
        (directory,) = tmp_path.iterdir()
        assert sorted(path.stat().st_size for path in directory.iterdir()) == [
            2 * 4 * width for width in WIDTHS.values()
        ]
        store.forget()
        assert not list(directory.iterdir())
        assert len(store) == 0
        found = store.look_up("narrow", ["b"])
        assert torch.equal(found[0], vector("narrow", "b", None))
    assert steps == [2, 1]
    assert not list(tmp_path.iterdir())


def test_batches_are_of_neighbours_in_length():
    asked = []
    embedder = Embedder()
    with EmbeddingStore(lambda texts, prompt: asked.append(texts) or embedder(texts, prompt), batch_size=2) as store:
        texts = ["a", "abc", "ab", "abcde", "abcd", "abc"]
        found = store.look_up("wide", texts)
        assert asked == [["abcde", "abcd"], ["abc", "ab"], ["a"]]
        assert torch.equal(found, torch.stack([vector("wide", text, None) for text in texts]))


def test_a_failed_batch_leaves_nothing_behind(tmp_path):
    embedder = Embedder()
    failing = [True]

    def embed(texts, prompt):
        embeddings = embedder(texts, prompt)
        if failing:
            failing.pop()
            return {"wide": embeddings["wide"], "narrow": None}
        return embeddings

    with EmbeddingStore(embed, directory=tmp_path) as store:
        with pytest.raises(AttributeError):
            store.look_up("wide", ["a", "b"])
        assert torch.equal(store.look_up("wide", ["c"])[0], vector("wide", "c", None))
        assert torch.equal(store.look_up("narrow", ["a"])[0], vector("narrow", "a", None))


def test_an_unknown_variant():
    with EmbeddingStore(Embedder()) as store, pytest.raises(KeyError, match=r"no variant 'echo'.*\['narrow', 'wide'\]"):
        store.look_up("echo", ["a"])


def test_a_stand_in_encodes_as_st_does():
    embedder = Embedder()
    like = SentenceTransformer(
        modules=[torch.nn.Identity()],
        device="cpu",
        prompts={"query": "ask: ", "document": "read: "},
        similarity_fn_name="dot",
        truncate_dim=8,
    )
    texts = ["a long text", "b", "a longer text still"]
    with EmbeddingStore(embedder) as store:
        wide, narrow = (stand_in(store, variant, like=like) for variant in ("wide", "narrow"))
        queries = wide.encode_query(texts, batch_size=2)
        assert np.allclose(queries, [vector("wide", text, "ask: ")[:8] for text in texts])
        # Longest first, as ST batches them.
        assert [text for _, text in embedder.asked] == [texts[2], texts[0], texts[1]]
        assert np.allclose(narrow.encode_query(texts), [vector("narrow", text, "ask: ") for text in texts])
        assert len(embedder.asked) == 3
        documents = narrow.encode_document(texts, normalize_embeddings=True)
        assert np.allclose(np.linalg.norm(documents, axis=1), 1)
        assert {prompt for prompt, _ in embedder.asked} == {"ask: ", "read: "}
        assert wide.similarity_fn_name == "dot"
        assert stand_in(store, "wide").prompts == SentenceTransformer(modules=[torch.nn.Identity()]).prompts
        assert wide.encode(texts, precision="binary").dtype == np.int8


def test_the_files_are_gone_after_an_error(tmp_path):
    def embed(texts, prompt):
        assert list(tmp_path.iterdir())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), EmbeddingStore(embed, directory=tmp_path) as store:
        store.look_up("wide", ["a"])
    assert not list(tmp_path.iterdir())
