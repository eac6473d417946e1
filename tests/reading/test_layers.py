from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers.base.modules import Transformer
from transformers import AutoConfig, AutoModel

from st_reba import (
    BidirectionalLastLayer,
    CausalTransformer,
    EchoModule,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    ReBAModule,
)
from st_reba.reading.layers import LayerReader

from .. import backbones
from ..backbones import TEXTS, third
from ..conftest import long, paired, pipeline, relative_error

NORMS = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm", "falcon": "ln_f", "bloom": "ln_f", "gpt_j": "ln_f",
         "gpt_neo": "ln_f", "mpt": "norm_f"}  # fmt: skip


def after_each_layer(model, ids, norm) -> list[torch.Tensor]:
    """(n, D) a layer, one text at a time, with the final norm that the architecture is known to have."""
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return [norm(states)[0] for states in output.hidden_states[:-1]] + [output.last_hidden_state[0]]


def final_norm(name, model):
    return model.decoder.final_layer_norm if name == "opt" else getattr(model, NORMS.get(name, "norm"))


@pytest.mark.parametrize("name", third(2))
def test_every_layer_on_every_architecture(name, backbone_path, eager, token_ids):
    model = pipeline(CausalTransformer(backbone_path(name)))
    reader = LayerReader(model)
    embeddings = reader.embeddings(TEXTS)
    assert reader.count == 4
    assert embeddings.shape == (4, len(TEXTS), 32)
    norm = final_norm(name, eager(name))
    for index, text in enumerate(TEXTS):
        expected = torch.stack([states.mean(0) for states in after_each_layer(eager(name), token_ids(text), norm)])
        assert relative_error(embeddings[:, index], expected) < 1e-5
    assert relative_error(embeddings[-1], model.encode(TEXTS)) < 1e-5


@pytest.mark.parametrize(("name", "layers"), paired(["llama", "gpt2", "opt", long("gpt_neox"), long("falcon")], [1, 2]))
def test_a_layer_is_a_model_without_those_above(name, layers, backbone_path):
    """What the paper does, taking layers away; and that the norm found is the one the architecture means."""
    config = AutoConfig.from_pretrained(backbone_path(name))
    config.num_hidden_layers = layers
    shorter = CausalTransformer(backbone_path(name))
    shorter.model = AutoModel.from_pretrained(backbone_path(name), config=config, dtype=torch.float32).eval()
    embeddings = LayerReader(pipeline(CausalTransformer(backbone_path(name)), "lasttoken")).embeddings(TEXTS)
    assert relative_error(embeddings[layers], pipeline(shorter, "lasttoken").encode(TEXTS)) < 1e-5


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
    raw = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: raw.append(output))
        for layer in backbone.decoder.layers
    ]
    with torch.inference_mode():
        backbone(input_ids=torch.tensor([token_ids(TEXTS[0])]))
        states = [states[0] if isinstance(states, tuple) else states for states in raw]
        expected = torch.stack([norm(backbone.decoder, layer.view(1, -1, 32))[:, -1] for layer in states])
    for hook in hooks:
        hook.remove()
    assert relative_error(embeddings[1:], expected) < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
@pytest.mark.parametrize(
    ("settings", "select"),
    [
        ({"repetitions": 3}, lambda n: slice(2 * n, 3 * n)),
        ({"repetitions": 3, "pool_copies": "repeated"}, lambda n: slice(n, 3 * n)),
    ],
)
def test_the_copy_that_the_module_reads(settings, select, pooling, shared, eager, token_ids):
    embeddings = LayerReader(pipeline(EchoModule(shared("qwen3"), **settings), pooling)).embeddings(TEXTS)
    for index, text in enumerate(TEXTS):
        ids = token_ids(text)
        layers = after_each_layer(eager("qwen3"), 3 * ids, eager("qwen3").norm)
        read = [states[select(len(ids))] for states in layers]
        expected = torch.stack([states.mean(0) if pooling == "mean" else states[-1] for states in read])
        assert relative_error(embeddings[:, index], expected) < 1e-5


@pytest.mark.parametrize("pool_over", ["text", "all"])
def test_prompt_template_and_pool_over(pool_over, backbone_path, eager, token_ids):
    module = CausalTransformer(backbone_path(), template='In a word: {text}:"', pool_over=pool_over)
    embeddings = LayerReader(pipeline(module)).embeddings(["the bank"], prompt="query: ")
    ids = token_ids('query: In a word: the bank:"')
    [copy_index] = module.preprocess(["the bank"], prompt="query: ")["copy_index"]
    is_text = copy_index == 0
    layers = after_each_layer(eager(), ids, eager().norm)
    if pool_over == "all":
        is_text = is_text.cummax(dim=0).values
    expected = torch.stack([states[is_text].mean(0) for states in layers])
    assert relative_error(embeddings[:, 0], expected) < 1e-5


def test_the_last_features_are_the_modules_own(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    *_, last = LayerReader(model).features(TEXTS)
    expected = model[0](model.preprocess(TEXTS))
    assert last.keys() == expected.keys()
    assert torch.equal(last["token_embeddings"], expected["token_embeddings"])


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
    state = {key: dict(vars(part)) for key, part in (("module", model[0]), ("backbone", backbone))}
    reader.embeddings(TEXTS)
    hook.remove()
    assert len(passes) == 1
    assert vars(model[0]).keys() == state["module"].keys()
    assert vars(backbone).keys() == state["backbone"].keys()
    assert not any(part._forward_hooks for part in LayerReader(model).model[0].model.norm.modules())
    assert np.array_equal(model.encode(TEXTS), before)


def test_bfloat16(backbone_path):
    full = LayerReader(pipeline(CausalTransformer(backbone_path()))).embeddings(TEXTS)
    half = pipeline(CausalTransformer(backbone_path(), model_kwargs={"dtype": torch.bfloat16}))
    similarity = torch.cosine_similarity(full, LayerReader(half).embeddings(TEXTS).float(), dim=-1)
    assert similarity.min() > 0.99


@pytest.mark.parametrize("kind", [ReBAModule, InputEmbeddings])
def test_modules_without_such_a_reading(kind, shared):
    model = pipeline(kind(shared()))
    with pytest.raises(ValueError, match=f"{kind.__name__}, whose embedding is not .* Use a model with CausalTrans"):
        LayerReader(model)


def test_a_state_inside_the_last_layer_has_no_like_in_the_others(shared):
    """They would be read behind their own feed-forward parts."""
    module = CausalTransformer(shared(), readout="before_mlp")
    message = 'CausalTransformer with readout="before_mlp" reads a state inside its last layer.* readout="layer"'
    with pytest.raises(ValueError, match=message):
        LayerReader(pipeline(module))
    with pytest.raises(ValueError, match=message):
        module.forward_all_layers(module.preprocess(TEXTS))


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


@pytest.mark.parametrize("kind", [LayerStates, BidirectionalLastLayer, KVReroutingModule])
def test_modules_that_read_more_than_tokens(kind, shared):
    """They are classical ones too: their last layer is what they embed, and what else they hand on stays."""
    model = pipeline(kind(shared()))
    *earlier, last = LayerReader(model).features(TEXTS)
    with torch.inference_mode():
        expected = model[0](model.preprocess(TEXTS))
    assert len(earlier) == 3
    for name, value in expected.items():
        assert torch.equal(last[name], value), name
        assert name == "token_embeddings" or all(torch.equal(features[name], value) for features in earlier)


def test_a_model_that_was_read_can_be_sent_to_another_process(backbone_path):
    """transformers' own hooks, for output_hidden_states, cannot be pickled."""
    model = pipeline(CausalTransformer(backbone_path()))
    LayerReader(model).embeddings(TEXTS)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).encode(TEXTS), model.encode(TEXTS))
