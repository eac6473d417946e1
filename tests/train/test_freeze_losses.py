from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

from st_reba import LayerStates, LayerwiseAutoencoder
from st_reba.train.losses import (
    EmbeddingCoSENTLoss,
    LogResidualVarianceLoss,
    PairScoreMSELoss,
    ReconstructionLoss,
    pair_scores,
)

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline


@pytest.fixture
def model(backbone_path):
    torch.manual_seed(0)
    modules = [LayerStates(backbone_path()), LayerwiseAutoencoder(3, 32, decoders=True)]
    return SentenceTransformer(modules=modules, device="cpu")


def columns(model):
    return [model.preprocess(TEXTS), model.preprocess(TEXTS[::-1])]


LABELS = torch.tensor([0.0, 0.3, 1.0, 0.6, 0.2])


@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_log_residual_variance(epsilon, model):
    loss = LogResidualVarianceLoss(model, epsilon=epsilon)
    predictions = pair_scores(model, columns(model))
    expected = oracles.log_residual_variance(predictions, LABELS, epsilon)
    assert torch.allclose(loss(columns(model), LABELS), expected, atol=1e-5)
    assert torch.allclose(loss.compute_loss_from_scores(predictions + 0.4, LABELS), expected, atol=1e-4)
    assert loss.get_config_dict() == {"epsilon": epsilon}


def test_gradients_of_log_residual_variance(model):
    loss = LogResidualVarianceLoss(model)
    predictions = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: loss.compute_loss_from_scores(given, LABELS), predictions)


@pytest.mark.parametrize("count", [1, 5])
def test_nothing_left_to_explain_is_finite(count, model):
    predictions = LABELS[:count].clone().requires_grad_()
    value = LogResidualVarianceLoss(model).compute_loss_from_scores(predictions, LABELS[:count])
    value.backward()
    assert value.item() == pytest.approx(-13.8, abs=0.1)
    assert not predictions.grad.any()


def test_mean_squared_error(model):
    predictions = pair_scores(model, columns(model))
    expected = sum((one - other) ** 2 for one, other in zip(predictions, LABELS, strict=True)) / 5
    assert torch.allclose(PairScoreMSELoss(model)(columns(model), LABELS), expected)


def test_cosent_trains_the_embedding_and_the_head_behind_it(model, backbone_path):
    embeddings = [model(column)["sentence_embedding"] for column in columns(model)]
    ranking = CoSENTLoss(model, scale=7).compute_loss_from_embeddings(embeddings, LABELS)
    squares = (model[-1].scores(*embeddings) - LABELS).square().mean()
    weights = dict(model[-1].named_parameters())
    encoders = {name: weight for name, weight in weights.items() if name.startswith("encoder")}
    expected = torch.autograd.grad(ranking, list(encoders.values()), retain_graph=True)
    loss = EmbeddingCoSENTLoss(model, scale=7)(columns(model), LABELS)
    assert torch.allclose(loss, ranking + squares, atol=1e-4)
    loss.backward()
    for (name, weight), own in zip(encoders.items(), expected, strict=True):
        assert torch.allclose(weight.grad, own, atol=1e-4), name
    assert all(weight.grad.any() for name, weight in weights.items() if name.startswith("head"))
    plain = pipeline(LayerStates(backbone_path()))
    embeddings = [plain(column)["sentence_embedding"] for column in columns(plain)]
    expected = CoSENTLoss(plain, scale=5).compute_loss_from_embeddings(embeddings, LABELS)
    assert torch.allclose(EmbeddingCoSENTLoss(plain)(columns(plain), LABELS), expected, atol=1e-4)


def test_the_score_is_the_heads_or_else_the_cosine(model, backbone_path):
    embeddings = [model(column)["sentence_embedding"] for column in columns(model)]
    assert torch.allclose(pair_scores(model, columns(model)), model[-1].scores(*embeddings), atol=1e-6)
    plain = pipeline(LayerStates(backbone_path()))
    embeddings = [plain(column)["sentence_embedding"] for column in columns(plain)]
    cosines = torch.cosine_similarity(*embeddings)
    assert torch.allclose(pair_scores(plain, columns(plain)), cosines, atol=1e-6)
    assert LogResidualVarianceLoss(plain)(columns(plain), LABELS).requires_grad


def test_reconstruction(model):
    loss = ReconstructionLoss(model)
    states = model[0](model.preprocess(TEXTS))["layer_states"]
    expected = oracles.reconstruction_error(model[1], states).mean()
    assert torch.allclose(loss([model.preprocess(TEXTS)]), expected, atol=1e-5)
    assert torch.allclose(loss([{"layer_states": states}], None), expected, atol=1e-5)


def test_gradients_of_reconstruction():
    autoencoder = LayerwiseAutoencoder(2, 4, decoders=True).double()
    states = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(autoencoder.reconstruction_errors, states)


def test_what_they_refuse(model, backbone_path):
    with pytest.raises(ValueError, match="epsilon=0: give a number above 0"):
        LogResidualVarianceLoss(model, epsilon=0)
    with pytest.raises(ValueError, match="3 columns of texts were given: a similarity is one of two"):
        PairScoreMSELoss(model)([*columns(model), *columns(model)[:1]], LABELS)
    with pytest.raises(ValueError, match="The model ends in Pooling, which has no decoders"):
        ReconstructionLoss(pipeline(LayerStates(backbone_path())))
    bare = SentenceTransformer(modules=[model[0], model[1].without_decoders()], device="cpu")
    with pytest.raises(ValueError, match="The model ends in LayerwiseAutoencoder, which has no decoders"):
        ReconstructionLoss(bare)
