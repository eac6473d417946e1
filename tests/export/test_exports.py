"""A static model gives what the bag behind weights and whitening gives; a plain one what the model itself gives."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding
from tokenizers import processors
from transformers import AutoModel

from st_reba import CausalTransformer, EchoModule, InputEmbeddings, ReBAModule
from st_reba.data.demo import demo_sentences
from st_reba.export import save_plain, static_model
from st_reba.hub.push import check_saved_model
from st_reba.modules import Centering, IdfWeights, WhiteningTransform

from ..backbones import TEXTS, backbone, save
from ..cli import typed
from ..conftest import pipeline, relative_error

#: Their means vary in all directions, so that the whitening has no rotation to choose.
FIT = [text[:24].strip() for text in demo_sentences()[:60]]
NEW = [*TEXTS, "a dog and a cat, and 7 languages", "苹果手机", " two  blanks\n"]


def bag(module) -> SentenceTransformer:
    """The pipeline of which it is the table, one module after another."""
    read = InputEmbeddings(module)
    pooled = [read, IdfWeights.fit(read, FIT), Pooling(read.get_embedding_dimension(), "mean")]
    whitening = WhiteningTransform.fit(SentenceTransformer(modules=pooled, device="cpu"), FIT)
    return SentenceTransformer(modules=[*pooled, whitening, Normalize()], device="cpu")


# Gemma's embeddings are scaled; GPT-2's tokens have positions.
BAGS = [("llama", "bytes"), ("gemma3", "sentencepiece"), ("gpt2", "bert"), ("llama", "greedy")]


@pytest.mark.parametrize(("architecture", "kind"), BAGS)
def test_it_is_the_bag_of_input_embeddings_behind_weights_and_whitening(architecture, kind, shared):
    module = shared(architecture, kind)
    static = static_model(module, FIT, layer=0)
    found, expected = static.encode(NEW), bag(module).encode(NEW)
    assert relative_error(found @ found.T, expected @ expected.T) < 1e-5
    # Directions of nearly one variance turn by rounding.
    assert relative_error(found, expected) < 1e-3
    assert not static.encode("").any()


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_after_a_layer_each_token_stands_alone(kind, backbone_path, shared):
    """By transformers alone: the state of each token behind what the tokenizer puts first."""
    module = shared("llama", kind)
    backbone = AutoModel.from_pretrained(backbone_path("llama", kind), dtype=torch.float32).eval()
    ids = [module.tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*FIT, *NEW]]
    front = module.tokenizer("a")["input_ids"][: 1 if kind == "sentencepiece" else 0]
    with torch.inference_mode():
        states = {
            token: backbone(torch.tensor([[*front, token]]), output_hidden_states=True).hidden_states[2][0, -1].double()
            for token in {token for own in ids for token in own}
        }
    read = InputEmbeddings(module)
    idf = IdfWeights.fit(read, FIT).weights.double()
    means = torch.stack(
        [sum(idf[token] * states[token] for token in own) / idf[torch.tensor(own)].sum() for own in ids]
    )
    fitted, new = means[: len(FIT)], means[len(FIT) :]
    centred = fitted - fitted.mean(dim=0)
    values, directions = torch.linalg.eigh(centred.T @ centred / len(FIT))
    whitened = (new - fitted.mean(dim=0)) @ directions / (values.clamp(min=0) + 0.1 * values.mean()).sqrt()
    cosines = torch.nn.functional.normalize(whitened) @ torch.nn.functional.normalize(whitened).T
    found = torch.from_numpy(static_model(module, FIT, layer=2).encode(NEW))
    assert relative_error(found @ found.T, cosines.float()) < 1e-4


def test_fewer_dimensions_are_those_in_which_texts_vary_most(shared):
    """As the whitening's own, which stand in that order."""
    whole = bag(shared())
    whole[3] = WhiteningTransform(whole[3].mean, whole[3].weight[:6])
    expected = whole.encode(NEW)
    found = static_model(shared(), FIT, layer=0, dimension=6).encode(NEW)
    assert found.shape == expected.shape
    assert relative_error(found @ found.T, expected @ expected.T) < 1e-4


def test_texts_come_in_any_number_of_blocks(shared, monkeypatch):
    whole = static_model(shared(), FIT, layer=1).encode(NEW)
    monkeypatch.setattr("st_reba.export.static._BLOCK", 7)
    done = []
    blocks = static_model(shared(), iter(FIT), layer=1, on_progress=lambda *at: done.append(at)).encode(NEW)
    assert relative_error(blocks @ blocks.T, whole @ whole.T) < 1e-5
    assert done[-1] == (384, 384)
    assert len(done) == -(-384 // 7)


def test_a_text_longer_than_the_language_model_takes_is_read_whole(backbone_path):
    module = CausalTransformer(backbone_path(), max_seq_length=4)
    module.tokenizer("to cut", truncation=True, max_length=4)
    module.tokenizer.add_tokens([f"<{number}>" for number in range(100)])
    static = static_model(module, FIT, layer=0)
    assert not np.allclose(static.encode("a dog " * 50 + "cat"), static.encode("a dog"), atol=1e-2)
    assert len(static.tokenize(["a dog and a cat"])["input_ids"]) > 4
    # Entries beyond the embeddings mean nothing.
    assert static.encode("<99>").tolist() == [0.0] * 32


REFUSALS = [
    ({"layer": 4}, "layer=4: give 0 for the input embeddings, or the layer to read after, up to 3"),
    ({"dimension": 33}, "dimension=33: give a whole number from 1 to 32"),
    ({"texts": "a b"}, "texts is one string"),
    ({"texts": ["a"]}, "1 texts were given, and their embeddings do not differ"),
    ({"texts": []}, "No texts with tokens were given"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        static_model(shared(), **{"texts": FIT, **settings})


def test_a_slow_tokenizer(backbone_path, monkeypatch):
    module = CausalTransformer(backbone_path())
    monkeypatch.setattr(type(module.tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="is a slow tokenizer, and .* StaticEmbedding needs a fast one"):
        static_model(module, FIT)


def test_the_command_writes_a_ready_directory(backbone_path, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(FIT), encoding="utf-8")
    out = tmp_path / "static"
    options = f"export --model {backbone_path()} --fit-texts {tmp_path / 'texts.txt'} --device cpu --static {out}"
    assert "layer=9: give 0 for the input embeddings" in typed(f"{options} --layer 9", expect=1)
    assert not out.exists()
    output = typed(f"{options} --dimensions 8")
    assert f"on {len(FIT)} texts. Wrote {out}. Load it with: from sentence_transformers import Sent" in output
    types = [entry["type"] for entry in json.loads((out / "modules.json").read_text())]
    assert not [name for name in types if not name.startswith("sentence_transformers.")]
    assert "requirements" not in json.loads((out / "config_sentence_transformers.json").read_text())
    check_saved_model(out)
    loaded = SentenceTransformer(str(out), device="cpu")
    assert isinstance(loaded[0], StaticEmbedding)
    expected = static_model(CausalTransformer(backbone_path()), FIT, dimension=8)
    assert relative_error(loaded.encode(NEW), expected.encode(NEW)) < 1e-5
    card = (out / "README.md").read_text(encoding="utf-8")
    for said in (
        "**a table of token vectors**",
        "print(embeddings.shape)  # (2, 8)",
        "the state of token $t$ after layer 1 of the 3 of the language model",
        f"over {len(FIT)} plain texts",
        "its inverse document frequency",
    ):
        assert said in card, said
    assert not any(unfilled in card for unfilled in ("{{", "{%", "Undefined", str(tmp_path), "import st_reba"))
    assert "exists and is not an empty directory: choose another --static" in typed(options, expect=1)


LONG = [*TEXTS, "Is this so?", 'He said "no"', "我爱你", "one two three " * 60]

RECIPES = {
    "classical": CausalTransformer,
    "classical-all": partial(CausalTransformer, pool_over="all"),
    "prompteol": partial(CausalTransformer, template="prompteol", tokenization="pieces", normalize_text=False),
    "early-exit": partial(CausalTransformer, output_layer=2),
    "prefix": partial(CausalTransformer, template="So {text}", tokenization="pieces"),
    "echo": EchoModule,
    "springer": partial(EchoModule, template="springer", pool_over="all"),
}


def last(module, **prompts) -> SentenceTransformer:
    return pipeline(module, "lasttoken", Normalize(), **prompts)


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
    whole = CausalTransformer(backbone_path(), pool_over="whole")
    check(pipeline(whole, **QUERY), tmp_path / "whole", prompt_name="query")


def test_what_engines_read(backbone_path, tmp_path):
    save_plain(last(RECIPES["early-exit"](backbone_path())), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaModel"], 2)
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    assert "max_seq_length" in json.loads((tmp_path / "sentence_bert_config.json").read_text())
    types = [part["type"] for part in json.loads((tmp_path / "modules.json").read_text())]
    assert types == [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]


DEFAULT, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}
OF_BOTH = {"full_attention": {**DEFAULT, "rope_theta": 1e6}, "sliding_attention": {**DEFAULT, "rope_theta": 2e4}}
ROTATIONS = [
    ("llama", {**DEFAULT, "rope_theta": 1e5}, {"rope_theta": 1e5}),
    ("llama", {**LINEAR, "rope_theta": 1e5}, {"rope_theta": 1e5, "rope_scaling": LINEAR}),
    ("gemma3", OF_BOTH, {"rope_theta": 1e6, "rope_local_base_freq": 2e4}),
]


@pytest.mark.parametrize(("architecture", "rotation", "older"), ROTATIONS)
def test_transformers_4_finds_the_rotation_and_the_tokenizer(architecture, rotation, older, tmp_path):
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


def adapted(path) -> SentenceTransformer:
    model = last(CausalTransformer(path()))
    model.add_adapter(pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"]))
    return model


NOT_FOR_ENGINES = [
    (adapted, "merge an adapter first"),
    (lambda path: last(ReBAModule(path())), "ReBAModule does more than one causal pass"),
    (lambda path: last(CausalTransformer(path(), bidirectional_layers=1)), "runs the language model unchanged"),
    (lambda path: pipeline(CausalTransformer(path(), template="So {text}:")), r'Pooling\("mean"\) over the tokens'),
    (lambda path: pipeline(CausalTransformer(path()), **QUERY), r"every token, of prompts too, or the last\. Build it"),
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
]


@pytest.mark.parametrize(("made", "message"), NOT_FOR_ENGINES)
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


def test_the_command_says_which_vectors_they_are(backbone_path, tmp_path):
    last(CausalTransformer(backbone_path(), template="prompteol")).save_pretrained(str(tmp_path / "a"))
    said = typed(f"export --model {tmp_path / 'a'} --plain {tmp_path / 'b'} --pieces")
    assert 'which gives the vectors of tokenization="pieces" and normalize_text=False. Serve it with' in said
    assert "any engine that has LlamaModel" in said


def test_what_is_not_the_same_is_refused(backbone_path, tmp_path, monkeypatch):
    nothing_around = processors.TemplateProcessing(single="$A", special_tokens=[])
    monkeypatch.setattr("st_reba.export.plain._template_processing", lambda around, tokenizer: nothing_around)
    with pytest.raises(ValueError, match="gives other vectors than the model itself"):
        save_plain(last(RECIPES["prompteol"](backbone_path())), tmp_path)
