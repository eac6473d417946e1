from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer, KVReroutingModule
from st_reba.evaluation import intrinsic_dimension
from st_reba.evaluation.intrinsic_dimension import layer_dimensions, select_layers, two_nn

from ..backbones import DEMO_MODEL
from ..conftest import relative_error


@pytest.fixture(scope="module")
def demo_model():
    return CausalTransformer(str(DEMO_MODEL))


WORDS = "the a cat dog mouse fox bank river money quick brown lazy chased loves sees 我 爱 语言"
TEXTS = [" ".join(np.random.default_rng(seed).choice(WORDS.split(), 6)) for seed in range(40)]


def cloud(dimension, points=1000, ambient=30, seed=0):
    """Points of a cube of some dimension, turned into a space of more."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(ambient, ambient, generator=generator))
    return torch.rand(points, dimension, generator=generator) @ basis[:dimension]


@pytest.mark.parametrize("dimension", [1, 5])
def test_clouds_whose_dimension_is_known(dimension):
    # The edges of a cube lower the estimate, the more the higher its dimension (figure 2 of the paper).
    assert two_nn(cloud(dimension)) == pytest.approx(dimension, rel=0.15)


def test_as_the_paper_writes_it(monkeypatch):
    points = cloud(4, points=57)
    ratios = []
    for i in range(len(points)):
        distances = sorted(float((points[i].double() - other.double()).norm()) for other in points)
        ratios.append(distances[2] / distances[1])
    ratios.sort()
    kept = int(0.9 * len(ratios))
    x = [math.log(ratio) for ratio in ratios[:kept]]
    y = [-math.log(1 - (i + 1) / len(ratios)) for i in range(kept)]
    expected = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    monkeypatch.setattr(intrinsic_dimension, "_BLOCK", 10)
    assert two_nn(points) == pytest.approx(expected, rel=1e-6)
    assert math.isfinite(two_nn(points, discard=0))
    assert two_nn(torch.cat([points, points[:20]])) == two_nn(points), "what occurs twice counts once"
    with pytest.raises(ValueError, match="9 different points: give at least 10"):
        two_nn(torch.cat([cloud(3, points=9)] * 3))
    with pytest.raises(ValueError, match=r"discard=1: give a share of the points, 0 or more and less than 1"):
        two_nn(cloud(3), discard=1)


def test_of_layers(backbone_path):
    """What each layer reads at the last real token, whatever the batch."""
    module = CausalTransformer(backbone_path(), template="compress", pool_over="all")
    dimensions = layer_dimensions(module, [*TEXTS, *TEXTS[:3], ""])
    # The first layer reads the same token of the template in every text.
    assert math.isnan(dimensions[0])
    states = []
    for text in TEXTS:
        ids = module.preprocess([text])["input_ids"]
        with torch.no_grad():
            output = module.model(input_ids=ids, output_hidden_states=True)
        states.append(torch.stack([layer[0, -1] for layer in output.hidden_states[:3]]))
    expected = [two_nn(layer) for layer in torch.stack(states, dim=1)[1:]]
    assert relative_error(dimensions[1:], expected) < 1e-2
    assert relative_error(layer_dimensions(module, TEXTS, batch_size=3)[1:], expected) < 1e-2


@pytest.mark.parametrize(
    ("dimensions", "count", "layers"),
    [
        ([math.nan, 5, 4, 3, 2, 3, 4, 5], None, [2, 3, 4, 5]),
        ([math.nan, 1, 4, 3, 2, 3, 4, 5], 3, [0, 1, 2]),
        ([math.nan, 5, 4, 3, 2, 3, 4, 1], 3, [5, 6, 7]),
    ],
)
def test_selected_layers(dimensions, count, layers, demo_model, monkeypatch):
    monkeypatch.setattr(intrinsic_dimension, "layer_dimensions", lambda *args: dimensions)
    found = select_layers(demo_model, TEXTS, count=count)
    assert found == layers == KVReroutingModule(demo_model, layers=found).layers


def test_refusals(backbone_path):
    module = CausalTransformer(backbone_path())
    with pytest.raises(ValueError, match="2 different texts: give at least 10"):
        select_layers(module, ["a", "b", "a", " "] * 20)
    for count in (0, 4, True, 1.0):
        with pytest.raises(ValueError, match="LlamaModel has 3 layers; give 1 to 3"):
            select_layers(module, TEXTS, count=count)
    one = CausalTransformer(module, template="compress", pool_over="all", output_layer=1)
    with pytest.raises(ValueError, match="The last token's state is the same for all texts in every layer"):
        select_layers(one, TEXTS)
