"""Embeddings after each layer: the states there, behind the final norm, as the module would read them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers.base.modules import Transformer
from transformers import AutoModel

from st_reba import BidirectionalLastLayer, CausalTransformer, EchoModule, KVReroutingModule, ReBAModule
from st_reba.reading.layers import LayerReader

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "falcon"])
def test_every_layer_on_every_architecture(name, backbone_path, eager, token_ids):
    model = pipeline(CausalTransformer(backbone_path(name)))
    reader = LayerReader(model)
    embeddings = reader.embeddings(TEXTS)
    assert reader.count == 4
    assert embeddings.shape == (4, len(TEXTS), 32)
    for index, text in enumerate(TEXTS):
        layers = oracles.after_each_layer(eager(name), name, token_ids(text))
        expected = torch.stack([states.mean(0) for states in layers])
        assert relative_error(embeddings[:, index], expected) < 1e-5
    assert relative_error(embeddings[-1], model.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize(
    ("settings", "norm"),
    [
        ({"word_embed_proj_dim": 16}, lambda model, states: model.project_out(model.final_layer_norm(states))),
        ({"do_layer_norm_before": False}, lambda model, states: states),
        ({"do_layer_norm_before": False, "word_embed_proj_dim": 16}, lambda model, states: model.project_out(states)),
    ],
)
def test_what_stands_behind_the_last_layer(settings, norm, tmp_path, token_ids):
    """A norm and a projection (two steps), nothing at all, or a projection alone: OPT has them all."""
    torch.manual_seed(0)
    _, size = backbones.CONFIGS["opt"]
    config = transformers.OPTConfig(**{**backbones.IDS, **size, "max_position_embeddings": 256, **settings})
    backbone = backbones.randomize(AutoModel.from_config(config).eval())
    model = pipeline(CausalTransformer(backbones.save(backbone, tmp_path)), "lasttoken")
    embeddings = LayerReader(model).embeddings(TEXTS[:1])
    with torch.inference_mode():
        states = oracles.layer_states(backbone, token_ids(TEXTS[0]))
        expected = norm(backbone.decoder, states[:, None])
    assert relative_error(embeddings[1:], expected) < 1e-5


@pytest.mark.parametrize(("pooling", "pool_copies", "first"), [("mean", "last", 2), ("lasttoken", "repeated", 1)])
def test_the_copy_that_the_module_reads(pooling, pool_copies, first, shared, eager, token_ids):
    module = EchoModule(shared("qwen3"), repetitions=3, pool_copies=pool_copies)
    embeddings = LayerReader(pipeline(module, pooling)).embeddings(TEXTS)
    for index, text in enumerate(TEXTS):
        ids = token_ids(text)
        layers = oracles.after_each_layer(eager("qwen3"), "qwen3", 3 * ids)
        read = [states[first * len(ids) :] for states in layers]
        expected = torch.stack([states.mean(0) if pooling == "mean" else states[-1] for states in read])
        assert relative_error(embeddings[:, index], expected) < 1e-5


@pytest.mark.parametrize("kind", [CausalTransformer, BidirectionalLastLayer, KVReroutingModule])
def test_the_last_features_are_the_modules_own(kind, shared):
    """What else it hands on stays."""
    model = pipeline(kind(shared()))
    *earlier, last = LayerReader(model).features(TEXTS)
    with torch.inference_mode():
        expected = model[0](model.preprocess(TEXTS))
    assert len(earlier) == 3
    assert last.keys() == expected.keys()
    assert all(torch.equal(last[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", [CausalTransformer, EchoModule])
def test_batches_do_not_matter(kind, shared, monkeypatch):
    reader = LayerReader(pipeline(kind(shared("gemma3"))))
    together = reader.embeddings([*TEXTS, ""])
    alone = torch.cat([reader.embeddings([text]) for text in [*TEXTS, ""]], dim=1)
    assert relative_error(together, alone) < 1e-5
    assert not together[:, -1].any()
    # A module may run a batch in parts: each layer's states must find their own.
    monkeypatch.setattr(kind, "CPU_TOKENS", 1)
    assert relative_error(reader.embeddings([*TEXTS, ""]), alone) < 1e-5


def test_one_pass_that_leaves_no_trace(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    before = model.encode(TEXTS)
    reader = LayerReader(model)
    backbone, passes = model[0].model, []
    hook = backbone.get_input_embeddings().register_forward_pre_hook(lambda *call: passes.append(call))
    reader.embeddings(TEXTS)
    hook.remove()
    assert len(passes) == 1
    assert not any(part._forward_hooks for part in LayerReader(model).model[0].model.norm.modules())
    assert np.array_equal(model.encode(TEXTS), before)
    # transformers' own hooks, for output_hidden_states, could not be pickled.
    assert np.array_equal(pickle.loads(pickle.dumps(model)).encode(TEXTS), before)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ReBAModule, {}, "ReBAModule, whose embedding is not .* Use a model with CausalTransformer"),
        # States inside the other layers would be read behind their own feed-forward parts.
    ],
)
def test_modules_without_such_a_reading(kind, settings, message, shared):
    module = kind(shared(), **settings)
    with pytest.raises(ValueError, match=message):
        LayerReader(pipeline(module))


def test_backbones_that_cannot_be_read(backbone_path, monkeypatch):
    backbone = Transformer(backbone_path())
    kind = type(backbone.model)
    forward = kind.forward

    def scaled(self, **kwargs):
        output = forward(self, **kwargs)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    model = pipeline(CausalTransformer(backbone))
    with pytest.raises(ValueError, match="LlamaModel changes its last layer's states in a way that could not be found"):
        LayerReader(model)
    monkeypatch.setattr(kind, "forward", forward)
    backbone.model.layers.append(torch.nn.Identity())
    model = pipeline(CausalTransformer(backbone))
    with pytest.raises(ValueError, match="The layers of LlamaModel were not found, so they cannot be read"):
        LayerReader(model)
