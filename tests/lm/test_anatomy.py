"""What a loaded model is, is found once, and leaves the model as it was; and what it is then set up for."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, ByT5Tokenizer, FalconH1Config, Llama4TextConfig, MambaConfig

from st_reba import CausalTransformer, ContrastivePromptingModule, EchoModule, ReBAModule, RefinedThoughtModule
from st_reba.lm import backbone
from st_reba.lm.anatomy import anatomy_of, embedding_scale, output_projections, reuses_cache
from st_reba.lm.attention import function, setup
from st_reba.lm.fingerprint import fingerprint as of_model
from st_reba.lm.fingerprint import fingerprint_of_weight
from st_reba.modules.lm_head import head_blocks

from .. import backbones, oracles
from ..backbones import ARCHITECTURES, DEMO_MODEL, IDS, MLP, OWN_ATTENTION, SIZE, TEXTS, config, randomize, save
from ..conftest import forward_passes, pipeline, relative_error

#: How many passes over a few tokens each takes on a backbone that is known.
KNOWN = {
    "reba": (ReBAModule, {"output_layer": -1}, 0),
    "residual stream": (CausalTransformer, {"final_norm": False, "bidirectional_layers": 2}, 0),
    "refined thought": (RefinedThoughtModule, {}, 3),
    # The whole one, and the short one.
    "short": (CausalTransformer, {"output_layer": 2}, 2),
    "short, steered": (ContrastivePromptingModule, {"output_layer": 2, "contrast_layer": 1}, 2),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_known_of_a_backbone_is_known_of_its_views(kind, roomy_path):
    module_class, settings, count = KNOWN[kind]
    whole = CausalTransformer(roomy_path)
    with forward_passes() as passes:
        module_class(whole, **settings)
    assert len(passes) == count
    with forward_passes() as passes:
        module_class(whole, **settings)
        module_class(EchoModule(whole), **settings)
    assert not passes


@pytest.mark.parametrize(("architecture", "count"), [("llama", 1), ("bloom", 3)])
def test_a_model_is_run_when_it_is_loaded_and_no_more(architecture, count, backbone_path):
    """Once; attention of its own is tried twice besides."""
    with forward_passes() as passes:
        whole = CausalTransformer(backbone_path(architecture))
    assert len(passes) == count
    if count > 1:
        with forward_passes() as passes, pytest.raises(ValueError, match="attention of .* cannot be watched, because"):
            ReBAModule(whole)
        assert not passes


def test_facts_do_not_keep_a_model_nor_the_layers_above(backbone_path):
    model = CausalTransformer(backbone_path()).model
    twin = copy.deepcopy(model)
    assert anatomy_of(twin) is not anatomy_of(model)
    whole = CausalTransformer(backbone_path())
    weights = [layer.mlp.up_proj.weight for layer in whole.model.layers]
    below, *gone = (weakref.ref(part) for part in (weights[0], weights[2], model, twin, model.layers[0].mlp))
    short = CausalTransformer(whole, output_layer=1)
    del model, twin, whole, weights
    gc.collect()
    assert not any(part() for part in gone)
    assert any(weight is below() for weight in short.model.parameters())


def state_of(model):
    """All that looking at a model could leave: configuration, modes, parts, hooks."""
    return model.config.to_dict(), model.config._attn_implementation, [
        (name, id(part), part.training, dict(part._forward_hooks), dict(part._forward_pre_hooks))
        for name, part in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_model_is_on_every_architecture(architecture):
    model = backbones.backbone(architecture).train()
    # A layer that its user froze by eval().
    next(part for part in model.modules() if isinstance(part, nn.ModuleList))[1].eval()
    before = state_of(model)
    facts = anatomy_of(model)
    assert facts.is_causal
    assert facts.calls_our_attention == (architecture not in OWN_ATTENTION)
    assert facts.attention_layers == (0, 1, 2)
    assert len(facts.layers) == 3
    assert model.get_submodule(facts.norm[0]) is oracles.final_norm(architecture, model)
    assert facts.widths == (32, 32, 32, 32)
    assert reuses_cache(model) == facts.calls_our_attention
    assert embedding_scale(model) is not None
    kinds = [type(model.get_submodule(path)).__name__ for path in facts.feed_forward]
    assert len(kinds) == (architecture not in ("opt", "falcon", "bloom", "mpt")), kinds
    assert output_projections(model) == {layer: oracles.projection_name(architecture, layer) for layer in range(3)}
    assert backbone.positions(model) == (None if architecture == "bloom" else 256)
    assert state_of(model) == before
    assert output_projections(model.to(torch.bfloat16)) == output_projections(model), "in half precision"


def test_a_model_whose_last_tokens_look_at_themselves():
    """In its own bfloat16, where what the demo model's first layer reads off other tokens is less than rounding."""
    model = AutoModel.from_pretrained(DEMO_MODEL)
    assert model.dtype == torch.bfloat16
    assert output_projections(model) == {layer: f"layers.{layer}.self_attn.o_proj" for layer in range(8)}


SIZES = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED, **backbones.IDS}


def test_a_state_space_beside_attention_has_no_projection():
    """It has the layer's number and a projection, too."""
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    both = FalconH1Config(**{**SIZES, **mamba, "mamba_chunk_size": 16, "pad_token_id": 0})
    model = AutoModel.from_config(both).eval()
    assert output_projections(model) == {layer: f"layers.{layer}.self_attn.o_proj" for layer in range(3)}
    # The embedding of a padding token is zero, and what comes behind it is as if it stood alone.
    assert anatomy_of(model).feed_forward == ("layers.2.feed_forward",)


def test_where_no_projection_is_found_and_nothing_to_watch():
    """None in a state-space model; and in BERT's build, the last matrix within the attention is that of the values."""
    mamba = AutoModel.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match="MambaModel has no attention whose values could be read. Use a model with"):
        output_projections(mamba)
    with pytest.raises(ValueError, match=r"MambaModel has no attention to look back with.*or EchoModule"):
        setup.watch_attention(mamba)
    model = backbones.backbone("llama")
    for layer in model.layers:
        layer.self_attn.o_proj = nn.Identity()
    with pytest.raises(ValueError, match="output projection of the attention in layer 0 of LlamaModel was not found"):
        output_projections(model)


@pytest.mark.filterwarnings("ignore:The cache of Llama4TextModel cannot be reused")
def test_masks_in_chunks_are_not_ours_to_make(tmp_path, token_ids):
    """Tokens of Llama 4 see no further back than their chunk begins."""
    chunked = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
    config = Llama4TextConfig(**SIZES, **chunked, max_position_embeddings=64)
    model = backbones.randomize(AutoModel.from_config(config).eval())
    assert not reuses_cache(model)
    module = RefinedThoughtModule(backbones.save(model, tmp_path))
    ids = [*token_ids("The dog chased the cat."), 0]
    eager = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    expected = oracles.refined_thought(eager, ids, 2)[-1]
    assert relative_error(pipeline(module, "lasttoken").encode("The dog chased the cat."), expected) < 1e-5


def test_long_range_rotary_embeddings_do_not_make_a_batch_matter(tmp_path):
    """One text beyond the length that the model was first trained on would change how all others are read."""
    phi3 = backbones.config("phi3")
    half = phi3.hidden_size // phi3.num_attention_heads // 2
    phi3.original_max_position_embeddings = 32
    phi3.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32, "short_factor": [1.0] * half, "long_factor": [4.0] * half,
    }  # fmt: skip
    torch.manual_seed(0)
    module = ReBAModule(backbones.save(backbones.randomize(AutoModel.from_config(phi3).eval()), tmp_path))
    assert module.max_seq_length == 16
    model = pipeline(module)
    assert relative_error(model.encode(["a cat", "word " * 90])[0], model.encode("a cat")) < 1e-5


def fingerprint(module) -> str:
    return of_model(module.model, module.tokenizer, module.max_seq_length)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_fingerprint_is_the_same_wherever_a_model_lies_and_shows_every_change(kind, backbone_path, tmp_path):
    """Every value counts: a sample of each weight would not show an edit."""
    module = CausalTransformer(backbone_path(kind=kind))
    mark = fingerprint(module)
    assert (len(mark), int(mark, 16) >= 0) == (16, True)
    module.save(str(tmp_path))
    assert fingerprint(CausalTransformer(str(tmp_path))) == mark
    weight = module.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[1] += 0.5
        assert fingerprint(module) != mark
        weight.view(-1)[1] -= 0.5
    # What a tokenizer was last told is no part of it.
    module.preprocess(["a long text", "b"], processing_kwargs={"text": {"max_length": 2}})
    module.tokenizer("one more text", truncation=True, max_length=2)
    assert fingerprint(module) == mark
    module.tokenizer.add_tokens(["cat"])
    assert fingerprint(module) != mark


def test_other_models_and_tokenizers_in_python_have_other_fingerprints(backbone_path):
    module, head = CausalTransformer(backbone_path()), CausalTransformer(backbone_path("qwen2"))
    settings = ({"max_seq_length": 20}, {"model_kwargs": {"dtype": torch.bfloat16}})
    others = [head, *(CausalTransformer(backbone_path(), **given) for given in settings)]
    marks = [*map(fingerprint, [module, *others])]
    for extra in (0, 5):
        module.processor = ByT5Tokenizer(extra_ids=extra)
        marks.append(fingerprint(module))
    assert len(set(marks)) == 6
    head.model.config.tie_word_embeddings = True
    mark = fingerprint_of_weight("head", head_blocks(head))
    with torch.no_grad():
        head.model.get_input_embeddings().weight[3, 1] += 1
    assert fingerprint_of_weight("head", head_blocks(head)) != mark


BERT = {**SIZE, **MLP}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}


class TestPrepare:
    @pytest.mark.parametrize(
        ("kind", "settings", "message"),
        [
            ("BertConfig", BERT, r"In BertModel the first token.*it is an encoder\..*decoder-only"),
            ("LlamaConfig", {**BERT, "is_causal": False}, "In LlamaModel the first token's state changes"),
            ("T5Config", T5, "T5Model is an encoder-decoder. st_reba needs a decoder-only"),
        ],
    )
    def test_what_is_no_decoder(self, kind, settings, message):
        model = randomize(AutoModel.from_config(getattr(transformers, kind)(**settings)).eval())
        with pytest.raises(ValueError, match=message):
            setup.prepare(model)

    @pytest.mark.parametrize(
        ("architecture", "chosen", "expected"),
        [("llama", None, "sdpa"), ("gemma2_softcap", None, function.ATTENTION), ("qwen3", "eager", "eager")],
    )
    def test_attention_that_sdpa_would_get_wrong_is_ours(self, architecture, chosen, expected):
        """And what a user has chosen stands."""
        model = AutoModel.from_config(config(architecture), attn_implementation=chosen).eval()
        model.config._attn_implementation = chosen or "sdpa"
        setup.prepare(model)
        assert model.config._attn_implementation == expected


@pytest.mark.parametrize("harmless", [True, False])
def test_arguments_that_are_new_to_us(harmless, monkeypatch):
    """An unknown argument that changes nothing is passed over; one that changes the result is not ignored."""
    model = backbones.backbone("llama")
    kind = type(model.layers[0].self_attn)
    original = kind.forward

    def forward(*args, **kwargs):
        return original(*args, **kwargs, new_trick=1)

    monkeypatch.setattr(kind, "forward", forward)
    if not harmless:
        observable = function.observable_attention

        def deaf(*args, **kwargs):
            output, nothing = observable(*args, **kwargs)
            return output * 1.5, nothing

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, function.ATTENTION, deaf)
    assert anatomy_of(model).calls_our_attention == harmless


def test_hybrid_models_use_the_layers_that_have_attention(tmp_path):
    jamba = transformers.JambaConfig(
        **SIZE, **MLP, **IDS, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=4, mamba_d_conv=2, mamba_expand=1, use_mamba_kernels=False, num_experts=2,
    )  # fmt: skip
    path = save(randomize(AutoModel.from_config(jamba).eval()), tmp_path)
    module = ReBAModule(path)
    assert anatomy_of(module.model).attention_layers == (1,)
    assert output_projections(module.model) == {1: "layers.1.self_attn.o_proj"}
    assert pipeline(module).encode(TEXTS).shape == (len(TEXTS), 32)
    with pytest.raises(ValueError, match=r"layers=\[0\]: layers \[0\] of JambaModel have no attention; .* are \[1\]"):
        ReBAModule(path, layers=[0])
