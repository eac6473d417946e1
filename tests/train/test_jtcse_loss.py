from __future__ import annotations

import pytest
import torch

from st_reba import CausalTransformer, TwinTower
from st_reba.train.losses import JTCSELoss

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline


@pytest.fixture
def model(encoder_paths):
    return pipeline(TwinTower(*encoder_paths(), cross_every=2), "cls")


def views(model, texts):
    """(h, p, c), each a pair of towers' (B, D), of single texts."""
    rows = []
    for text in texts:
        with torch.no_grad():
            states, streams, pooled, _ = oracles.twin_tower(*model[0].towers, model.tokenizer(text)["input_ids"], 2)
        rows.append([[part[0] for part in states], pooled, [part[0] for part in streams]])
    return [[torch.stack([row[kind][tower] for row in rows]) for tower in (0, 1)] for kind in range(3)]


@pytest.mark.parametrize("columns", [1, 2])
def test_oracle(columns, model):
    """Without dropout, two columns are two views; one column is twice the same."""
    model.eval()
    texts = [["a cat", TEXTS[3]], [TEXTS[3], "the dog"]][:columns]
    loss = JTCSELoss(model)
    found = loss([model.preprocess(column) for column in texts])
    first, second = views(model, texts[0]), views(model, texts[-1])
    coin = torch.Generator().manual_seed(42)
    # The towers' roles: 0 has tower I as the anchor, which is R = 1.
    expected = oracles.jtcse(first, second, 1 - int(torch.randint(2, (1,), generator=coin)))
    for name, value in zip(("info_nce", "interaction", "modulus"), expected, strict=True):
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-4), name


def test_dropout_makes_the_views(model):
    features = [model.preprocess(TEXTS)]
    model.eval()
    same = JTCSELoss(model)(features)["info_nce"]
    model.train()
    torch.manual_seed(0)
    first, second = (JTCSELoss(model)(features)["info_nce"] for _ in range(2))
    assert len({value.item() for value in (same, first, second)}) == 3


@pytest.mark.parametrize("left", ["info_nce", "interaction", "modulus"])
def test_terms_by_their_weights(left, model):
    """The ablations of Table X, and weights beside 1."""
    model.eval()
    features = [model.preprocess(TEXTS)]
    full = JTCSELoss(model)(features)
    weights = {f"{name}_weight": 2.0 if name == left else 0.0 for name in full}
    found = JTCSELoss(model, **weights)(features)
    assert list(found) == [left]
    assert torch.allclose(found[left], 2 * full[left])


def test_the_cross_stream_runs_only_where_it_is_looked_at(model, monkeypatch):
    from st_reba.modules import twin_tower

    ran = []
    run = twin_tower.cross_stream
    monkeypatch.setattr(twin_tower, "cross_stream", lambda *a: ran.append(True) or run(*a))
    features = [model.preprocess(TEXTS)]
    JTCSELoss(model, interaction_weight=0)(features)
    model.encode(TEXTS)
    assert not ran
    JTCSELoss(model)(features)
    assert len(ran) == 2


def test_tncse_has_no_cross_stream(encoder_paths):
    model = pipeline(TwinTower(*encoder_paths(), cross_every=0), "cls").eval()
    crossed = pipeline(TwinTower(*encoder_paths()), "cls").eval()
    features = [model.preprocess(TEXTS)]
    found, other = JTCSELoss(model)(features), JTCSELoss(crossed)(features)
    assert found["interaction"] < other["interaction"]
    assert torch.equal(found["modulus"], other["modulus"])


def test_both_towers_learn(model):
    model.train()
    sum(JTCSELoss(model)([model.preprocess(TEXTS)]).values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_gradients(encoder_paths):
    """Of the whole loss with respect to a weight of each tower, in float64, through the cross stream."""
    model = pipeline(TwinTower(*encoder_paths()), "cls").eval().double()
    features = [model.preprocess(TEXTS[:3])]
    biases = [tower.encoder.layer[1].attention.self.value.bias for tower in model[0].towers]

    names = [name for name, parameter in model.named_parameters() if any(parameter is bias for bias in biases)]

    def total(*offsets):
        moved = {name: bias + offset for name, bias, offset in zip(names, biases, offsets, strict=True)}
        loss = JTCSELoss(model, temperature=0.5)
        del loss.model
        loss.model = lambda *a, **k: torch.func.functional_call(model, moved, a, k)
        return sum(loss(features).values())

    offsets = [torch.zeros_like(bias, requires_grad=True) for bias in biases]
    assert torch.autograd.gradcheck(total, offsets, fast_mode=True)


@pytest.mark.parametrize(
    "weights", [{"info_nce_weight": -1}, {"modulus_weight": float("nan")}, dict.fromkeys(
        ("info_nce_weight", "interaction_weight", "modulus_weight"), 0)]
)  # fmt: skip
def test_bad_weights(weights, model):
    with pytest.raises(
        ValueError, match="The weights .* give numbers of 0 or more, at least one of them greater than 0"
    ):
        JTCSELoss(model, **weights)


def test_other_models_are_refused(backbone_path):
    with pytest.raises(ValueError, match="the model's first module is CausalTransformer: use a TwinTower"):
        JTCSELoss(pipeline(CausalTransformer(backbone_path())))


def test_three_columns_are_refused(model):
    with pytest.raises(ValueError, match="The data has 3 columns of text: JTCSELoss takes one, or two"):
        JTCSELoss(model)([model.preprocess(TEXTS)] * 3)


def test_what_the_card_says(model):
    assert JTCSELoss(model, temperature=0.1, seed=3).get_config_dict() == {
        "temperature": 0.1, "info_nce_weight": 1.0, "interaction_weight": 1.0, "modulus_weight": 1.0,
        "least_cosine": 1e-4, "seed": 3,
    }  # fmt: skip
