from __future__ import annotations

import json
import sys
from itertools import cycle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import normalizers

from st_reba import CausalTransformer, Centering, EchoModule, ReBAModule
from st_reba.export import save_plain
from st_reba.export.plain import _normalizers
from st_reba.text.templates import normalized

from ..backbones import TEXTS
from ..conftest import pipeline, relative_error

LONG = [*TEXTS, "Is this so?", 'He said "no"', "我爱你", "one two three " * 60]

RECIPES = {
    "classical": lambda path: CausalTransformer(path),
    "classical-all": lambda path: CausalTransformer(path, pool_over="all"),
    "prompteol": lambda path: CausalTransformer(path, template="prompteol", tokenization="pieces"),
    "early-exit": lambda path: CausalTransformer(path, output_layer=2),
    "early-exit-before-the-norm": lambda path: CausalTransformer(path, output_layer=2, final_norm=False),
    "prefix": lambda path: CausalTransformer(path, template="So {text}", tokenization="pieces"),
    "echo": lambda path: EchoModule(path),
    "springer": lambda path: EchoModule(path, template="springer", pool_over="all"),
}


def last(module, **prompts) -> SentenceTransformer:
    pooling = Pooling(module.get_embedding_dimension(), "lasttoken")
    return SentenceTransformer(modules=[module, pooling, Normalize()], device="cpu", **prompts)


QUERY = {"prompts": {"query": "Find: "}}


def check(model, directory, **kwargs):
    """What is written gives what the model gave, and the model gives the same as before."""
    before = model.encode(LONG, **kwargs)
    save_plain(model, directory)
    plain = SentenceTransformer(str(directory), device="cpu")
    assert type(plain[0]).__module__.startswith("sentence_transformers")
    assert relative_error(plain.encode(LONG, **kwargs), before) < 1e-5
    assert relative_error(model.encode(LONG, **kwargs), before) == 0


@pytest.mark.parametrize(
    ("recipe", "architecture", "kind"),
    [
        *zip(RECIPES, cycle(["llama"]), cycle(["bytes", "bert", "sentencepiece"])),
        *(("early-exit-before-the-norm", name, "bytes") for name in ("qwen3", "gemma3", "mistral_window", "phi3")),
    ],
)
def test_gives_the_same_vectors(recipe, architecture, kind, backbone_path, tmp_path):
    check(last(RECIPES[recipe](backbone_path(architecture, kind))), tmp_path)


def test_the_mean_of_every_token_and_prompts(backbone_path, tmp_path):
    check(pipeline(CausalTransformer(backbone_path("llama", "bert"), pool_over="all")), tmp_path / "mean")
    check(last(CausalTransformer(backbone_path()), **QUERY), tmp_path / "prompts", prompt_name="query")


def test_what_engines_read(backbone_path, tmp_path):
    save_plain(last(RECIPES["early-exit"](backbone_path())), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaModel"], 2)
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    assert "max_seq_length" in json.loads((tmp_path / "sentence_bert_config.json").read_text())
    types = [part["type"] for part in json.loads((tmp_path / "modules.json").read_text())]
    assert types == [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]


@given(text=st.text(st.sampled_from("ab .?\"'。？“”’‘、我，\n") | st.characters(codec="utf-8"), max_size=6))
@example(text="\x1f")
@example(text="a\x1f\x85")
def test_texts_are_normalized_alike(text):
    assert normalizers.Sequence(list(_normalizers())).normalize_str(text) == normalized(text)


def test_every_blank_is_one_for_the_tokenizer_too():
    blanks = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    read = normalizers.Sequence(list(_normalizers()))
    for text in [*blanks, *(f"a{blank}" for blank in blanks)]:
        assert read.normalize_str(text) == normalized(text), ascii(text)


def filtered(path) -> SentenceTransformer:
    model = last(CausalTransformer(path()))
    return SentenceTransformer(modules=[*model.children(), Centering.fit(model, TEXTS)], device="cpu")


def without_weights_in_its_norm(path) -> SentenceTransformer:
    """As OLMo has it."""
    module = CausalTransformer(path(), output_layer=2, final_norm=False)
    module.model.norm = torch.nn.LayerNorm(32, elementwise_affine=False)
    return last(module)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: last(ReBAModule(path())), "ReBAModule does more than one causal pass read as it is"),
        (lambda path: last(CausalTransformer(path(), bidirectional_layers=1)), "runs the language model unchanged"),
        (lambda path: pipeline(CausalTransformer(path(), template="So {text}:")), r'Pooling\("mean"\) over the tokens'),
        (lambda path: last(EchoModule(path(), repetitions=3)), r"every combination .* Two copies can be exported"),
        (lambda path: pipeline(EchoModule(path())), r'Build it with Pooling\("lasttoken"\)'),
        (lambda path: pipeline(CausalTransformer(path(), final_norm=False), "lasttoken"), "Add Normalize"),
        (lambda path: last(CausalTransformer(path(), template="prompteol")), r"as one string.*\(--pieces\)"),
        (filtered, "stand Pooling, Normalize, Centering: an engine runs"),
        (lambda path: last(CausalTransformer(path()), default_prompt_name="query", **QUERY), '"query" is the default'),
        (lambda path: last(EchoModule(path()), **QUERY), r"The model has the prompts \['query'\]"),
        (lambda path: last(CausalTransformer(path("gpt2"), output_layer=2, final_norm=False)), "changes more than a"),
        (without_weights_in_its_norm, "changes more than a vector's length"),
    ],
)
def test_what_no_engine_carries_is_refused(made, message, backbone_path, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_plain(made(backbone_path), tmp_path)
    assert not list(tmp_path.iterdir())


def test_pieces_are_those_of_a_model_that_is_built_so(backbone_path, tmp_path):
    whole = last(CausalTransformer(backbone_path(), template="prompteol"))
    save_plain(whole, tmp_path, pieces=True)
    expected = last(CausalTransformer(backbone_path(), template="prompteol", tokenization="pieces")).encode(LONG)
    assert relative_error(SentenceTransformer(str(tmp_path), device="cpu").encode(LONG), expected) < 1e-5
    assert whole[0].tokenization == "whole"


def test_what_is_not_the_same_is_refused(backbone_path, tmp_path, monkeypatch):
    monkeypatch.setattr("st_reba.export.plain._normalizers", tuple)
    with pytest.raises(ValueError, match="gives other vectors than the model itself"):
        save_plain(last(RECIPES["prompteol"](backbone_path())), tmp_path)
