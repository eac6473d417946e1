"""A language model's head, found wherever the model lies: in memory, in a checkpoint, in one shard of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from st_reba import CausalTransformer
from st_reba.modules import lm_head
from st_reba.modules.lm_head import head_blocks

from .. import backbones
from ..conftest import pipeline
from .methods import language_model


def head(source, **kwargs):
    return torch.cat(list(head_blocks(source, **kwargs)))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(lm_head, "BLOCK", 100)


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), ("gemma2_softcap", False), ("gpt2", True), ("opt", False), ("falcon", True), ("phi3", False)],
)
def test_it_is_what_the_language_model_has(architecture, tied, tmp_path, small_blocks):
    model = language_model(tmp_path, architecture, tie_word_embeddings=tied)
    expected = model.get_output_embeddings().weight.detach()
    assert torch.equal(expected, model.get_input_embeddings().weight) == tied
    backbone = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    module = CausalTransformer(str(tmp_path))
    for source in (model, str(tmp_path), backbone, module, pipeline(module)):
        blocks = list(head_blocks(source))
        assert [len(block) for block in blocks] == [100, 100, 100, 84]
        assert torch.equal(torch.cat(blocks), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_one_shard_alone_is_read(tied, tmp_path):
    model = language_model(tmp_path / "whole", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = shards["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert len(set(shards.values())) > 1
    for shard in set(shards.values()) - {own}:
        (tmp_path / shard).write_bytes(b"not read")
    assert torch.equal(head(str(tmp_path)), model.lm_head.weight)


def test_a_checkpoint_before_safetensors_is_refused(tmp_path):
    model = language_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"in files of safetensors.* in \.bin files is to be saved again"):
        head(str(tmp_path))


def test_the_name_it_had_in_gpt_neox(tmp_path):
    model = language_model(tmp_path, "gpt_neox")
    state = {name.replace("lm_head", "embed_out"): value for name, value in model.state_dict().items()}
    assert "embed_out.weight" in state
    save_file(state, tmp_path / "model.safetensors")
    # Under its former name in memory, too, where transformers is old.
    assert torch.equal(head(str(tmp_path)), model.get_output_embeddings().weight)


def test_the_shortest_name():
    """Heads of layers that predict further tokens are not the head."""
    keys = ["model.layers.61.shared_head.lm_head.weight", "lm_head.weight", "lm_head.weight_scale"]
    assert lm_head._find(["lm_head.weight"], keys) == "lm_head.weight"
    assert lm_head._find(["head.weight"], keys) is None


def given(source):
    return lambda path: source


@pytest.mark.parametrize(
    ("weights", "source", "message"),
    [
        ({"words.weight": torch.zeros(384, 32)}, str, "no weight named lm_head.weight or embed_out.weight .* given"),
        ({"lm_head.weight": torch.zeros(384, 32, dtype=torch.int8)}, str, "is torch.int8 of shape .384, 32"),
        ({}, CausalTransformer, "no weight named lm_head.weight.*the language model that it was made"),
        ({}, given(AutoModel.from_config(backbones.config("llama"))), "does not know from where: give the"),
        ({}, given(Pooling(32)), "A Pooling has no language model's head"),
    ],
)
def test_what_is_refused(weights, source, message, tmp_path):
    """A head of another name, quantised, of an embedder that kept its backbone alone, from nowhere; something else."""
    backbones.save(language_model(tmp_path).model, tmp_path)
    if weights:
        save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        head(source(str(tmp_path)))
