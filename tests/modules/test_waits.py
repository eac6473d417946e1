"""An accelerator works on while the CPU prepares what comes next, until the CPU asks it for a number and waits.

The CPU asks once a batch: for the layout, which sentence-transformers has sent to the accelerator. The meta device
stands in for an accelerator: its tensors have shapes and no values, so whatever else asks for a value fails.
"""

from __future__ import annotations

import copy

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import masking_utils

from st_reba import CausalTransformer
from st_reba.modules.changes import Steer

from .methods import EACH_MODULE, RECIPES

TEXTS = ["one text", "and a longer one, with padding beside it", "", "a third"]

CASES = {
    **RECIPES,
    "steered": (CausalTransformer, {"template": "prompteol", "changes": [Steer()]}),
    "one by one": (CausalTransformer, {"deterministic": True}),
}


@pytest.fixture
def transformers_asks_nothing(monkeypatch):
    """transformers itself asks once a pass, before the first layer, whether positions are of several texts in a row."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize("case", [*EACH_MODULE, "steered", "one by one"])
def test_nothing_but_the_layout_is_asked_for(case, shared, transformers_asks_nothing):
    kind, settings = CASES[case]
    module = copy.deepcopy(kind(shared(), **settings)).eval()
    pool = Pooling(module.get_embedding_dimension(), "lasttoken")
    with torch.no_grad():
        expected = pool(module(module.preprocess(TEXTS)))
        module.to("meta")
        found = pool(module(module.preprocess(TEXTS)))
    for name in ("token_embeddings", "attention_mask", "input_ids", "sentence_embedding"):
        assert found[name].is_meta
        assert found[name].shape == expected[name].shape
    assert found.keys() == expected.keys()
