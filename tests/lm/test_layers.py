"""Models without their last layers, and hooks at single modules."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from st_reba import (
    CausalTransformer,
)
from st_reba.lm.anatomy import layer_paths, shortened
from st_reba.lm.backbone import _PER_LAYER
from st_reba.lm.run import Hook, hooked

from .. import oracles
from ..backbones import FEW, TEXTS
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize("name", FEW)
def test_stops_after_a_layer_and_is_saved_without_the_others(name, shared, eager, token_ids, tmp_path):
    for layer in (1, 2):
        module = CausalTransformer(shared(name), output_layer=layer)
        assert len(layer_paths(module.model)) == layer
        model = pipeline(module, "lasttoken")
        vectors = model.encode(TEXTS[:3])
        for vector, text in zip(vectors, TEXTS[:3], strict=True):
            expected = oracles.after_each_layer(eager(name), name, token_ids(text))[layer][-1]
            assert relative_error(vector, expected) < 1e-5
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path))
    assert again[0].output_layer == again[0].model.config.num_hidden_layers == 2
    assert (again.encode(TEXTS[:3]) == vectors).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lists_that_are_as_long_as_the_model_is_deep(name, eager):
    """Those that say something of each layer are cut with the layers; the ids of end tokens are not."""
    model = copy.deepcopy(eager(name))
    model.config.eos_token_id = [5, 6, 7]
    model.config.suppress_tokens = [1, 2, 3]
    short = shortened(model, 2).config
    assert short.eos_token_id == [5, 6, 7]
    assert short.suppress_tokens == [1, 2, 3]
    if name == "gemma3":
        assert short.layer_types == model.config.layer_types[:2]
        assert len(model.config.layer_types) == 3


@pytest.mark.long
def test_every_list_of_transformers_that_grows_with_the_depth_is_known():
    """A new architecture's list that is not known would be saved too long for its model."""
    unknown = {}
    for kind in {CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}:
        # Some can have no such depth, whatever their own checks raise.
        with contextlib.suppress(Exception):
            shallow, deep = (vars(kind(num_hidden_layers=depth)) for depth in (7, 11))
            lists = [name for name, value in shallow.items() if isinstance(value, list) and "layer" not in name]
            grown = {name for name in lists if (len(shallow[name]), len(deep.get(name) or ())) == (7, 11)}
            unknown |= dict.fromkeys(grown - _PER_LAYER, kind.__name__)
    assert unknown == {}


@pytest.mark.parametrize("layer", [0, 4, -4, True, 1.0, "2"])
def test_layers_that_there_are_not(layer, shared):
    with pytest.raises(ValueError, match=r"output_layer=.*LlamaModel has 3 layers; give .* 1 to 3"):
        CausalTransformer(shared(), output_layer=layer)


def test_hooks_nest_and_end_with_their_block():
    linear = torch.nn.Linear(2, 2)
    states = torch.ones(1, 1, 2)
    plain = linear(states)
    with hooked({linear: Hook(after=lambda out: out + 1)}), hooked({linear: Hook(after=lambda out: out * 2)}):
        assert torch.equal(linear(states), (plain + 1) * 2)
    with hooked({linear: Hook(before=lambda given: given * 0)}):
        assert torch.equal(linear(input=states), linear(states * 0))
    assert torch.equal(linear(states), plain)


def test_a_short_model_that_computes_something_else_is_refused(backbone_path, monkeypatch):
    model = CausalTransformer(backbone_path()).model
    kind = type(model.layers[0])
    forward = kind.forward

    def by_the_depth(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + self.self_attn.config.num_hidden_layers

    monkeypatch.setattr(kind, "forward", by_the_depth)
    with pytest.raises(ValueError, match="cannot be shortened to 1 layers: it then computes something else"):
        shortened(model, 1)
