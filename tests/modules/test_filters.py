"""The modules after Pooling: EmbeddingFilter, Centering, Standardization, WhiteningTransform, AllButTheTop."""

from __future__ import annotations

import copy
import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import (
    AllButTheTop,
    CausalTransformer,
    Centering,
    EmbeddingFilter,
    ReBAModule,
    Standardization,
    WhiteningTransform,
)
from st_reba.modules.embedding_transforms import SHRINKAGE
from st_reba.modules.moments import Moments, embedding_moments
from st_reba.recipes.rows import PARTS
from st_reba.version import REQUIREMENT

from .. import oracles
from ..backbones import TEXTS
from ..conftest import examples, pipeline, relative_error

#: More texts than dimensions.
CORPUS = [f"{number}: {text}" for number in range(8) for text in TEXTS]


@pytest.fixture(scope="module")
def model(shared):
    return pipeline(CausalTransformer(shared("gpt2")))


@pytest.fixture(scope="module")
def embedded(model):
    """What ``model`` makes of :data:`CORPUS` and of :data:`TEXTS`."""
    return model.encode(CORPUS), model.encode(TEXTS)


@pytest.fixture(scope="module")
def moments(model):
    return embedding_moments(model, CORPUS)


@pytest.fixture(scope="module")
def filters(model, moments):
    """One of each class, fitted to ``model``."""
    return {
        "filter": EmbeddingFilter.from_language_model(model, keep=(3, 20)),
        "whitening": WhiteningTransform.from_moments(moments, dimension=8),
        "all but the top": AllButTheTop.from_moments(moments, removed=2),
        "centring": Centering.from_moments(moments),
        "standardisation": Standardization.from_moments(moments),
    }


CASES = ["filter", "whitening", "all but the top", "centring", "standardisation"]


def applied(module, vectors):
    return module({"sentence_embedding": torch.as_tensor(vectors)})["sentence_embedding"].numpy()


def same_up_to_signs(found, expected):
    signs = np.sign((found * expected).sum(axis=0))
    return relative_error(found, (expected * signs).astype(found.dtype))


def test_settings_are_shown(filters):
    for module in filters.values():
        assert module.extra_repr() == ", ".join(f"{name}={getattr(module, name)!r}" for name in module.config_keys)
    assert "low=3" in filters["filter"].extra_repr()


class TestEmbeddingFilter:
    @pytest.mark.parametrize(
        ("choice", "low", "high"),
        [
            ({}, 8, 24),
            ({"skip_first": 5}, 5, 32),
            ({"skip_last": 5}, 0, 27),
            ({"skip_first": 4, "skip_last": 10}, 4, 22),
            ({"keep": (1, 3)}, 1, 3),
            ({"keep": (0, 32)}, 0, 32),
        ],
    )
    def test_oracle(self, model, embedded, choice, low, high):
        module = EmbeddingFilter.from_language_model(model, **choice)
        head = model[0].model.get_input_embeddings().weight.detach()
        _, vectors = embedded
        assert (module.keep, module.low, module.get_embedding_dimension()) == ((low, high), low, high - low)
        assert same_up_to_signs(applied(module, vectors), oracles.filtered(head, vectors, low, high)) < 1e-5

    def test_from_a_path(self, model, backbone_path):
        by_path = EmbeddingFilter.from_language_model(backbone_path("gpt2"), skip_first=2)
        assert torch.equal(by_path.directions, EmbeddingFilter.from_language_model(model[0], skip_first=2).directions)

    def test_all_directions_are_a_rotation(self, model, embedded):
        module = EmbeddingFilter.from_language_model(model, skip_first=0)
        _, vectors = embedded
        assert np.allclose(applied(module, vectors) @ applied(module, vectors).T, vectors @ vectors.T, rtol=1e-4)

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            ({"keep": (0, 4), "skip_first": 1}, "give one or the other"),
            ({"keep": (4,)}, "give (low, high), two whole numbers"),
            ({"keep": 5}, "keep=5: give (low, high), two whole numbers"),
            ({"keep": (0.5, 2)}, "give (low, high), two whole numbers"),
            ({"keep": (4, 4)}, "keep=(4, 4) of the head's 32 directions: give 0 <= low < high <= 32"),
            ({"keep": (0, 33)}, "of the head's 32 directions"),
            ({"skip_first": -1}, "skip_first=-1: give how many directions to leave out, 0 or more"),
            ({"skip_last": True}, "skip_last=True"),
            ({"skip_first": 20, "skip_last": 12}, "keep=(20, 20) of the head's 32 directions"),
        ],
    )
    def test_what_is_refused(self, model, choice, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            EmbeddingFilter.from_language_model(model, **choice)

    @pytest.mark.parametrize(
        ("directions", "low", "message"),
        [
            (torch.zeros(4), 0, "directions is (4,): give (k, D)"),
            (torch.zeros(5, 4), 0, "directions is (5, 4)"),
            (torch.zeros(0, 4), 0, "directions is (0, 4)"),
            (torch.eye(4)[:3], 2, "low=2: with 3 of 4 directions kept it is a whole number from 0 to 1"),
            (torch.full((1, 4), float("inf")), 0, "EmbeddingFilter's directions has the value inf, and weights are"),
            (
                torch.full((1, 4), float("nan")),
                0,
                "the value nan, and weights are numbers not beyond 1e+12",
            ),
            (
                torch.full((1, 4), 3e38),
                0,
                "the value 3e+38, and weights are numbers not beyond 1e+12",
            ),
        ],
    )
    def test_weights_that_are_refused(self, directions, low, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            EmbeddingFilter(directions, low)


class TestWhitening:
    @given(
        texts=st.integers(2, 60),
        size=st.integers(1, 12),
        seed=st.integers(0, 2**32 - 1),
        shrinkage=st.sampled_from([1e-3, SHRINKAGE, 1.0, 5]),
    )
    @settings(max_examples=examples(40))
    def test_shrinkage(self, texts, size, seed, shrinkage):
        """With any number of texts, also fewer than dimensions: distances are those of the oracle, signs apart."""
        draw = np.random.default_rng(seed)
        corpus, vectors = (
            draw.normal(size=(rows, size)) * 4.0 ** -np.arange(size) + 1 for rows in (texts, 5)
        )  # fmt: skip
        moments = Moments(size)
        moments.add(torch.from_numpy(corpus))
        module = WhiteningTransform.from_moments(moments, shrinkage=shrinkage)
        assert (module.in_features, module.out_features) == (size, size)
        found, expected = applied(module, vectors), oracles.whitened(corpus, vectors, size, shrinkage)
        assert np.allclose(found @ found.T, expected @ expected.T, rtol=1e-4, atol=1e-4)

    def test_shrinkage_by_default(self, model):
        module = WhiteningTransform.fit(model, CORPUS)
        assert SHRINKAGE == 0.1
        assert torch.equal(module.weight, WhiteningTransform.fit(model, CORPUS, shrinkage=0.1).weight)
        assert torch.equal(PARTS["whitened"].from_moments(embedding_moments(model, CORPUS)).weight, module.weight)
        # A LayerNorm takes one direction away: it is kept, and not blown up.
        assert module.out_features == 32
        largest = torch.linalg.norm(module.weight, dim=1).max()
        mean = float(np.linalg.eigvalsh(np.cov(model.encode(CORPUS).T, bias=True)).mean())
        assert largest <= (0.1 * mean) ** -0.5 * 1.001

    def test_fewer_texts_than_directions(self, model):
        module = WhiteningTransform.fit(model, TEXTS, dimension=20)
        whole = WhiteningTransform.fit(model, TEXTS)
        assert (module.out_features, whole.out_features) == (20, 32)
        assert np.isfinite(applied(whole, model.encode(CORPUS))).all()

    @pytest.mark.parametrize("shrinkage", [-0.1, float("nan"), float("inf"), "0.1", True, None])
    def test_shrinkages_that_are_refused_before_a_text_is_read(self, model, shrinkage):
        texts = (pytest.fail("a text was read") for _ in TEXTS)
        with pytest.raises(ValueError, match=f"shrinkage={shrinkage!r}: give a number, 0 or more"):
            WhiteningTransform.fit(model, texts, shrinkage=shrinkage)

    @pytest.mark.parametrize("shrinkage", [0, 0.1])
    @pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS[:1] * 7])
    def test_texts_that_do_not_differ(self, model, texts, shrinkage):
        with pytest.raises(ValueError, match=f"{len(texts)} texts were given, and their embeddings do not differ"):
            WhiteningTransform.fit(model, texts, shrinkage=shrinkage)

    @pytest.mark.parametrize("dimension", [1, 20, 31])
    def test_oracle_without_shrinkage(self, model, embedded, dimension):
        module = WhiteningTransform.fit(model, iter(CORPUS), dimension=dimension, shrinkage=0, chunk_size=16)
        corpus, vectors = embedded
        expected = oracles.whitened(corpus, vectors, dimension)
        assert module.get_embedding_dimension() == dimension
        assert same_up_to_signs(applied(module, vectors), expected) < 1e-3

    @pytest.mark.parametrize(("architecture", "directions"), [("llama", 32), ("gpt2", 31), ("opt", 31)])
    def test_all_directions_there_are_without_shrinkage(self, architecture, directions, shared):
        """A LayerNorm's values sum to a constant, so that one direction is not there, and is not blown up."""
        model = pipeline(CausalTransformer(shared(architecture)))
        module = WhiteningTransform.fit(model, CORPUS, shrinkage=0)
        assert module.get_embedding_dimension() == directions
        corpus, vectors = model.encode(CORPUS), model.encode(TEXTS)
        assert same_up_to_signs(applied(module, vectors), oracles.whitened(corpus, vectors, directions)) < 1e-3
        if directions == 31:
            with pytest.raises(ValueError, match="vary in 31 directions only, so 32 cannot be whitened"):
                WhiteningTransform.fit(model, CORPUS, dimension=32, shrinkage=0)

    def test_the_texts_become_white(self, moments, embedded):
        module = WhiteningTransform.from_moments(moments, dimension=10, shrinkage=0)
        white = applied(module, embedded[0])
        assert np.allclose(white.mean(axis=0), 0, atol=1e-4)
        assert np.allclose(np.cov(white.T, bias=True), np.eye(10), atol=1e-3)

    @pytest.mark.parametrize("dimension", [0, 33, 2.0, True])
    def test_dimensions_that_are_refused(self, model, dimension):
        with pytest.raises(ValueError, match=f"dimension={dimension!r}: give the directions to keep, a whole number"):
            WhiteningTransform.fit(model, TEXTS, dimension=dimension)

    def test_too_few_texts_without_shrinkage(self, model):
        with pytest.raises(
            ValueError,
            match="The embeddings of these 5 texts vary in 4 directions only, so 5 cannot be whitened without "
            "shrinkage: give more than 5 varied texts, or set shrinkage above 0, or give a lower dimension.",
        ):
            WhiteningTransform.fit(model, TEXTS, dimension=5, shrinkage=0)
        with pytest.raises(ValueError, match="so 32 cannot be whitened"):
            WhiteningTransform.fit(model, CORPUS[:32], shrinkage=0)
        assert WhiteningTransform.fit(model, TEXTS, dimension=4, shrinkage=0).out_features == 4

    def test_texts_too_much_alike_without_shrinkage(self, model):
        alike = embedding_moments(model, TEXTS * 7)
        with pytest.raises(ValueError, match="The embeddings of these 35 texts vary in 4 directions only, so 6"):
            WhiteningTransform.from_moments(alike, dimension=6, shrinkage=0)
        with pytest.raises(ValueError, match="vary in 4 directions only, so 32"):
            WhiteningTransform.fit(model, TEXTS * 7, shrinkage=0)

    @pytest.mark.parametrize(("mean", "weight"), [((4,), (2, 5)), ((4,), (5, 4)), ((4, 1), (2, 4)), ((4,), (4,))])
    def test_weights_that_are_refused(self, mean, weight):
        with pytest.raises(ValueError, match="give .D,. and .k, D. with k from 1 to D"):
            WhiteningTransform(torch.zeros(mean), torch.zeros(weight))


class TestAllButTheTop:
    @pytest.mark.parametrize("removed", [None, 0, 1, 7])
    def test_oracle(self, model, embedded, removed):
        module = AllButTheTop.fit(model, iter(CORPUS), removed=removed, chunk_size=16)
        corpus, vectors = embedded
        expected = oracles.without_the_top(corpus, vectors, 1 if removed is None else removed)
        assert relative_error(applied(module, vectors), expected.astype(np.float32)) < 1e-4
        assert module.get_embedding_dimension() == 32

    def test_a_hundredth_by_default(self):
        moments = Moments(250)
        moments.add(torch.randn(300, 250, generator=torch.Generator().manual_seed(0)))
        assert AllButTheTop.from_moments(moments).directions.shape == (2, 250)

    @pytest.mark.parametrize("removed", [-1, 32, "2"])
    def test_numbers_that_are_refused(self, model, removed):
        with pytest.raises(ValueError, match=f"removed={removed!r}: give the principal directions to remove"):
            AllButTheTop.fit(model, TEXTS, removed=removed)

    def test_too_few_texts(self, model):
        with pytest.raises(ValueError, match="5 texts are too few to find 4 principal directions to remove: give at"):
            AllButTheTop.fit(model, TEXTS, removed=4)
        assert AllButTheTop.fit(model, TEXTS, removed=3).directions.shape == (3, 32)

    @pytest.mark.parametrize(("mean", "directions"), [((4,), (4, 4)), ((4,), (2, 5)), ((4,), (4,))])
    def test_weights_that_are_refused(self, mean, directions):
        with pytest.raises(ValueError, match="give .D,. and .k, D. with k from 0 to D - 1"):
            AllButTheTop(torch.zeros(mean), torch.zeros(directions))


class TestCenteringAndStandardization:
    def test_oracle(self, filters, embedded):
        corpus, vectors = (vectors.astype(np.float64) for vectors in embedded)
        centred = vectors - corpus.mean(axis=0)
        for case, expected in (("centring", centred), ("standardisation", centred / corpus.std(axis=0))):
            assert filters[case].get_embedding_dimension() == 32
            assert relative_error(applied(filters[case], vectors), expected) < 1e-5

    @pytest.mark.parametrize("module_class", [Centering, Standardization])
    def test_fitted_in_one_pass(self, model, moments, module_class):
        module = module_class.fit(model, iter(CORPUS), chunk_size=16)
        fitted_at_once = module_class.from_moments(moments)
        for name, weight in fitted_at_once.state_dict().items():
            assert relative_error(module.state_dict()[name], weight) < 1e-5

    def test_a_dimension_that_does_not_vary_is_centred_alone(self):
        vectors = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
        vectors[:, 1] = 1 / 3
        moments = Moments(3)
        for vector in vectors:
            moments.add(vector[None])
        module = Standardization.from_moments(moments)
        assert module.deviation[1] == 1
        assert np.abs(applied(module, vectors)[:, 1]).max() < 1e-6

    @pytest.mark.parametrize("module_class", [Centering, Standardization])
    def test_texts_that_do_not_differ(self, model, module_class):
        with pytest.raises(ValueError, match="1 texts were given, and their embeddings do not differ: give two texts"):
            module_class.fit(model, TEXTS[:1])

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (lambda: Centering(torch.zeros(2, 2)), "mean is (2, 2): give (D,)"),
            (lambda: Centering(torch.zeros(0)), "mean is (0,)"),
            (lambda: Standardization(torch.zeros(2), torch.ones(3)), "mean is (2,) and deviation (3,): give (D,) for"),
            (lambda: Standardization(torch.zeros(2), torch.tensor([1.0, 0])), "A deviation is 0 or below"),
            (lambda: Standardization(torch.zeros(1), torch.tensor([float("nan")])), "the value nan"),
        ],
    )
    def test_weights_that_are_refused(self, made, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            made()


def piped(model, module) -> SentenceTransformer:
    return SentenceTransformer(modules=[*model, module, Normalize()], device="cpu")


def test_weights_stay_float32(model, filters, backbone_path):
    """ST gives each module of a pipeline the precision of the first, in place."""
    for module in filters.values():
        before = {name: weight.clone() for name, weight in module.state_dict().items()}
        half = CausalTransformer(backbone_path("gpt2"), model_kwargs={"dtype": "bfloat16"})
        whole = piped(pipeline(half), module)
        whole.half()
        assert whole[0].model.dtype == torch.float16
        for name, weight in module.state_dict().items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, before[name])
        assert {weight.dtype for weight in copy.deepcopy(module).double().state_dict().values()} == {torch.float64}
        assert {weight.device.type for weight in copy.deepcopy(module).to("meta", torch.half).buffers()} == {"meta"}


def test_behind_a_backbone_that_is_not_ours(filters, backbone_path, tmp_path):
    parts = [Transformer(backbone_path("gpt2", "bert")), Pooling(32, "mean")]
    # Those that keep the width, and one behind them that does not.
    parts += sorted(filters.values(), key=lambda part: -part.get_embedding_dimension())
    parts = [part for part in parts if getattr(part, "in_features", 32) == 32]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path))
    config = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert config["requirements"] == REQUIREMENT
    assert [type(part) for part in SentenceTransformer(str(tmp_path), device="cpu")] == [type(part) for part in parts]


@pytest.mark.parametrize("case", CASES)
class TestInAPipeline:
    def test_dimension(self, model, filters, case):
        whole = piped(model, filters[case])
        vectors = whole.encode(TEXTS)
        assert vectors.shape == (5, whole.get_embedding_dimension())
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)

    def test_save_and_load(self, model, filters, case, tmp_path):
        whole = piped(model, filters[case])
        whole.save_pretrained(str(tmp_path))
        loaded = SentenceTransformer(str(tmp_path), device="cpu")
        assert type(loaded[2]) is type(filters[case])
        assert loaded[2].get_config_dict() == filters[case].get_config_dict()
        assert np.array_equal(loaded.encode(TEXTS), whole.encode(TEXTS))
        types = [module["type"] for module in json.loads((tmp_path / "modules.json").read_text())]
        assert types[2] == f"st_reba.modules.{type(filters[case]).__name__}"
        assert f"{type(filters[case]).__name__} → Normalize" in (tmp_path / "README.md").read_text()
        (tmp_path / "again").mkdir()
        loaded[2].save(str(tmp_path / "again"))
        again = type(filters[case]).load(str(tmp_path / "again"))
        assert again.get_config_dict() == filters[case].get_config_dict()
        for name, weight in filters[case].state_dict().items():
            assert torch.equal(again.state_dict()[name], weight)

    def test_saved_without_safetensors(self, filters, case, tmp_path):
        filters[case].save(str(tmp_path), safe_serialization=False)
        assert not (tmp_path / "model.safetensors").exists()
        loaded = type(filters[case]).load(str(tmp_path))
        for name, weight in filters[case].state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight)

    def test_pickle(self, backbone_path, filters, case):
        # Of its own: transformers cannot pickle a backbone whose layers were read once.
        whole = piped(pipeline(CausalTransformer(backbone_path("gpt2"))), filters[case])
        assert np.array_equal(pickle.loads(pickle.dumps(whole)).encode(TEXTS), whole.encode(TEXTS))

    @pytest.mark.filterwarnings("ignore:A text without tokens")
    def test_an_empty_text_stays_a_zero_vector(self, model, filters, case):
        vectors = piped(model, filters[case]).encode(["", TEXTS[0]])
        assert not vectors[0].any()
        assert vectors[1].any()

    def test_gradients_pass_and_weights_stay(self, backbone_path, filters, case):
        model = piped(pipeline(CausalTransformer(backbone_path("gpt2"))), filters[case]).train()
        assert not list(filters[case].parameters())
        vectors = model(model.preprocess(TEXTS))["sentence_embedding"]
        vectors[:, 0].sum().backward()
        weight = model[0].model.get_input_embeddings().weight
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0

    def test_half_precision(self, filters, case, model, backbone_path):
        half = pipeline(CausalTransformer(backbone_path("gpt2"), model_kwargs={"dtype": "bfloat16"}))
        vectors = SentenceTransformer(modules=[*half, filters[case]]).encode(TEXTS, convert_to_tensor=True)
        assert vectors.dtype == torch.bfloat16
        exact = torch.as_tensor(applied(filters[case], half.encode(TEXTS, convert_to_tensor=True).float()))
        assert torch.cosine_similarity(vectors.float().cpu(), exact).min() > 0.999

    def test_embeddings_of_another_width(self, filters, case):
        with pytest.raises(ValueError, match="maps embeddings of 32 values and was given 16: put it right behind"):
            filters[case]({"sentence_embedding": torch.zeros(1, 16)})

    def test_a_configuration_of_another_module(self, filters, case, tmp_path):
        filters[case].save(str(tmp_path))
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "in_features": 10**9}))
        said = rf"^{tmp_path} is not a saved \w+: config.json says .*1000000000.* two modules; save the model again\.$"
        with pytest.raises(ValueError, match=said):
            type(filters[case]).load(str(tmp_path))

    def test_weights_of_another_module(self, filters, case, tmp_path):
        filters[case].save(str(tmp_path))
        weights = load_file(tmp_path / "model.safetensors")
        weights["other"] = weights.pop(next(iter(weights)))
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"is not a saved {type(filters[case]).__name__}"):
            type(filters[case]).load(str(tmp_path))

    def test_a_path_out_of_the_model(self, filters, case, tmp_path):
        with pytest.raises(ValueError, match=r"\.\."):
            type(filters[case]).load(str(tmp_path), subfolder="../elsewhere")


def test_truncation_keeps_the_first_directions(model):
    """``truncate_dim`` after a filter or a whitening is the filter or whitening of that dimension."""
    moments = embedding_moments(model, CORPUS)
    for long, short in (
        (
            EmbeddingFilter.from_language_model(model, keep=(4, 20)),
            EmbeddingFilter.from_language_model(model, keep=(4, 9)),
        ),
        (WhiteningTransform.from_moments(moments), WhiteningTransform.from_moments(moments, dimension=5)),
    ):
        truncated = SentenceTransformer(modules=[*model, long], truncate_dim=5, device="cpu")
        assert truncated.get_embedding_dimension() == 5
        expected = SentenceTransformer(modules=[*model, short], device="cpu").encode(TEXTS)
        assert np.allclose(truncated.encode(TEXTS), expected, rtol=1e-5, atol=1e-5)


def test_fitting_looks_behind_truncation(shared):
    model = pipeline(CausalTransformer(shared("gpt2")))
    model.truncate_dim = 4
    assert WhiteningTransform.fit(model, CORPUS, dimension=20).in_features == 32
    assert AllButTheTop.fit(model, CORPUS, removed=20).in_features == 32


def test_one_behind_the_other(shared):
    """Each is fitted on what those before it give, and works behind any pooling."""
    base = pipeline(ReBAModule(shared("gpt2")), "lasttoken")
    filtered = SentenceTransformer(modules=[*base, EmbeddingFilter.from_language_model(base)], device="cpu")
    whitening = WhiteningTransform.fit(filtered, CORPUS, dimension=8)
    assert (whitening.in_features, whitening.out_features) == (16, 8)
    assert piped(filtered, whitening).encode(TEXTS).shape == (5, 8)
