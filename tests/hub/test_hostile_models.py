"""Saved models that somebody has tampered with: each is refused in a line that names the file, before it costs much.

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
CONFIG, SETTINGS = f"{OWN}/config.json", f"{OWN}/sentence_bert_config.json"
TOKENIZER, TOKENIZER_CONFIG = f"{OWN}/tokenizer.json", f"{OWN}/tokenizer_config.json"
ST_CONFIG, MODULES, POOLING, FILTER = (
    "config_sentence_transformers.json", "modules.json", "1_Pooling/config.json", "2_EmbeddingFilter/config.json",
)  # fmt: skip

DEEP = "[" * 100_000 + "]" * 100_000


class Sets(dict):
    """What is set in a JSON file, the rest of which stays."""


def added_token(**changes: Any) -> Sets:
    token = {"id": 7, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    return Sets(added_tokens=[{**token, **changes}])


#: Each is a file, and what becomes of it: a text that takes its place, or :class:`Sets`.
SEEN_BY_OUR_CLASSES: list[tuple[str, str | Sets]] = [
    (CONFIG, "[]"),
    (CONFIG, '"llama"'),
    (CONFIG, "null"),
    (CONFIG, ""),
    (CONFIG, '{"model_type": "llama"'),
    (CONFIG, DEEP),
    (CONFIG, '{"a":' * 100_000 + "1" + "}" * 100_000),
    (CONFIG, '{"vocab_size": ' + "9" * 5000 + "}"),
    (CONFIG, Sets(model_type="no-such-model")),
    (CONFIG, Sets(model_type=["llama"])),
    (CONFIG, Sets(model_type=None)),
    (CONFIG, Sets(architectures="LlamaModel")),
    (CONFIG, Sets(num_attention_heads=0)),
    (CONFIG, Sets(num_attention_heads=-4)),
    (CONFIG, Sets(num_attention_heads=2.5)),
    (CONFIG, Sets(num_key_value_heads=0)),
    (CONFIG, Sets(head_dim=-8)),
    (CONFIG, Sets(num_hidden_layers="8")),
    (CONFIG, Sets(num_hidden_layers=True)),
    (CONFIG, Sets(num_hidden_layers=-1)),
    (CONFIG, Sets(num_hidden_layers=None)),
    (CONFIG, Sets(num_hidden_layers=[3])),
    (CONFIG, Sets(num_hidden_layers=1000)),
    (CONFIG, Sets(hidden_size=float("nan"))),
    (CONFIG, Sets(hidden_size=0)),
    (CONFIG, Sets(hidden_size=33)),
    (CONFIG, Sets(intermediate_size="48")),
    (CONFIG, Sets(intermediate_size=300_000_000)),
    (CONFIG, Sets(vocab_size=10**7)),
    (CONFIG, Sets(vocab_size=False)),
    (CONFIG, Sets(vocab_size={})),
    (CONFIG, Sets(max_position_embeddings="many")),
    (CONFIG, Sets(max_position_embeddings=-1)),
    (CONFIG, Sets(num_labels=2**20)),
    (CONFIG, Sets(rms_norm_eps=float("nan"))),
    (CONFIG, Sets(rms_norm_eps="small")),
    (CONFIG, Sets(rope_parameters=[])),
    (CONFIG, Sets(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4})),
    (CONFIG, Sets(rope_parameters={"rope_type": "default", "rope_theta": "x"})),
    (CONFIG, Sets(hidden_act="os.system")),
    (CONFIG, Sets(hidden_act=7)),
    (CONFIG, Sets(dtype="os.system")),
    (CONFIG, Sets(dtype="load")),
    (CONFIG, Sets(dtype=32)),
    (CONFIG, Sets(torch_dtype="__class__", dtype=None)),
    (CONFIG, Sets(text_config=[])),
    (CONFIG, Sets(quantization_config=[])),
    (CONFIG, Sets(transformers_weights="../../../outside.safetensors")),
    (CONFIG, Sets(transformers_weights=3)),
    (CONFIG, Sets(configuration_files=["../config.4.0.0.json"])),
    (CONFIG, Sets(model_type="gpt_neo", attention_types=[[["global"], 10**9]])),
    (CONFIG, Sets(model_type="gpt_neo", attention_types=[["global", "x"]])),
    (CONFIG, Sets(model_type="gpt2", n_embd=32, n_layer=3, n_head=4, n_inner=10**7)),
    (CONFIG, Sets(model_type="mixtral", num_local_experts=4000)),
    (SETTINGS, "[]"),
    (SETTINGS, "[1]"),
    (SETTINGS, "{"),
    (SETTINGS, DEEP),
    (SETTINGS, Sets(template=3)),
    (SETTINGS, Sets(template=None)),
    (SETTINGS, Sets(rows=[])),
    (SETTINGS, Sets(rows={})),
    (SETTINGS, Sets(pool_over={})),
    (SETTINGS, Sets(output_layer="2")),
    (SETTINGS, Sets(output_layer=10**9)),
    (SETTINGS, Sets(output_layer=2.0)),
    (SETTINGS, Sets(output_layer=True)),
    (SETTINGS, Sets(bidirectional_layers=-1)),
    (SETTINGS, Sets(tokenization=[])),
    (SETTINGS, Sets(deterministic="yes")),
    (SETTINGS, Sets(max_seq_length="long")),
    (SETTINGS, Sets(transformer_task="os.system")),
    (SETTINGS, Sets(transformer_task=[])),
    (SETTINGS, Sets(modality_config=[])),
    (SETTINGS, Sets(modality_config={"text": 3})),
    (SETTINGS, Sets(modality_config={"text": {"method": "forward"}})),
    (SETTINGS, Sets(modality_config={})),
    (SETTINGS, Sets(module_output_name=7)),
    (SETTINGS, Sets(module_output_name=None)),
    (SETTINGS, Sets(model_kwargs={"dtype": "os.system"})),
    (SETTINGS, Sets(processor_kwargs={"model_max_length": "x"})),
    (SETTINGS, Sets(processing_kwargs=3)),
    (SETTINGS, Sets(unpad_inputs="x")),
    (SETTINGS, Sets(changes=[[]])),
    (SETTINGS, Sets(changes=[{"key": ["a"]}])),
    (SETTINGS, Sets(changes=[{"key": "reroute", "nonsense": 1}])),
    (TOKENIZER, "[]"),
    (TOKENIZER, "nonsense"),
    (TOKENIZER, "{}"),
    (TOKENIZER, DEEP),
    (TOKENIZER, Sets(model={"type": "nonsense"})),
    (TOKENIZER, Sets(model=None)),
    (TOKENIZER, Sets(pre_tokenizer={"type": "nonsense"})),
    (TOKENIZER, Sets(added_tokens={})),
    (TOKENIZER, Sets(added_tokens=["a"])),
    (TOKENIZER, added_token(id=-1)),
    (TOKENIZER, added_token(id="7")),
    (TOKENIZER_CONFIG, "[]"),
    (TOKENIZER_CONFIG, "3"),
    (TOKENIZER_CONFIG, "{"),
    (TOKENIZER_CONFIG, DEEP),
    (TOKENIZER_CONFIG, Sets(tokenizer_class=["x"])),
    (TOKENIZER_CONFIG, Sets(model_max_length="long")),
    (TOKENIZER_CONFIG, Sets(eos_token=3)),
    (TOKENIZER_CONFIG, Sets(eos_token=["a"])),
    (TOKENIZER_CONFIG, Sets(eos_token={"content": 3, "__type": "AddedToken"})),
    (TOKENIZER_CONFIG, Sets(padding_side="up")),
    (TOKENIZER_CONFIG, Sets(added_tokens_decoder=[])),
    (TOKENIZER_CONFIG, Sets(added_tokens_decoder={"x": {"content": "<x>"}})),
    (TOKENIZER_CONFIG, Sets(added_tokens_decoder={"7": "x"})),
    (TOKENIZER_CONFIG, Sets(added_tokens_decoder={"100000000": {"content": "<x>"}})),
    (TOKENIZER_CONFIG, Sets(extra_special_tokens=3)),
    (TOKENIZER_CONFIG, Sets(fast_tokenizer_files=["../tokenizer.4.0.0.json"])),
    (TOKENIZER_CONFIG, Sets(fast_tokenizer_files=3)),
    (FILTER, "[]"),
    (FILTER, "{"),
    (FILTER, DEEP),
    (FILTER, Sets(low="x")),
    (FILTER, Sets(low=10**9)),
    (f"{OWN}/model.safetensors", "nonsense"),
    (f"{OWN}/model.safetensors.index.json", "[]"),
    (f"{OWN}/model.safetensors.index.json", DEEP),
    (f"{OWN}/model.safetensors.index.json", '{"metadata": {}, "weight_map": []}'),
    (f"{OWN}/model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": 3}}'),
    (f"{OWN}/model.safetensors.index.json", '{"metadata": {}, "weight_map": {}}'),
    (f"{OWN}/model.safetensors.index.json", '{"metadata": 3, "weight_map": {"a": "missing.safetensors"}}'),
]  # fmt: skip

SEEN_BY_COMMANDS: list[tuple[str, str | Sets]] = [
    (MODULES, "[]"),
    (MODULES, "{}"),
    (MODULES, "3"),
    (MODULES, "["),
    (MODULES, DEEP),
    (MODULES, '["a"]'),
    (MODULES, '[{"type": "st_reba.modules.CausalTransformer", "name": "0"}]'),
    (MODULES, '[{"path": "", "name": "0"}]'),
    (MODULES, '[{"type": 3, "path": "", "name": "0"}]'),
    (MODULES, '[{"type": "st_reba.modules.CausalTransformer", "path": 3, "name": "0"}]'),
    (MODULES, '[{"type": "st_reba.modules.CausalTransformer", "path": "../..", "name": "0"}]'),
    (MODULES, '[{"type": "st_reba.modules.CausalTransformer", "path": "C:/x", "name": "0"}]'),
    (MODULES, '[{"type": "st_reba.modules.CausalTransformer", "path": "0_CausalTransformer", "name": 3}]'),
    (MODULES, '[{"type": "os.system", "path": "", "name": "0"}]'),
    (ST_CONFIG, "[]"),
    (ST_CONFIG, "3"),
    (ST_CONFIG, "{"),
    (ST_CONFIG, DEEP),
    (ST_CONFIG, Sets(prompts=["a"])),
    (ST_CONFIG, Sets(prompts={"query": 3})),
    (ST_CONFIG, Sets(prompts="a")),
    (ST_CONFIG, Sets(default_prompt_name=["query"])),
    (ST_CONFIG, Sets(default_prompt_name="nowhere")),
    (ST_CONFIG, Sets(similarity_fn_name=3)),
    (ST_CONFIG, Sets(model_type=["a"])),
    (ST_CONFIG, Sets(model_type="nonsense")),
    (ST_CONFIG, Sets(requirements={"st_reba": {"specifier": ">=99", "reason": ["a"]}})),
    (ST_CONFIG, Sets(__version__=3)),
    (ST_CONFIG, Sets(__version__={"sentence_transformers": "nonsense"})),
    (ST_CONFIG, Sets(__version__={"sentence_transformers": 3})),
    (POOLING, "[]"),
    (POOLING, "{"),
    (POOLING, Sets(embedding_dimension="x")),
    (POOLING, Sets(embedding_dimension=-1)),
    (POOLING, Sets(pooling_mode="nonsense")),
    (POOLING, Sets(pooling_mode=3)),
]  # fmt: skip

#: Refused by ST itself in words of its own.
LEFT_TO_ST = [
    (MODULES, '[{"type": "os.system", "path": "", "name": "0"}]'),
    (ST_CONFIG, Sets(model_type="nonsense")),
    (ST_CONFIG, Sets(requirements={"st_reba": {"specifier": ">=99", "reason": ["a"]}})),
    (POOLING, Sets(pooling_mode="nonsense")),
]


def named(case: tuple[str, str | Sets]) -> str:
    file, what = case
    return f"{Path(file).name}-{json.dumps(what)[:60]}"


@pytest.fixture(scope="module")
def original(backbone_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "model"
    module = CausalTransformer(backbone_path())
    pooling = Pooling(module.get_embedding_dimension(), "mean")
    SentenceTransformer(modules=[module, pooling, EmbeddingFilter(torch.eye(32)[:4], low=1)]).save_pretrained(
        str(directory), create_model_card=False
    )
    return directory


@pytest.fixture
def tampered(original, tmp_path):
    """``tampered(file, what)``: a copy in which one file is not what it was."""

    def model(file: str, what: str | Sets) -> Path:
        directory = shutil.copytree(original, tmp_path / "model")
        path = directory / file
        if isinstance(what, Sets):
            what = json.dumps({**json.loads(path.read_text()), **what})
        if "index.json" in file:
            (directory / OWN / "model.safetensors").rename(directory / OWN / "model-1.safetensors")
        path.write_text(what)
        return directory

    return model


def names_what_is_wrong(said: str, case: tuple[str, str | Sets]) -> bool:
    """One sentence or two in one line, with the file or, of a setting that the class itself checks, with its key."""
    file, what = case
    keys = list(what) if isinstance(what, Sets) else []
    return "\n" not in said and len(said) < 900 and any(name in said for name in [Path(file).name, *keys])


@pytest.mark.parametrize("case", SEEN_BY_OUR_CLASSES, ids=named)
def test_through_sentence_transformers(case, tampered):
    path = tampered(*case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ValueError, OSError)) as refused:
        SentenceTransformer(str(path), device="cpu")
    assert names_what_is_wrong(str(refused.value), case), refused.value
    # In kilobytes; what was asked for are gigabytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize("case", SEEN_BY_COMMANDS, ids=named)
def test_what_commands_check_as_well(case, tampered):
    path = tampered(*case)
    with pytest.raises((ValueError, OSError, ImportError)) as refused, usable(str(path)):
        SentenceTransformer(str(path), device="cpu")
    assert Path(case[0]).name in str(refused.value) or case in LEFT_TO_ST, refused.value


#: One of each file, and of each kind of damage.
TYPED = [
    (CONFIG, "[]"),
    (CONFIG, DEEP),
    (CONFIG, Sets(num_hidden_layers="8")),
    (CONFIG, Sets(vocab_size=10**7)),
    (SETTINGS, Sets(processing_kwargs=3)),
    (TOKENIZER, "nonsense"),
    (MODULES, '["a"]'),
    (ST_CONFIG, Sets(prompts=["a"])),
    (POOLING, "[]"),
]


@pytest.mark.parametrize("case", TYPED, ids=named)
def test_through_the_command(case, tampered, tmp_path):
    path, texts = tampered(*case), tmp_path / "texts.txt"
    texts.write_text("a\nb\n")
    result = CliRunner().invoke(
        cli.app, ["encode", str(path), str(texts), "--out", str(tmp_path / "out.npy")], env={"COLUMNS": "900"}
    )
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert re.search(rf"Error: .*{re.escape(Path(case[0]).name)}", result.output), result.output
    assert not (tmp_path / "out.npy").exists()


def test_a_token_without_an_embedding(tampered):
    """Until it stands in a text, a tokenizer with more tokens than the model has embeddings does no harm."""
    tokens = [{**added_token()["added_tokens"][0], "id": 320 + n, "content": f"<{n}>"} for n in range(100)]
    model = SentenceTransformer(str(tampered(TOKENIZER, Sets(added_tokens=tokens))), device="cpu")
    assert len(model.encode(["a", "<9>"])) == 2
    with pytest.raises(ValueError, match=r"gives '<99>' the id 4\d\d, and LlamaModel has embeddings for 384 tokens"):
        model.encode(["a", "b<99>"])


def test_a_model_as_it_was_saved_loads(tampered):
    """The bounds are far from it."""
    model = SentenceTransformer(str(tampered(CONFIG, Sets())), device="cpu")
    assert model.encode(["a"]).shape == (1, 4)
