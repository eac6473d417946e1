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

from st_reba import (
    AttentionPoolingModule,
    BidirectionalLastLayer,
    CausalTransformer,
    EarlyLateModule,
    EchoModule,
    KVReroutingModule,
    MetaEOLModule,
    ReBAModule,
    RefinedThoughtModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.modules.changes import Steer

from .. import backbones
from ..catalogued import Case, completed
from ..conftest import long

TEXTS = ["one text", "and a longer one, with padding beside it", "", "a third"]

CASES: list[Case] = [
    (CausalTransformer, {}),
    (CausalTransformer, {"rows": "last"}),
    (CausalTransformer, {"pool_over": "all", "template": "prompteol"}),
    (CausalTransformer, {"bidirectional_layers": 2}),
    (CausalTransformer, {"template": "prompteol", "changes": [Steer()]}),
    (CausalTransformer, {"deterministic": True}),
    (BidirectionalLastLayer, {}),
    (EchoModule, {}),
    (EchoModule, {"rows": "last"}),
    (EchoModule, {"pool_over": "all"}),
    (ReBAModule, {}),
    (ReBAModule, {"rows": "last"}),
    (ReBAModule, {"normalize_weights": True, "bidirectional_layers": 1}),
    (ReBAModule, {"chunk_length": 3}),
    (ReBAModule, {"chunk_length": 3, "rows": "last"}),
    (RefinedThoughtModule, {"iterations": 3}),
    (KVReroutingModule, {}),
    (TokenPrependingModule, {}),
    (EarlyLateModule, {}),
    (MetaEOLModule, {"templates": ['In a word, {text}:"', 'In a word, what {text} says:"']}),
    (AttentionPoolingModule, {}),
    (ValueAggregationModule, {}),
]
#: Of which others stand for what they do with numbers.
FURTHER: list[Case] = [
    (BidirectionalLastLayer, {}),
    (EchoModule, {"rows": "last"}),
    (EchoModule, {"pool_over": "all"}),
    (CausalTransformer, {"deterministic": True}),
    (CausalTransformer, {"pool_over": "all", "template": "prompteol"}),
    (ReBAModule, {}),
    (ReBAModule, {"chunk_length": 3, "rows": "last"}),
]
METHODS = [
    long(*case) if case in FURTHER else case
    for case in completed({str(number): case for number, case in enumerate(CASES)}).values()
]


@pytest.fixture
def transformers_asks_nothing(monkeypatch):
    """transformers itself asks once a pass, before the first layer, whether positions are of several texts in a row."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Of two layers: operations on the meta device take long."""
    model = backbones.backbone("llama", num_hidden_layers=2)
    return CausalTransformer(backbones.save(model, tmp_path_factory.mktemp("two-layers")))


@pytest.mark.parametrize(("made", "settings"), METHODS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_nothing_but_the_layout_is_asked_for(made, settings, backbone, transformers_asks_nothing):
    module = copy.deepcopy(made(backbone, **settings)).eval()
    pool = Pooling(module.get_embedding_dimension(), "lasttoken")
    with torch.no_grad():
        expected = pool(module(module.preprocess(TEXTS)))
        module.to("meta")
        found = pool(module(module.preprocess(TEXTS)))
    for name in ("token_embeddings", "attention_mask", "input_ids", "sentence_embedding"):
        assert found[name].is_meta
        assert found[name].shape == expected[name].shape
    assert found.keys() == expected.keys()
