"""A checkpoint that lacks weights is refused, and not written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer

from st_reba import CausalTransformer, EmbeddingFilter, PromptRepsModule, ReBAModule
from st_reba.lm.sizes import SizeError
from st_reba.modules.lm_head import head_blocks

from .. import backbones
from ..backbones import TEXTS, language_model, own
from ..conftest import change, long, pipeline, raising, relative_error, reloaded

SHARD = "model-00002-of-00002.safetensors"


def rewrite(directory: Path, change, sharded: bool = False) -> None:
    """Give a checkpoint other weights."""
    weights = load_file(directory / "model.safetensors")
    weights = {name: weight.contiguous() for name, weight in change(dict(weights)).items()}
    if not sharded:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    (directory / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for file in {*places.values()}:
        own = {name: weights[name] for name in weights if places[name] == file}
        save_file(own, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def without(*parts: str):
    return lambda weights: {name: weight for name, weight in weights.items() if not any(part in name for part in parts)}


class TestShardsOutside:
    """Weights come from the model's own directory, whatever its index says."""

    @pytest.fixture
    def model(self, tmp_path):
        """Sharded, with its second shard beside the model's directory."""
        language_model(tmp_path / "lm", tie_word_embeddings=True)
        rewrite(tmp_path / "lm", lambda weights: weights, sharded=True)
        shutil.move(tmp_path / "lm" / SHARD, tmp_path / SHARD)
        return tmp_path / "lm"

    @pytest.mark.parametrize("load", [CausalTransformer, lambda path: list(head_blocks(path))], ids=["model", "head"])
    @pytest.mark.parametrize("name", ["../{}", "{root}/{}", ""])
    def test_by_name(self, name, load, model):
        index = model / "model.safetensors.index.json"
        names = json.loads(index.read_text())["weight_map"]
        names |= {key: name.format(SHARD, root=model.parent) for key, file in names.items() if file == SHARD}
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        said = r"index.json sets weight_map\.model.* to '.*: (.* leads out of its model|String should have at least 1)"
        with pytest.raises(ValueError, match=said):
            load(str(model))

    def test_by_a_link(self, model):
        (model / SHARD).symlink_to(model.parent / SHARD)
        for load in (CausalTransformer, lambda path: list(head_blocks(path))):
            with pytest.raises(ValueError, match=rf"{SHARD} is a link to .*, outside the model: put the file itself"):
                load(str(model))

    def test_missing(self, model):
        with pytest.raises(FileNotFoundError, match=rf"names '{SHARD}', which is not there: get the whole checkpoint"):
            CausalTransformer(str(model))


NO_WEIGHTS = [
    ("pytorch_model.bin", {"use_safetensors": False}, None),
    ("model.fp16.safetensors", {"variant": "fp16"}, None),
    ("model.fp16.safetensors", {}, r"none of model.safetensors, .*index.json is there\. Give a directory with"),
    ("q4.gguf", {}, r"none of model.safetensors, .* is there\. Give the GGUF file in it: .*q4\.gguf\.$"),
]


@pytest.mark.parametrize(("beside", "settings", "said"), NO_WEIGHTS)
def test_no_weights_at_all(beside, settings, said, tmp_path):
    language_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    if beside.endswith(".bin"):
        torch.save(load_file(weights), tmp_path / beside)
    else:
        shutil.copy(weights, tmp_path / beside)
    weights.unlink()
    if said is None:
        CausalTransformer(str(tmp_path), model_kwargs=settings)
        return
    with pytest.raises(FileNotFoundError, match=rf"has a config.json and no weights: {said}"):
        CausalTransformer(str(tmp_path), model_kwargs=settings)


def test_embeddings_that_a_checkpoint_keeps_as_its_head_alone(tmp_path):
    """As the public TinyStories-656K does: they are refused, and the head is found for a filter."""
    language_model(tmp_path, tie_word_embeddings=True)
    expected = EmbeddingFilter.from_language_model(str(tmp_path))
    rewrite(tmp_path, lambda weights: {"lm_head.weight": weights.pop("model.embed_tokens.weight"), **weights})
    with pytest.raises(ValueError, match=r"lacks 1 weight that LlamaModel needs: embed_tokens.weight\. .* random"):
        ReBAModule(str(tmp_path))
    assert torch.equal(EmbeddingFilter.from_language_model(str(tmp_path)).directions, expected.directions)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_missing_weights_are_named(sharded, tmp_path):
    """But those above the layer that is read are not run, and not saved."""
    language_model(tmp_path, tie_word_embeddings=True)
    expected = pipeline(CausalTransformer(str(tmp_path), output_layer=2)).encode(TEXTS)
    rewrite(tmp_path, without("layers.2.mlp"), sharded)
    assert relative_error(pipeline(CausalTransformer(str(tmp_path), output_layer=2)).encode(TEXTS), expected) == 0
    with pytest.raises(ValueError, match=r"lacks \d+ weights that LlamaModel needs: .*layers.2.mlp.down_proj"):
        CausalTransformer(str(tmp_path))


def test_shapes(tmp_path):
    language_model(tmp_path, tie_word_embeddings=True)
    change(tmp_path / "config.json", vocab_size=400)
    said = r"lacks 1 weight .*: embed_tokens.weight \(\(384, 32\) there, \(400, 32\) by its configuration\)"
    for settings in ({}, {"model_kwargs": {"ignore_mismatched_sizes": True}}):
        with pytest.raises(ValueError, match=said):
            ReBAModule(str(tmp_path), **settings)


class TestAdapters:
    @pytest.fixture
    def adapter(self, tmp_path):
        peft = pytest.importorskip("peft")
        language_model(tmp_path / "lm", tie_word_embeddings=True)
        module = ReBAModule(str(tmp_path / "lm"))
        torch.manual_seed(1)
        module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        model = pipeline(module)
        model.save_pretrained(str(tmp_path / "adapter"))
        return tmp_path / "adapter", model.encode(TEXTS)

    def test_they_load_on_the_model_below(self, adapter, tmp_path):
        """transformers reports on the adapter alone."""
        path, expected = adapter
        assert relative_error(SentenceTransformer(str(path), device="cpu").encode(TEXTS), expected) < 1e-6
        rewrite(tmp_path / "lm", without("layers.1.mlp.up_proj"))
        with pytest.raises(ValueError, match=r"lm lacks 1 weight .*: layers.1.mlp.up_proj.weight"):
            SentenceTransformer(str(path), device="cpu")

    def test_the_tokenizer_of_the_model_below(self, adapter, tmp_path):
        for file in adapter[0].glob("tokenizer*"):
            file.unlink()
        assert relative_error(SentenceTransformer(str(adapter[0]), device="cpu").encode(TEXTS), adapter[1]) < 1e-6
        change(tmp_path / "lm" / "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.json"])
        with pytest.raises(ValueError, match=r"lm.tokenizer_config.json sets fast_tokenizer_files.0 to"):
            CausalTransformer(str(adapter[0]))

    def test_what_its_configuration_says(self, adapter):
        """Ranks that its weights have not, and nonsense."""
        path = adapter[0] / "adapter_config.json"
        said = json.loads(path.read_text())
        for other in ({**said, "r": 10**6}, {**said, "rank_pattern": {"q_proj": 10**6}}, [], {"r": "x"}):
            path.write_text(json.dumps(other))
            with pytest.raises(ValueError, match=r"adapter_config.json (is|sets|asks for a rank of 1000000, and no) "):
                SentenceTransformer(str(adapter[0]), device="cpu")


def test_weights_of_other_names_are_saved_under_their_own(tmp_path):
    language_model(tmp_path / "lm", tie_word_embeddings=True)
    expected = pipeline(CausalTransformer(str(tmp_path / "lm"))).encode(TEXTS)
    rewrite(tmp_path / "lm", lambda weights: {f"x.{name}": weight for name, weight in weights.items()})
    model = pipeline(CausalTransformer(str(tmp_path / "lm"), model_kwargs={"key_mapping": {r"^x\.model\.": ""}}))
    assert relative_error(reloaded(model, tmp_path / "saved").encode(TEXTS), expected) < 1e-6


def test_what_would_not_load_is_not_saved(backbone_path, tmp_path):
    """Other sizes than those of the configuration, and a layer that has more weights if it is the last."""
    sizes = {"intermediate_multiple_size": 2, "max_position_embeddings": backbones.POSITIONS}
    config = transformers.GPTNeoXJapaneseConfig(**backbones.SIZE, **backbones.IDS, **sizes)
    path = backbones.save(AutoModel.from_config(config), tmp_path / "lm")
    saved = tmp_path / "saved"
    CausalTransformer(path).save(str(saved / "whole"))
    message = "GPTNeoXJapaneseModel cannot be saved, .*layers.1.attention.dense_bias .* Use output_layer=None, or"
    with pytest.raises(ValueError, match=message):
        CausalTransformer(path, output_layer=2).save(str(saved / "cut"))
    module = CausalTransformer(backbone_path())
    module.model.set_input_embeddings(torch.nn.Embedding(400, 32))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is of shape \(400, 32\), and of \(384, 32\) there"):
        module.save(str(saved / "replaced"))
    module.model.config.vocab_size = 400
    module.save(str(saved / "resized"))
    assert {path.name for path in saved.iterdir()} == {"whole", "resized"}
    CausalTransformer.load(str(saved / "resized"))


def test_a_larger_model_is_not_filled(tmp_path):
    """transformers builds a model without memory before it fills it: what is too large ends there."""
    language_model(tmp_path, tie_word_embeddings=True)
    change(tmp_path / "config.json", intermediate_size=10**6)
    made = []
    hook = register_module_parameter_registration_hook(
        lambda module, name, weight: made.append(weight) if not weight.is_meta else None
    )
    said = r"config.json describes a larger model .* numbers of weights or more"
    with pytest.raises(SizeError, match=said):
        CausalTransformer(str(tmp_path))
    hook.remove()
    assert not made


# Multimodal ones: the language model and the tokenizer alone are loaded and saved

TEXT = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED, **backbones.IDS, "max_position_embeddings": 256}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {**VISION, "image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 32, "depth": 2, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 14}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR_TEXT = {**TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LLAMA, MISTRAL = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "mistral"}
PIXTRAL = {**IMAGE, "head_dim": 8, "model_type": "pixtral"}

#: Configurations: of the text, of the images, and further settings.
MODELS = {
    "Gemma3": ({**TEXT, "sliding_window": 7, "query_pre_attn_scalar": 8}, IMAGE, {"mm_tokens_per_image": 4}),
    "Qwen3VL": ({**TEXT, **ROTARY}, {**QWEN, "deepstack_visual_indexes": [0]}, {}),
    "Qwen3_5": (LINEAR_TEXT, QWEN, {}),
    "Mistral3": (MISTRAL, PIXTRAL, {"spatial_merge_size": 1}),
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
    lm = multimodal(name)
    backbones.save(lm, tmp_path / "lm")
    # Such a processor could not be made: nothing may look for it.
    (tmp_path / "lm" / "preprocessor_config.json").write_text("{}")
    for file in ("preprocessor_config.json", "tokenizer_config.json"):
        change(tmp_path / "lm" / file, processor_class=f"{name}Processor")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "lm")
    vectors = []
    for way, given in (("loaded", {"model_name_or_path": lm, "tokenizer": tokenizer}), ("path", {})):
        model = pipeline(CausalTransformer(**{"model_name_or_path": str(tmp_path / "lm"), **given}))
        tokens = model.encode(TEXTS[0], output_value="token_embeddings")
        assert relative_error(tokens, of_whole(lm)) < 1e-6
        vectors.append(model.encode(TEXTS))
        np.testing.assert_array_equal(reloaded(model, tmp_path / way).encode(TEXTS), vectors[-1])
        assert not [weight for weight in saved_weights(tmp_path / way) if "vision" in weight or "visual" in weight]
        assert not [*own(tmp_path / way).glob("*processor*")]
        # Without st_reba's safe loading, too.
        assert Transformer(str(own(tmp_path / way))).modalities == ["text"]
    np.testing.assert_array_equal(*vectors)


@pytest.mark.parametrize("prefix", ["model.language_model.", long("language_model.model.")])
def test_its_language_model_needs_no_package_for_images(prefix, tmp_path, monkeypatch):
    """As Gemma 3n without timm."""
    expected = pipeline(CausalTransformer(backbones.save(multimodal("Gemma3"), tmp_path))).encode(TEXTS)
    file = tmp_path / "model.safetensors"
    weights = {re.sub("^.*language_model.(model.)?", prefix, name): own for name, own in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    lacking = ImportError("TimmWrapperModel requires the timm library")
    monkeypatch.setattr(transformers.AutoModelForMultimodalLM, "from_pretrained", raising(lacking))
    model = pipeline(CausalTransformer(str(tmp_path)))
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(reloaded(model, tmp_path / "saved").encode(TEXTS), expected, atol=1e-6)
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
    read = PromptRepsModule(backbones.save(lm, tmp_path))
    loaded = PromptRepsModule(lm, tokenizer=backbones.tokenizer())
    for module in (loaded, read):
        assert torch.equal(module.head_weight, lm.get_output_embeddings().weight)
    vectors = [pipeline(module).encode(TEXTS) for module in (loaded, read)]
    np.testing.assert_allclose(*vectors, atol=1e-5)


def test_adapters_of_the_whole_and_of_its_language_model(tmp_path):
    peft = pytest.importorskip("peft")
    lm = multimodal("Gemma3")
    backbones.save(lm, tmp_path / "lm")
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
        ("of-view", pipeline(CausalTransformer(whole, tokenizer=backbones.tokenizer()))),
        ("own", pipeline(CausalTransformer(str(tmp_path / "lm")))),
    ):
        if path == "own":
            model.add_adapter(peft.LoraConfig(**config))
        expected = model.encode(TEXTS)
        np.testing.assert_allclose(reloaded(model, tmp_path / path).encode(TEXTS), expected, atol=1e-6)
