"""The papers' losses beside their equations, written out naively."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder, TwinTower
from st_reba.train.losses import (
    ContrastiveAngleLoss,
    EmbeddingCoSENTLoss,
    InfoNCELoss,
    InteractionInfoNCELoss,
    JTCSELoss,
    LogResidualVarianceLoss,
    PairScoreMSELoss,
    ReconstructionLoss,
    TensorModulusLoss,
    pair_scores,
)

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error

LABELS = torch.tensor([0.0, 0.3, 1.0, 0.6, 0.2])


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_contrastive_and_angle():
    """BeLLM's Equation 6, with ST's loss too, and AnglE's loss, each with its weight."""
    embeddings = [part.requires_grad_() for part in vectors(3, 5, 8)]
    loss = ContrastiveAngleLoss(None, temperature=0.1, contrastive_weight=20.0, angle_weight=2.0, angle_scale=7.0)
    found = loss.compute_loss_from_embeddings(embeddings)
    found["alone"] = MultipleNegativesRankingLoss(None, scale=10).compute_loss_from_embeddings(embeddings, None)
    # The paper sums over the batch.
    equation_6 = oracles.equation_6(*embeddings, 0.1) / 5
    angle = oracles.angle_loss(*embeddings, 7.0)
    for name, value in (("contrastive", 20 * equation_6), ("angle", 2 * angle), ("alone", equation_6)):
        assert relative_error(found[name].detach(), value.detach()) < 1e-10
        gradients = torch.autograd.grad(found[name], embeddings, retain_graph=True)
        for gradient, other in zip(gradients, torch.autograd.grad(value, embeddings, retain_graph=True), strict=True):
            assert relative_error(gradient, other) < 1e-8
    for left in ("contrastive", "angle"):
        assert left not in ContrastiveAngleLoss(None, **{f"{left}_weight": 0}).compute_loss_from_embeddings(embeddings)
    with pytest.raises(ValueError, match="2 columns of texts were given: it takes triplets, which have three"):
        loss.compute_loss_from_embeddings(embeddings[:2])
    assert loss.get_config_dict() == {
        "scale": 10.0, "angle_scale": 7.0, "contrastive_weight": 20.0, "angle_weight": 2.0,
        "gather_across_devices": False,
    }  # fmt: skip
    assert "Angle-optimized" in loss.citation


NAN, NO_WEIGHTS = float("nan"), "give numbers of 0 or more, at least one of them greater than 0"


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (ContrastiveAngleLoss, {"angle_weight": -1}, NO_WEIGHTS),
        (ContrastiveAngleLoss, {"angle_weight": 0, "contrastive_weight": 0}, NO_WEIGHTS),
        (LogResidualVarianceLoss, {"epsilon": 0}, "epsilon=0: give a number above 0"),
        (InfoNCELoss, {"temperature": 0}, "temperature=0: give a number greater than 0"),
        (TensorModulusLoss, {"least_cosine": NAN}, "least_cosine=nan: give a number between 0 and 1"),
        (JTCSELoss, {"info_nce_weight": 0, "interaction_weight": 0, "modulus_weight": 0}, NO_WEIGHTS),
    ],
)
def test_numbers_that_are_refused(loss, settings, message, encoder_paths):
    towers = pipeline(TwinTower(*encoder_paths()), "cls")
    model = {InfoNCELoss: [], TensorModulusLoss: [], JTCSELoss: [towers]}.get(loss, [None])
    with pytest.raises(ValueError, match=message):
        loss(*model, **settings)


class TestFreeze:
    @pytest.fixture
    def model(self, backbone_path):
        torch.manual_seed(0)
        modules = [LayerStates(backbone_path()), LayerwiseAutoencoder(3, 32, decoders=True)]
        return SentenceTransformer(modules=modules, device="cpu")

    @pytest.fixture
    def plain(self, backbone_path):
        return pipeline(LayerStates(backbone_path()))

    def columns(self, model):
        return [model.preprocess(TEXTS), model.preprocess(TEXTS[::-1])]

    def embeddings(self, model):
        return [model(column)["sentence_embedding"] for column in self.columns(model)]

    @pytest.mark.parametrize("epsilon", [1e-6, 0.1])
    def test_log_residual_variance(self, epsilon, model):
        loss = LogResidualVarianceLoss(model, epsilon=epsilon)
        predictions = pair_scores(model, self.columns(model))
        expected = oracles.log_residual_variance(predictions, LABELS, epsilon)
        assert torch.allclose(loss(self.columns(model), LABELS), expected, atol=1e-5)
        assert torch.allclose(loss.compute_loss_from_scores(predictions + 0.4, LABELS), expected, atol=1e-4)
        assert loss.get_config_dict() == {"epsilon": epsilon}

    @pytest.mark.parametrize("count", [1, 5])
    def test_nothing_left_to_explain_is_finite(self, count, model):
        predictions = LABELS[:count].clone().requires_grad_()
        value = LogResidualVarianceLoss(model).compute_loss_from_scores(predictions, LABELS[:count])
        value.backward()
        assert value.item() == pytest.approx(-13.8, abs=0.1)
        assert not predictions.grad.any()

    def test_mean_squared_error_of_the_heads_score_or_else_the_cosine(self, model, plain):
        predictions = pair_scores(model, self.columns(model))
        assert torch.allclose(predictions, model[-1].scores(*self.embeddings(model)), atol=1e-6)
        expected = sum((one - other) ** 2 for one, other in zip(predictions, LABELS, strict=True)) / 5
        assert torch.allclose(PairScoreMSELoss(model)(self.columns(model), LABELS), expected)
        cosines = torch.cosine_similarity(*self.embeddings(plain))
        assert torch.allclose(pair_scores(plain, self.columns(plain)), cosines, atol=1e-6)

    def test_cosent_trains_the_embedding_and_the_head_behind_it(self, model, plain):
        embeddings = self.embeddings(model)
        ranking = CoSENTLoss(model, scale=7).compute_loss_from_embeddings(embeddings, LABELS)
        squares = (model[-1].scores(*embeddings) - LABELS).square().mean()
        weights = dict(model[-1].named_parameters())
        encoders = {name: weight for name, weight in weights.items() if name.startswith("encoder")}
        expected = torch.autograd.grad(ranking, list(encoders.values()), retain_graph=True)
        loss = EmbeddingCoSENTLoss(model, scale=7)(self.columns(model), LABELS)
        assert torch.allclose(loss, ranking + squares, atol=1e-4)
        loss.backward()
        for (name, weight), own in zip(encoders.items(), expected, strict=True):
            assert torch.allclose(weight.grad, own, atol=1e-4), name
        assert all(weight.grad.any() for name, weight in weights.items() if name.startswith("head"))
        expected = CoSENTLoss(plain, scale=5).compute_loss_from_embeddings(self.embeddings(plain), LABELS)
        assert torch.allclose(EmbeddingCoSENTLoss(plain)(self.columns(plain), LABELS), expected, atol=1e-4)

    def test_reconstruction(self, model):
        loss = ReconstructionLoss(model)
        states = model[0](model.preprocess(TEXTS))["layer_states"]
        expected = oracles.reconstruction_error(model[1], states).mean()
        assert torch.allclose(loss([model.preprocess(TEXTS)]), expected, atol=1e-5)
        assert torch.allclose(loss([{"layer_states": states}], None), expected, atol=1e-5)

    def test_models_and_columns_that_they_refuse(self, model, plain):
        with pytest.raises(ValueError, match="3 columns of texts were given: a similarity is one of two"):
            PairScoreMSELoss(model)([*self.columns(model), *self.columns(model)[:1]], LABELS)
        bare = SentenceTransformer(modules=[model[0], model[1].without_decoders()], device="cpu")
        for other, last in ((plain, "Pooling"), (bare, "LayerwiseAutoencoder")):
            with pytest.raises(ValueError, match=f"The model ends in {last}, which has no decoders"):
                ReconstructionLoss(other)


class TestInfoNCE:
    @given(batch=st.integers(1, 6), width=st.integers(1, 5), temperature=st.floats(0.03, 3), seed=st.integers(0, 99))
    def test_oracle(self, batch, width, temperature, seed):
        anchors, positives = vectors(2, batch, width, seed=seed)
        found = InfoNCELoss(temperature)(anchors, positives)
        assert torch.allclose(found, oracles.info_nce(anchors, positives, temperature))
        assert torch.allclose(found, InfoNCELoss(temperature)(7 * anchors, positives / 3))


class TestInteraction:
    STREAMS = tuple((vectors(4, 2, 3, seed=seed), vectors(4, 2, 3, seed=seed + 1)) for seed in (1, 3))

    def throws(self, loss: InteractionInfoNCELoss, count: int, streams=STREAMS) -> list[int]:
        """Which tower was the anchor, beside the loss with either as the anchor."""
        expected = torch.stack(
            [
                sum(oracles.info_nce(first[:, own], second[:, 1 - own], 0.05) for first, second in streams)
                for own in (0, 1)
            ]
        )
        assert abs(expected[0] - expected[1]) > 1e-3
        values = torch.stack([loss(*streams) for _ in range(count)])
        sides = (expected - values[:, None]).abs().argmin(dim=1)
        assert torch.allclose(values, expected[sides])
        return sides.tolist()

    def test_oracle_on_either_side(self):
        assert set(self.throws(InteractionInfoNCELoss(), 12, self.STREAMS[:1])) == {0, 1}

    def test_the_coin_is_fair_seeded_and_apart_from_other_randomness(self):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = self.throws(InteractionInfoNCELoss(seed=3), 200)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        again, other = (self.throws(InteractionInfoNCELoss(seed=seed), 30) for seed in (3, 4))
        assert first[:30] == again != other
        assert 70 < sum(first) < 130


class TestTensorModulus:
    def near(self, seed: int) -> list[torch.Tensor]:
        """States whose cosines are greater than 0, where the loss is smooth."""
        h, noise, p, p_plus = vectors(4, 3, 2, 4, seed=seed)
        # The towers are near each other, too.
        h = h[:, :1] + 0.1 * h
        return [part.requires_grad_() for part in (h.detach(), (h + 0.2 * noise).detach(), p, p_plus)]

    @given(batch=st.integers(1, 5), width=st.integers(1, 5), seed=st.integers(0, 99))
    def test_oracle(self, batch, width, seed):
        h, h_plus, p, p_plus = vectors(4, batch, 2, width, seed=seed)
        expected = oracles.tensor_modulus(h[:, 0], h_plus[:, 1], p[:, 0], p_plus[:, 1])
        expected = expected + oracles.tensor_modulus(h[:, 1], h_plus[:, 0], p[:, 1], p_plus[:, 0])
        assert torch.allclose(TensorModulusLoss()(h, h_plus, p, p_plus), expected)

    def test_opposite_states_have_no_gradient_and_a_bounded_loss(self):
        h, _, p, p_plus = self.near(0)
        loss = TensorModulusLoss()(h, -h.detach(), p, p_plus)
        (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
        assert not gradient.any()
        # -log of the floor, twice, times a ratio that is at most 1.
        assert 0 < loss < 2 * 9.22
        assert torch.autograd.grad(loss, p)[0].any()

    def test_vanished_pooler_outputs_are_no_nan(self):
        h, h_plus, p, _ = (part.detach() for part in self.near(1))
        nothing = torch.zeros_like(p).requires_grad_()
        loss = TensorModulusLoss()(h, h_plus, nothing, nothing)
        loss.backward()
        assert loss == 0
        assert nothing.grad.isfinite().all()


class TestJTCSE:
    @pytest.fixture
    def model(self, encoder_paths):
        return pipeline(TwinTower(*encoder_paths(), cross_every=2), "cls")

    def views(self, model, texts):
        """(h, p, c), each a pair of towers' (B, D), of single texts."""
        rows = []
        for text in texts:
            with torch.no_grad():
                states, streams, pooled, _ = oracles.twin_tower(*model[0].towers, model.tokenizer(text)["input_ids"], 2)
            rows.append([[part[0] for part in states], pooled, [part[0] for part in streams]])
        return [[torch.stack([row[kind][tower] for row in rows]) for tower in (0, 1)] for kind in range(3)]

    @pytest.mark.parametrize("columns", [1, 2])
    def test_oracle(self, columns, model):
        """Without dropout, two columns are two views; one column is twice the same."""
        model.eval()
        texts = [["a cat", TEXTS[3]], [TEXTS[3], "the dog"]][:columns]
        found = JTCSELoss(model)([model.preprocess(column) for column in texts])
        first, second = self.views(model, texts[0]), self.views(model, texts[-1])
        coin = torch.Generator().manual_seed(42)
        # The towers' roles: 0 has tower I as the anchor, which is R = 1.
        expected = oracles.jtcse(first, second, 1 - int(torch.randint(2, (1,), generator=coin)))
        for name, value in zip(("info_nce", "interaction", "modulus"), expected, strict=True):
            assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-4), name

    def test_dropout_makes_the_views_and_both_towers_learn(self, model):
        features = [model.preprocess(TEXTS)]
        model.eval()
        same = JTCSELoss(model)(features)["info_nce"]
        model.train()
        torch.manual_seed(0)
        first, second = (JTCSELoss(model)(features) for _ in range(2))
        assert len({value.item() for value in (same, first["info_nce"], second["info_nce"])}) == 3
        sum(second.values()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name

    @pytest.mark.parametrize("left", ["info_nce", "interaction", "modulus"])
    def test_terms_by_their_weights(self, left, model):
        """The ablations of Table X, and weights beside 1."""
        model.eval()
        features = [model.preprocess(TEXTS)]
        full = JTCSELoss(model)(features)
        found = JTCSELoss(model, **{f"{name}_weight": 2.0 if name == left else 0.0 for name in full})(features)
        assert list(found) == [left]
        assert torch.allclose(found[left], 2 * full[left])

    def test_what_it_refuses_and_tells_a_card(self, model, backbone_path):
        with pytest.raises(ValueError, match="the model's first module is CausalTransformer: use a TwinTower"):
            JTCSELoss(pipeline(CausalTransformer(backbone_path())))
        with pytest.raises(ValueError, match="The data has 3 columns of text: JTCSELoss takes one, or two"):
            JTCSELoss(model)([model.preprocess(TEXTS)] * 3)
        assert JTCSELoss(model, temperature=0.1, seed=3).get_config_dict() == {
            "temperature": 0.1, "info_nce_weight": 1.0, "interaction_weight": 1.0, "modulus_weight": 1.0,
            "least_cosine": 1e-4, "seed": 3,
        }  # fmt: skip
