from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from st_reba.train.losses import InfoNCELoss

from .. import oracles
from ..conftest import examples


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=examples(25))
@given(batch=st.integers(1, 6), width=st.integers(1, 5), temperature=st.floats(0.03, 3), seed=st.integers(0, 99))
def test_oracle(batch, width, temperature, seed):
    anchors, positives = vectors(2, batch, width, seed=seed)
    found = InfoNCELoss(temperature)(anchors, positives)
    assert torch.allclose(found, oracles.info_nce(anchors, positives, temperature))


def test_gradients():
    anchors, positives = (part.requires_grad_() for part in vectors(2, 4, 3))
    assert torch.autograd.gradcheck(InfoNCELoss(0.5), (anchors, positives))


def test_lengths_do_not_count():
    anchors, positives = vectors(2, 4, 3)
    assert torch.allclose(InfoNCELoss()(anchors, positives), InfoNCELoss()(7 * anchors, positives / 3))


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature}: give a number greater than 0"):
        InfoNCELoss(temperature)
