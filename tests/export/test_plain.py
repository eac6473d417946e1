from __future__ import annotations

import json
from itertools import cycle

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import processors

from st_reba import CausalTransformer, Centering, EchoModule, ReBAModule
from st_reba.export import save_plain

from ..backbones import TEXTS, backbone, save
from ..conftest import pipeline, relative_error

LONG = [*TEXTS, "Is this so?", 'He said "no"', "我爱你", "one two three " * 60]

RECIPES = {
    "classical": lambda path: CausalTransformer(path),
    "classical-all": lambda path: CausalTransformer(path, pool_over="all"),
    "prompteol": lambda path: CausalTransformer(
        path, template="prompteol", tokenization="pieces", normalize_text=False
    ),
    "early-exit": lambda path: CausalTransformer(path, output_layer=2),
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


@pytest.mark.parametrize(("recipe", "kind"), zip(RECIPES, cycle(["bytes", "bert", "sentencepiece"])))
def test_gives_the_same_vectors(recipe, kind, backbone_path, tmp_path):
    check(last(RECIPES[recipe](backbone_path("llama", kind))), tmp_path)


def test_other_architectures_the_mean_of_every_token_and_prompts(backbone_path, tmp_path):
    for architecture in ("mistral_window", "phi3"):
        check(last(CausalTransformer(backbone_path(architecture), output_layer=2)), tmp_path / architecture)
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


@pytest.mark.parametrize(
    ("architecture", "rotation", "older"),
    [
        ("llama", {"rope_theta": 1e5}, {"rope_theta": 1e5}),
        (
            "llama",
            {"rope_theta": 1e5, "rope_type": "linear", "factor": 2.0},
            {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "gemma3",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}},
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4},
        ),
    ],
)
def test_transformers_4_finds_the_rotation_and_the_tokenizer(architecture, rotation, older, tmp_path):
    if "rope_theta" in rotation:
        rotation = {"rope_type": "default", **rotation}
    else:
        rotation = {name: {"rope_type": "default", **each} for name, each in rotation.items()}
    made = save(backbone(architecture, rope_parameters=rotation), tmp_path / "made")
    (tmp_path / "plain").mkdir()
    check(last(EchoModule(made)), tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert {name: value for name, value in config.items() if name in (*older, "rope_scaling")} == older
    tokenizer = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def filtered(path) -> SentenceTransformer:
    model = last(CausalTransformer(path()))
    return SentenceTransformer(modules=[*model.children(), Centering.fit(model, TEXTS)], device="cpu")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: last(ReBAModule(path())), "ReBAModule does more than one causal pass"),
        (lambda path: last(CausalTransformer(path(), bidirectional_layers=1)), "runs the language model unchanged"),
        (lambda path: pipeline(CausalTransformer(path(), template="So {text}:")), r'Pooling\("mean"\) over the tokens'),
        (lambda path: last(EchoModule(path(), repetitions=3)), r"every combination .* Two copies can be exported"),
        (lambda path: pipeline(EchoModule(path())), r'Build it with Pooling\("lasttoken"\)'),
        (lambda path: last(CausalTransformer(path(), output_layer=2, final_norm=False)), "final_norm=True"),
        (lambda path: last(CausalTransformer(path(), template="prompteol")), r"as one string.*\(--pieces\)"),
        (
            lambda path: last(CausalTransformer(path(), template="prompteol", tokenization="pieces")),
            r"the text is normalized, .* with pieces \(--pieces\)",
        ),
        (filtered, "is followed by Pooling, Normalize, Centering: an engine runs"),
        (lambda path: last(CausalTransformer(path()), default_prompt_name="query", **QUERY), '"query" is the default'),
        (lambda path: last(EchoModule(path()), **QUERY), r"Remove the prompts \['query'\]"),
    ],
)
def test_what_no_engine_carries_is_refused(made, message, backbone_path, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_plain(made(backbone_path), tmp_path)
    assert not list(tmp_path.iterdir())


def test_pieces_are_those_of_a_model_that_is_built_so(backbone_path, tmp_path):
    whole = last(CausalTransformer(backbone_path(), template="prompteol"))
    save_plain(whole, tmp_path, pieces=True)
    expected = last(RECIPES["prompteol"](backbone_path())).encode(LONG)
    assert relative_error(SentenceTransformer(str(tmp_path), device="cpu").encode(LONG), expected) < 1e-5
    assert (whole[0].tokenization, whole[0].normalize_text) == ("whole", True)


def test_what_is_not_the_same_is_refused(backbone_path, tmp_path, monkeypatch):
    nothing_around = processors.TemplateProcessing(single="$A", special_tokens=[])
    monkeypatch.setattr("st_reba.export.plain._template_processing", lambda around, tokenizer: nothing_around)
    with pytest.raises(ValueError, match="gives other vectors than the model itself"):
        save_plain(last(RECIPES["prompteol"](backbone_path())), tmp_path)
