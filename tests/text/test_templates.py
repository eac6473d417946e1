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

from ..backbones import TEXTS, own, third
from ..conftest import paired, pipeline, relative_error

FAMILY = [name for name, preset in PRESETS.items() if preset.rows == "last"]
LAST_BUT_ONE = ["pretended-cot", "knowledge", "pretended-cot-zh", "knowledge-zh"]
ONE_SLOT = [CausalTransformer, BidirectionalLastLayer, LayerStates]


def reading(module):
    return module.pool_over, module.rows, module.normalize_text, module.output_layer, module.final_norm


@pytest.mark.parametrize("template", FAMILY)
@pytest.mark.parametrize("module_class", [CausalTransformer, BidirectionalLastLayer])
def test_a_prompt_is_read_at_its_end(template, module_class, shared):
    module = module_class(shared(), template=template)
    layer, norm = (2, False) if template in LAST_BUT_ONE else (None, True)
    assert module.template == TEMPLATES[template]
    # PromptReps asks for a word that is to be found as it is written.
    lowered = not template.startswith("promptreps")
    assert reading(module) == ("all", "last", lowered, layer, norm)


def test_the_family_is_that_of_prompteol():
    assert [name.removesuffix("-zh") for name in FAMILY] == [
        *("prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum") * 2,
        *("promptreps", "promptreps", "topic", "topic"),
    ]


@pytest.mark.parametrize(("architecture", "template"), paired(third(2), ["prompteol", "knowledge-zh"]))
def test_oracle(architecture, template, shared, eager, token_ids):
    """The last token of the prompt, of transformers' own hidden states: the last entry, or the last but one."""
    vectors = pipeline(CausalTransformer(shared(architecture), template=template), "lasttoken").encode(TEXTS)
    before, after = map(token_ids, TEMPLATES[template].split("{text}"))
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([[*before, *token_ids(normalized(text)), *after]])
        with torch.inference_mode():
            states = eager(architecture)(input_ids=ids, output_hidden_states=True).hidden_states
        expected = states[-2 if template == "knowledge-zh" else -1][0, -1]
        assert relative_error(vector, expected) < 1e-5, text


def test_what_the_caller_says_comes_first(backbone_path):
    path = backbone_path()
    given = {"pool_over": "text", "rows": "all", "normalize_text": False, "output_layer": -1, "final_norm": True}
    module = CausalTransformer(path, template="pretended-cot", **given)
    assert reading(module) == ("text", "all", False, 3, True)
    assert reading(CausalTransformer(path, template="knowledge", output_layer=1)) == ("all", "last", True, 1, False)


@pytest.mark.parametrize("module_class", ONE_SLOT)
def test_a_text_is_read_as_any_template(module_class, shared):
    """Also that of a preset: saved models have texts."""
    module = module_class(shared(), template=TEMPLATES["pretended-cot"])
    usual = "all" if module_class is BidirectionalLastLayer else "text"
    assert reading(module) == (usual, "all", False, None, True)


def test_where_no_hidden_state_is_read_the_layer_stays(shared):
    """What every layer, or the attention in it, gives is not read at the last but one."""
    states = LayerStates(shared(), template="pretended-cot")
    assert (states.depth, states.pool_over, states.normalize_text, states.final_norm) == (3, "all", True, True)
    values = ValueAggregationModule(shared(), template="pretended-cot")
    assert (values.output_layer, values.pool_over, values.normalize_text) == (None, "all", True)


def test_a_hybrid_reads_more_than_the_last(shared):
    module = KVReroutingModule(shared(), template="prompteol")
    assert (module.hybrid, module.rows, module.pool_over, module.normalize_text) == (True, "all", "all", True)
    assert KVReroutingModule(shared(), template="prompteol", hybrid=False).rows == "last"


def test_what_modules_bring_themselves(shared):
    assert reading(TokenPrependingModule(shared())) == ("all", "last", True, 3, False)
    assert ValueAggregationModule(shared()).normalize_text
    own = TokenPrependingModule(shared(), template='Of {prepend} "{text}":')
    assert reading(own) == ("all", "all", False, 3, False)


@pytest.mark.parametrize("template", ["prompteol", "pretended-cot"])
def test_a_saved_model_has_what_was_meant(template, backbone_path, tmp_path):
    model = pipeline(CausalTransformer(backbone_path(), template=template), "lasttoken")
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert reading(loaded[0])[:3] == ("all", "last", True)
    assert np.array_equal(loaded.encode(TEXTS), model.encode(TEXTS))


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


def test_prompts_agree(backbone_path):
    path = backbone_path()
    ck = MetaEOLModule(path, templates=["pretended-cot", "knowledge"])
    assert (ck.output_layer, ck.final_norm, ck.normalize_text) == (2, False, True)
    mixed = MetaEOLModule(path, templates=["prompteol", "pretended-cot"])
    assert (mixed.output_layer, mixed.final_norm, mixed.normalize_text) == (None, True, True)
    assert not MetaEOLModule(path, templates=["prompteol", "{text} sounds"]).normalize_text


@pytest.mark.parametrize("layers", [1, 3])
def test_on_a_model_with_few_layers(layers, backbone_path):
    """A model of one layer has no last but one."""
    backbone = CausalTransformer(backbone_path(), output_layer=layers)
    assert CausalTransformer(backbone, template="pretended-cot").output_layer == max(1, layers - 1)


def test_contrastive_prompting_reads_where_the_prompts_authors_do(shared):
    module = ContrastivePromptingModule(shared(), template="knowledge")
    assert (module.output_layer, module.final_norm, module.scale) == (2, False, 3.0)
