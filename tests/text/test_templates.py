"""A template's name brings how its authors read it; what the caller or a saved model says comes first."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import (
    TEMPLATES,
    BidirectionalLastLayer,
    CausalTransformer,
    ContrastivePromptingModule,
    KVReroutingModule,
    LayerStates,
    MetaEOLModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from st_reba.text.templates import PRESETS, normalized

from ..backbones import FEW, TEXTS, own
from ..conftest import pipeline, relative_error

#: Of PromptEOL's family, in both languages.
FAMILY = [
    *("prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum"),
    *("prompteol-zh", "pretended-cot-zh", "knowledge-zh", "promptsth-zh", "promptsum-zh"),
    *("promptreps", "promptreps-zh", "topic", "topic-zh"),
]


def reading(module):
    return module.pool_over, module.rows, module.normalize_text, module.output_layer, module.final_norm


def test_a_prompt_is_read_at_its_end(shared):
    assert [name for name, preset in PRESETS.items() if preset.rows == "last"] == FAMILY
    for template in FAMILY:
        module = CausalTransformer(shared(), template=template)
        layer, norm = (2, False) if template.startswith(("pretended-cot", "knowledge")) else (None, True)
        assert module.template == TEMPLATES[template]
        # PromptReps asks for a word that is to be found as it is written.
        assert reading(module) == ("all", "last", not template.startswith("promptreps"), layer, norm)


@pytest.mark.filterwarnings("ignore:.*in its own code")
@pytest.mark.parametrize("architecture", FEW)
@pytest.mark.parametrize("template", ["prompteol", "knowledge-zh"])
def test_oracle(architecture, template, shared, eager, token_ids):
    """The last token of the prompt, of transformers' own hidden states: the last entry, or the last but one."""
    vectors = pipeline(CausalTransformer(shared(architecture), template=template), "lasttoken").encode(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        before, after = (token_ids(part) for part in TEMPLATES[template].split("{text}"))
        ids = torch.tensor([[*before, *token_ids(normalized(text)), *after]])
        with torch.inference_mode():
            states = eager(architecture)(input_ids=ids, output_hidden_states=True).hidden_states
        expected = states[-2 if template == "knowledge-zh" else -1][0, -1]
        assert relative_error(vector, expected) < 1e-5, text


@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
@pytest.mark.parametrize("template", ["prompteol", "promptsum-zh"])
def test_the_very_last_token_is_read(kind, template, shared):
    """Of the template, or the special token that the tokenizer puts behind it, as it does for everybody."""
    module = CausalTransformer(shared("llama", kind), template=template)
    literal = module.tokenizer(TEMPLATES[template].split("{text}")[1], add_special_tokens=False)["input_ids"]
    expected = 3 if kind == "bert" else literal[-1]
    for prompt in (None, "query: "):
        features = module.preprocess(TEXTS, prompt=prompt)
        ends = features["input_ids"][torch.arange(len(TEXTS)), features["attention_mask"].sum(dim=1) - 1]
        assert ends.tolist() == [expected] * len(TEXTS)
        assert module(features)["input_ids"].tolist() == [[expected]] * len(TEXTS)


def test_what_the_caller_says_comes_first(shared):
    given = {"pool_over": "text", "rows": "all", "normalize_text": False, "output_layer": -1, "final_norm": True}
    module = CausalTransformer(shared(), template="pretended-cot", **given)
    assert reading(module) == ("text", "all", False, 3, True)
    assert reading(CausalTransformer(shared(), template="knowledge", output_layer=1)) == ("all", "last", True, 1, False)


@pytest.mark.parametrize("module_class", [CausalTransformer, BidirectionalLastLayer, LayerStates])
def test_a_text_is_read_as_any_template(module_class, shared):
    """Also that of a preset: saved models have texts."""
    module = module_class(shared(), template=TEMPLATES["pretended-cot"])
    usual = "all" if module_class is BidirectionalLastLayer else "text"
    assert reading(module) == (usual, "all", False, None, True)


def test_what_each_module_takes_of_a_preset(shared):
    """What every layer, or the attention in it, gives is not read at the last but one; a hybrid reads more than the
    last token."""
    states = LayerStates(shared(), template="pretended-cot")
    assert (states.depth, states.pool_over, states.normalize_text, states.final_norm) == (3, "all", True, True)
    values = ValueAggregationModule(shared(), template="pretended-cot")
    assert (values.output_layer, values.pool_over, values.normalize_text) == (None, "all", True)
    hybrid = KVReroutingModule(shared(), template="prompteol")
    assert (hybrid.hybrid, hybrid.rows, hybrid.pool_over, hybrid.normalize_text) == (True, "all", "all", True)
    assert KVReroutingModule(shared(), template="prompteol", hybrid=False).rows == "last"
    contrast = ContrastivePromptingModule(shared(), template="knowledge")
    assert (contrast.output_layer, contrast.final_norm, contrast.scale) == (2, False, 3.0)
    assert reading(TokenPrependingModule(shared())) == ("all", "last", True, 3, False)
    own = TokenPrependingModule(shared(), template='Of {prepend} "{text}":')
    assert reading(own) == ("all", "all", False, 3, False)


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        (["pretended-cot", "knowledge"], (2, False, True)),
        (["prompteol", "pretended-cot"], (None, True, True)),
        (["prompteol", "{text} sounds"], (None, True, False)),
    ],
)
def test_prompts_agree(templates, expected, shared):
    module = MetaEOLModule(shared(), templates=templates)
    assert (module.output_layer, module.final_norm, module.normalize_text) == expected


@pytest.mark.parametrize("layers", [1, 3])
def test_on_a_model_with_few_layers(layers, shared):
    """A model of one layer has no last but one."""
    backbone = CausalTransformer(shared(), output_layer=layers)
    assert CausalTransformer(backbone, template="pretended-cot").output_layer == max(1, layers - 1)


def test_a_model_of_version_0_1_is_read_as_it_was(backbone_path, tmp_path):
    """It has the text of a preset, every key but those that came later, and null for the last layer."""
    settings = {"pool_over": "all", "rows": "last", "normalize_text": False, "output_layer": -1, "final_norm": True}
    model = pipeline(CausalTransformer(backbone_path(), template="knowledge", **settings), "lasttoken")
    model.save_pretrained(str(tmp_path))
    file = own(tmp_path) / "sentence_bert_config.json"
    config = json.loads(file.read_text())
    del config["final_norm"]
    file.write_text(json.dumps({**config, "output_layer": None}))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert reading(loaded[0]) == ("all", "last", False, None, True)
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))


def test_normalised_texts(shared):
    texts = ['He said "sit"', "Did it sit?", "你爱猫吗？", "the cat", ""]
    model, plain = (pipeline(CausalTransformer(shared(), normalize_text=value)) for value in (True, False))
    with pytest.warns(UserWarning, match="A text without tokens"):
        vectors = model.encode(texts, batch_size=len(texts))
    with pytest.warns(UserWarning, match="A text without tokens"):
        expected = plain.encode([normalized(text) for text in texts], batch_size=len(texts))
    assert np.array_equal(vectors, expected)
    assert not vectors[-1].any()
    for value in ("yes", 1):
        with pytest.raises(ValueError, match=f"normalize_text={value!r}: use True or False"):
            CausalTransformer(shared(), normalize_text=value)
