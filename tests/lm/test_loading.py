"""A model, a tokenizer and what its checkpoint lacks; and views of models that somebody else has loaded."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModelForCausalLM

from st_reba.hub.checkpoints import check_model
from st_reba.lm.loaded import body_of, is_borrowed
from st_reba.lm.loading import load
from st_reba.lm.model import LanguageModel

from .. import backbones


@pytest.fixture
def saved(tmp_path):
    backbones.save(backbones.backbone("llama"), tmp_path)
    return tmp_path


def test_a_checkpoint_is_loaded_with_its_tokenizer_and_its_pooling(saved):
    (saved / "1_Pooling").mkdir()
    Pooling(32, "lasttoken").save(str(saved / "1_Pooling"))
    loaded = load(saved, max_seq_length=7)
    assert loaded.transformer.tokenizer.model_max_length == 7
    assert loaded.poolings == {"lasttoken"}
    assert not loaded.missing.names
    # A loaded one is shared.
    assert load(loaded.transformer).transformer is loaded.transformer


def test_missing_weights_are_named_where_they_are_needed(saved):
    weights = load_file(saved / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.2.mlp" not in name}
    save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})
    loaded = load(str(saved))
    model = loaded.transformer.model
    with pytest.raises(ValueError, match=r"lacks 3 weights that LlamaModel needs: layers\.2\.mlp\.down_proj\.weight"):
        loaded.missing.check(model)
    loaded.missing.check(model, needless=["layers.2.mlp"])
    loaded.missing.check(LanguageModel(model, 2).model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("_attn_implementation", "kernels/some", "that may be a kernel, code from the Hub"),
        ("dtype", "os", "give a type of PyTorch's numbers"),
        ("num_hidden_layers", 2**20, r"asks for 1048576 \(num_hidden_layers\): st_reba loads models with at most 1024"),
        ("hidden_size", 2**20, "describes a larger model than its checkpoint holds"),
        ("architectures", "Llama", "sets architectures to 'Llama'"),
    ],
)
def test_a_configuration_asks_for_nothing_but_what_saving_writes(key, value, message, saved):
    file = saved / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ValueError, match=message):
        load(str(saved))
    if key != "hidden_size":
        with pytest.raises(ValueError, match=message):
            check_model(str(saved), None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": None}, "tokenizer goes with a language model that is already loaded"),
        ({"backend": "onnx"}, "backend='onnx': st_reba reads hidden states"),
        ({"transformer_task": "fill-mask"}, "transformer_task='fill-mask': st_reba embeds text"),
        ({"query_expansion": 3}, "query_expansion=3: a causal language model was not trained"),
        ({"max_seq_length": 0}, "max_seq_length=0: give a number of tokens"),
    ],
)
def test_settings_that_this_package_has_not(settings, message, saved):
    with pytest.raises(ValueError, match=message):
        load(str(saved), **settings)


def test_a_borrowed_model_is_moved_and_cast_by_its_owner_alone():
    lm = AutoModelForCausalLM.from_config(backbones.config("llama")).train()
    view = body_of(lm)
    assert is_borrowed(view)
    assert not view.training
    assert not is_borrowed(lm.model)
    for borrowed in (view, LanguageModel(view).model, pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert borrowed.half() is borrowed
        assert borrowed.dtype == torch.float32
    lm.double()
    assert view.dtype == torch.float64
    assert all(module.training for module in lm.modules())


def test_a_loaded_language_model_brings_no_tokenizer(saved):
    lm = AutoModelForCausalLM.from_config(backbones.config("llama")).eval()
    loaded = load(lm, tokenizer=backbones.tokenizer(), max_seq_length=9)
    assert isinstance(loaded.transformer, Transformer)
    assert loaded.transformer.tokenizer.model_max_length == 9
    assert is_borrowed(loaded.transformer.model)
    for settings, message in (
        ({}, "does not bring its tokenizer"),
        ({"tokenizer": backbones.tokenizer(), "model_kwargs": {}}, r"\['model_kwargs'\] cannot be set"),
        ({"tokenizer": backbones.tokenizer(), "disable_adapter": True}, "this model has no adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            load(lm, **settings)
