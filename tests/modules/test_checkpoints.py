"""A checkpoint that lacks weights is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, ZambaConfig

from st_reba import CausalTransformer, EmbeddingFilter, ReBAModule, TwinTower
from st_reba.hub import compat
from st_reba.lm.sizes import SizeError, check_size
from st_reba.modules.lm_head import head_blocks

from .. import backbones
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error

SHARD = "model-00002-of-00002.safetensors"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def language_model(directory: Path, name: str = "llama", tied: bool = True):
    config = backbones.config(name)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = backbones.randomize(AutoModelForCausalLM.from_config(config).eval())
    backbones.save(model, directory)
    return model


def rewrite(directory: Path, change, sharded: bool = False) -> None:
    """Give a checkpoint other weights."""
    weights = load_file(directory / "model.safetensors")
    weights = {name: weight.contiguous() for name, weight in change(dict(weights)).items()}
    if not sharded:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {f"model-0000{part}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def head_alone(weights: dict) -> dict:
    return {**{name: weight for name, weight in weights.items() if name != EMBEDDINGS}, HEAD: weights[EMBEDDINGS]}


def without(*parts: str):
    return lambda weights: {name: weight for name, weight in weights.items() if not any(part in name for part in parts)}


class TestShardsOutside:
    """Weights come from the model's own directory, whatever its index says."""

    @pytest.fixture
    def model(self, tmp_path):
        """Sharded, with its second shard beside the model's directory."""
        language_model(tmp_path / "lm")
        rewrite(tmp_path / "lm", lambda weights: weights, sharded=True)
        shutil.move(tmp_path / "lm" / SHARD, tmp_path / SHARD)
        return tmp_path / "lm"

    def renamed(self, index: Path, name: str) -> None:
        said = json.loads(index.read_text())
        said["weight_map"] = {key: name if file == SHARD else file for key, file in said["weight_map"].items()}
        index.write_text(json.dumps(said))

    @pytest.mark.parametrize("load", [CausalTransformer, lambda path: list(head_blocks(path))], ids=["model", "head"])
    @pytest.mark.parametrize("name", ["../{}", "a/../../{}", "{root}/{}", "..\\{}", "C:{}", ""])
    def test_by_name(self, name, load, model):
        self.renamed(model / "model.safetensors.index.json", name.format(SHARD, root=model.parent))
        said = 'index.json has the path .*: a file lies inside its model, so give a relative path without "..".$'
        with pytest.raises(ValueError, match=said):
            load(str(model))

    @pytest.mark.parametrize("load", [CausalTransformer, lambda path: list(head_blocks(path))], ids=["model", "head"])
    def test_by_a_link(self, load, model):
        (model / SHARD).symlink_to(model.parent / SHARD)
        with pytest.raises(ValueError, match=rf"{SHARD} is a link to .*, outside the model: put the file itself there"):
            load(str(model))

    def test_whole_weights_may_be_linked(self, tmp_path):
        """Nothing in the model says where they lie: who has the directory has made the link."""
        language_model(tmp_path / "lm")
        expected = pipeline(CausalTransformer(str(tmp_path / "lm"))).encode(TEXTS)
        weights = tmp_path / "lm" / "model.safetensors"
        weights.rename(tmp_path / "elsewhere.safetensors")
        weights.symlink_to(tmp_path / "elsewhere.safetensors")
        assert relative_error(pipeline(CausalTransformer(str(tmp_path / "lm"))).encode(TEXTS), expected) == 0

    def test_pickled(self, model):
        names = {}
        for path in (model / "model-00001-of-00002.safetensors", model.parent / SHARD):
            torch.save(load_file(path), path.with_suffix(".bin"))
            names |= dict.fromkeys(load_file(path), path.with_suffix(".bin").name)
            path.unlink()
        (model / "model.safetensors.index.json").unlink()
        names = {key: f"../{file}" if file.startswith("model-00002") else file for key, file in names.items()}
        index = model / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        with pytest.raises(ValueError, match=r"pytorch_model.bin.index.json has the path '../model-00002.*': a file"):
            CausalTransformer(str(model))

    def test_of_a_saved_model(self, backbone_path, tmp_path):
        pipeline(ReBAModule(backbone_path())).save_pretrained(str(tmp_path / "saved"))
        own = tmp_path / "saved" / "0_ReBAModule"
        rewrite(own, lambda weights: weights, sharded=True)
        shutil.move(own / SHARD, tmp_path / "saved" / SHARD)
        self.renamed(own / "model.safetensors.index.json", f"../{SHARD}")
        with pytest.raises(ValueError, match=r"index.json has the path '../model-00002"):
            SentenceTransformer(str(tmp_path / "saved"), device="cpu")

    def test_missing(self, model):
        with pytest.raises(FileNotFoundError, match=rf"names '{SHARD}', which is not there: get the whole checkpoint"):
            CausalTransformer(str(model))

    def test_of_the_hubs_cache(self, model):
        shutil.move(model.parent / SHARD, model / SHARD)
        expected = pipeline(CausalTransformer(str(model))).encode(TEXTS)
        snapshot, blobs = (model.parent / "models--a--b" / name for name in ("snapshots/0", "blobs"))
        for place in (snapshot, blobs):
            place.mkdir(parents=True)
        for number, path in enumerate(model.iterdir()):
            shutil.move(path, blobs / str(number))
            (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        assert relative_error(pipeline(CausalTransformer(str(snapshot))).encode(TEXTS), expected) == 0


class TestTied:
    """Input embeddings that a checkpoint keeps as its head alone, as the public TinyStories-656K does."""

    def test_are_refused(self, tmp_path):
        language_model(tmp_path)
        rewrite(tmp_path, head_alone)
        with pytest.raises(ValueError, match=r"lacks 1 weight that LlamaModel needs: embed_tokens.weight\. .* random"):
            ReBAModule(str(tmp_path))

    def test_the_head_is_found_for_a_filter(self, tmp_path):
        language_model(tmp_path)
        expected = EmbeddingFilter.from_language_model(str(tmp_path))
        rewrite(tmp_path, head_alone)
        assert torch.equal(EmbeddingFilter.from_language_model(str(tmp_path)).directions, expected.directions)


class TestMissing:
    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    def test_names(self, sharded, tmp_path):
        language_model(tmp_path)
        rewrite(tmp_path, without("layers.1.mlp", "norm.weight"), sharded)
        with pytest.raises(ValueError, match=r"lacks \d+ weights that LlamaModel needs: .*layers.1.mlp.down_proj"):
            CausalTransformer(str(tmp_path))

    def test_another_models_weights(self, tmp_path):
        """None of the names fit: everything would be random."""
        language_model(tmp_path)
        rewrite(tmp_path, lambda weights: {f"other.{name}": weight for name, weight in weights.items()})
        with pytest.raises(ValueError, match=r"lacks 29 weights that LlamaModel needs: .* and 24 more\."):
            ReBAModule(str(tmp_path))

    def test_in_a_saved_model(self, backbone_path, tmp_path):
        pipeline(ReBAModule(backbone_path())).save_pretrained(str(tmp_path))
        rewrite(tmp_path / "0_ReBAModule", without("layers.2.input_layernorm"))
        with pytest.raises(ValueError, match=r"lacks 1 weight .*: layers.2.input_layernorm.weight\."):
            SentenceTransformer(str(tmp_path), device="cpu")

    def test_shapes(self, tmp_path):
        language_model(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
        with pytest.raises(
            ValueError,
            match=r"lacks 1 weight .*: embed_tokens.weight \(\(384, 32\) there, \(400, 32\) by its configuration\)",
        ):
            ReBAModule(str(tmp_path))
        with pytest.raises(ValueError, match="lacks 1 weight"):
            ReBAModule(str(tmp_path), model_kwargs={"ignore_mismatched_sizes": True})

    def test_above_the_layer_that_is_read(self, tmp_path):
        """They are not run, and not saved."""
        language_model(tmp_path)
        expected = pipeline(CausalTransformer(str(tmp_path), output_layer=2)).encode(TEXTS)
        rewrite(tmp_path, without("layers.2."))
        assert relative_error(pipeline(CausalTransformer(str(tmp_path), output_layer=2)).encode(TEXTS), expected) == 0
        with pytest.raises(ValueError, match=r"lacks \d+ weights .*layers.2."):
            CausalTransformer(str(tmp_path))

    def test_what_is_too_many_does_no_harm(self, tmp_path):
        """A task's head, and the masks that old GPT-2 checkpoints hold."""
        model = language_model(tmp_path, "gpt2", tied=False)
        mask = torch.ones(1, 1, 256, 256, dtype=torch.bool)
        rewrite(
            tmp_path, lambda weights: {**weights, "transformer.h.0.attn.bias": mask, "score.weight": mask[0, 0].float()}
        )
        expected = AutoModel.from_pretrained(tmp_path).state_dict()
        found = ReBAModule(str(tmp_path)).model.state_dict()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        assert model.config.tie_word_embeddings is False

    def test_what_the_caller_asks_of_the_report(self, backbone_path):
        assert isinstance(
            ReBAModule(backbone_path(), model_kwargs={"output_loading_info": True}).model, torch.nn.Module
        )


class TestAdapters:
    @pytest.fixture
    def adapter(self, tmp_path):
        peft = pytest.importorskip("peft")
        language_model(tmp_path / "lm")
        module = ReBAModule(str(tmp_path / "lm"))
        torch.manual_seed(1)
        module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        model = pipeline(module)
        model.save_pretrained(str(tmp_path / "adapter"))
        return tmp_path / "adapter", model.encode(TEXTS)

    def test_they_load(self, adapter):
        path, expected = adapter
        assert relative_error(SentenceTransformer(str(path), device="cpu").encode(TEXTS), expected) < 1e-6

    def test_the_model_below(self, adapter, tmp_path):
        """transformers reports on the adapter alone."""
        rewrite(tmp_path / "lm", without("layers.1.mlp.up_proj"))
        with pytest.raises(ValueError, match=r"lm lacks 1 weight .*: layers.1.mlp.up_proj.weight"):
            SentenceTransformer(str(adapter[0]), device="cpu")

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ({"fast_tokenizer_files": ["../tokenizer.json"]}, r"lm.tokenizer_config.json sets fast_tokenizer_files to"),
            ({"model_max_length": "long"}, r"^the tokenizer's model_max_length='long': give a number of tokens"),
        ],
    )
    def test_the_tokenizer_of_the_model_below(self, said, message, adapter, tmp_path):
        for file in adapter[0].glob("tokenizer*"):
            file.unlink()
        CausalTransformer(str(adapter[0]))
        path = tmp_path / "lm" / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
        with pytest.raises(ValueError, match=message):
            CausalTransformer(str(adapter[0]))

    @pytest.mark.parametrize("key", ["r", "rank_pattern"])
    def test_a_rank_that_its_weights_have_not(self, key, adapter):
        path = adapter[0] / "adapter_config.json"
        rank = 10**6 if key == "r" else {"q_proj": 10**6}
        path.write_text(json.dumps({**json.loads(path.read_text()), key: rank}))
        with pytest.raises(ValueError, match=r"adapter_config.json asks for a rank of 1000000, and no weight"):
            SentenceTransformer(str(adapter[0]), device="cpu")

    @pytest.mark.parametrize("said", ["[]", '{"r": "x"}', '{"layer_replication": [3]}', '{"peft_type": {}, "r": -1}'])
    def test_nonsense(self, said, adapter):
        (adapter[0] / "adapter_config.json").write_text(said)
        with pytest.raises(ValueError, match=r"adapter_config.json (is|sets) "):
            SentenceTransformer(str(adapter[0]), device="cpu")

    @pytest.mark.skipif(not compat.ADAPTERS_ARE_REPORTED, reason="this version of transformers does not report on them")
    def test_the_adapter(self, adapter):
        path, _ = adapter
        weights = load_file(path / "adapter_model.safetensors")
        weights.pop(next(name for name in sorted(weights) if "lora_B" in name))
        save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"adapter lacks 1 weight .*lora_B"):
            SentenceTransformer(str(path), device="cpu")


class TestTwinTower:
    @pytest.fixture(scope="class")
    def written(self, encoder_paths, tmp_path_factory):
        model, path = pipeline(TwinTower(*encoder_paths()), "cls"), tmp_path_factory.mktemp("towers")
        model.save_pretrained(str(path))
        return path, model.encode(TEXTS)

    @pytest.fixture
    def saved(self, written, tmp_path):
        return shutil.copytree(written[0], tmp_path, dirs_exist_ok=True), written[1]

    @pytest.mark.parametrize("tower", ["0_TwinTower", "0_TwinTower/tower_2"])
    def test_a_tower_that_lacks_something(self, tower, saved):
        path, _ = saved
        rewrite(path / tower, without("layer.1.attention.self.value"))
        with pytest.raises(ValueError, match=r"lacks 2 weights that BertModel needs: encoder.layer.1.attention.self"):
            SentenceTransformer(str(path), device="cpu")

    @pytest.mark.parametrize("tower", ["0_TwinTower", "0_TwinTower/tower_2"])
    def test_a_pooler_is_for_training_alone(self, tower, saved):
        """Encoders that were trained on masked words have none."""
        path, expected = saved
        rewrite(path / tower, without("pooler"))
        assert relative_error(SentenceTransformer(str(path), device="cpu").encode(TEXTS), expected) == 0


class TestSizes:
    """A checkpoint that has what its configuration says loads, however its weights are shared."""

    @pytest.mark.parametrize("name", ["gemma3", "gpt2"])
    def test_embeddings_that_are_most_of_a_model(self, name, tmp_path):
        config = backbones.config(name)
        config.tie_word_embeddings, config.vocab_size = True, 50_000
        backbones.save(AutoModelForCausalLM.from_config(config).eval(), tmp_path)
        stored = sum(weight.numel() for weight in load_file(tmp_path / "model.safetensors").values())
        for kind in (AutoModel, AutoModelForCausalLM):
            check_size(AutoConfig.from_pretrained(tmp_path), stored, "config.json", kind)
        CausalTransformer(str(tmp_path))

    def test_layers_that_share_their_weights(self):
        """Several hybrid layers of Zamba have one block of attention, which its checkpoint holds once."""
        config = ZambaConfig(
            vocab_size=64, hidden_size=32, attention_hidden_size=64, intermediate_size=64, num_attention_heads=2,
            num_key_value_heads=2, num_hidden_layers=7, attention_head_dim=32, mamba_dt_rank=4, n_mamba_heads=1,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid", "hybrid"],
        )  # fmt: skip
        model = AutoModel.from_config(config)
        check_size(config, sum(weight.numel() for weight in model.parameters()), "config.json")

    def test_what_is_too_large_is_not_built_to_its_end(self):
        with pytest.raises(SizeError, match=r"config.json describes a larger model .* where the checkpoint has 1,000"):
            check_size(LlamaConfig(num_hidden_layers=1000), 1000, "config.json")


def test_a_shared_backbone_is_its_owners(tmp_path):
    """Nobody can tell any more what was in its checkpoint, or what its owner put there since."""
    language_model(tmp_path)
    rewrite(tmp_path, without("layers.1.mlp"))
    shared = Transformer(str(tmp_path))
    assert ReBAModule(shared).model.embed_tokens.weight is shared.model.embed_tokens.weight


def test_should_st_load_in_another_way(tmp_path, monkeypatch):
    """Guards ``Transformer._load_model``, and what is done without it."""
    assert hasattr(Transformer, "_load_model")
    language_model(tmp_path)

    def load(self, name, task, config, *args, **kwargs):
        return AutoModel.from_pretrained(name, config=config)

    monkeypatch.setattr(compat.ReportingTransformer, "_load_model", load)
    ReBAModule(str(tmp_path))
    rewrite(tmp_path, without("layers.1.mlp.up_proj"))
    with pytest.raises(ValueError, match=r"lacks 1 weight .*: layers.1.mlp.up_proj.weight"):
        ReBAModule(str(tmp_path))


def test_what_is_far_too_large_is_not_built_to_its_end():
    built = []
    hook = register_module_parameter_registration_hook(lambda module, name, weight: built.append(name))
    try:
        with pytest.raises(SizeError, match="describes a larger model"):
            check_size(backbones.config("llama"), 10, "config.json")
    finally:
        hook.remove()
    assert len(built) == 1
