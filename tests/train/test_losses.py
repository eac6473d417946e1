"""The papers' losses beside their equations, written out naively; and a run of JTCSE."""

from __future__ import annotations

import json

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder, TwinTower
from st_reba.train import JTCSETraining, losses, train_jtcse

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline
from . import check_card, stop

LABELS = torch.tensor([0.0, 0.3, 1.0, 0.6, 0.2])


def equation_6(anchors, positives, negatives, temperature):
    """BeLLM, Eq. 6: rows are h_i, h_i^+ and h_i^-; the sum over i, as it is written."""
    return len(anchors) * info_nce(anchors, [*positives, *negatives], temperature)


def log_residual_variance(predictions, labels, epsilon):
    """FREEZE's loss: the log of the mean squared distance of the residuals from their mean."""
    residuals = [prediction - label for prediction, label in zip(predictions, labels, strict=True)]
    mean = sum(residuals) / len(residuals)
    variance = sum((residual - mean) ** 2 for residual in residuals) / len(residuals)
    return torch.log(variance + epsilon)


def cosine(first, second):
    return first @ second / (first.norm() * second.norm())


def info_nce(anchors, positives, temperature):
    """Eq. 11, a text at a time."""
    total = torch.zeros(())
    for i, anchor in enumerate(anchors):
        exponentials = [torch.exp(cosine(anchor, positive) / temperature) for positive in positives]
        total = total - torch.log(exponentials[i] / sum(exponentials))
    return total / len(anchors)


def modulus(own, other, own_pooled, other_pooled, least=1e-4):
    """Eq. 13, one way: ``own`` of one tower, ``other`` the positives of the other."""
    total = 0
    for h, h_plus, p, p_plus in zip(own, other, own_pooled, other_pooled, strict=True):
        coefficient = -torch.log(torch.clamp(cosine(h, h_plus), min=least))
        total = total + coefficient * (p - p_plus).norm() / (p.norm() + p_plus.norm())
    return total / len(own)


def jtcse(first, second, coin, temperature=0.05):
    """Eq. 15. ``first`` and ``second`` are views: (h, p, c), each a pair of towers' (B, D); coin is R."""
    (h, p, c), (h_plus, p_plus, c_plus) = first, second
    nce = sum(info_nce(h[tower], h_plus[tower], temperature) for tower in (0, 1))
    own, other = (0, 1) if coin == 1 else (1, 0)
    interaction = sum(info_nce(s[own], s_plus[other], temperature) for s, s_plus in ((h, h_plus), (c, c_plus)))
    of_moduli = modulus(h[0], h_plus[1], p[0], p_plus[1]) + modulus(h[1], h_plus[0], p[1], p_plus[0])
    return nce, interaction, of_moduli


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_bellms_loss_is_st_s():
    """Equation 6, which the paper sums over the batch."""
    embeddings = list(vectors(3, 5, 8))
    found = MultipleNegativesRankingLoss(None, scale=10).compute_loss_from_embeddings(embeddings, None)
    assert torch.allclose(found, equation_6(*embeddings, 0.1) / 5)


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

    def test_log_residual_variance(self, model):
        loss = losses.LogResidualVarianceLoss(model)
        predictions = losses.pair_scores(model, self.columns(model))
        expected = log_residual_variance(predictions, LABELS, 1e-6)
        assert torch.allclose(loss(self.columns(model), LABELS), expected, atol=1e-5)
        assert torch.allclose(loss.compute_loss_from_scores(predictions + 0.4, LABELS), expected, atol=1e-4)
        # Nothing left to explain is finite.
        predictions = LABELS.clone().requires_grad_()
        loss.compute_loss_from_scores(predictions, LABELS).backward()
        assert not predictions.grad.any()

    def test_mean_squared_error_of_the_heads_score_or_else_the_cosine(self, model, plain):
        predictions = losses.pair_scores(model, self.columns(model))
        assert torch.allclose(predictions, model[-1].scores(*self.embeddings(model)), atol=1e-6)
        expected = sum((one - other) ** 2 for one, other in zip(predictions, LABELS, strict=True)) / 5
        assert torch.allclose(losses.PairScoreMSELoss(model)(self.columns(model), LABELS), expected)
        cosines = torch.cosine_similarity(*self.embeddings(plain))
        assert torch.allclose(losses.pair_scores(plain, self.columns(plain)), cosines, atol=1e-6)

    def test_cosent_trains_the_embedding_and_the_head_behind_it(self, model, plain):
        embeddings = self.embeddings(model)
        ranking = CoSENTLoss(model, scale=7).compute_loss_from_embeddings(embeddings, LABELS)
        head = [weight for name, weight in model[-1].named_parameters() if name.startswith("head")]
        squares = (model[-1].scores(*embeddings) - LABELS).square().mean()
        loss = losses.EmbeddingCoSENTLoss(model, scale=7)(self.columns(model), LABELS)
        assert torch.allclose(loss, ranking + squares, atol=1e-4)
        assert all(gradient.any() for gradient in torch.autograd.grad(loss, head))
        expected = CoSENTLoss(plain, scale=5).compute_loss_from_embeddings(self.embeddings(plain), LABELS)
        assert torch.allclose(losses.EmbeddingCoSENTLoss(plain)(self.columns(plain), LABELS), expected, atol=1e-4)

    def test_reconstruction(self, model):
        loss = losses.ReconstructionLoss(model)
        states = model[0](model.preprocess(TEXTS))["layer_states"]
        expected = oracles.reconstruction_error(model[1], states).mean()
        assert torch.allclose(loss([model.preprocess(TEXTS)]), expected, atol=1e-5)
        assert torch.allclose(loss([{"layer_states": states}], None), expected, atol=1e-5)

    def test_models_and_columns_that_they_refuse(self, model, plain):
        with pytest.raises(ValueError, match="3 columns of texts were given, but a similarity needs two"):
            losses.PairScoreMSELoss(model)([*self.columns(model), *self.columns(model)[:1]], LABELS)
        bare = SentenceTransformer(modules=[model[0], model[1].without_decoders()], device="cpu")
        for other, last in ((plain, "Pooling"), (bare, "LayerwiseAutoencoder")):
            with pytest.raises(ValueError, match=f"The model ends in {last}, which has no decoders"):
                losses.ReconstructionLoss(other)


def test_the_coin_is_fair_seeded_and_apart_from_other_randomness():
    """It decides in each batch which tower is the anchor, of all streams."""
    streams = [(vectors(4, 2, 3, seed=seed), vectors(4, 2, 3, seed=seed + 1)) for seed in (1, 3)]
    sides = [sum(info_nce(one[:, own], other[:, 1 - own], 0.05) for one, other in streams) for own in (0, 1)]
    expected = torch.stack(sides)
    assert abs(expected[0] - expected[1]) > 1e-3

    def throws(seed: int, count: int) -> list[int]:
        loss = losses.InteractionInfoNCELoss(seed=seed)
        values = torch.stack([loss(*streams) for _ in range(count)])
        sides = (expected - values[:, None]).abs().argmin(dim=1)
        assert torch.allclose(values, expected[sides])
        return sides.tolist()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = throws(3, 60)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert first[:30] == throws(3, 30) != throws(4, 30)
    assert 15 < sum(first) < 45


def test_opposite_states_and_vanished_pooler_outputs_are_no_nan():
    h, p, p_plus = (part.requires_grad_() for part in vectors(3, 3, 2, 4))
    loss = losses.tensor_modulus(h, -h.detach().flip(1), p, p_plus, 1e-4)
    (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert not gradient.any()
    # -log of the floor, twice, times a ratio that is at most 1.
    assert 0 < loss < 2 * 9.22
    nothing = torch.zeros_like(p).requires_grad_()
    loss = losses.tensor_modulus(h, h, nothing, nothing, 1e-4)
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
        found = losses.JTCSELoss(model)([model.preprocess(column) for column in texts])
        first, second = self.views(model, texts[0]), self.views(model, texts[-1])
        coin = torch.Generator().manual_seed(42)
        # The towers' roles: 0 has tower I as the anchor, which is R = 1.
        expected = jtcse(first, second, 1 - int(torch.randint(2, (1,), generator=coin)))
        for name, value in zip(("info_nce", "interaction", "modulus"), expected, strict=True):
            assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-4), name

    def test_dropout_makes_the_views_and_both_towers_learn(self, model):
        features = [model.preprocess(TEXTS)]
        model.eval()
        same = losses.JTCSELoss(model)(features)["info_nce"]
        model.train()
        torch.manual_seed(0)
        first, second = (losses.JTCSELoss(model)(features) for _ in range(2))
        assert len({value.item() for value in (same, first["info_nce"], second["info_nce"])}) == 3
        sum(second.values()).backward()
        assert all(part.grad.isfinite().all() and part.grad.any() for part in model.parameters())

    def test_terms_by_their_weights(self, model):
        """The ablations of Table X, and weights beside 1."""
        features = [model.eval().preprocess(TEXTS)]
        full = losses.JTCSELoss(model)(features)
        for left in full:
            weights = {f"{name}_weight": 2.0 if name == left else 0.0 for name in full}
            found = losses.JTCSELoss(model, **weights)(features)
            assert list(found) == [left]
            assert torch.allclose(found[left], 2 * full[left])

    def test_what_it_refuses_and_tells_a_card(self, model, backbone_path):
        with pytest.raises(ValueError, match="the model's first module is CausalTransformer. Give a model that"):
            losses.JTCSELoss(pipeline(CausalTransformer(backbone_path())))
        with pytest.raises(ValueError, match="The data has 3 columns of text. Give one, or two with"):
            losses.JTCSELoss(model)([model.preprocess(TEXTS)] * 3)
        none = {"info_nce_weight": 0, "interaction_weight": 0, "modulus_weight": 0}
        for wrong, said in (
            ({"temperature": 0}, "temperature\n.*greater than 0"), (none, "All weights are 0: give"),
            ({"least_cosine": 1.0}, "least_cosine\n.*less than 1"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                losses.JTCSELoss(model, **wrong)
        told = losses.JTCSELoss(model, temperature=0.1, seed=3).get_config_dict()
        assert (told["temperature"], told["modulus_weight"], told["seed"]) == (0.1, 1.0, 3)


def test_a_resumed_run_is_the_run_and_what_is_written(encoder_paths, tmp_path):
    """With dropout, and the coin of the interaction loss, which has a generator of its own; with moved data."""
    path, pairs, out = (tmp_path / name for name in ("texts.txt", "dev.tsv", "parts"))
    path.write_text("\n".join(f"{text} {number}" for number in range(2) for text in TEXTS), encoding="utf-8")
    pairs.write_text("".join(f"{text}\t{TEXTS[0]}\t{score}\n" for score, text in enumerate(TEXTS)), encoding="utf-8")
    towers = dict(zip(("model", "second_model"), encoder_paths(num_hidden_layers=2), strict=True))
    given = {**towers, "texts": str(path), "evaluation": str(pairs), "cross_every": 1, "max_seq_length": 9}
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 2, "save_steps": 2}

    def settings(changes=(), **arguments):
        return JTCSETraining(**{**given, **dict(changes)}, arguments={**usual, "eval_steps": 3, **arguments})

    expected = train_jtcse(settings(save_steps=6), tmp_path / "whole", progress=False).state_dict()
    stop(train_jtcse, settings(), out, 5)
    given["texts"] = str(path.rename(tmp_path / "moved.txt"))
    with pytest.raises(ValueError, match="of a run with temperature=0.05, but this run has temperature=0.1"):
        train_jtcse(settings({"temperature": 0.1}), out, progress=False)
    model = train_jtcse(settings(save_steps=3), out, progress=False)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    before = TwinTower(*towers.values()).state_dict()
    assert sum(not torch.equal(value, expected[f"0.{name}"]) for name, value in before.items()) > len(before) / 2
    loaded = SentenceTransformer(str(out / "model"), device="cpu")
    assert (loaded[0].cross_every, loaded.max_seq_length) == (1, 9)
    assert (loaded.encode(TEXTS) == model.to("cpu").encode(TEXTS)).all()
    log = json.loads((out / "checkpoints/checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_dev_spearman_cosine" in entry] == [3, 6]
    assert {"info_nce", "interaction", "modulus"} <= set(log[0])
    check_card(out / "model", "**JTCSE**", "JTCSELoss")
