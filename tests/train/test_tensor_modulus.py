from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from st_reba.train.losses import TensorModulusLoss

from .. import oracles
from ..conftest import examples
from .test_info_nce import vectors


@settings(max_examples=examples(25))
@given(batch=st.integers(1, 5), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_oracle(batch, width, seed):
    h, h_plus, p, p_plus = vectors(4, batch, 2, width, seed=seed)
    expected = oracles.tensor_modulus(h[:, 0], h_plus[:, 1], p[:, 0], p_plus[:, 1])
    expected = expected + oracles.tensor_modulus(h[:, 1], h_plus[:, 0], p[:, 1], p_plus[:, 0])
    assert torch.allclose(TensorModulusLoss()(h, h_plus, p, p_plus), expected)


def near(seed: int) -> list[torch.Tensor]:
    """States whose cosines are greater than 0, where the loss is smooth."""
    h, noise, p, p_plus = vectors(4, 3, 2, 4, seed=seed)
    # The towers are near each other, too.
    h = h[:, :1] + 0.1 * h
    return [part.requires_grad_() for part in (h.detach(), (h + 0.2 * noise).detach(), p, p_plus)]


def test_gradients():
    assert torch.autograd.gradcheck(TensorModulusLoss(), near(0))


def test_opposite_states_have_no_gradient_and_a_bounded_loss():
    h, _, p, p_plus = near(0)
    loss = TensorModulusLoss()(h, -h.detach(), p, p_plus)
    (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert not gradient.any()
    # -log of the floor, twice, times a ratio that is at most 1.
    assert 0 < loss < 2 * 9.22
    assert torch.autograd.grad(loss, p)[0].any()


def test_the_ratio_is_at_most_one_and_zero_for_equal_lengths_and_directions():
    h, h_plus, p, _ = near(1)
    towers = p[:, :1].expand(-1, 2, -1)
    assert TensorModulusLoss()(h, h_plus, towers, towers) == 0
    assert TensorModulusLoss()(h, h_plus, towers, 1e-9 * towers) > TensorModulusLoss()(h, h_plus, towers, 0.5 * towers)


def test_vanished_pooler_outputs_are_no_nan():
    h, h_plus, p, _ = (part.detach() for part in near(1))
    nothing = torch.zeros_like(p).requires_grad_()
    loss = TensorModulusLoss()(h, h_plus, nothing, nothing)
    loss.backward()
    assert loss == 0
    assert nothing.grad.isfinite().all()


@pytest.mark.parametrize("least", [0, 1, -0.5, float("nan")])
def test_bad_floor(least):
    with pytest.raises(ValueError, match=f"least_cosine={least}: give a number between 0 and 1"):
        TensorModulusLoss(least)
