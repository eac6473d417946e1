from __future__ import annotations

import pytest
import torch
from torch import nn

from st_reba.compare.recipes import set_aside


class Own(nn.Parameter):
    """As quantised weights have."""


@pytest.fixture
def model():
    made = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 7, bias=False))
    made[2].weight = made[0].weight
    made[1].bias = Own(made[1].bias.detach())
    return made


def test_weights_are_gone_and_come_back_to_the_bit(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with set_aside(model):
        sizes = {name: value.numel() for name, value in model.state_dict().items()}
        assert sizes == {"0.weight": 0, "1.weight": 0, "1.bias": 4, "2.weight": 0}
        assert next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(own is other for own, other in zip(model.parameters(), parameters, strict=True))
    assert model[2].weight is model[0].weight


def test_weights_come_back_after_an_error(model):
    before = model[0].weight.detach().clone()
    with pytest.raises(KeyboardInterrupt), set_aside(model):
        raise KeyboardInterrupt
    assert torch.equal(model[0].weight, before)


def test_they_stay_where_the_disk_has_no_room(model, monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with set_aside(model):
        assert model[0].weight.numel() == 28


def test_other_errors_are_not_hidden(model, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such storage")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="no such storage"), set_aside(model):
        pass
    assert model[0].weight.numel() == 28
