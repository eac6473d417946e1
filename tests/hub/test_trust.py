"""What the files of a model may not do on loading: run code, read or write elsewhere, ask for the absurd."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba import CausalTransformer, EmbeddingFilter, LayerwiseAutoencoder, ReBAModule, TwinTower
from st_reba.hub.saved_files import quoted
from st_reba.modules.lm_head import head_blocks

from ..backbones import TEXTS, own
from ..conftest import examples, paired, pipeline, relative_error

SETTINGS = "sentence_bert_config.json"


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture(scope="session")
def originals(backbone_path, encoder_paths, tmp_path_factory):
    """A saved model of each class that has a backbone inside, in directories that nothing writes to."""
    made = {}

    def path(module_class: type) -> Path:
        if module_class not in made:
            made[module_class] = tmp_path_factory.mktemp("original")
            given = encoder_paths() if module_class is TwinTower else [backbone_path()]
            pipeline(module_class(*given)).save_pretrained(str(made[module_class]))
        return made[module_class]

    return path


@pytest.fixture
def model_of(originals, tmp_path):
    """``model_of(module_class)``: a copy of a saved model, to tamper with."""

    def copy(module_class: type = ReBAModule) -> Path:
        shutil.copytree(originals(module_class), tmp_path / "model")
        return tmp_path / "model"

    return copy


def change(path: Path, *, remove: tuple[str, ...] = (), **settings) -> None:
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**old, **settings}))


def pickle_weights(directory: Path, weights: dict, sharded: bool = False) -> None:
    """In place of the safetensors file; transformers then learns the dtype from the weights."""
    (directory / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save(weights, directory / name)
    if sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    change(directory / "config.json", remove=("dtype",))


class TestPickledWeights:
    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    @pytest.mark.parametrize("key", ["model_kwargs", "model_args"])
    @pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
    def test_a_file_cannot_ask_for_their_code(self, module_class, key, sharded, model_of, tmp_path):
        model = model_of(module_class)
        pickle_weights(own(model), {"norm.weight": Canary(tmp_path / "marker")}, sharded)
        change(own(model) / SETTINGS, **{key: {"weights_only": False}})
        for load in (module_class.load, SentenceTransformer):
            with pytest.raises(ValueError, match=rf"{SETTINGS} sets weights_only in {key} to False"):
                load(str(model))
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    @pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
    def test_without_being_asked_it_is_not_run(self, module_class, sharded, model_of, tmp_path):
        model = model_of(module_class)
        pickle_weights(own(model), {"norm.weight": Canary(tmp_path / "marker")}, sharded)
        for load in (module_class.load, module_class):
            with pytest.raises(Exception, match="[Ww]eights.only"):
                load(str(model))
        assert not (tmp_path / "marker").exists()

    def test_of_the_second_tower(self, model_of, tmp_path):
        model = model_of(TwinTower)
        pickle_weights(own(model) / "tower_2", {"norm.weight": Canary(tmp_path / "marker")})
        with pytest.raises(Exception, match="[Ww]eights.only"):
            SentenceTransformer(str(model))
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
    def test_that_are_nothing_but_weights_load(self, sharded, model_of):
        model = model_of()
        expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
        pickle_weights(own(model), load_file(own(model) / "model.safetensors"), sharded)
        assert relative_error(SentenceTransformer(str(model), device="cpu").encode(TEXTS), expected) == 0

    def test_of_a_filter(self, tmp_path):
        EmbeddingFilter(torch.eye(4)[:2], low=1).save(str(tmp_path))
        (tmp_path / "model.safetensors").unlink()
        torch.save({"directions": Canary(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
        with pytest.raises(Exception, match="[Ww]eights.only"):
            EmbeddingFilter.load(str(tmp_path))
        assert not (tmp_path / "marker").exists()

    def test_a_pytorch_that_is_not_safe(self, model_of, tmp_path, monkeypatch):
        """Before 2.6, ``weights_only`` could be got around: safetensors alone are read."""
        from transformers.utils import import_utils

        for name in ("filter", "autoencoder"):
            (tmp_path / name).mkdir()
        EmbeddingFilter(torch.eye(4)[:2], low=1).save(str(tmp_path / "filter"))
        LayerwiseAutoencoder(2, 8).save(str(tmp_path / "autoencoder"), safe_serialization=False)
        model = model_of()
        pickle_weights(own(model), load_file(own(model) / "model.safetensors"))
        monkeypatch.setattr(import_utils, "is_torch_greater_or_equal", lambda version, *args, **kwargs: version < "2.6")
        EmbeddingFilter.load(str(tmp_path / "filter"))
        pickled = (
            lambda: LayerwiseAutoencoder.load(str(tmp_path / "autoencoder")),
            lambda: ReBAModule(str(model)),
        )
        for load in pickled:
            with pytest.raises(ValueError, match="upgrade torch to at least v2.6"):
                load()

    def test_of_a_language_models_head(self, model_of, tmp_path):
        model = model_of()
        pickle_weights(own(model), {"lm_head.weight": Canary(tmp_path / "marker")})
        with pytest.raises(ValueError, match="in files of safetensors"):
            list(head_blocks(str(model)))
        assert not (tmp_path / "marker").exists()

    def test_of_an_adapter(self, model_of, tmp_path):
        peft = pytest.importorskip("peft")
        model = model_of()
        module = ReBAModule.load(str(model))
        module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
        module.save(str(tmp_path / "adapter"))
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
        torch.save({"x": Canary(tmp_path / "marker")}, tmp_path / "adapter" / "adapter_model.bin")
        # Some versions of transformers do not even look for it.
        with pytest.raises(Exception, match=r"[Ww]eights.only|adapter_model\.safetensors"):
            ReBAModule.load(str(tmp_path / "adapter"))
        assert not (tmp_path / "marker").exists()


#: What a saved file could do with transformers' arguments, and with ST's.
REFUSED: dict[str, Any] = {
    "model_kwargs": {
        "adapter_kwargs": {"_adapter_model_path": "../elsewhere"},
        "allow_all_kernels": True,
        "attn_implementation": "org/kernel",
        "code_revision": "main",
        "device_map": "auto",
        "gguf_file": "../elsewhere.gguf",
        "ignore_mismatched_sizes": True,
        "key_mapping": {"a": "b"},
        "kernel_config": {},
        "offload_folder": "written",
        "output_loading_info": True,
        "proxies": {"https": "elsewhere"},
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "state_dict": {},
        "use_kernels": True,
        "weights_only": True,
    },
    "processor_kwargs": {"gguf_file": "/elsewhere.gguf", "tokenizer_file": "/etc/hostname", "vocab_file": "../words"},
    "config_kwargs": {"_configuration_file": "../elsewhere.json", "attn_implementation": "org/kernel", "num_labels": 3},
}  # fmt: skip
OLD_NAMES = {"model_kwargs": "model_args", "processor_kwargs": "tokenizer_args", "config_kwargs": "config_args"}


@pytest.mark.parametrize(
    ("argument", "module_class"),
    paired([(kind, key) for kind, keys in REFUSED.items() for key in keys], [ReBAModule, TwinTower]),
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_arguments_that_a_file_may_not_give(module_class, argument, model_of, tmp_path, monkeypatch):
    kind, key = argument
    monkeypatch.chdir(tmp_path)
    model = model_of(module_class)
    before = set(tmp_path.rglob("*"))
    for name in (kind, OLD_NAMES[kind]):
        change(own(model) / SETTINGS, remove=(kind,), **{name: {key: REFUSED[kind][key]}})
        with pytest.raises(ValueError, match=rf"{SETTINGS} sets {key} in {name} to .* pass {kind}="):
            SentenceTransformer(str(model), device="cpu")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("setting", "module_class"),
    paired(
        [
            ("backend", "onnx"),
            ("cache_dir", "/elsewhere"),
            ("model_name_or_path", "org/other"),
            ("second_model_name_or_path", "org/other"),
            ("tokenizer_name_or_path", "org/other"),
            ("transformer_kwargs", {}),
        ],
        [ReBAModule, TwinTower],
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_settings_that_a_file_may_not_make(module_class, setting, model_of):
    key, value = setting
    model = model_of(module_class)
    change(own(model) / SETTINGS, **{key: value})
    with pytest.raises(ValueError, match=rf"{SETTINGS} sets {key}, which is no setting of {module_class.__name__}"):
        SentenceTransformer(str(model), device="cpu")


@settings(max_examples=examples(15))
@given(kind=st.sampled_from(["model_kwargs", "tokenizer_args", "config_kwargs"]), key=st.text(min_size=1, max_size=9))
def test_any_other_argument(kind, key, originals, tmp_path):
    """What nobody has thought of is refused, too."""
    shutil.copy(own(originals(ReBAModule)) / SETTINGS, tmp_path / SETTINGS)
    change(tmp_path / SETTINGS, **{kind: {key: 1}})
    with pytest.raises(ValueError, match=re.escape(f"sets {quoted(key)} in {kind} to 1")):
        ReBAModule.load_config(str(tmp_path))


def test_names_that_would_move_the_terminals_cursor(model_of):
    """They are shown in quotes, escaped."""
    model = model_of()
    change(own(model) / SETTINGS, **{"\x1b[2Jx": 1})
    with pytest.raises(ValueError, match=re.escape(r"sets '\x1b[2Jx', which is no setting")):
        ReBAModule.load(str(model))


@pytest.mark.parametrize("value", [None, [], "weights_only", 3])
def test_arguments_that_are_no_arguments(value, model_of):
    model = model_of()
    change(own(model) / SETTINGS, model_kwargs=value)
    with pytest.raises(ValueError, match=f"{SETTINGS} .*model_kwargs"):
        ReBAModule.load(str(model))


def test_a_file_of_a_former_name_is_not_read(model_of):
    """ST reads it where there is none of today's name. No saved module of ours has one."""
    model = model_of()
    (own(model) / SETTINGS).rename(own(model) / "sentence_roberta_config.json")
    change(own(model) / "sentence_roberta_config.json", model_args={"weights_only": False}, repetitions=3)
    assert ReBAModule.load(str(model)).repetitions == 2


def test_a_method_other_than_forward(model_of):
    """ST calls the backbone's method that the file names."""
    model = model_of()
    change(own(model) / SETTINGS, modality_config={"text": {"method": "save_pretrained", "method_output_name": "x"}})
    with pytest.raises(ValueError, match=f"{SETTINGS} sets modality_config to .*'save_pretrained'.* forward"):
        ReBAModule.load(str(model))


def test_what_a_file_may_give(model_of):
    model = model_of()
    change(
        own(model) / SETTINGS,
        model_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
        processor_kwargs={"model_max_length": 9},
        max_seq_length=None,
    )
    module = ReBAModule.load(str(model))
    assert (module.model.dtype, module.max_seq_length) == (torch.bfloat16, 9)


def test_what_the_caller_gives_stays_free(model_of, tmp_path):
    """Also where a file says something else."""
    model = model_of()
    change(own(model) / SETTINGS, model_kwargs={"dtype": "bfloat16"})
    change(own(model) / "config.json", attn_implementation="org/kernel")
    given = {
        "dtype": "float32",
        "attn_implementation": "eager",
        "device_map": {"": "cpu"},
        "offload_folder": str(tmp_path / "written"),
        "weights_only": False,
    }
    loaded = SentenceTransformer(str(model), model_kwargs=given)
    assert loaded[0].model.dtype == torch.float32


class TestConfigJson:
    @pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
    @pytest.mark.parametrize(
        "load", [ReBAModule.load, ReBAModule, CausalTransformer, lambda path: list(head_blocks(path))]
    )
    def test_a_kernel_is_code(self, key, load, model_of):
        model = model_of()
        for value in ("org/kernel", {"": "org/kernel"}):
            change(own(model) / "config.json", **{key: value})
            with pytest.raises(ValueError, match=rf"config.json sets {key} to '?.*org/kernel.*: .*model_kwargs"):
                load(str(model))

    def test_wherever_it_stands(self, model_of):
        model = model_of()
        change(own(model) / "config.json", text_config={"attn_implementation": "org/kernel"})
        with pytest.raises(ValueError, match=r"config.json sets text_config.attn_implementation to 'org/kernel'"):
            ReBAModule.load(str(model))

    @pytest.mark.parametrize("tower", [".", "tower_2"])
    def test_of_both_towers(self, tower, model_of):
        model = model_of(TwinTower)
        change(own(model) / tower / "config.json", attn_implementation="org/kernel")
        with pytest.raises(ValueError, match=r"config.json sets attn_implementation to 'org/kernel'"):
            TwinTower.load(str(model))

    @pytest.mark.parametrize("value", ["eager", "sdpa", None])
    def test_plain_attention(self, value, model_of):
        model = model_of()
        change(own(model) / "config.json", attn_implementation=value)
        ReBAModule.load(str(model))

    @pytest.mark.parametrize(
        ("key", "value"),
        [("num_hidden_layers", 10**6), ("n_layer", 10**6), ("num_local_experts", 10**6), ("num_labels", 10**8)],
    )
    def test_a_million_layers(self, key, value, model_of):
        model = model_of()
        change(own(model) / "config.json", **{key: value})
        with pytest.raises(ValueError, match=rf"config.json asks for 1\d+ \({key}\).*at most"):
            ReBAModule.load(str(model))

    def test_of_the_model_that_an_adapter_is_for(self, model_of, tmp_path):
        """An adapter names its model, which is held to the same."""
        peft = pytest.importorskip("peft")
        model = model_of()
        module = ReBAModule.load(str(model))
        module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
        module.save(str(tmp_path / "adapter"))
        assert ReBAModule.load(str(tmp_path / "adapter")).repetitions == 2
        change(own(model) / "config.json", attn_implementation="org/kernel")
        with pytest.raises(
            ValueError, match=r"model/0_ReBAModule/config.json sets attn_implementation to 'org/kernel'"
        ):
            ReBAModule.load(str(tmp_path / "adapter"))

    def test_code_that_an_adapter_imports(self, model_of, tmp_path):
        peft = pytest.importorskip("peft")
        model = model_of()
        module = ReBAModule.load(str(model))
        module.model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear"))
        module.save(str(tmp_path / "adapter"))
        change(tmp_path / "adapter" / "adapter_config.json", megatron_config={"a": 1}, megatron_core="os")
        with pytest.raises(ValueError, match=r"adapter_config.json sets megatron_config"):
            ReBAModule.load(str(tmp_path / "adapter"))


class TestAfterPooling:
    """Modules whose directory holds settings and weights."""

    def test_settings_that_are_none(self, tmp_path):
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", device_map="auto")
        with pytest.raises(ValueError, match="config.json sets device_map, which is no setting of Layerwise"):
            LayerwiseAutoencoder.load(str(tmp_path))

    def test_a_million_layers(self, tmp_path):
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", depth=10**6)
        with pytest.raises(ValueError, match="depth=1000000: give a whole number from 1 to"):
            LayerwiseAutoencoder.load(str(tmp_path))

    @pytest.mark.parametrize("settings", [{"hidden_size": 2**20, "bottlenecks": [2**20]}, {"head_dimension": 9}])
    def test_sizes_that_the_weights_have_not(self, settings, tmp_path):
        """They would be allocated first: 4 TiB."""
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", **settings)
        with pytest.raises(ValueError, match=r"config.json and the weights do not fit .*\(.*\).* save the model again"):
            LayerwiseAutoencoder.load(str(tmp_path))

    def test_it_loads_as_it_was(self, tmp_path):
        module = LayerwiseAutoencoder(2, 8, decoders=True).to(torch.bfloat16)
        for safe in (True, False):
            module.save(str(tmp_path), safe_serialization=safe)
            loaded = LayerwiseAutoencoder.load(str(tmp_path))
            for name, weight in module.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], weight.float())
            (tmp_path / "model.safetensors").unlink(missing_ok=True)

    @pytest.mark.parametrize("value", [3e38, -3e38, float("nan"), float("inf")])
    def test_weights_that_no_embedding_survives(self, value, tmp_path):
        module = LayerwiseAutoencoder(2, 8)
        with torch.no_grad():
            next(module.parameters())[0] = value
        module.save(str(tmp_path))
        with pytest.raises(ValueError, match=r"encoder\.0\.0\.weight has the value .* not beyond 1e\+12"):
            LayerwiseAutoencoder.load(str(tmp_path))


def test_everything_of_sts_own_behind_ours(originals):
    """A control: what is saved loads."""
    for module_class in (ReBAModule, TwinTower):
        loaded = SentenceTransformer(str(originals(module_class)), device="cpu")
        assert [type(part) for part in loaded] == [module_class, Pooling]
