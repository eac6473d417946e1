"""What the files of a model may not do on loading: run code, read or write elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers.utils import import_utils

from st_reba import CausalTransformer, EmbeddingFilter, LayerwiseAutoencoder, ReBAModule, TwinTower
from st_reba.hub.saved_files import quoted
from st_reba.modules.lm_head import head_blocks

from ..backbones import TEXTS, own
from ..conftest import pipeline, relative_error

SETTINGS = "sentence_bert_config.json"


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture(scope="module")
def originals(backbone_path, encoder_paths, tmp_path_factory):
    """A saved model of each class that has a backbone inside, in directories that nothing writes to."""
    made = {ReBAModule: [backbone_path()], TwinTower: encoder_paths()}
    paths = {module_class: tmp_path_factory.mktemp("original") for module_class in made}
    for module_class, sources in made.items():
        pipeline(module_class(*sources)).save_pretrained(str(paths[module_class]), create_model_card=False)
    return paths


@pytest.fixture
def model_of(originals, tmp_path):
    """``model_of(module_class)``: a copy of a saved model, to tamper with."""
    return lambda module_class=ReBAModule: Path(shutil.copytree(originals[module_class], tmp_path / "model"))


def change(path: Path, *, remove: str = "", **settings) -> None:
    old = {key: value for key, value in json.loads(path.read_text()).items() if key != remove}
    path.write_text(json.dumps({**old, **settings}))


def pickle_weights(directory: Path, weights: dict, sharded: bool = False) -> None:
    """In place of the safetensors file; transformers then learns the dtype from the weights."""
    (directory / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save(weights, directory / name)
    if sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    change(directory / "config.json", remove="dtype")


def adapted(model: Path, directory: Path) -> Path:
    """A model with an adapter, saved: it names the model that it is for."""
    peft = pytest.importorskip("peft")
    module = ReBAModule.load(str(model))
    module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
    module.save(str(directory))
    return directory


class TestPickledWeights:
    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    @pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
    def test_their_code_is_not_run(self, module_class, sharded, model_of, tmp_path):
        """Neither as it is, nor where a file asks for it."""
        model = model_of(module_class)
        pickle_weights(own(model), {"norm.weight": Canary(tmp_path / "marker")}, sharded)
        with pytest.raises(Exception, match="[Ww]eights.only"):
            SentenceTransformer(str(model))
        for key in ("model_kwargs", "model_args"):
            change(own(model) / SETTINGS, remove="model_kwargs", **{key: {"weights_only": False}})
            with pytest.raises(ValueError, match=rf"{SETTINGS} sets weights_only in {key} to False"):
                SentenceTransformer(str(model))
        assert not (tmp_path / "marker").exists()

    def test_of_a_second_tower_an_adapter_a_filter_and_a_head(self, model_of, originals, tmp_path):
        canary = Canary(tmp_path / "marker")
        model = model_of(TwinTower)
        pickle_weights(own(model) / "tower_2", {"norm.weight": canary})
        with pytest.raises(Exception, match="[Ww]eights.only"):
            SentenceTransformer(str(model))
        adapter = adapted(originals[ReBAModule], tmp_path / "adapter")
        (adapter / "adapter_model.safetensors").unlink()
        torch.save({"x": canary}, adapter / "adapter_model.bin")
        # Some versions of transformers do not even look for it.
        with pytest.raises(Exception, match=r"[Ww]eights.only|adapter_model\.safetensors"):
            ReBAModule.load(str(adapter))
        EmbeddingFilter(torch.eye(4)[:2], low=1).save(str(tmp_path))
        (tmp_path / "model.safetensors").unlink()
        torch.save({"directions": canary}, tmp_path / "pytorch_model.bin")
        with pytest.raises(Exception, match="[Ww]eights.only"):
            EmbeddingFilter.load(str(tmp_path))
        head = Path(shutil.copytree(own(originals[ReBAModule]), tmp_path / "head"))
        pickle_weights(head, {"lm_head.weight": canary})
        with pytest.raises(ValueError, match="in files of safetensors"):
            list(head_blocks(str(head)))
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    def test_that_are_nothing_but_weights_load(self, sharded, model_of):
        model = model_of()
        expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
        pickle_weights(own(model), load_file(own(model) / "model.safetensors"), sharded)
        assert relative_error(SentenceTransformer(str(model), device="cpu").encode(TEXTS), expected) == 0

    def test_a_pytorch_that_is_not_safe(self, model_of, tmp_path, monkeypatch):
        """Before 2.6, ``weights_only`` could be got around: safetensors alone are read."""
        (tmp_path / "autoencoder").mkdir()
        LayerwiseAutoencoder(2, 8).save(str(tmp_path / "autoencoder"), safe_serialization=False)
        model = model_of()
        pickle_weights(own(model), load_file(own(model) / "model.safetensors"))
        monkeypatch.setattr(import_utils, "is_torch_greater_or_equal", lambda version, *args, **kwargs: version < "2.6")
        for load, path in ((LayerwiseAutoencoder.load, tmp_path / "autoencoder"), (ReBAModule, model)):
            with pytest.raises(ValueError, match="upgrade torch to at least v2.6"):
                load(str(path))


#: What a saved file could do with transformers' arguments, and with ST's, under their names of today and of before.
REFUSED: dict[tuple[str, str], dict[str, Any]] = {
    ("model_kwargs", "model_args"): {
        "adapter_kwargs": {"_adapter_model_path": "../elsewhere"},
        "attn_implementation": "org/kernel",
        "device_map": "auto",
        "gguf_file": "../elsewhere.gguf",
        "key_mapping": {"a": "b"},
        "offload_folder": "written",
        "proxies": {"https": "elsewhere"},
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "weights_only": True,
    },
    ("processor_kwargs", "tokenizer_args"): {"tokenizer_file": "/etc/hostname", "vocab_file": "../words"},
    ("config_kwargs", "config_args"): {"_configuration_file": "../elsewhere.json", "num_labels": 3},
}


@pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
@pytest.mark.parametrize(("kinds", "key"), [(kinds, key) for kinds, keys in REFUSED.items() for key in keys])
def test_arguments_that_a_file_may_not_give(module_class, kinds, key, model_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_of(module_class)
    before = set(tmp_path.rglob("*"))
    for name in kinds:
        change(own(model) / SETTINGS, remove=kinds[0], **{name: {key: REFUSED[kinds][key]}})
        with pytest.raises(ValueError, match=rf"{SETTINGS} sets {key} in {name} to .* pass {kinds[0]}="):
            SentenceTransformer(str(model), device="cpu")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
@pytest.mark.parametrize(
    "setting", ["backend", "cache_dir", "model_name_or_path", "second_model_name_or_path", "tokenizer_name_or_path"]
)
def test_settings_that_a_file_may_not_make(module_class, setting, model_of):
    model = model_of(module_class)
    change(own(model) / SETTINGS, **{setting: "/elsewhere"})
    with pytest.raises(ValueError, match=rf"{SETTINGS} sets {setting}, which is no setting of {module_class.__name__}"):
        SentenceTransformer(str(model), device="cpu")


@given(kind=st.sampled_from(["model_kwargs", "tokenizer_args", "config_kwargs"]), key=st.text(min_size=1, max_size=9))
def test_any_other_argument(kind, key, originals, tmp_path):
    """What nobody has thought of is refused, too; a name that would move the terminal's cursor is shown escaped."""
    shutil.copy(own(originals[ReBAModule]) / SETTINGS, tmp_path / SETTINGS)
    change(tmp_path / SETTINGS, **{kind: {key: 1}})
    with pytest.raises(ValueError, match=re.escape(f"sets {quoted(key)} in {kind} to 1")):
        ReBAModule.load_config(str(tmp_path))
    change(tmp_path / SETTINGS, remove=kind, **{"\x1b[2Jx": 1})
    with pytest.raises(ValueError, match=re.escape(r"sets '\x1b[2Jx', which is no setting")):
        ReBAModule.load_config(str(tmp_path))


def test_a_file_of_a_former_name_is_not_read(model_of):
    """ST reads it where there is none of today's name. No saved module of ours has one."""
    model = model_of()
    (own(model) / SETTINGS).rename(own(model) / "sentence_roberta_config.json")
    change(own(model) / "sentence_roberta_config.json", model_args={"weights_only": False}, repetitions=3)
    assert ReBAModule.load(str(model)).repetitions == 2


def test_what_a_file_and_what_the_caller_may_give(model_of, tmp_path):
    """What the caller gives is free, also where a file says something else."""
    model = model_of()
    said = {"model_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"}, "max_seq_length": None}
    change(own(model) / SETTINGS, **said, processor_kwargs={"model_max_length": 9})
    module = ReBAModule.load(str(model))
    assert (module.model.dtype, module.max_seq_length) == (torch.bfloat16, 9)
    change(own(model) / "config.json", attn_implementation="org/kernel")
    given = {"dtype": "float32", "attn_implementation": "eager", "device_map": {"": "cpu"}, "weights_only": False}
    loaded = SentenceTransformer(str(model), model_kwargs={**given, "offload_folder": str(tmp_path / "written")})
    assert loaded[0].model.dtype == torch.float32


class TestAKernelIsCode:
    @pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
    @pytest.mark.parametrize(
        "load", [ReBAModule.load, ReBAModule, CausalTransformer, lambda path: list(head_blocks(path))]
    )
    def test_in_a_backbones_config(self, key, load, model_of):
        model = model_of()
        for value in ("org/kernel", {"": "org/kernel"}):
            change(own(model) / "config.json", **{key: value})
            with pytest.raises(ValueError, match=rf"config.json sets {key} to '?.*org/kernel.*: .*model_kwargs"):
                load(str(model))
        for plain in ("eager", "sdpa", None):
            change(own(model) / "config.json", **{key: plain})
        ReBAModule.load(str(model))

    @pytest.mark.parametrize("tower", [".", "tower_2"])
    def test_of_both_towers_and_wherever_it_stands(self, tower, model_of):
        model = model_of(TwinTower)
        change(own(model) / tower / "config.json", text_config={"attn_implementation": "org/kernel"})
        with pytest.raises(ValueError, match=r"config.json sets text_config.attn_implementation to 'org/kernel'"):
            TwinTower.load(str(model))

    def test_of_the_model_that_an_adapter_is_for_and_of_what_the_adapter_imports(self, model_of, tmp_path):
        model = model_of()
        adapter = adapted(model, tmp_path / "adapter")
        assert ReBAModule.load(str(adapter)).repetitions == 2
        change(own(model) / "config.json", attn_implementation="org/kernel")
        with pytest.raises(ValueError, match=r"ReBAModule/config.json sets attn_implementation to 'org/kernel'"):
            ReBAModule.load(str(adapter))
        change(adapter / "adapter_config.json", megatron_config={"a": 1}, megatron_core="os")
        with pytest.raises(ValueError, match=r"adapter_config.json sets megatron_config"):
            ReBAModule.load(str(adapter))


class TestAfterPooling:
    """Modules whose directory holds settings and weights."""

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"device_map": "auto"}, "config.json sets device_map, which is no setting of Layerwise"),
            ({"depth": 10**6}, "depth=1000000: give a whole number from 1 to"),
            # They would be allocated first: 4 TiB.
            ({"hidden_size": 2**20, "bottlenecks": [2**20]}, r"config.json and the weights do not fit .*\(.*\).* save"),
            ({"head_dimension": 9}, r"config.json and the weights do not fit .*\(.*\).* save the model again"),
        ],
    )
    def test_settings_that_may_not_be(self, settings, message, tmp_path):
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", **settings)
        with pytest.raises(ValueError, match=message):
            LayerwiseAutoencoder.load(str(tmp_path))

    @pytest.mark.parametrize("value", [3e38, float("nan"), float("-inf")])
    def test_weights_that_no_embedding_survives(self, value, tmp_path):
        module = LayerwiseAutoencoder(2, 8)
        with torch.no_grad():
            next(module.parameters())[0] = value
        module.save(str(tmp_path))
        with pytest.raises(ValueError, match=r"encoder\.0\.0\.weight has the value .* not beyond 1e\+12"):
            LayerwiseAutoencoder.load(str(tmp_path))
