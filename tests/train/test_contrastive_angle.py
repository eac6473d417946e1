from __future__ import annotations

import pytest
import torch

from st_reba.train.losses import ContrastiveAngleLoss

from .. import oracles
from ..conftest import relative_error


@pytest.fixture
def embeddings():
    torch.manual_seed(0)
    return [torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_equals_the_papers(embeddings):
    """BeLLM's Equation 6 and AnglE's loss, each with its weight."""
    loss = ContrastiveAngleLoss(None, temperature=0.1, contrastive_weight=20.0, angle_weight=2.0, angle_scale=7.0)
    found = loss.compute_loss_from_embeddings(embeddings)
    # The paper sums over the batch.
    expected = {
        "contrastive": 20 * oracles.equation_6(*embeddings, 0.1) / 5,
        "angle": 2 * oracles.angle_loss(*embeddings, 7.0),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name].detach(), value.detach()) < 1e-10
        gradients = torch.autograd.grad(found[name], embeddings, retain_graph=True)
        for gradient, other in zip(gradients, torch.autograd.grad(value, embeddings, retain_graph=True), strict=True):
            assert relative_error(gradient, other) < 1e-8


@pytest.mark.parametrize("left", ["contrastive", "angle"])
def test_a_weight_of_zero_leaves_a_term_out(left, embeddings):
    loss = ContrastiveAngleLoss(None, **{f"{left}_weight": 0})
    assert left not in loss.compute_loss_from_embeddings(embeddings)


@pytest.mark.parametrize(
    "weights",
    [{"angle_weight": -1}, {"contrastive_weight": float("nan")}, {"angle_weight": 0, "contrastive_weight": 0}],
)
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match="give numbers of 0 or more, at least one of them greater than 0"):
        ContrastiveAngleLoss(None, **weights)


def test_two_columns_are_not_triplets(embeddings):
    with pytest.raises(ValueError, match="2 columns of texts were given: it takes triplets, which have three"):
        ContrastiveAngleLoss(None).compute_loss_from_embeddings(embeddings[:2])


def test_what_a_card_tells():
    loss = ContrastiveAngleLoss(None, contrastive_weight=20.0)
    assert loss.get_config_dict() == {
        "scale": 20.0, "angle_scale": 20.0, "contrastive_weight": 20.0, "angle_weight": 1.0,
        "gather_across_devices": False,
    }  # fmt: skip
    assert "Angle-optimized" in loss.citation
