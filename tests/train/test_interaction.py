from __future__ import annotations

import torch

from st_reba.train.losses import InteractionInfoNCELoss

from .. import oracles
from .test_info_nce import vectors

STREAMS = ((vectors(4, 2, 3, seed=1), vectors(4, 2, 3, seed=2)), (vectors(4, 2, 3, seed=3), vectors(4, 2, 3, seed=4)))


def sides(streams) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss with tower I as the anchor, and with tower II."""
    return tuple(
        sum(oracles.info_nce(first[:, own], second[:, other], 0.05) for first, second in streams)
        for own, other in ((0, 1), (1, 0))
    )


def throws(loss: InteractionInfoNCELoss, count: int, streams=STREAMS) -> list[int]:
    """Which tower was the anchor."""
    expected = torch.stack(sides(streams))
    assert abs(expected[0] - expected[1]) > 1e-3
    found = []
    for _ in range(count):
        value = loss(*streams)
        side = int((expected - value).abs().argmin())
        assert torch.allclose(value, expected[side])
        found.append(side)
    return found


def test_oracle_on_either_side():
    assert set(throws(InteractionInfoNCELoss(), 12)) == {0, 1}
    assert set(throws(InteractionInfoNCELoss(), 12, STREAMS[:1])) == {0, 1}


def test_the_coin_is_fair_and_seeded():
    first = throws(InteractionInfoNCELoss(seed=3), 200)
    again, other = (throws(InteractionInfoNCELoss(seed=seed), 30) for seed in (3, 4))
    assert first[:30] == again != other
    assert 70 < sum(first) < 130


def test_the_coin_is_apart_from_other_randomness():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loss = InteractionInfoNCELoss()
    expected = throws(InteractionInfoNCELoss(), 8)
    torch.manual_seed(1)
    assert throws(loss, 8) == expected
    torch.manual_seed(0)
    throws(loss, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_of_the_coin_is_saved():
    loss, other = InteractionInfoNCELoss(), InteractionInfoNCELoss(seed=9)
    throws(loss, 5)
    other.load_state_dict(loss.state_dict())
    assert throws(other, 50) == throws(loss, 50)


def test_gradients():
    streams = [part.clone().requires_grad_() for stream in STREAMS for part in stream]

    def loss(*parts):
        return InteractionInfoNCELoss(0.5)(parts[:2], parts[2:])

    assert torch.autograd.gradcheck(loss, streams)
