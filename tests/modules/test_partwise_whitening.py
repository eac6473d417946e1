"""PartwiseWhitening: each part of an embedding on its own."""

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

from st_reba import CausalTransformer, EarlyLateModule, PartwiseWhitening
from st_reba.modules.moments import Moments
from st_reba.version import REQUIREMENT

from .. import oracles
from ..backbones import TEXTS
from ..conftest import examples, pipeline, relative_error

CORPUS = [f"{number}: {text}" for number in range(8) for text in TEXTS]


def moments_of(vectors) -> Moments:
    moments = Moments(vectors.shape[1])
    moments.add(torch.as_tensor(vectors))
    return moments


def drawn(seed: int, texts: int, dimension: int) -> np.ndarray:
    """Correlated, with dimensions of very different sizes, far from 0."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(texts, dimension)) @ random.normal(size=(dimension, dimension))
    return (mixed * np.exp(random.normal(size=dimension)) + 3 * random.normal(size=dimension)).astype(np.float32)


def applied(module, vectors):
    return module({"sentence_embedding": torch.as_tensor(vectors)})["sentence_embedding"].numpy()


def cosines(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


shares = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda parts: tuple(np.array(parts) / sum(parts)))


@settings(max_examples=examples(40))
@given(shares, st.integers(2, 7), st.integers(3, 40), st.floats(0.1, 30), st.integers(0, 99))
def test_oracle(shares, width, texts, shrinkage, seed):
    """Of any sizes: more dimensions than texts, too."""
    vectors = drawn(seed, texts, width * len(shares))
    module = PartwiseWhitening.from_moments(moments_of(vectors), shares=shares, shrinkage=shrinkage)
    new = drawn(seed + 1, 5, vectors.shape[1])
    found, expected = applied(module, new), oracles.partwise_whitened(vectors, new, shares, shrinkage)
    # Directions of one variance, as those without any are, may be turned: their inner products stay.
    assert np.allclose(found @ found.T, expected @ expected.T, atol=1e-4)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for part, share in zip(np.split(found, len(shares), axis=1), shares, strict=True):
        assert np.allclose(np.linalg.norm(part, axis=1), share**0.5, atol=1e-5)


def test_oracle_direction_by_direction():
    vectors = drawn(0, 200, 12)
    module = PartwiseWhitening.from_moments(moments_of(vectors), shares=(0.3, 0.7), shrinkage=2.0)
    found, expected = applied(module, vectors), oracles.partwise_whitened(vectors, vectors, (0.3, 0.7), 2.0)
    signs = np.sign((found * expected).sum(axis=0))
    assert relative_error(found, (expected * signs).astype(np.float32)) < 1e-5


def test_the_cosine_is_the_parts_weighted_mean():
    vectors = drawn(1, 30, 16)
    both = PartwiseWhitening.from_moments(moments_of(vectors), shares=(0.3, 0.7))
    alone = [
        cosines(applied(PartwiseWhitening.from_moments(moments_of(part), shares=(1.0,)), part))
        for part in np.split(vectors, 2, axis=1)
    ]
    assert np.allclose(cosines(applied(both, vectors)), 0.3 * alone[0] + 0.7 * alone[1], atol=1e-5)


@pytest.mark.parametrize(("shrinkage", "apart"), [(1e-6, 1e-2), (1e6, 1e-5)])
def test_between_whitening_and_standardising(shrinkage, apart):
    vectors = drawn(2, 400, 8)
    module = PartwiseWhitening.from_moments(moments_of(vectors), shares=(1.0,), shrinkage=shrinkage)
    standard = ((vectors - vectors.mean(axis=0)) / vectors.std(axis=0)).astype(np.float64)
    if shrinkage < 1:
        standard = standard @ np.linalg.inv(np.linalg.cholesky(np.cov(standard.T, bias=True))).T
    assert np.abs(cosines(applied(module, vectors)) - cosines(standard)).max() < apart


def test_dimensions_that_do_not_vary_say_nothing():
    vectors = drawn(3, 20, 8)
    vectors[:, 1], vectors[:, 6] = 1 / 3, 0
    module = PartwiseWhitening.from_moments(moments_of(vectors), shares=(0.5, 0.5))
    changed = vectors.copy()
    changed[:, [1, 6]] += 100
    assert np.array_equal(applied(module, changed), applied(module, vectors))
    kept = [column for column in range(8) if column not in (1, 6)]
    fewer = PartwiseWhitening.from_moments(moments_of(vectors[:, kept]), shares=(0.5, 0.5))
    # Their mean variance is over all dimensions: the shrinkage is less by as much.
    same = PartwiseWhitening.from_moments(moments_of(vectors), shares=(0.5, 0.5), shrinkage=10.0 * 4 / 3)
    assert np.allclose(cosines(applied(same, vectors)), cosines(applied(fewer, vectors[:, kept])), atol=1e-5)


@pytest.fixture(scope="module")
def model(shared):
    return pipeline(EarlyLateModule(shared()))


@pytest.fixture(scope="module")
def whitening(model):
    return PartwiseWhitening.fit(model, CORPUS)


def test_the_parts_are_those_of_the_module_in_front(model, whitening, shared):
    assert (whitening.shares, whitening.mean.shape) == ([0.3, 0.7], (2, 32))
    classical = PartwiseWhitening.fit(pipeline(CausalTransformer(shared())), CORPUS)
    assert (classical.shares, classical.mean.shape) == ([1.0], (1, 32))
    chosen = PartwiseWhitening.fit(model, CORPUS, shares=[0.25] * 4)
    assert (chosen.shares, chosen.mean.shape) == ([0.25] * 4, (4, 16))


def test_fitted_in_one_pass(model, whitening):
    chunks = PartwiseWhitening.fit(model, iter([*CORPUS, *CORPUS[:3]]), chunk_size=7)
    at_once = PartwiseWhitening.fit(model, [*CORPUS, *CORPUS[:3]])
    assert np.allclose(*(applied(module, model.encode(TEXTS)) for module in (chunks, at_once)), atol=1e-4)
    expected = oracles.partwise_whitened(model.encode(CORPUS), model.encode(TEXTS), (0.3, 0.7), 10.0)
    assert np.allclose(cosines(applied(whitening, model.encode(TEXTS))), cosines(expected), atol=1e-4)


def test_save_load_and_pickle(backbone_path, whitening, tmp_path):
    model = pipeline(EarlyLateModule(backbone_path()))
    whole = SentenceTransformer(modules=[*model, whitening, Normalize()], device="cpu")
    whole.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "2_PartwiseWhitening" / "config.json").read_text()) == {
        "in_features": 64, "out_features": 64, "shares": [0.3, 0.7],
    }  # fmt: skip
    for other in (SentenceTransformer(str(tmp_path), device="cpu"), pickle.loads(pickle.dumps(whole))):
        assert type(other[2]) is PartwiseWhitening
        assert other[2].shares == [0.3, 0.7]
        assert np.array_equal(other.encode(TEXTS), whole.encode(TEXTS))
    assert json.loads((tmp_path / "modules.json").read_text())[2]["type"] == "st_reba.modules.PartwiseWhitening"
    assert json.loads((tmp_path / "config_sentence_transformers.json").read_text())["requirements"] == REQUIREMENT


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"in_features": 64, "out_features": 63, "shares": [0.3, 0.7]}, "They are of two modules; save the model"),
        ({"in_features": 64, "out_features": 64, "shares": [0.3, 0.3]}, "shares=[0.3, 0.3]: give how much each"),
        ({"in_features": 64, "out_features": 64, "shares": [1.0]}, "shares=[1.0] for 2 parts: give one for each"),
        ({"in_features": 64, "out_features": 64}, "is not a saved PartwiseWhitening"),
        ({"in_features": 64, "shrinkage": 1}, "sets shrinkage, which is no setting of PartwiseWhitening"),
    ],
)
def test_a_configuration_of_another_module(whitening, config, message, tmp_path):
    whitening.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        PartwiseWhitening.load(str(tmp_path))


def test_a_zero_vector_stays_one_and_the_mean_has_no_direction(whitening):
    vectors = torch.stack([torch.zeros(64), whitening.mean.flatten(), whitening.mean.flatten() + 1])
    found = applied(whitening, vectors)
    assert not found[:2].any()
    assert np.linalg.norm(found[2]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision(whitening, dtype, model):
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    found = whitening({"sentence_embedding": vectors.to(dtype)})["sentence_embedding"]
    assert found.dtype == dtype
    exact = whitening({"sentence_embedding": vectors})["sentence_embedding"]
    assert torch.cosine_similarity(found.double(), exact.double()).min() > 1 - (1e-9 if dtype.itemsize == 8 else 1e-2)


def test_gradients_pass_and_weights_stay(backbone_path, whitening):
    model = SentenceTransformer(modules=[*pipeline(EarlyLateModule(backbone_path())), whitening], device="cpu").train()
    assert not list(whitening.parameters())
    model(model.preprocess(TEXTS))["sentence_embedding"][:, 0].sum().backward()
    assert model[0].model.get_input_embeddings().weight.grad.abs().sum() > 0


VARIED = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("vectors", "settings", "message"),
    [
        (VARIED, {"shares": ()}, "shares=(): give how much each part counts, numbers above 0 whose sum is 1"),
        (VARIED, {"shares": (0.5, 0.6)}, "shares=(0.5, 0.6)"),
        (VARIED, {"shares": (1.5, -0.5)}, "shares=(1.5, -0.5)"),
        (VARIED, {"shares": (1, float("nan"))}, "shares=(1, nan)"),
        (VARIED, {"shares": "1"}, "shares='1'"),
        (VARIED, {"shares": 1.0}, "shares=1.0"),
        (VARIED, {"shares": (0.25,) * 4}, "embeddings of 6 values cannot be cut into 4 equal parts"),
        (VARIED, {"shares": (1,), "shrinkage": 0}, "shrinkage=0: give a number above 0"),
        (VARIED, {"shares": (1,), "shrinkage": -1}, "shrinkage=-1"),
        (VARIED, {"shares": (1,), "shrinkage": float("inf")}, "shrinkage=inf"),
        (VARIED, {"shares": (1,), "shrinkage": "10"}, "shrinkage='10'"),
        (VARIED[:1], {"shares": (1,)}, "1 texts were given, and their embeddings do not differ"),
        (
            VARIED * torch.tensor([1.0] * 3 + [0] * 3),
            {"shares": (0.5, 0.5)},
            "Part 2 of 2 of the embeddings is the same",
        ),
    ],
)
def test_what_cannot_be_fitted(vectors, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PartwiseWhitening.from_moments(moments_of(vectors), **settings)


def test_shares_that_do_not_fit(model):
    with pytest.raises(ValueError, match=re.escape("shares=[0.2, 0.3]: give how much each part counts")):
        PartwiseWhitening.fit(model, (pytest.fail("a text was read") for _ in CORPUS), shares=[0.2, 0.3])
    with pytest.raises(ValueError, match="embeddings of 64 values cannot be cut into 3 equal parts"):
        PartwiseWhitening.fit(model, CORPUS, shares=[0.2, 0.3, 0.5])


@pytest.mark.parametrize(
    ("mean", "weight", "shares", "message"),
    [
        (torch.zeros(4), torch.zeros(4, 4), [1.0], "mean is (4,) and weight (4, 4): give (P, D), (P, D, D)"),
        (torch.zeros(1, 4), torch.zeros(1, 3, 4), [1.0], "mean is (1, 4) and weight (1, 3, 4)"),
        (torch.zeros(1, 0), torch.zeros(1, 0, 0), [1.0], "mean is (1, 0)"),
        (torch.zeros(2, 2), torch.zeros(2, 2, 2), [1.0], "shares=[1.0] for 2 parts: give one for each"),
        (torch.zeros(1, 2), torch.full((1, 2, 2), float("nan")), [1.0], "the value nan"),
    ],
)
def test_weights_that_are_refused(mean, weight, shares, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PartwiseWhitening(mean, weight, shares)
