"""What is fitted on texts: filters, whitenings and sums behind Pooling, idf weights before it; and texts' moments."""

from __future__ import annotations

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import CausalTransformer, EarlyLateModule, EchoModule, StandardizedSum, WhiteningTransform
from st_reba.modules import AllButTheTop, Centering, EmbeddingFilter, IdfWeights, PartwiseWhitening, Standardization
from st_reba.moments import Moments, embedding_moments
from st_reba.recipes.rows import POST_PROCESSORS

from ..backbones import TEXTS, VOCABULARY
from ..conftest import change, pipeline, relative_error
from .methods import RECIPES

#: More texts than dimensions.
CORPUS = [f"{number}: {text}" for number in range(8) for text in TEXTS]
SHARES = [0.3, 0.7]

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")


def filtered(head, vectors, low, high):
    """EmbedFilter: coordinates in the right singular vectors low .. high - 1 of the head (V, D), up to their signs."""
    _, _, directions = np.linalg.svd(np.asarray(head, dtype=np.float64), full_matrices=False)
    return np.asarray(vectors, dtype=np.float64) @ directions[low:high].T


def whitened(fitted_on, vectors, k, shrinkage=0.0):
    """Su et al. (2021), Algorithm 1: (x - mu) W with W = (U sqrt(Lambda^-1))[:, :k], up to signs.

    With shrinkage, Lambda + shrinkage * mean(Lambda) stands in Lambda's place.
    """
    fitted_on, vectors = np.asarray(fitted_on, dtype=np.float64), np.asarray(vectors, dtype=np.float64)
    u, variances, _ = np.linalg.svd(np.atleast_2d(np.cov(fitted_on.T, bias=True)))
    return (vectors - fitted_on.mean(axis=0)) @ (u @ np.diag((variances + shrinkage * variances.mean()) ** -0.5))[:, :k]


def partwise_whitened(fitted_on, vectors, shares, shrinkage):
    """Each part less its mean, over its deviations, times U (Lambda + shrinkage * mean(Lambda) I)^-1/2 of its
    correlations, with a length of the root of its share; up to signs within a part."""
    parts = []
    for own, new, share in zip(*(np.split(np.asarray(each, dtype=np.float64), len(shares), axis=1)
                                 for each in (fitted_on, vectors)), shares, strict=True):  # fmt: skip
        mean, deviation = own.mean(axis=0), own.std(axis=0)
        u, variances, _ = np.linalg.svd(np.atleast_2d(np.corrcoef(own.T)))
        mapped = (new - mean) / deviation @ u @ np.diag((variances + shrinkage * variances.mean()) ** -0.5)
        parts.append(share**0.5 * mapped / np.linalg.norm(mapped, axis=1, keepdims=True))
    return np.concatenate(parts, axis=1)


def standardized_sum(fitted_on, vectors, shares):
    """The sum of s_p z_p / |z_p| with z_p the standardised part p."""
    found = 0
    for own, new, share in zip(*(np.split(np.asarray(each, dtype=np.float64), len(shares), axis=1)
                                 for each in (fitted_on, vectors)), shares, strict=True):  # fmt: skip
        standard = (new - own.mean(axis=0)) / own.std(axis=0)
        found = found + share * standard / np.linalg.norm(standard, axis=1, keepdims=True)
    return found


def idf_weighted_mean(fitted_on, ids, vectors):
    """sum_i idf(w_i) v_i / sum_i idf(w_i) with idf = ln((1 + N) / (1 + df)) + 1, texts as lists of token ids."""
    return np.average(np.asarray(vectors, dtype=np.float64), axis=0, weights=[idf(fitted_on, token) for token in ids])


def idf(texts, token):
    return math.log((1 + len(texts)) / (1 + sum(token in text for text in texts))) + 1


def without_the_top(fitted_on, vectors, d):
    """All-but-the-top: minus the mean, minus the parts in the first d principal components."""
    fitted_on, vectors = np.asarray(fitted_on, dtype=np.float64), np.asarray(vectors, dtype=np.float64)
    mean = fitted_on.mean(axis=0)
    _, _, components = np.linalg.svd(fitted_on - mean)
    centred = vectors - mean
    return centred - sum(np.outer(centred @ component, component) for component in components[:d])


@pytest.fixture(scope="module")
def model(shared):
    return pipeline(CausalTransformer(shared("gpt2")))


@pytest.fixture(scope="module")
def embedded(model):
    """What ``model`` makes of :data:`CORPUS` and of :data:`TEXTS`."""
    return model.encode(CORPUS), model.encode(TEXTS)


#: Each class that is fitted on texts, with settings.
FITTED = {
    "whitening": (WhiteningTransform, {"dimension": 8}),
    "all but the top": (AllButTheTop, {"removed": 2}),
    "centring": (Centering, {}),
    "standardisation": (Standardization, {}),
    "partwise whitening": (PartwiseWhitening, {"shares": SHARES}),
    "standardised sum": (StandardizedSum, {"shares": SHARES}),
}
CASES = ["filter", *FITTED]


@pytest.fixture(scope="module")
def filters(model):
    """One of each class, fitted to ``model``."""
    moments = embedding_moments(model, CORPUS)
    fitted = {case: kind.from_moments(moments, **given) for case, (kind, given) in FITTED.items()}
    return {"filter": EmbeddingFilter.from_language_model(model, keep=(3, 20)), **fitted}


def applied(module, vectors):
    return module({"sentence_embedding": torch.as_tensor(vectors)})["sentence_embedding"].numpy()


def moments_of(vectors) -> Moments:
    moments = Moments(vectors.shape[1])
    moments.add(torch.as_tensor(vectors))
    return moments


def drawn(seed: int, texts: int, dimension: int) -> np.ndarray:
    """Correlated, with dimensions of very different sizes, far from 0."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(texts, dimension)) @ random.normal(size=(dimension, dimension))
    return (mixed * np.exp(random.normal(size=dimension)) + 3 * random.normal(size=dimension)).astype(np.float32)


class TestOracle:
    """Of any sizes, more dimensions than texts, too. Directions of one variance may be turned: inner products stay."""

    shares = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda parts: tuple(np.array(parts) / sum(parts)))

    @given(shares, st.integers(2, 6), st.integers(3, 40), st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 99))
    def test_of_what_is_fitted(self, shares, width, texts, shrinkage, seed):
        size = width * len(shares)
        corpus, vectors = drawn(seed, texts, size), drawn(seed + 1, 5, size)
        mean, deviation = corpus.astype(np.float64).mean(axis=0), corpus.astype(np.float64).std(axis=0)
        both = {"shares": shares, "shrinkage": shrinkage}
        for kind, arguments, expected in (
            (WhiteningTransform, {"shrinkage": shrinkage}, whitened(corpus, vectors, size, shrinkage)),
            (AllButTheTop, {"removed": 1}, without_the_top(corpus, vectors, 1)),
            (Centering, {}, vectors - mean),
            (Standardization, {}, (vectors - mean) / deviation),
            (PartwiseWhitening, both, partwise_whitened(corpus, vectors, **both)),
            (StandardizedSum, {"shares": shares}, standardized_sum(corpus, vectors, shares)),
        ):
            found = applied(kind.from_moments(moments_of(corpus), **arguments), vectors)
            scale = np.abs(expected @ expected.T).max()
            assert np.allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-4 * max(scale, 1)), kind

    RANGES = [({}, 8, 24), ({"keep": (1, 3)}, 1, 3), ({"keep": [4, 22]}, 4, 22)]

    @pytest.mark.parametrize(("choice", "low", "high"), RANGES)
    def test_of_a_filter(self, choice, low, high, model, embedded, backbone_path):
        module = EmbeddingFilter.from_language_model(model, **choice)
        head = model[0].model.get_input_embeddings().weight.detach()
        assert (module.low, module.get_embedding_dimension()) == (low, high - low)
        expected = filtered(head, embedded[1], low, high)
        found = applied(module, embedded[1])
        signs = np.sign((found * expected).sum(axis=0))
        assert relative_error(found, (expected * signs).astype(found.dtype)) < 1e-5
        by_path = EmbeddingFilter.from_language_model(backbone_path("gpt2"), **choice)
        assert torch.equal(by_path.directions, module.directions)


class TestFitting:
    def test_the_usual_shrinkage_and_number_of_directions(self, model):
        module = WhiteningTransform.fit(model, CORPUS)
        assert torch.equal(module.weight, WhiteningTransform.fit(model, CORPUS, shrinkage=0.1).weight)
        usual = POST_PROCESSORS["whitened"].from_moments(embedding_moments(model, CORPUS))
        assert torch.equal(usual.weight, module.weight)
        assert AllButTheTop.from_moments(moments_of(drawn(0, 300, 250))).directions.shape == (2, 250)
        assert AllButTheTop.fit(model, CORPUS).directions.shape == (1, 32)
        # A LayerNorm's values sum to a constant, so that one direction is not there.
        assert WhiteningTransform.fit(model, CORPUS, shrinkage=0).get_embedding_dimension() == 31

    def test_dimensions_that_do_not_vary_say_nothing(self):
        vectors = drawn(3, 20, 8)
        vectors[:, 1], vectors[:, 6] = 1 / 3, 0
        changed = vectors.copy()
        changed[:, [1, 6]] += 100
        for kind in (PartwiseWhitening, StandardizedSum):
            module = kind.from_moments(moments_of(vectors), shares=(0.5, 0.5))
            assert np.array_equal(applied(module, changed), applied(module, vectors))
        standard = Standardization.from_moments(moments_of(vectors))
        assert standard.deviation[1] == 1
        assert np.abs(applied(standard, vectors)[:, 1]).max() < 1e-6

    def test_the_parts_are_those_of_the_module_in_front(self, shared):
        pooled = pipeline(EarlyLateModule(shared()))
        for kind, out_features in ((PartwiseWhitening, 64), (StandardizedSum, 32)):
            both = kind.fit(pooled, CORPUS)
            assert (both.shares, both.mean.shape, both.get_embedding_dimension()) == ([0.3, 0.7], (2, 32), out_features)
            assert kind.fit(pooled, CORPUS, shares=[0.25] * 4).mean.shape == (4, 16)


@pytest.mark.parametrize("case", CASES)
class TestInAPipeline:
    def test_saved_loaded_and_pickled(self, filters, case, tmp_path):
        module = filters[case]
        module.save(str(tmp_path), safe_serialization=False)
        assert not (tmp_path / "model.safetensors").exists()
        for other in (type(module).load(str(tmp_path)), pickle.loads(pickle.dumps(module))):
            assert other.extra_repr() == ", ".join(f"{name}={getattr(module, name)!r}" for name in module.config_keys)
            assert all(torch.equal(other.state_dict()[name], weight) for name, weight in module.state_dict().items())

    def test_zero_vectors_stay_and_rows_are_independent(self, filters, case, embedded):
        vectors = np.concatenate([np.zeros((1, 32), dtype=np.float32), embedded[1]])
        found = applied(filters[case], vectors)
        assert not found[0].any()
        alone = np.concatenate([applied(filters[case], row[None]) for row in vectors])
        assert np.allclose(alone, found, atol=1e-5)

    def test_precision(self, filters, case, embedded):
        """ST gives each module of a pipeline the precision of the first, in place: weights stay in float32."""
        module = filters[case]
        before = {name: weight.clone() for name, weight in module.state_dict().items()}
        module.half()
        assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
        assert {weight.device.type for weight in copy.deepcopy(module).to("meta", torch.half).buffers()} == {"meta"}
        vectors = torch.as_tensor(embedded[1])
        exact = torch.as_tensor(applied(module, vectors.double()))
        for dtype, apart in ((torch.bfloat16, 2e-2), (torch.float32, 1e-6)):
            found = module({"sentence_embedding": vectors.to(dtype)})["sentence_embedding"]
            assert found.dtype == dtype
            assert (1 - torch.cosine_similarity(found.double(), exact)).max() < apart

    def test_what_is_refused(self, filters, case, tmp_path):
        kind = type(filters[case])
        with pytest.raises(ValueError, match="maps embeddings of 32 values and was given 16: put it right behind"):
            filters[case]({"sentence_embedding": torch.zeros(1, 16)})
        filters[case].save(str(tmp_path))
        change(tmp_path / "config.json", in_features=10**9)
        said = rf"^{tmp_path} is not a saved \w+: config.json says .*1000000000.* two modules; save the model again\.$"
        with pytest.raises(ValueError, match=said):
            kind.load(str(tmp_path))


VARIED = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
ALIKE = VARIED * torch.tensor([1.0] * 3 + [0] * 3)


def fit(kind, vectors, **settings):
    return kind.from_moments(moments_of(vectors), **settings)


EYE, ZEROS, ONES = torch.eye(4), torch.zeros, torch.ones


REFUSED = [
    # What cannot be fitted
    (lambda: fit(WhiteningTransform, VARIED, dimension=0), "dimension=0: give a whole number from 1 to 6"),
    (lambda: fit(WhiteningTransform, VARIED[:5], dimension=5, shrinkage=0), "5 texts vary in 4 directions only"),
    (lambda: fit(WhiteningTransform, VARIED[:1].repeat(7, 1)), "7 texts were given, and their embeddings do not d"),
    (lambda: fit(AllButTheTop, VARIED[:4], removed=3), "4 texts are too few to find 3 principal directions"),
    (lambda: fit(PartwiseWhitening, VARIED, shares=()), "shares=(): give how much each part counts, numbers above"),
    (lambda: fit(PartwiseWhitening, VARIED, shares=(0.25,) * 4), "embeddings of 6 values cannot be cut into 4 equ"),
    (lambda: fit(PartwiseWhitening, VARIED, shares=(1,), shrinkage=0), "shrinkage=0: give a number above 0"),
    (lambda: fit(PartwiseWhitening, ALIKE, shares=(0.5, 0.5)), "A part of the embeddings is the same for all 9"),
    (lambda: Moments(5).add(ZEROS(2, 4)), "The vectors are (2, 4): give (B, 5)"),
    (lambda: Moments(5).add(torch.full((2, 5), float("nan"))), "load the model in bfloat16 or float32"),
    # Weights that are none
    (
        lambda: AllButTheTop(ZEROS(4), ZEROS(4, 3)),
        "mean is (4,) and directions is (4, 3): give (D,) and (n, D) with n at most D",
    ),
    (lambda: IdfWeights(ZEROS(2, 2)), "weights is (2, 2): give (V,)"),
    (lambda: EmbeddingFilter(ZEROS(4), 0), "directions is (4,): give (k, D)"),
    (lambda: EmbeddingFilter(ZEROS(5, 4), 0), "directions is (5, 4): give (k, D) with k at most D"),
    (lambda: EmbeddingFilter(EYE[:3], 2), "low=2: give a whole number from 0 to 1"),
    (lambda: EmbeddingFilter(torch.full((1, 4), 3e38), 0), "the value 3e+38, and weights are numbers not beyond 1"),
    (lambda: Centering(ZEROS(2, 2)), "mean is (2, 2): give (D,)"),
    (lambda: Standardization(ZEROS(2), ONES(3)), "mean is (2,) and deviation is (3,): give (D,) and (D,)"),
    (lambda: Standardization(ZEROS(2), ZEROS(2)), "A deviation is 0 or below"),
    (lambda: IdfWeights(-ONES(2)), "A weight is below 0"),
    (
        lambda: PartwiseWhitening(ZEROS(4), ZEROS(4, 4), [1.0]),
        "mean is (4,) and weight is (4, 4): give (P, D) and (P, D, D)",
    ),
    (lambda: PartwiseWhitening(ZEROS(2, 2), ZEROS(2, 2, 2), [1.0]), "shares=[1.0] for 2 parts: give one for"),
    (lambda: StandardizedSum(ZEROS(1, 4), ZEROS(1, 3), [1.0]), "mean is (1, 4) and scale is (1, 3)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


REFUSED_OF_A_MODEL = [
    (lambda model: embedding_moments(model, "one text"), "texts is one string: give an iterable of texts"),
    (lambda model: embedding_moments(model, []), "No texts were given"),
    (lambda model: EmbeddingFilter.from_language_model(model, keep=(20, 20)), "keep=(20, 20): give (low, high) wi"),
    (lambda model: IdfWeights.fit(model[0], []), "No texts with tokens were given"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED_OF_A_MODEL)
def test_what_is_refused_of_a_model(make, message, model):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(model)


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    offset=st.sampled_from([0.0, 1e4, 1e8]),
    dtype=st.sampled_from([torch.bfloat16, torch.float64]),
)
def test_batches_do_not_matter(seed, sizes, offset, dtype):
    """In whatever batches the vectors come: numpy's, of all at once, in double.

    Where the mean dwarfs the spread, sums of squares would cancel to nothing.
    """
    vectors = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    vectors = vectors.to(dtype)
    found, expected = Moments(5), vectors.double().numpy()
    for batch in vectors.split(sizes):
        found.add(batch)
    spread = np.abs(expected - expected.mean(axis=0)).max() + 1e-12
    assert found.count == len(expected)
    assert np.allclose(found.mean, expected.mean(axis=0), rtol=1e-12, atol=1e-9 * spread)
    assert np.allclose(found.covariance, np.cov(expected.T, bias=True), rtol=1e-6, atol=1e-9 * spread**2)


def test_moments_of_embeddings_in_chunks(model, monkeypatch):
    """Behind a prompt, too; texts without tokens do not count, and a truncation is put aside and back."""
    model.truncate_dim = 4
    monkeypatch.setattr("st_reba.moments.CHUNK", 3)
    moments = embedding_moments(model, iter(["", *TEXTS * 3, ""]), batch_size=2, prompt="so: ")
    assert model.truncate_dim == 4
    model.truncate_dim = None
    vectors = model.encode(TEXTS * 3, prompt="so: ")
    assert moments.count == len(vectors)
    assert np.allclose(moments.mean, vectors.mean(axis=0), atol=1e-5)
    assert np.allclose(moments.covariance, np.cov(vectors.T, bias=True), rtol=1e-4, atol=1e-5)


FIT = [*TEXTS, "the dog and the cat", "I love the cat", "我爱猫。"]


def weighed(module) -> SentenceTransformer:
    parts = [module, IdfWeights.fit(module, FIT), Pooling(module.get_embedding_dimension(), "mean")]
    return SentenceTransformer(modules=parts, device="cpu")


class TestIdfWeights:
    @pytest.mark.parametrize("recipe", ["classical", "bag", "echo-3 repeated", "reba-2"])
    def test_oracle(self, recipe, shared, token_ids):
        """And a text without tokens stays a zero vector."""
        kind, arguments = RECIPES[recipe]
        module = kind(shared(), **arguments)
        tokens = pipeline(module).encode(TEXTS, output_value="token_embeddings")
        fit_ids = [token_ids(text) for text in FIT]
        expected = [
            idf_weighted_mean(fit_ids, ids * (len(rows) // len(ids)), rows)
            for ids, rows in zip(map(token_ids, TEXTS), tokens, strict=True)
        ]
        *found, nothing = weighed(module).encode([*TEXTS, ""])
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert not nothing.any()

    @pytest.mark.parametrize("over", ["text", "all", "whole"])
    def test_what_is_handed_on_is_what_counts(self, over, shared):
        """Of a template's own words, those behind the text may be handed on, those before it not, or with all."""
        module = EchoModule(shared(), template="the dog: {text} again: {text} in a word", pool_over=over)
        with torch.no_grad():
            handed = module.eval()(module.preprocess(FIT))
        rows = zip(handed["input_ids"].tolist(), handed["attention_mask"].sum(dim=1).tolist(), strict=True)
        texts = [set(ids[:count]) for ids, count in rows]
        weights = IdfWeights.fit(module, ["", *FIT]).weights
        assert torch.allclose(weights, torch.tensor([idf(texts, token) for token in range(len(weights))]))

    def test_the_language_model_is_not_run(self, shared, monkeypatch):
        module = CausalTransformer(shared())
        monkeypatch.setattr(CausalTransformer, "forward", lambda *_, **__: pytest.fail("the model was run"))
        whole = IdfWeights.fit(module, FIT)
        monkeypatch.setattr("st_reba.moments.CHUNK", 3)
        chunks = IdfWeights.fit(module, iter(FIT))
        assert torch.equal(chunks.weights, whole.weights)
        assert len(chunks.weights) == VOCABULARY

    def test_of_early_and_late_they_are_of_the_early_half(self, shared):
        plain, found = (make(EarlyLateModule(shared())).encode(TEXTS) for make in (pipeline, weighed))
        assert relative_error(found[:, 32:], plain[:, 32:]) < 1e-5
        assert relative_error(found[:, :32], plain[:, :32]) > 1e-3

    def test_what_is_refused(self, shared):
        with pytest.raises(ValueError, match='CausalTransformer returns one token alone, rows="last"'):
            IdfWeights.fit(CausalTransformer(shared(), rows="last"), TEXTS)
        features = {"input_ids": torch.tensor([[7]]), "token_embeddings": ONES(1, 1, 2), "attention_mask": ONES(1, 1)}
        with pytest.raises(ValueError, match="IdfWeights has weights for 5 token ids and was given the id 7"):
            IdfWeights(ONES(5))(features)
