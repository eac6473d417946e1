"""The names inside BERT-like encoders that are relied on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from st_reba.modules import encoders

from .. import backbones


@pytest.mark.parametrize("family", backbones.ENCODERS)
def test_the_names_are_there(family):
    model = backbones.encoder(family)
    for layer in encoders.layers(model):
        own = layer.attention.self
        assert all(isinstance(linear, nn.Linear) for linear in (own.query, own.key, own.value))
        assert all(callable(part) for part in (layer.attention.output, layer.intermediate, layer.output))
        assert own.num_attention_heads * own.attention_head_size == 32
        assert isinstance(own.dropout, nn.Dropout)


@pytest.mark.parametrize(("family", "expected"), [("bert", 256), ("roberta", 255)])
def test_positions(family, expected):
    assert encoders.positions(backbones.encoder(family)) == expected


@pytest.mark.parametrize("family", backbones.ENCODERS)
def test_contexts_are_the_attention_maps_times_the_values(family, encoder_paths):
    path, _ = encoder_paths(family)
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    tokens = AutoTokenizer.from_pretrained(path)(backbones.TEXTS[:1], return_tensors="pt")
    with torch.no_grad(), encoders.watching_contexts(model) as contexts:
        found = model(**tokens, output_attentions=True, output_hidden_states=True)
    assert len(contexts) == 4
    for layer, context, maps, states in zip(
        encoders.layers(model), contexts, found.attentions, found.hidden_states, strict=False
    ):
        values = layer.attention.self.value(states).unflatten(2, (4, 8)).transpose(1, 2)
        assert torch.allclose((maps @ values).transpose(1, 2).flatten(2), context, atol=1e-5)
