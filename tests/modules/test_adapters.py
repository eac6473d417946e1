"""Adapters of peft: each kind comes back, merges, or is refused in a sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer
from st_reba.train import merge_adapter

from ..backbones import TEXTS
from ..conftest import long, pipeline

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
    "norms": lambda: peft.LNTuningConfig(target_modules=["norm", "input_layernorm"]),
}
#: Those of different build; ``make test-long`` takes all.
FEW_KINDS = [name if name in ("dora", "with norms and embeddings", "adalora", "ia3") else long(name) for name in KINDS]


def adapted(path: str, config) -> SentenceTransformer:
    """Return a model with an adapter as after a training."""
    model = pipeline(CausalTransformer(path))
    model.add_adapter(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def saved(model: SentenceTransformer, directory) -> SentenceTransformer:
    """Return a model as it is loaded again."""
    model.save_pretrained(str(directory))
    return SentenceTransformer(str(directory), device="cpu")


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_it_comes_back_and_merges(kind, backbone_path, tmp_path):
    model = adapted(backbone_path(), KINDS[kind]())
    expected = model.encode(TEXTS)
    assert np.abs(expected - pipeline(CausalTransformer(backbone_path())).encode(TEXTS)).max() > 0.01
    np.testing.assert_allclose(saved(model, tmp_path / "adapter").encode(TEXTS), expected, atol=1e-6)
    merge_adapter(model)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_array_equal(saved(model, tmp_path / "merged").encode(TEXTS), model.encode(TEXTS))
    assert not (tmp_path / "merged/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: peft.LoraConfig(r=4, lora_bias=True, **LAYERS), "of kind LORA .* the base layer has no bias"),
        (
            lambda: peft.LoraConfig(r=4, layer_replication=[[0, 2], [1, 3]], **LAYERS),
            "of kind LORA .*layers share weig",
        ),
    ],
)
def test_what_peft_does_not_merge_stays(config, message, backbone_path):
    model = adapted(backbone_path(), config())
    expected = model.encode(TEXTS)
    with pytest.raises(ValueError, match=rf"peft cannot merge this adapter {message}.*Save it as an adapter"):
        merge_adapter(model)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    with pytest.raises(ValueError, match="has no adapter to merge"):
        merge_adapter(pipeline(CausalTransformer(backbone_path())))


def test_ranks_that_adalora_has_chosen(backbone_path, tmp_path):
    """peft writes null before the training, and then which of the ranks are left."""
    model = adapted(backbone_path(), KINDS["adalora"]())
    saved(model, tmp_path)
    config = tmp_path / "adapter_config.json"
    assert json.loads(config.read_text())["rank_pattern"] is None
