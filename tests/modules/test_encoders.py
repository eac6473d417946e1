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
        linears = (own.query, own.key, own.value, layer.attention.output.dense)
        linears = (*linears, layer.intermediate.dense, layer.output.dense)
        assert all(isinstance(linear, nn.Linear) for linear in linears)
        assert isinstance(layer.attention.output.LayerNorm, nn.LayerNorm)
        assert isinstance(layer.output.LayerNorm, nn.LayerNorm)
        assert callable(layer.intermediate.intermediate_act_fn)
        assert own.num_attention_heads * own.attention_head_size == 32
        assert isinstance(own.dropout, nn.Dropout)
        # All that a layer has: what is not named here would be left out of the batched pass.
        named = sum(p.numel() for linear in linears for p in linear.parameters()) + 2 * 2 * 32
        assert sum(p.numel() for p in layer.parameters()) == named
    assert model.config._attn_implementation == "sdpa"


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


def test_halves_stay_halves():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    values = [first.weight.detach().clone(), second.weight.detach().clone()]
    both = encoders._beside([first, second], "weight")
    assert torch.equal(both, torch.stack(values))
    assert encoders._beside([first, second], "weight").data_ptr() == both.data_ptr()
    with torch.no_grad():
        second.weight.add_(1)
    assert torch.equal(encoders._beside([first, second], "weight")[1], values[1] + 1)
    first.double()
    second.double()
    assert encoders._beside([first, second], "weight").dtype == torch.float64
    assert first.weight.requires_grad


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_pairs_up(attention, encoder_paths):
    towers = [AutoModel.from_pretrained(path, attn_implementation=attention) for path in encoder_paths()]
    assert encoders.pairs_up(*towers)
    towers[1].to(torch.bfloat16)
    assert not encoders.pairs_up(*towers)
