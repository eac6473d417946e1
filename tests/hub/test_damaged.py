"""Saved models whose files say what cannot be: each is refused in a line that names the file, before it costs much.

What sentence-transformers reads before it comes to a class of ours is checked in the commands alone.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from typer.testing import CliRunner

import st_reba_cli as cli
from st_reba import CausalTransformer, EmbeddingFilter
from st_reba_cli.load import usable

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


@pytest.mark.parametrize(
    ("file", "what"),
    [(CONFIG, DEEP), (CONFIG, {"vocab_size": 10**7}), (SETTINGS, {"processing_kwargs": 3}), (MODULES, '["a"]')],
    ids=["deep", "large", "settings", "modules"],
)
def test_through_the_command(file, what, damaged, tmp_path):
    path, texts = damaged(file, what), tmp_path / "texts.txt"
    texts.write_text("a\nb\n")
    typed = ["encode", str(path), str(texts), "--out", str(tmp_path / "out.npy")]
    result = CliRunner().invoke(cli.app, typed, env={"COLUMNS": "900"})
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert re.search(rf"Error: .*{re.escape(Path(file).name)}", result.output), result.output
    assert not (tmp_path / "out.npy").exists()


def test_a_token_without_an_embedding(damaged):
    """Until it stands in a text, a tokenizer with more tokens than the model has embeddings does no harm."""
    tokens = [{**added_token()["added_tokens"][0], "id": 320 + n, "content": f"<{n}>"} for n in range(100)]
    model = SentenceTransformer(str(damaged(TOKENIZER, {"added_tokens": tokens})), device="cpu")
    assert len(model.encode(["a", "<9>"])) == 2
    with pytest.raises(ValueError, match=r"gives '<99>' the id 4\d\d, and LlamaModel has embeddings for 384 tokens"):
        model.encode(["a", "b<99>"])
