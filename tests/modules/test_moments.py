from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from st_reba import CausalTransformer
from st_reba.modules.moments import Moments, embedding_moments, principal_directions

from ..backbones import TEXTS
from ..conftest import examples, pipeline


def taken(batches, dimension=5) -> Moments:
    moments = Moments(dimension)
    for batch in batches:
        moments.add(batch)
    return moments


def assert_equal(moments: Moments, vectors) -> None:
    vectors = np.asarray(vectors, dtype=np.float64)
    spread = np.abs(vectors - vectors.mean(axis=0)).max() + 1e-12
    assert moments.count == len(vectors)
    assert np.allclose(moments.mean, vectors.mean(axis=0), rtol=1e-12, atol=1e-9 * spread)
    assert np.allclose(moments.covariance, np.cov(vectors.T, bias=True), rtol=1e-9, atol=1e-9 * spread**2)


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    split=st.integers(0, 8),
)
@settings(max_examples=examples(60))
def test_batches_do_not_matter(seed, sizes, offset, split):
    """In whatever batches the vectors come, and wherever two halves are merged: numpy's, of all at once."""
    vectors = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    batches = vectors.split(sizes)
    assert_equal(taken(batches), vectors)
    merged = taken(batches[:split])
    merged.merge(taken(batches[split:]))
    assert_equal(merged, vectors)


def test_a_mean_that_dwarfs_the_spread():
    """Sums of squares would cancel to nothing here."""
    vectors = 1e8 + torch.randn(3000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = taken(vectors.split(7))
    assert np.allclose(moments.covariance, np.cov(vectors.T, bias=True), rtol=1e-6, atol=1e-6)


def test_half_precision_is_summed_in_double():
    vectors = torch.randn(500, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_equal(taken(vectors.split(9)), vectors.double())


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.zeros(2, 4), r"The vectors are (2, 4): give (B, 5)"),
        (torch.zeros(5), r"The vectors are (5,): give (B, 5)"),
        (torch.full((2, 5), float("nan")), "load the model in bfloat16 or float32"),
    ],
)
def test_what_is_refused(vectors, message):
    moments = Moments(5)
    with pytest.raises(ValueError, match=re.escape(message)):
        moments.add(vectors)
    assert moments.count == 0


def test_directions():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(40, 6, generator=generator, dtype=torch.float64) * torch.arange(1, 7)
    values, directions = principal_directions(vectors.mT @ vectors)
    _, singular, expected = torch.linalg.svd(vectors, full_matrices=False)
    assert torch.allclose(values, singular**2)
    assert torch.allclose((directions @ expected.mT).abs(), torch.eye(6, dtype=torch.float64), atol=1e-9)
    assert (directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)) > 0).all()


class TestOfEmbeddings:
    @pytest.fixture(scope="class")
    def model(self, shared):
        return pipeline(CausalTransformer(shared()))

    @pytest.mark.parametrize("chunk_size", [1, 3, 1024])
    def test_are_those_of_all_at_once(self, model, chunk_size):
        moments = embedding_moments(model, (text for text in TEXTS * 3), chunk_size=chunk_size, batch_size=2)
        assert_equal_in_float32(moments, model.encode(TEXTS * 3))

    def test_no_more_than_a_chunk_is_drawn(self, model, monkeypatch):
        drawn, ahead = 0, []

        def texts():
            nonlocal drawn
            for text in TEXTS * 4:
                drawn += 1
                yield text

        encode = model.encode
        seen = 0

        def watched(chunk, **kwargs):
            nonlocal seen
            seen += len(chunk)
            ahead.append(drawn - seen)
            return encode(chunk, **kwargs)

        monkeypatch.setattr(model, "encode", watched)
        embedding_moments(model, texts(), chunk_size=6)
        assert ahead == [0, 0, 0, 0]

    @pytest.mark.filterwarnings("ignore:A text without tokens")
    def test_empty_texts_do_not_count(self, model):
        assert_equal_in_float32(embedding_moments(model, ["", *TEXTS, ""]), model.encode(TEXTS))

    def test_truncation_is_put_aside_and_back(self, shared):
        model = pipeline(CausalTransformer(shared()))
        model.truncate_dim = 4
        assert embedding_moments(model, TEXTS).mean.shape == (32,)
        assert model.truncate_dim == 4

    def test_settings_of_encode(self, model):
        prompted = embedding_moments(model, TEXTS, prompt="query: ")
        assert_equal_in_float32(prompted, model.encode(TEXTS, prompt="query: "))

    @pytest.mark.parametrize(
        ("texts", "settings", "message"),
        [
            ("one text", {}, "texts is one string: give an iterable of texts"),
            ([], {}, "No texts were given"),
            (TEXTS, {"chunk_size": 0}, "chunk_size=0: give how many texts are read at a time, 1 or more"),
        ],
    )
    def test_what_is_refused(self, model, texts, settings, message):
        with pytest.raises(ValueError, match=message):
            embedding_moments(model, texts, **settings)


def assert_equal_in_float32(moments: Moments, vectors: np.ndarray) -> None:
    assert moments.count == len(vectors)
    assert np.allclose(moments.mean, vectors.mean(axis=0), atol=1e-5)
    assert np.allclose(moments.covariance, np.cov(vectors.T, bias=True), rtol=1e-4, atol=1e-5)
