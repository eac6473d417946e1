"""What the files of a model may not do on loading: run code, read or write elsewhere, or say what cannot be."""

from __future__ import annotations

import json
import re
import resource
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.utils import import_utils

from st_reba import CausalTransformer, EmbeddingFilter, LayerwiseAutoencoder, ReBAModule, TwinTower
from st_reba.hub.saved_files import quoted
from st_reba.modules.lm_head import head_blocks
from st_reba_cli.load import usable

from ..backbones import TEXTS, own
from ..cli import typed
from ..conftest import pipeline, relative_error

OWN_SETTINGS = "sentence_bert_config.json"


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
            change(own(model) / OWN_SETTINGS, remove="model_kwargs", **{key: {"weights_only": False}})
            with pytest.raises(ValueError, match=rf"{OWN_SETTINGS} sets weights_only in {key} to False"):
                SentenceTransformer(str(model))
        assert not (tmp_path / "marker").exists()

    def test_of_a_second_tower_an_adapter_a_filter_and_a_head(self, model_of, originals, tmp_path):
        canary = Canary(tmp_path / "marker")
        model = model_of(TwinTower)
        pickle_weights(own(model) / "tower_2", {"norm.weight": canary})
        adapter = adapted(originals[ReBAModule], tmp_path / "adapter")
        (adapter / "adapter_model.safetensors").unlink()
        torch.save({"x": canary}, adapter / "adapter_model.bin")
        EmbeddingFilter(torch.eye(4)[:2], low=1).save(str(tmp_path))
        (tmp_path / "model.safetensors").unlink()
        torch.save({"directions": canary}, tmp_path / "pytorch_model.bin")
        head = Path(shutil.copytree(own(originals[ReBAModule]), tmp_path / "head"))
        pickle_weights(head, {"lm_head.weight": canary})
        # Some versions of transformers do not even look for a pickled adapter.
        for load, path, said in (
            (SentenceTransformer, model, "[Ww]eights.only"),
            (ReBAModule.load, adapter, r"[Ww]eights.only|adapter_model\.safetensors"),
            (EmbeddingFilter.load, tmp_path, "[Ww]eights.only"),
            (lambda path: list(head_blocks(path)), head, "in files of safetensors"),
        ):
            with pytest.raises(Exception, match=said):
                load(str(path))
        assert not (tmp_path / "marker").exists()

    def test_that_are_nothing_but_weights_load_unless_pytorch_is_not_safe(self, model_of, tmp_path, monkeypatch):
        """Before PyTorch 2.6, ``weights_only`` could be got around: safetensors alone are read."""
        model = model_of()
        expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
        weights = load_file(own(model) / "model.safetensors")
        for sharded in (True, False):
            shutil.copytree(model, copied := tmp_path / f"copied-{sharded}")
            pickle_weights(own(copied), weights, sharded)
            assert relative_error(SentenceTransformer(str(copied), device="cpu").encode(TEXTS), expected) == 0
        (tmp_path / "autoencoder").mkdir()
        LayerwiseAutoencoder(2, 8).save(str(tmp_path / "autoencoder"), safe_serialization=False)
        monkeypatch.setattr(import_utils, "is_torch_greater_or_equal", lambda version, *args, **kwargs: version < "2.6")
        for load, path in ((LayerwiseAutoencoder.load, tmp_path / "autoencoder"), (ReBAModule, copied)):
            with pytest.raises(ValueError, match="upgrade torch to at least v2.6"):
                load(str(path))


#: What a saved file could do with transformers' arguments, and with ST's, under their names of today and of before.
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("model_kwargs", "model_args", {"attn_implementation": "org/kernel"}),
    ("model_kwargs", "model_args", {"gguf_file": "../elsewhere.gguf"}),
    ("model_kwargs", "model_args", {"offload_folder": "written"}),
    ("model_kwargs", "model_args", {"weights_only": True}),
    ("processor_kwargs", "tokenizer_args", {"tokenizer_file": "/etc/hostname"}),
    ("config_kwargs", "config_args", {"_configuration_file": "../elsewhere.json"}),
]


@pytest.mark.parametrize("module_class", [ReBAModule, TwinTower])
def test_arguments_that_a_file_may_not_give(module_class, model_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = own(model_of(module_class)) / OWN_SETTINGS
    before, saved = set(tmp_path.rglob("*")), file.read_text()
    for kind, former, arguments in REFUSED:
        for name in (kind, former):
            file.write_text(saved)
            change(file, remove=kind, **{name: arguments})
            with pytest.raises(ValueError, match=rf"sets {next(iter(arguments))} in {name} to .* pass {kind}="):
                SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert set(tmp_path.rglob("*")) == before


@given(kind=st.sampled_from(["model_kwargs", "tokenizer_args", "config_kwargs"]), key=st.text(min_size=1, max_size=9))
def test_any_other_argument(kind, key, originals, tmp_path):
    """What nobody has thought of is refused, too; a name that would move the terminal's cursor is shown escaped."""
    shutil.copy(own(originals[ReBAModule]) / OWN_SETTINGS, tmp_path / OWN_SETTINGS)
    change(tmp_path / OWN_SETTINGS, **{kind: {key: 1}})
    with pytest.raises(ValueError, match=re.escape(f"sets {quoted(key)} in {kind} to 1")):
        ReBAModule.load_config(str(tmp_path))
    for setting in ("\x1b[2Jx", "backend", "cache_dir", "model_name_or_path", "tokenizer_name_or_path"):
        shutil.copy(own(originals[ReBAModule]) / OWN_SETTINGS, tmp_path / OWN_SETTINGS)
        change(tmp_path / OWN_SETTINGS, **{setting: "/elsewhere"})
        with pytest.raises(ValueError, match=re.escape(f"sets {quoted(setting)}, which is no setting of ReBAModule")):
            ReBAModule.load_config(str(tmp_path))


def test_what_a_file_and_what_the_caller_may_give(model_of, tmp_path):
    """What the caller gives is free, also where a file says something else."""
    model = model_of()
    # A file of a former name, which ST reads where there is none of today's name, is not read.
    former, today = own(model) / "sentence_roberta_config.json", own(model) / OWN_SETTINGS
    today.rename(former)
    change(former, model_args={"weights_only": False}, repetitions=3)
    assert ReBAModule.load(str(model)).repetitions == 2
    former.rename(today)
    said = {"model_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager"}, "max_seq_length": None}
    change(today, remove="model_args", **said, processor_kwargs={"model_max_length": 9})
    module = ReBAModule.load(str(model))
    assert (module.model.dtype, module.max_seq_length) == (torch.bfloat16, 9)
    change(own(model) / "config.json", attn_implementation="org/kernel")
    given = {"dtype": "float32", "attn_implementation": "eager", "device_map": {"": "cpu"}, "weights_only": False}
    loaded = SentenceTransformer(str(model), model_kwargs={**given, "offload_folder": str(tmp_path / "written")})
    assert loaded[0].model.dtype == torch.float32


class TestAKernelIsCode:
    def test_in_a_backbones_config(self, model_of):
        model = model_of()
        loaders = (ReBAModule.load, ReBAModule, CausalTransformer, lambda path: list(head_blocks(path)))
        for key, value, load in product(
            ("attn_implementation", "_attn_implementation"), ("org/kernel", {"": "org/kernel"}), loaders
        ):
            change(own(model) / "config.json", **{key: value})
            with pytest.raises(ValueError, match=rf"config.json sets {key} to '?.*org/kernel.*: .*model_kwargs"):
                load(str(model))
            for plain in ("eager", "sdpa", None):
                change(own(model) / "config.json", **{key: plain})
        ReBAModule.load(str(model))

    def test_wherever_it_stands(self, originals, model_of, tmp_path):
        """In both towers, in the model that an adapter is for, and in what the adapter imports."""
        for tower in (".", "tower_2"):
            towers = shutil.copytree(originals[TwinTower], tmp_path / f"of {tower}")
            change(own(towers) / tower / "config.json", text_config={"attn_implementation": "org/kernel"})
            with pytest.raises(ValueError, match=r"config.json sets text_config.attn_implementation to 'org/kernel'"):
                TwinTower.load(str(towers))
        model = model_of()
        adapter = adapted(model, tmp_path / "adapter")
        assert ReBAModule.load(str(adapter)).repetitions == 2
        change(own(model) / "config.json", attn_implementation="org/kernel")
        with pytest.raises(ValueError, match=r"ReBAModule/config.json sets attn_implementation to 'org/kernel'"):
            ReBAModule.load(str(adapter))
        change(adapter / "adapter_config.json", megatron_config={"a": 1}, megatron_core="os")
        with pytest.raises(ValueError, match=r"adapter_config.json sets megatron_config"):
            ReBAModule.load(str(adapter))


def test_settings_and_weights_after_pooling(tmp_path):
    """Modules whose directory holds settings and weights."""
    for settings, message in (
        ({"device_map": "auto"}, "config.json sets device_map, which is no setting of Layerwise"),
        # They would be allocated first: 4 TiB.
        ({"hidden_size": 2**20, "bottlenecks": [2**20]}, r"config.json and the weights do not fit .*\(.*\).* save"),
    ):
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", **settings)
        with pytest.raises(ValueError, match=message):
            LayerwiseAutoencoder.load(str(tmp_path))
    for value in (3e38, float("nan"), float("-inf")):
        module = LayerwiseAutoencoder(2, 8)
        with torch.no_grad():
            next(module.parameters())[0] = value
        module.save(str(tmp_path))
        with pytest.raises(ValueError, match=r"encoder\.0\.0\.weight has the value .* not beyond 1e\+12"):
            LayerwiseAutoencoder.load(str(tmp_path))


OWN = "0_CausalTransformer"
CONFIG, SETTINGS, INDEX = (
    f"{OWN}/{name}" for name in ("config.json", "sentence_bert_config.json", "model.safetensors.index.json")
)
TOKENIZER, TOKENIZER_CONFIG = f"{OWN}/tokenizer.json", f"{OWN}/tokenizer_config.json"
ST_CONFIG, MODULES, POOLING, FILTER = (
    "config_sentence_transformers.json", "modules.json", "1_Pooling/config.json", "2_EmbeddingFilter/config.json",
)  # fmt: skip

#: Texts that stand in a file's place.
DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = '{"vocab_size": ' + "9" * 5000 + "}"
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


def added_token(**changes: Any) -> dict[str, Any]:
    token = {"id": 7, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    return {"added_tokens": [{**token, **changes}]}


#: By file: each text takes its place, and each object sets what is set in it, the rest of which stays.
SEEN_BY_OUR_CLASSES: dict[str, list[str | dict[str, Any]]] = {
    CONFIG: [
        "[]", "", '{"model_type": "llama"', DEEP, DEEP_OBJECT, LONG_NUMBER,
        {"model_type": "no-such-model"}, {"model_type": ["llama"]}, {"num_attention_heads": 0}, {"head_dim": -8},
        {"num_hidden_layers": "8"}, {"num_hidden_layers": None}, {"num_hidden_layers": 10**6},
        {"hidden_size": float("nan")}, {"hidden_size": 33}, {"intermediate_size": 300_000_000}, {"vocab_size": 10**7},
        {"vocab_size": {}}, {"num_labels": 2**20}, {"rms_norm_eps": "small"}, {"hidden_act": "os.system"},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, {"dtype": "os.system"},
        {"torch_dtype": "__class__", "dtype": None}, {"text_config": []}, {"quantization_config": []},
        {"transformers_weights": "../../../outside.safetensors"}, {"configuration_files": ["../config.4.0.0.json"]},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
        {"model_type": "mixtral", "num_local_experts": 4000},
    ],
    SETTINGS: [
        "[1]", DEEP, {"template": 3}, {"rows": []}, {"output_layer": 10**9}, {"bidirectional_layers": -1},
        {"max_seq_length": "long"}, {"transformer_task": "os.system"}, {"modality_config": {"text": 3}},
        {"modality_config": {"text": {"method": "save_pretrained", "method_output_name": "x"}}},
        {"module_output_name": 7}, {"model_kwargs": {"dtype": "os.system"}}, {"model_kwargs": None},
        {"processor_kwargs": {"model_max_length": "x"}}, {"processing_kwargs": 3}, {"changes": [[]]},
        {"changes": [{"key": "reroute", "nonsense": 1}]},
    ],
    TOKENIZER: ["nonsense", "{}", DEEP, {"model": {"type": "nonsense"}}, added_token(id=-1)],
    TOKENIZER_CONFIG: [
        "3", {"tokenizer_class": ["x"]}, {"model_max_length": "long"}, {"padding_side": "up"},
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"added_tokens_decoder": {"100000000": {"content": "<x>"}}}, {"extra_special_tokens": 3},
        {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]},
    ],
    FILTER: ["[]", {"low": "x"}, {"low": 10**9}],
    f"{OWN}/model.safetensors": ["nonsense"],
    INDEX: ["[]", '{"metadata": {}, "weight_map": {"a": 3}}', '{"metadata": 3, "weight_map": {"a": "missing"}}'],
}  # fmt: skip


def module(**changes: Any) -> str:
    return json.dumps([{"type": "st_reba.modules.CausalTransformer", "path": OWN, "name": "0", **changes}])


SEEN_BY_COMMANDS: dict[str, list[str | dict[str, Any]]] = {
    MODULES: [
        "[]", "[", DEEP, '["a"]', '[{"path": "", "name": "0"}]', module(type=3), module(path="../.."),
        module(path="C:/x"), module(name=3),
    ],
    ST_CONFIG: [
        "[]", {"prompts": ["a"]}, {"prompts": {"query": 3}}, {"default_prompt_name": "nowhere"},
        {"similarity_fn_name": 3}, {"model_type": ["a"]}, {"__version__": {"sentence_transformers": "nonsense"}},
    ],
    POOLING: ["[]", {"embedding_dimension": "x"}, {"embedding_dimension": -1}, {"pooling_mode": 3}],
}  # fmt: skip


def rows(table):
    return [
        pytest.param(file, what, id=f"{Path(file).name}-{json.dumps(what)[:60]}")
        for file, damages in table.items()
        for what in damages
    ]


@pytest.fixture(scope="module")
def original(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "model"
    parts = [CausalTransformer(backbone_path()), Pooling(32, "mean"), EmbeddingFilter(torch.eye(32)[:4], low=1)]
    SentenceTransformer(modules=parts).save_pretrained(str(directory), create_model_card=False)
    return directory


@pytest.fixture
def damaged(original, tmp_path):
    """``damaged(file, what)``: a copy in which one file is not what it was."""

    def model(file: str, what: str | dict[str, Any]) -> Path:
        directory = shutil.copytree(original, tmp_path / "model")
        path = directory / file
        if isinstance(what, dict):
            what = json.dumps({**json.loads(path.read_text()), **what})
        if file == INDEX:
            (directory / OWN / "model.safetensors").rename(directory / OWN / "model-1.safetensors")
        path.write_text(what)
        return directory

    return model


@pytest.mark.parametrize(("file", "what"), rows(SEEN_BY_OUR_CLASSES))
def test_through_sentence_transformers(file, what, damaged):
    """One line, with the file or, of a setting that the class itself checks, with its key."""
    path = damaged(file, what)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError)) as refused:
        SentenceTransformer(str(path), device="cpu")
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 900
    assert any(name in said for name in [Path(file).name, *(what if isinstance(what, dict) else [])]), said
    # In kilobytes; what was asked for are gigabytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize(("file", "what"), rows(SEEN_BY_COMMANDS))
def test_what_commands_check_as_well(file, what, damaged):
    path = damaged(file, what)
    with pytest.raises((ValueError, OSError)) as refused, usable(str(path)):
        SentenceTransformer(str(path), device="cpu")
    assert Path(file).name in str(refused.value)


def test_through_the_command(damaged, tmp_path):
    (tmp_path / "texts.txt").write_text("a\n")
    path = damaged(MODULES, '["a"]')
    told = typed(f"encode {path} {tmp_path / 'texts.txt'} --out {tmp_path / 'a.npy'}", expect=1)
    assert re.search(r"Error: .*modules\.json", told), told


def test_a_token_without_an_embedding(damaged):
    """Until it stands in a text, a tokenizer with more tokens than the model has embeddings does no harm."""
    tokens = [{**added_token()["added_tokens"][0], "id": 320 + n, "content": f"<{n}>"} for n in range(100)]
    model = SentenceTransformer(str(damaged(TOKENIZER, {"added_tokens": tokens})), device="cpu")
    assert len(model.encode(["a", "<9>"])) == 2
    with pytest.raises(ValueError, match=r"gives '<99>' the id 4\d\d, and LlamaModel has embeddings for 384 tokens"):
        model.encode(["a", "b<99>"])
