"""Multimodal checkpoints: the language model and the tokenizer alone are loaded and saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoTokenizer

from st_reba import CausalTransformer, PromptRepsModule, ReBAModule

from .. import backbones
from ..backbones import TEXTS, own
from ..conftest import long, pipeline, relative_error

TEXT = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED, **backbones.IDS, "max_position_embeddings": 256}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {**VISION, "image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 32, "depth": 2, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 14}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LLAMA = {**TEXT, "model_type": "llama"}

#: Configurations: of the text, of the images, and further settings.
MODELS = {
    "Gemma3": ({**TEXT, "sliding_window": 7, "query_pre_attn_scalar": 8}, IMAGE, {"mm_tokens_per_image": 4}),
    "Qwen3VL": ({**TEXT, **ROTARY}, {**QWEN, "deepstack_visual_indexes": [0]}, {}),
    "Qwen3_5": (
        {**TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        QWEN,
        {},
    ),
    "Mistral3": (
        {**TEXT, "model_type": "mistral"},
        {**IMAGE, "head_dim": 8, "model_type": "pixtral"},
        {"spatial_merge_size": 1},
    ),
    "SmolVLM": (LLAMA, IMAGE, {"scale_factor": 1}),
    "Llava": (LLAMA, {**IMAGE, "model_type": "clip_vision_model"}, {}),
}
FEW = [name if name in ("Gemma3", "Qwen3VL") else long(name) for name in MODELS]


def multimodal(name: str):
    """Return a tiny one, with its head."""
    text, vision, others = MODELS[name]
    kind = getattr(transformers, f"{name}Config")
    ids = {name: 7 for name in ("image_token_id", "image_token_index") if hasattr(kind(), name)}
    torch.manual_seed(0)
    config = kind(text_config=text, vision_config=vision, **ids, **others)
    return backbones.randomize(AutoModelForImageTextToText.from_config(config).eval())


def of_whole(lm) -> torch.Tensor:
    """Return the last hidden states of the first text, as the whole model gives them."""
    ids = backbones.tokenizer()(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return lm(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]


def saved_weights(directory: Path) -> list[str]:
    with safe_open(own(directory) / "model.safetensors", framework="pt") as weights:
        return [*weights.keys()]


@pytest.mark.parametrize("name", FEW)
def test_its_language_model_is_read_and_saved(name, tmp_path):
    lm, tokenizer = multimodal(name), backbones.tokenizer()
    lm.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    # Such a processor could not be made: nothing may look for it.
    for file in ("preprocessor_config.json", "tokenizer_config.json"):
        path = tmp_path / "lm" / file
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "processor_class": f"{name}Processor"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    vectors = []
    for way, given in (("loaded", {"model_name_or_path": lm, "tokenizer": tokenizer}), ("path", {})):
        model = pipeline(CausalTransformer(**{"model_name_or_path": str(tmp_path / "lm"), **given}))
        tokens = model.encode(TEXTS[0], output_value="token_embeddings")
        assert relative_error(tokens, of_whole(lm)) < 1e-6
        vectors.append(model.encode(TEXTS))
        model.save_pretrained(str(tmp_path / way))
        again = SentenceTransformer(str(tmp_path / way), device="cpu")
        np.testing.assert_array_equal(again.encode(TEXTS), vectors[-1])
        assert not [weight for weight in saved_weights(tmp_path / way) if "vision" in weight or "visual" in weight]
        assert not [*own(tmp_path / way).glob("*processor*")]
        # Without st_reba's safe loading, too.
        assert Transformer(str(own(tmp_path / way))).modalities == ["text"]
    np.testing.assert_array_equal(*vectors)


@pytest.mark.parametrize("prefix", ["model.language_model.", long("language_model.model.")])
def test_its_language_model_needs_no_package_for_images(prefix, tmp_path, monkeypatch):
    """As Gemma 3n without timm."""
    lm, tokenizer = multimodal("Gemma3"), backbones.tokenizer()
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = pipeline(CausalTransformer(str(tmp_path))).encode(TEXTS)
    file = tmp_path / "model.safetensors"
    weights = {re.sub("^.*language_model.(model.)?", prefix, name): own for name, own in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})

    def lacking(*args, **kwargs):
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(AutoModelForMultimodalLM, "from_pretrained", lacking)
    model = pipeline(CausalTransformer(str(tmp_path)))
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-6)
    save_file({name: own for name, own in weights.items() if "up_proj" not in name}, file, metadata={"format": "pt"})
    with pytest.raises(ImportError, match="requires the timm library"):
        CausalTransformer(str(tmp_path))


def test_of_a_transformer_with_its_processor(tmp_path):
    lm = multimodal("Gemma3")
    before = {name for name, _ in lm.named_modules()}
    module = ReBAModule(lm, tokenizer=backbones.tokenizer())
    assert [type(part.model).__name__ for part in (module, CausalTransformer(module))] == ["Gemma3TextModel"] * 2
    assert {name for name, _ in lm.named_modules()} == before


@pytest.mark.parametrize("is_tied", [True, False])
def test_its_head_is_found(is_tied, tmp_path):
    """Also where the configuration of the whole says alone whether it is tied."""
    text, vision, _ = MODELS["Llava"]
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    lm = AutoModelForImageTextToText.from_config(config).eval()
    lm.save_pretrained(tmp_path)
    backbones.tokenizer().save_pretrained(tmp_path)
    loaded, read = PromptRepsModule(lm, tokenizer=backbones.tokenizer()), PromptRepsModule(str(tmp_path))
    for module in (loaded, read):
        assert torch.equal(module.head_weight, lm.get_output_embeddings().weight)
    vectors = [pipeline(module).encode(TEXTS) for module in (loaded, read)]
    np.testing.assert_allclose(*vectors, atol=1e-5)


def test_adapters_of_the_whole_and_of_its_language_model(tmp_path):
    peft = pytest.importorskip("peft")
    lm, tokenizer = multimodal("Gemma3"), backbones.tokenizer()
    lm.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    config = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}

    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "lm")
    whole = peft.get_peft_model(base, peft.LoraConfig(**config, modules_to_save=["lm_head"]))
    whole.eval().save_pretrained(tmp_path / "whole")
    module = CausalTransformer(str(tmp_path / "whole"))
    tokens = pipeline(module).encode(TEXTS[0], output_value="token_embeddings")
    assert relative_error(tokens, of_whole(whole)) < 1e-6
    assert relative_error(tokens, of_whole(lm)) > 0.01

    for path, model in (
        ("of-whole", pipeline(module)),
        ("of-view", pipeline(CausalTransformer(whole, tokenizer=tokenizer))),
        ("own", pipeline(CausalTransformer(str(tmp_path / "lm")))),
    ):
        if path == "own":
            model.add_adapter(peft.LoraConfig(**config))
        expected = model.encode(TEXTS)
        model.save_pretrained(str(tmp_path / path))
        found = SentenceTransformer(str(tmp_path / path), device="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, expected, atol=1e-6)
