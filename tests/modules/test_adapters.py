"""Adapters of peft: each kind comes back, merges, or is refused in a sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import AutoModel, AutoModelForCausalLM

import st_reba
from st_reba import CausalTransformer
from st_reba.train import merge_adapter

from .. import backbones, processes
from ..backbones import TEXTS
from ..conftest import change, long, pipeline, relative_error, reloaded

peft = pytest.importorskip("peft")

LAYERS = {"target_modules": ["q_proj", "v_proj"]}
#: Kinds of adapters that transformers can add to a model.
KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, **LAYERS),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LAYERS),
    "pissa": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", **LAYERS),
    "with norms and embeddings": lambda: peft.LoraConfig(r=4, modules_to_save=["norm", "embed_tokens"], **LAYERS),
    "with tokens": lambda: peft.LoraConfig(r=4, trainable_token_indices=[1, 70, 80], **LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=100, **LAYERS),
    "ia3": lambda: peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, **LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=4, **LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, r=0, **LAYERS),
    "adamss": lambda: peft.AdamssConfig(**LAYERS),  # its rank of 100 is no dimension of a weight
    "norms": lambda: peft.LNTuningConfig(target_modules=["norm", "input_layernorm"]),
}
#: Those of different build; ``make test-long`` takes all.
FEW_KINDS = [name if name in ("dora", "with norms and embeddings", "adalora", "ia3") else long(name) for name in KINDS]


def adapted(path: str, config, load=lambda path: pipeline(CausalTransformer(path))) -> SentenceTransformer:
    """Return a model with an adapter as after a training."""
    model = load(path)
    model.add_adapter(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_it_comes_back_and_merges(kind, backbone_path, tmp_path):
    model = adapted(backbone_path(), KINDS[kind]())
    expected = model.encode(TEXTS)
    assert np.abs(expected - pipeline(CausalTransformer(backbone_path())).encode(TEXTS)).max() > 0.01
    np.testing.assert_allclose(reloaded(model, tmp_path / "adapter").encode(TEXTS), expected, atol=1e-6)
    merge_adapter(model)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_array_equal(reloaded(model, tmp_path / "merged").encode(TEXTS), model.encode(TEXTS))
    assert not (tmp_path / "merged/adapter_config.json").exists()


NOT_MERGED = [
    (lambda: peft.LoraConfig(r=4, lora_bias=True, **LAYERS), "of kind LORA .* the base layer has no bias"),
    (lambda: peft.LoraConfig(r=4, layer_replication=[[0, 2], [1, 3]], **LAYERS), "of kind LORA .*layers share weig"),
]


@pytest.mark.parametrize(("config", "message"), NOT_MERGED)
def test_what_peft_does_not_merge_stays(config, message, backbone_path):
    model = adapted(backbone_path(), config())
    expected = model.encode(TEXTS)
    with pytest.raises(ValueError, match=rf"peft cannot merge this adapter {message}.*It stays as it was"):
        merge_adapter(model)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    with pytest.raises(ValueError, match="has no adapter to merge"):
        merge_adapter(pipeline(CausalTransformer(backbone_path())))


def test_ranks_that_adalora_has_chosen(backbone_path, tmp_path):
    """peft writes null before the training, and then which of the ranks are left: its own training cuts the others."""
    whole = peft.get_peft_model(AutoModel.from_pretrained(backbone_path()), KINDS["adalora"]()).eval()
    layers = [layer for layer in whole.modules() if hasattr(layer, "lora_E")]
    kept = [True, False, True, True, False, True]
    with torch.no_grad():
        for layer in layers:
            layer.lora_E["default"].copy_(torch.tensor(kept)[:, None] * torch.arange(1.0, 7)[:, None])
    expected = pipeline(CausalTransformer(whole, tokenizer=backbones.tokenizer())).encode(TEXTS)
    names = [name for name, _ in whole.get_base_model().named_parameters() if "lora_E" in name]
    whole.peft_config["default"].rank_pattern = dict.fromkeys(names, kept)
    viewed = pipeline(CausalTransformer(whole, tokenizer=backbones.tokenizer()))
    found = [reloaded(viewed, tmp_path / "view")]
    found.append(pipeline(CausalTransformer(backbones.save(whole, tmp_path / "peft"))))
    stored = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert {weight.shape[0] for name, weight in stored.items() if "lora_A" in name} == {4}
    for model in (*found, reloaded(found[1], tmp_path / "again")):
        np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)


SCRIPT = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
import st_reba
model, texts, vectors = sys.argv[1:]
np.save(vectors, SentenceTransformer(model, device="cpu").encode(np.load(texts).tolist()))
"""


@pytest.mark.parametrize("kind", ["lora", "ia3", long("with norms and embeddings")])
@pytest.mark.parametrize("way", ["in its folder", long("over the model"), long("by a trainer")])
def test_it_comes_back_on_a_model_that_was_saved(way, kind, backbone_path, tmp_path, monkeypatch):
    """Built, saved, loaded, adapted, saved, and loaded by another program from another directory."""
    base = st_reba.build(backbone_path(), "classical")
    base.save_pretrained(str(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    model = adapted("base", KINDS[kind](), load=SentenceTransformer)
    expected = model.encode(TEXTS)
    out = tmp_path / ("base" if way == "over the model" else "adapter")
    if way == "by a trainer":
        arguments = SentenceTransformerTrainingArguments(str(tmp_path / "run"), report_to="none")
        SentenceTransformerTrainer(model, arguments).save_model(str(out))
    else:
        model.save_pretrained(str(out))
    stored = (out / "adapter_config.json").read_text()
    assert json.loads(stored)["base_model_name_or_path"] == str(tmp_path / "base/0_CausalTransformer")
    np.save("texts.npy", TEXTS)
    done = processes.run("-c", SCRIPT, out, "texts.npy", "vectors.npy", out=tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    np.testing.assert_allclose(np.load("vectors.npy"), expected, atol=1e-6)
    if way != "over the model":  # Version 0.8 named the root, and could not load what it saved over the model.
        (out / "adapter_config.json").write_text(stored.replace("base/0_CausalTransformer", "base"))
        np.testing.assert_allclose(SentenceTransformer(str(out), device="cpu").encode(TEXTS), expected, atol=1e-6)

    merge_adapter(model)
    np.testing.assert_allclose(reloaded(model, out).encode(TEXTS), expected, atol=1e-5)


def test_an_adapter_that_mixes_texts_is_refused(backbone_path):
    model = AutoModel.from_pretrained(backbone_path())
    model.add_adapter(peft.LilyConfig(r=4, init_weights=False, **LAYERS))
    with pytest.raises(ValueError, match="adapter of LlamaModel mixes the texts of a batch, .* others. Use an adapter"):
        CausalTransformer(model, tokenizer=backbones.tokenizer())


def test_what_would_not_load_is_not_saved(backbone_path, tmp_path):
    """Nothing is written. What is merged first is saved."""
    # One for all, which names the model that it was given last.
    lora = peft.LoraConfig(r=2, init_lora_weights=False, **LAYERS)
    merge = r"Merge it first, with st_reba.train.merge_adapter\(\), or use LoRA"

    def with_two(model):
        model.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, **LAYERS), "b")
        model.set_adapter(["default", "b"])

    nameless = AutoModel.from_config(backbones.config("llama"))
    nameless.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, **LAYERS))
    cases = {
        "vocabulary": (lambda model: model.resize_token_embeddings(400), rf"embed_tokens.weight is of .*\. {merge}"),
        "two": (with_two, rf"The adapter cannot be saved: default and b are active, and one can be saved\. {merge}"),
        "disabled": (lambda model: model.disable_adapters(), r"disabled, .* active .*Call enable_adapters\(\)"),
    }
    for name, (spoil, message) in cases.items():
        model = pipeline(CausalTransformer(backbone_path()))
        model.add_adapter(lora)
        spoil(model[0].model)
        with pytest.raises(ValueError, match=message):
            model[0].save(str(tmp_path))
        if name == "disabled":
            model[0].model.enable_adapters()
            reloaded(model, tmp_path / name)
            model.delete_adapter("default")
            bare = pipeline(CausalTransformer(backbone_path())).encode(TEXTS)
            np.testing.assert_array_equal(reloaded(model, tmp_path / "deleted").encode(TEXTS), bare)
        else:
            expected = model.encode(TEXTS)
            merge_adapter(model)
            np.testing.assert_allclose(reloaded(model, tmp_path / name).encode(TEXTS), expected, atol=1e-5)
    module = CausalTransformer(nameless, tokenizer=backbones.tokenizer())
    with pytest.raises(ValueError, match=r"was not loaded from files.*Merge it first, where the model was loaded"):
        module.save(str(tmp_path))
    with pytest.raises(ValueError, match=r"belongs to a model that the program has loaded.*merge_and_unload\(\)"):
        merge_adapter(pipeline(module))
    assert {path.name for path in tmp_path.iterdir()} == {*cases, "deleted"}


def test_kinds_that_peft_keeps_apart(backbone_path, tmp_path):
    """They are read, and not saved: shared weights, and what the layers' own modules do not hold."""
    for config in (peft.VeraConfig(r=4, **LAYERS), peft.RandLoraConfig(r=4, **LAYERS)):
        whole = peft.get_peft_model(AutoModel.from_pretrained(backbone_path()), config).eval()
        module = CausalTransformer(whole, tokenizer=backbones.tokenizer())
        tokens = pipeline(module).encode(TEXTS[0], output_value="token_embeddings")
        ids = backbones.tokenizer()(TEXTS[0], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            assert relative_error(tokens, whole(input_ids=ids).last_hidden_state[0]) < 1e-6
        with pytest.raises(ValueError, match="The adapter cannot be saved: .*Merge it first, where the model was lo"):
            module.save(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_left_out_with_the_modules_that_it_trains(backbone_path):
    bare = pipeline(CausalTransformer(backbone_path())).encode(TEXTS)
    for name in ("with norms and embeddings", "with tokens"):
        whole = peft.get_peft_model(AutoModel.from_pretrained(backbone_path()), KINDS[name]())
        for parameter in whole.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter))
        module = CausalTransformer(whole, tokenizer=backbones.tokenizer(), disable_adapter=True)
        np.testing.assert_array_equal(pipeline(module).encode(TEXTS), bare)


def test_a_learned_prompt_is_refused(backbone_path, tmp_path):
    lm = AutoModelForCausalLM.from_config(backbones.config("llama"))
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    peft.get_peft_model(lm, config).save_pretrained(tmp_path)
    change(tmp_path / "adapter_config.json", base_model_name_or_path=backbone_path())
    with pytest.raises(ValueError, match="is a learned prompt, which no recipe of st_reba can read. Give the"):
        CausalTransformer(str(tmp_path))


TARGETS = [
    {"target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"]},
    long({"target_modules": r"model\.layers\.\d\.self_attn\.(q|k)_proj"}),
    long({"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}),
]


@pytest.mark.parametrize("targets", TARGETS)
def test_of_a_model_with_its_head(targets, tmp_path):
    """Its configuration names paths there, which are others in the body."""
    lm, tokenizer = AutoModelForCausalLM.from_config(backbones.config("llama")), backbones.tokenizer()
    lm.save_pretrained(tmp_path / "lm")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    whole = peft.get_peft_model(lm, peft.LoraConfig(r=2, init_lora_weights=False, **targets)).eval()
    whole.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        output = whole(tokenizer(TEXTS[0], return_tensors="pt")["input_ids"], output_hidden_states=True)
    view = pipeline(CausalTransformer(whole, tokenizer=tokenizer))
    read = pipeline(CausalTransformer(str(tmp_path / "adapter")))
    for number, model in enumerate((view, read, reloaded(view, tmp_path / "view"), reloaded(read, tmp_path / "read"))):
        tokens = model.encode(TEXTS[0], output_value="token_embeddings")
        assert relative_error(tokens, output.hidden_states[-1][0]) < 1e-6, number
    # Of another model, which has fewer layers.
    backbones.save(backbones.backbone("llama", num_hidden_layers=1), tmp_path / "lm")
    with pytest.raises(ValueError, match=r"has weights of layers that LlamaModel has not, such as layers|cannot put"):
        CausalTransformer(str(tmp_path / "adapter"))
