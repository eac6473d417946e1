"""Layers that attend both ways, besides their oracles: which tokens see which, and BeLLM's prompts."""

from __future__ import annotations

import pytest
import torch

from st_reba import BidirectionalLastLayer, CausalTransformer, ReBAModule
from st_reba.lm.attention.changes import Bidirectional
from st_reba.lm.run import Pass, passing

from ..backbones import DEMO_MODEL


@pytest.mark.parametrize(("architecture", "count"), [("qwen2", 1), ("mistral_window", 2), ("gpt2", 0)])
def test_causality(architecture, count, shared):
    """The last token reaches the first token's state in the last layer if and only if that layer attends both ways,
    and never before the first layer that does."""
    module = CausalTransformer(shared(architecture), bidirectional_layers=count)
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 10]])
    turned = range(3 - count, 3)
    with torch.no_grad(), passing(Pass(masking=Bidirectional(turned, torch.ones(2, 5, dtype=torch.bool)))):
        states = module.model(input_ids=ids, output_hidden_states=True).hidden_states
    changed = [not torch.allclose(layer[0, 0], layer[1, 0], atol=1e-5) for layer in states]
    assert changed == [False] * (4 - count) + [True] * count


@pytest.mark.parametrize(
    ("module_class", "dtype"),
    [(BidirectionalLastLayer, "bfloat16"), (ReBAModule, "float16")],
)
def test_a_small_effect_in_half_precision_is_an_effect(module_class, dtype):
    """In the demo model, one bidirectional layer moves the first token by less than bfloat16's rounding might."""
    module = module_class(str(DEMO_MODEL), bidirectional_layers=1, model_kwargs={"dtype": dtype})
    assert module.bidirectional_layers == 1


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
def test_the_whole_layout(kind, backbone_path):
    """The ``avg`` of the authors' training command: every token of the input, what stands before the text too."""
    path = backbone_path("llama", kind)
    module = BidirectionalLastLayer(path, pool_over="whole")
    features = module.preprocess(["the cat"], prompt="query: ")
    given = module(dict(features))
    assert given["input_ids"].tolist() == features["input_ids"].tolist()
