"""StandardizedSum: the parts of an embedding, standardised and added."""

from __future__ import annotations

import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from st_reba import CausalTransformer, EarlyLateModule, StandardizedSum
from st_reba.modules.moments import Moments, embedding_moments

from ..backbones import TEXTS
from ..conftest import examples, pipeline, relative_error
from .test_partwise_whitening import CORPUS, VARIED, applied, drawn, moments_of, shares


def oracle(fitted_on, vectors, shares):
    """The sum of s_p z_p / |z_p| with z_p the standardised part p, in plain torch."""
    found = 0
    for own, new, share in zip(*(torch.tensor(each, dtype=torch.float64).chunk(len(shares), dim=1)
                                 for each in (fitted_on, vectors)), shares, strict=True):  # fmt: skip
        standard = (new - own.mean(dim=0)) / own.std(dim=0, correction=0)
        found = found + share * standard / standard.norm(dim=1, keepdim=True)
    return found.numpy()


@settings(max_examples=examples(40))
@given(shares, st.integers(2, 7), st.integers(3, 40), st.integers(0, 99))
def test_oracle(shares, width, texts, seed):
    """Of any sizes: more dimensions than texts, too."""
    vectors = drawn(seed, texts, width * len(shares))
    module = StandardizedSum.from_moments(moments_of(vectors), shares=shares)
    new = drawn(seed + 1, 5, vectors.shape[1])
    assert np.allclose(applied(module, new), oracle(vectors, new, shares), atol=1e-5)


def test_variances_are_enough():
    """They take one number for each dimension, whatever the batches they came in."""
    vectors = torch.tensor(drawn(0, 90, 12))
    alone = Moments(12, covariance=False)
    for batch in vectors.split(7):
        alone.add(batch)
    whole = moments_of(vectors)
    assert alone.scatter.shape == (12,)
    assert torch.allclose(alone.variances, whole.covariance.diagonal(), rtol=1e-12)
    modules = [StandardizedSum.from_moments(moments, shares=(0.5, 0.5)) for moments in (alone, whole)]
    assert relative_error(*(applied(module, vectors) for module in modules)) < 1e-6


def test_dimensions_that_do_not_vary_say_nothing():
    vectors = drawn(3, 20, 8)
    vectors[:, 1], vectors[:, 6] = 1 / 3, 0
    module = StandardizedSum.from_moments(moments_of(vectors), shares=(0.5, 0.5))
    changed = vectors.copy()
    changed[:, [1, 6]] += 100
    assert np.array_equal(applied(module, changed), applied(module, vectors))


@pytest.fixture(scope="module")
def model(shared):
    return pipeline(EarlyLateModule(shared()))


@pytest.fixture(scope="module")
def fitted(model):
    return StandardizedSum.fit(model, CORPUS)


def test_the_parts_are_those_of_the_module_in_front(model, fitted, shared):
    assert (fitted.shares, fitted.mean.shape, fitted.get_embedding_dimension()) == ([0.3, 0.7], (2, 32), 32)
    classical = StandardizedSum.fit(pipeline(CausalTransformer(shared())), CORPUS)
    assert (classical.shares, classical.mean.shape) == ([1.0], (1, 32))
    assert StandardizedSum.fit(model, CORPUS, shares=[0.25] * 4).mean.shape == (4, 16)


def test_fitted_in_one_pass(model, fitted):
    chunks = StandardizedSum.fit(model, iter([*CORPUS, *CORPUS[:3]]), chunk_size=7)
    at_once = StandardizedSum.fit(model, [*CORPUS, *CORPUS[:3]])
    assert np.allclose(*(applied(module, model.encode(TEXTS)) for module in (chunks, at_once)), atol=1e-5)
    expected = oracle(model.encode(CORPUS), model.encode(TEXTS), (0.3, 0.7))
    assert relative_error(applied(fitted, model.encode(TEXTS)), expected.astype(np.float32)) < 1e-4
    assert embedding_moments(model, CORPUS, covariance=False).scatter.shape == (64,)


def test_save_load_and_pickle(backbone_path, fitted, tmp_path):
    whole = SentenceTransformer(
        modules=[*pipeline(EarlyLateModule(backbone_path())), fitted, Normalize()], device="cpu"
    )
    whole.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "2_StandardizedSum" / "config.json").read_text()) == {
        "in_features": 64, "out_features": 32, "shares": [0.3, 0.7],
    }  # fmt: skip
    assert json.loads((tmp_path / "modules.json").read_text())[2]["type"] == "st_reba.modules.StandardizedSum"
    for other in (SentenceTransformer(str(tmp_path), device="cpu"), pickle.loads(pickle.dumps(whole))):
        assert (type(other[2]), other[2].shares) == (StandardizedSum, [0.3, 0.7])
        assert np.array_equal(other.encode(TEXTS), whole.encode(TEXTS))
    assert fitted.extra_repr() == "in_features=64, out_features=32, shares=[0.3, 0.7]"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"in_features": 64, "out_features": 64, "shares": [0.3, 0.7]}, "They are of two modules; save the model"),
        ({"in_features": 64, "out_features": 32, "shares": [0.3, 0.3]}, "shares=[0.3, 0.3]: give how much each"),
        ({"in_features": 64, "out_features": 32, "shares": [1.0]}, "shares=[1.0] for 2 parts: give one for each"),
        ({"in_features": 64, "out_features": 32}, "is not a saved StandardizedSum"),
    ],
)
def test_a_configuration_of_another_module(fitted, config, message, tmp_path):
    fitted.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        StandardizedSum.load(str(tmp_path))


def test_a_zero_vector_stays_one_and_rows_are_independent(fitted, model):
    vectors = torch.cat([torch.zeros(1, 64), model.encode(TEXTS, convert_to_tensor=True)])
    found = applied(fitted, vectors)
    assert not found[0].any()
    for row, own in zip(vectors, found, strict=True):
        assert np.array_equal(applied(fitted, row[None])[0], own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision(fitted, dtype, model):
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    found = fitted({"sentence_embedding": vectors.to(dtype)})["sentence_embedding"]
    assert found.dtype == dtype
    exact = fitted({"sentence_embedding": vectors})["sentence_embedding"]
    assert torch.cosine_similarity(found.double(), exact.double()).min() > 1 - (1e-9 if dtype.itemsize == 8 else 2e-2)


def test_gradients_are_those_of_the_definition(fitted):
    vectors = torch.randn(3, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert not list(fitted.parameters())

    def mapped(vectors):
        return fitted({"sentence_embedding": vectors})["sentence_embedding"]

    assert torch.autograd.gradcheck(mapped, vectors)


@pytest.mark.parametrize(
    ("vectors", "shares", "message"),
    [
        (VARIED, (0.5, 0.6), "shares=(0.5, 0.6): give how much each part counts, numbers above 0 whose sum is 1"),
        (VARIED, (0.25,) * 4, "embeddings of 6 values cannot be cut into 4 equal parts"),
        (VARIED[:1], (1,), "1 texts were given, and their embeddings do not differ"),
        (VARIED * torch.tensor([1.0] * 3 + [0] * 3), (0.5, 0.5), "Part 2 of 2 of the embeddings is the same"),
    ],
)
def test_what_cannot_be_fitted(vectors, shares, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StandardizedSum.from_moments(moments_of(vectors), shares=shares)


@pytest.mark.parametrize(
    ("mean", "scale", "shares", "message"),
    [
        (torch.zeros(4), torch.zeros(4), [1.0], "mean is (4,) and scale (4,): give (P, D) for both"),
        (torch.zeros(1, 4), torch.zeros(1, 3), [1.0], "mean is (1, 4) and scale (1, 3)"),
        (torch.zeros(1, 0), torch.zeros(1, 0), [1.0], "mean is (1, 0)"),
        (torch.zeros(2, 2), torch.zeros(2, 2), [1.0], "shares=[1.0] for 2 parts: give one for each"),
        (torch.zeros(1, 2), torch.full((1, 2), float("nan")), [1.0], "the value nan"),
    ],
)
def test_weights_that_are_refused(mean, scale, shares, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StandardizedSum(mean, scale, shares)
