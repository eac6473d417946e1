from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoModel

from st_reba import ReBAModule
from st_reba.lm.anatomy import anatomy_of
from st_reba.lm.attention import function, setup

from ...backbones import IDS, MLP, SIZE, TEXTS, config, randomize, save
from ...conftest import pipeline


def build(kind, **settings):
    torch.manual_seed(0)
    return randomize(AutoModel.from_config(getattr(transformers, kind)(**settings)).eval().float())


BERT = {**SIZE, **MLP}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}


class TestPrepare:
    def test_decoders(self):
        for model in (AutoModel.from_config(config("gpt2")), build("BertConfig", **BERT, is_decoder=True)):
            setup.prepare(model.train())
            assert model.training, "a model in training is left so"

    @pytest.mark.parametrize(
        ("kind", "settings", "message"),
        [
            ("BertConfig", BERT, r"In BertModel the first token.*it is an encoder\..*decoder-only"),
            ("LlamaConfig", {"is_causal": False}, "In LlamaModel the first token's state changes"),
            ("T5Config", T5, "T5Model is an encoder-decoder. st_reba needs a decoder-only"),
        ],
    )
    def test_what_is_no_decoder(self, kind, settings, message):
        if kind == "LlamaConfig":
            settings = {**config("llama").to_dict(), **settings}
        model = build(kind, **settings)
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


class TestWatching:
    @pytest.mark.parametrize(("architecture", "is_ours"), [("qwen3", True), ("bloom", False)])
    def test_through_the_function_or_its_maps(self, architecture, is_ours):
        model = AutoModel.from_config(config(architecture)).eval()
        anatomy = setup.watch_attention(model)
        assert (anatomy.attention_layers, anatomy.calls_our_attention) == ((0, 1, 2), is_ours)
        assert model.config._attn_implementation == (function.ATTENTION if is_ours else "eager")

    def test_no_attention(self):
        model = build("MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2)
        with pytest.raises(ValueError, match=r"MambaModel has no attention to look back with.*or EchoModule"):
            setup.watch_attention(model)

    def test_maps_that_belong_to_other_states(self):
        """Falcon with ALiBi adds the bias twice when it runs eagerly (seen in transformers 5.23)."""
        model = build("FalconConfig", **SIZE, alibi=True, new_decoder_architecture=False)
        eager = AutoModel.from_config(copy.deepcopy(model.config)).eval()
        eager.load_state_dict(model.state_dict())
        eager.config._attn_implementation = "eager"
        ids = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            same = torch.allclose(model(ids).last_hidden_state, eager(ids).last_hidden_state, atol=1e-4)
        if same:
            assert not setup.watch_attention(model).calls_our_attention
        else:
            with pytest.raises(ValueError, match="the maps cannot be trusted"):
                setup.watch_attention(model)

    @pytest.mark.parametrize("harmless", [True, False])
    def test_arguments_that_are_new_to_us(self, harmless, monkeypatch):
        """An unknown argument that changes nothing is passed over; one that changes the result is not ignored."""
        model = build("LlamaConfig", **config("llama").to_dict())
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
        assert setup.watch_attention(model).calls_our_attention == harmless


def test_hybrid_models_use_the_layers_that_have_attention(tmp_path):
    model = build(
        "JambaConfig", **SIZE, **MLP, **IDS, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=4, mamba_d_conv=2, mamba_expand=1, use_mamba_kernels=False, num_experts=2,
    )  # fmt: skip
    path = save(model, tmp_path)
    module = ReBAModule(path)
    assert anatomy_of(module.model).attention_layers == (1,)
    assert pipeline(module).encode(TEXTS).shape == (len(TEXTS), 32)
    with pytest.raises(ValueError, match=r"layers=\[0\]: layers \[0\] of JambaModel have no attention; .* are \[1\]"):
        ReBAModule(path, layers=[0])


def test_micro_batches_stay_within_the_budget(monkeypatch):
    model = AutoModel.from_config(config("bloom"))
    one = 3 * 4 * 10 * 10 * 4
    for budget, size in ((5 * one, 5), (2 * one + 1, 2), (1, 1)):
        monkeypatch.setattr(setup, "MAP_BUDGET", budget)
        assert setup.micro_batch(model, 10) == size
