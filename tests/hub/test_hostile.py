"""What the files of a model may not do on loading: run code, read or write elsewhere, or say what cannot be."""

from __future__ import annotations

import json
import re
import resource
import shutil
from contextlib import nullcontext
from itertools import product
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
from st_reba_cli.load import usable

from ..backbones import TEXTS, own
from ..conftest import change, pipeline, relative_error

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
    low = EmbeddingFilter(torch.eye(32)[:4], low=1)
    made = {
        ReBAModule: pipeline(ReBAModule(backbone_path())).append(low),
        TwinTower: pipeline(TwinTower(*encoder_paths())),
    }
    paths = {module_class: tmp_path_factory.mktemp("original") for module_class in made}
    for module_class, model in made.items():
        model.save_pretrained(str(paths[module_class]), create_model_card=False)
    return paths


@pytest.fixture
def model_of(originals, tmp_path):
    """``model_of(module_class)``: a copy of a saved model, to tamper with."""
    return lambda module_class=ReBAModule: Path(shutil.copytree(originals[module_class], tmp_path / "model"))


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
        change(own(model) / OWN_SETTINGS, model_kwargs={"weights_only": False})
        with pytest.raises(ValueError, match=rf"{OWN_SETTINGS} sets model_kwargs.weights_only to False: a file"):
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
        pickle_weights(own(model), weights, sharded=True)
        assert relative_error(SentenceTransformer(str(model), device="cpu").encode(TEXTS), expected) == 0
        (tmp_path / "autoencoder").mkdir()
        LayerwiseAutoencoder(2, 8).save(str(tmp_path / "autoencoder"), safe_serialization=False)
        monkeypatch.setattr(import_utils, "is_torch_greater_or_equal", lambda version, *args, **kwargs: version < "2.6")
        for load, path in ((LayerwiseAutoencoder.load, tmp_path / "autoencoder"), (ReBAModule, model)):
            with pytest.raises(ValueError, match="upgrade torch to at least v2.6"):
                load(str(path))


@given(
    kind=st.sampled_from([f"{kind}_{end}" for kind in ("model", "config") for end in ("kwargs", "args")]),
    key=st.sampled_from(["offload_folder", "gguf_file", "_configuration_file"]) | st.text(min_size=1, max_size=9),
    module_class=st.sampled_from([ReBAModule, TwinTower]),
)
def test_arguments_that_a_file_may_not_give(kind, key, module_class, originals, tmp_path):
    """What nobody has thought of is refused, too; a name that would move the terminal's cursor is shown escaped."""
    saved, file = own(originals[module_class]) / OWN_SETTINGS, tmp_path / OWN_SETTINGS
    for changes, said in (
        ({kind: {key: 1}}, f"sets {kind}.{quoted(key)} to 1: a file may not"),
        ({"tokenizer_args": {"tokenizer_file": "/x"}}, "sets tokenizer_args.tokenizer_file to '/x': a file may not"),
        ({"\x1b[2Jx": "/x"}, f"sets {quoted(chr(27) + '[2Jx')}, which is no setting of {module_class.__name__}"),
        ({"backend": "onnx"}, "sets backend, which is no setting of"),
    ):
        shutil.copy(saved, file)
        change(file, **changes)
        with pytest.raises(ValueError, match=re.escape(said)):
            module_class.load_config(str(tmp_path))


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
        keys, values = ("attn_implementation", "_attn_implementation"), ("org/kernel", {"": "org/kernel"})
        for key, value, load in product(keys, values, loaders):
            change(own(model) / "config.json", **{key: value})
            with pytest.raises(ValueError, match=rf"config.json sets {key} to '?.*org/kernel.*: .*model_kwargs"):
                load(str(model))
            change(own(model) / "config.json", **{key: "sdpa"})
        change(own(model) / OWN_SETTINGS, model_kwargs={"attn_implementation": "org/kernel"})
        with pytest.raises(ValueError, match=r"sets model_kwargs.attn_implementation to 'org/kernel': it may"):
            ReBAModule.load(str(model))

    def test_wherever_it_stands(self, model_of, tmp_path):
        """In the second tower, in the model that an adapter is for, and in what the adapter imports."""
        towers = model_of(TwinTower)
        change(own(towers) / "tower_2" / "config.json", text_config={"attn_implementation": "org/kernel"})
        with pytest.raises(ValueError, match=r"config.json sets text_config.attn_implementation to 'org/kernel'"):
            TwinTower.load(str(own(towers)))
        shutil.rmtree(towers)
        model = model_of()
        adapter = adapted(model, tmp_path / "adapter")
        assert ReBAModule.load(str(adapter)).repetitions == 2
        change(own(model) / "config.json", attn_implementation="org/kernel")
        with pytest.raises(ValueError, match=r"ReBAModule/config.json sets attn_implementation to 'org/kernel'"):
            ReBAModule.load(str(adapter))
        change(adapter / "adapter_config.json", megatron_config={"a": 1}, megatron_core="os")
        with pytest.raises(ValueError, match=r"adapter_config.json sets megatron_config"):
            ReBAModule.load(str(adapter))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("peft_type", "OF_LATER", "adapter: its adapter cannot be read (KeyError: 'OF_LATER'). Get the whole"),
        ("target_modules", "((", "peft cannot put the adapter "),
        ("base_model_name_or_path", "org/gone", "The model org/gone: there is no such directory, and it cannot be do"),
    ],
)
def test_an_adapter_that_cannot_be_put_on(key, value, said, originals, tmp_path):
    adapter = adapted(originals[ReBAModule], tmp_path / "adapter")
    change(adapter / "adapter_config.json", **{key: value})
    with pytest.raises((ValueError, OSError), match=re.escape(said)):
        ReBAModule.load(str(adapter))


def test_settings_and_weights_after_pooling(tmp_path):
    """Modules whose directory holds settings and weights."""
    for settings, message in (
        ({"device_map": "auto"}, "config.json sets device_map, which is no setting of Layerwise"),
        # They would be allocated first: 4 TiB.
        ({"hidden_size": 2**20, "bottlenecks": [2**20]}, "is not a saved LayerwiseAutoencoder: (?s:.*)size mismatch"),
    ):
        LayerwiseAutoencoder(2, 8).save(str(tmp_path))
        change(tmp_path / "config.json", **settings)
        with pytest.raises(ValueError, match=message):
            LayerwiseAutoencoder.load(str(tmp_path))


BACKBONE = "0_ReBAModule"
INDEX = f"{BACKBONE}/model.safetensors.index.json"
ST_CONFIG, MODULES, POOLING = "config_sentence_transformers.json", "modules.json", "1_Pooling/config.json"
SEEN_BY_COMMANDS = (ST_CONFIG, MODULES, POOLING)

#: Texts that stand in a file's place.
DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = '{"vocab_size": ' + "9" * 5000 + "}"


def added_token(**changes: Any) -> dict[str, Any]:
    token = {"id": 7, "content": "<x>", "special": True}
    ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [{**token, **ways, **changes}]}


def module(**changes: Any) -> str:
    return json.dumps([{"type": "st_reba.modules.ReBAModule", "path": BACKBONE, "name": "0", **changes}])


#: By file: each text takes its place, and each object sets what is set in it, the rest of which stays.
TABLE: dict[str, list[str | dict[str, Any]]] = {
    f"{BACKBONE}/config.json": [
        "[]", DEEP, LONG_NUMBER, {"model_type": ["llama"]}, {"num_attention_heads": 0}, {"num_hidden_layers": 10**6},
        {"hidden_size": float("nan")}, {"hidden_size": 33}, {"vocab_size": 10**7}, {"hidden_act": "os.system"},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, {"torch_dtype": "__class__", "dtype": None},
        {"quantization_config": []}, {"num_labels": 2**20}, {"transformers_weights": "../../../outside.safetensors"},
        {"configuration_files": ["../config.4.0.0.json"]}, {"model_type": "mixtral", "num_local_experts": 4000},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
    ],
    f"{BACKBONE}/sentence_bert_config.json": [
        "[1]", {"template": 3}, {"output_layer": 10**9}, {"max_seq_length": "long"}, {"changes": [[]]},
        {"modality_config": {"text": {"method": "save_pretrained", "method_output_name": "x"}}},
        {"transformer_task": "os.system"}, {"model_kwargs": None}, {"model_kwargs": {"dtype": "os.system"}},
        {"changes": [{"key": "reroute", "nonsense": 1}]},
    ],
    f"{BACKBONE}/tokenizer.json": ["nonsense", DEEP, {"model": {"type": "nonsense"}}, added_token(id=-1)],
    f"{BACKBONE}/tokenizer_config.json": [
        {"tokenizer_class": ["x"]}, {"model_max_length": "long"}, {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"added_tokens_decoder": {"100000000": {"content": "<x>"}}}, {"fast_tokenizer_files": ["../tokenizer.json"]},
    ],
    "2_EmbeddingFilter/config.json": ["[]", {"low": 10**9}],
    f"{BACKBONE}/model.safetensors": ["nonsense"],
    INDEX: ['{"metadata": {}, "weight_map": {"a": 3}}', '{"metadata": 3, "weight_map": {"a": "missing"}}'],
    MODULES: [DEEP, '["a"]', '[{"path": "", "name": "0"}]', module(type=3), module(path="../.."), module(path="C:/x")],
    ST_CONFIG: [{"prompts": {"a": 3}}, {"default_prompt_name": "x"}, {"__version__": {"sentence_transformers": "x"}}],
    POOLING: [{"embedding_dimension": -1}, {"pooling_mode": 3}],
}  # fmt: skip


@pytest.fixture
def damaged(model_of):
    """``damaged(file, what)``: a copy in which one file is not what it was."""

    def model(file: str, what: str | dict[str, Any]) -> Path:
        directory = model_of()
        path = directory / file
        if isinstance(what, dict):
            what = json.dumps({**json.loads(path.read_text()), **what})
        if file == INDEX:
            (directory / BACKBONE / "model.safetensors").rename(directory / BACKBONE / "model-1.safetensors")
        path.write_text(what)
        return directory

    return model


@pytest.mark.parametrize(
    ("file", "what"), [(file, what) for file, damages in TABLE.items() for what in damages], ids=lambda it: str(it)[:60]
)
def test_a_damaged_file(file, what, damaged):
    """One line, with the file or, of a setting that the class itself checks, with its key."""
    path = str(damaged(file, what))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError)) as refused, usable(path) if file in SEEN_BY_COMMANDS else nullcontext():
        SentenceTransformer(path, device="cpu")
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 900
    assert any(name in said for name in [Path(file).name, *(what if isinstance(what, dict) else [])]), said
    # In kilobytes; what was asked for are gigabytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_a_token_without_an_embedding(damaged):
    """Until it stands in a text, a tokenizer with more tokens than the model has embeddings does no harm."""
    tokens = [{**added_token()["added_tokens"][0], "id": 320 + n, "content": f"<{n}>"} for n in range(100)]
    model = SentenceTransformer(str(damaged(f"{BACKBONE}/tokenizer.json", {"added_tokens": tokens})), device="cpu")
    assert len(model.encode(["a", "<9>"])) == 2
    with pytest.raises(ValueError, match=r"gives the id 4\d\d, and LlamaModel has embeddings for 384 tokens"):
        model.encode(["a", "b<99>"])
