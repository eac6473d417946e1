from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from st_reba import CausalTransformer
from st_reba.modules import lm_head
from st_reba.modules.lm_head import head_blocks

from .. import backbones
from ..conftest import paired, pipeline


def language_model(name="llama", **settings):
    config = backbones.config(name)
    config.update(settings)
    torch.manual_seed(1)
    return backbones.randomize(AutoModelForCausalLM.from_config(config).eval().float())


def head(source, **kwargs):
    return torch.cat(list(head_blocks(source, **kwargs)))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(lm_head, "BLOCK", 100)


@pytest.mark.parametrize(("architecture", "tied"), paired(backbones.TELLING, [True, False]))
def test_it_is_what_the_language_model_has(architecture, tied, tmp_path, small_blocks):
    model = language_model(architecture, tie_word_embeddings=tied)
    backbones.save(model, tmp_path)
    expected = model.get_output_embeddings().weight.detach()
    assert torch.equal(expected, model.get_input_embeddings().weight) == tied
    backbone = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    for source in (model, str(tmp_path), backbone):
        blocks = list(head_blocks(source))
        assert [len(block) for block in blocks] == [100, 100, 100, 84]
        assert torch.equal(torch.cat(blocks), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_pipeline(tied, tmp_path):
    model = language_model(tie_word_embeddings=tied)
    backbones.save(model, tmp_path)
    module = CausalTransformer(str(tmp_path))
    for source in (module, pipeline(module)):
        assert torch.equal(head(source), model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_one_shard_alone_is_read(tied, tmp_path):
    model = language_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = shards["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert len(set(shards.values())) > 1
    for shard in set(shards.values()) - {own}:
        (tmp_path / shard).write_bytes(b"not read")
    assert torch.equal(head(str(tmp_path)), model.lm_head.weight)


def test_a_checkpoint_before_safetensors_is_refused(tmp_path):
    model = language_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"in files of safetensors.* in \.bin files is to be saved again"):
        head(str(tmp_path))


def test_the_name_it_had_in_gpt_neox(tmp_path):
    model = language_model("gpt_neox")
    model.config.save_pretrained(tmp_path)
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


class TestRefused:
    def test_a_head_of_another_name(self, tmp_path):
        model = language_model(tie_word_embeddings=False)
        backbones.save(model, tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["words.weight"] = weights.pop("lm_head.weight")
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="no weight named lm_head.weight or embed_out.weight .* given as it is"):
            head(str(tmp_path))

    def test_an_embedder_that_kept_its_backbone_alone(self, tmp_path):
        backbones.save(language_model().model, tmp_path)
        for source in (str(tmp_path), CausalTransformer(str(tmp_path))):
            with pytest.raises(ValueError, match="no weight named lm_head.weight.*the language model that it was made"):
                head(source)

    def test_a_directory_without_weights(self, tmp_path):
        backbones.config("llama").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="no weight named lm_head.weight"):
            head(str(tmp_path))

    def test_an_index_without_it(self, tmp_path):
        model = language_model()
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"]["lm_head.weight"]
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match="no weight named lm_head.weight"):
            head(str(tmp_path))

    def test_a_backbone_from_nowhere(self):
        backbone = AutoModel.from_config(LlamaConfig(**backbones.CONFIGS["llama"][1]))
        with pytest.raises(ValueError, match="does not know from where: give the language model's path or Hub id"):
            head(backbone)

    def test_quantised(self, tmp_path):
        model = language_model()
        model.config.save_pretrained(tmp_path)
        save_file({"lm_head.weight": torch.zeros(384, 32, dtype=torch.int8)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="is torch.int8 of shape .384, 32.*before it was quantised"):
            head(str(tmp_path))

    def test_something_else(self):
        with pytest.raises(ValueError, match="A Pooling has no language model's head"):
            head(Pooling(32))
