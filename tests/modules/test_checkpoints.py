"""A checkpoint that lacks weights is refused, and not written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModel, GPTNeoXJapaneseConfig

from st_reba import CausalTransformer, EmbeddingFilter, ReBAModule
from st_reba.lm.sizes import SizeError
from st_reba.modules.lm_head import head_blocks

from .. import backbones
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import language_model

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


@pytest.mark.parametrize(
    ("beside", "settings", "said"),
    [
        ("pytorch_model.bin", {"use_safetensors": False}, None),
        ("model.fp16.safetensors", {"variant": "fp16"}, None),
        ("model.fp16.safetensors", {}, r"none of model.safetensors, .*index.json is there\. Give a directory with"),
        ("q4.gguf", {}, r"none of model.safetensors, .* is there\. Give the GGUF file in it: .*q4\.gguf\.$"),
    ],
)
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
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
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
        path = tmp_path / "lm" / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "fast_tokenizer_files": ["../tokenizer.json"]}))
        with pytest.raises(ValueError, match=r"lm.tokenizer_config.json sets fast_tokenizer_files.0 to"):
            CausalTransformer(str(adapter[0]))

    def test_what_its_configuration_says(self, adapter):
        """Ranks that its weights have not, and nonsense."""
        path = adapter[0] / "adapter_config.json"
        said = json.loads(path.read_text())
        for other in ({**said, "r": 10**6}, {**said, "rank_pattern": {"q_proj": 10**6}}, [], {"r": "x"}):
            path.write_text(json.dumps(other))
            with pytest.raises(
                ValueError, match=r"adapter_config.json (is |sets |asks for a rank of 1000000, and no )"
            ):
                SentenceTransformer(str(adapter[0]), device="cpu")


def test_weights_of_other_names_are_saved_under_their_own(tmp_path):
    language_model(tmp_path / "lm", tie_word_embeddings=True)
    expected = pipeline(CausalTransformer(str(tmp_path / "lm"))).encode(TEXTS)
    rewrite(tmp_path / "lm", lambda weights: {f"x.{name}": weight for name, weight in weights.items()})
    model = pipeline(CausalTransformer(str(tmp_path / "lm"), model_kwargs={"key_mapping": {r"^x\.model\.": ""}}))
    model.save_pretrained(str(tmp_path / "saved"))
    assert relative_error(SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(TEXTS), expected) < 1e-6


def test_what_would_not_load_is_not_saved(backbone_path, tmp_path):
    """Other sizes than those of the configuration, and a layer that has more weights if it is the last."""
    sizes = {"intermediate_multiple_size": 2, "max_position_embeddings": backbones.POSITIONS}
    config = GPTNeoXJapaneseConfig(**backbones.SIZE, **backbones.IDS, **sizes)
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
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 10**6}))
    made = []
    hook = register_module_parameter_registration_hook(
        lambda module, name, weight: made.append(weight) if not weight.is_meta else None
    )
    said = r"config.json describes a larger model .* numbers of weights or more"
    with pytest.raises(SizeError, match=said):
        CausalTransformer(str(tmp_path))
    hook.remove()
    assert not made
