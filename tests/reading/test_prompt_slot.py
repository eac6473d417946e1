"""A text in terms of a prompt that stands in a slot of its own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from st_reba import TEMPLATES, CausalTransformer, build, in_terms_of
from st_reba.export.plain import save_plain

from ..backbones import TEXTS
from ..conftest import pipeline, relative_error

ASPECTS = ["its topic", "情感", "the number of animals that are in it, if there are any", '"a {text} {prepend}"']
PONTE = [name for name in TEMPLATES if name.startswith("ponte")]


def asked(module, **settings):
    return pipeline(CausalTransformer(module, **{"template": "ponte", **settings}), "lasttoken")


@pytest.mark.parametrize("kind", ["greedy", "bert"])
@pytest.mark.parametrize("template", PONTE)
def test_plain_transformers_on_the_string_with_both_in_their_slots(template, kind, backbone_path):
    path = backbone_path("llama", kind)
    plain = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = pipeline(CausalTransformer(path, template=template), "lasttoken")
    # A text may read like a slot.
    texts = [*TEXTS, "{prompt} of {text}"]
    for aspect in ASPECTS:
        vectors = model.encode(texts, prompt=aspect)
        for text, vector in zip(texts, vectors, strict=True):
            before, behind = (part.replace("{prompt}", aspect) for part in TEMPLATES[template].split("{text}"))
            with torch.no_grad():
                inputs = tokenizer(before + text + behind, return_tensors="pt")
                states = plain(input_ids=inputs["input_ids"]).last_hidden_state[0]
            assert relative_error(vector, states[-1]) < 1e-5, (text, aspect)


def test_every_way_to_give_a_prompt(backbone_path, tmp_path):
    """By encode, by name, by default, as an input's own, which comes in place of any other; and after saving."""
    model = asked(backbone_path("llama"))
    model.prompts = {"topic": "its topic", "query": "the question", "document": "the answer"}
    model.default_prompt_name = "topic"
    expected = model.encode(TEXTS, prompt="its topic")
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    for each in (model, loaded):
        assert np.array_equal(each.encode(TEXTS), expected)
        assert np.array_equal(each.encode(TEXTS, prompt_name="topic"), expected)
        own = each.encode([in_terms_of(text, "its topic") for text in TEXTS], prompt="the answer")
        assert relative_error(own, expected) < 1e-5
        assert np.array_equal(each.encode_query(TEXTS), each.encode(TEXTS, prompt="the question"))


@pytest.mark.parametrize("template", ["ponte", "ponte-aspect-first"])
def test_long_texts_are_cut_and_what_is_asked_is_not(template, shared):
    module = CausalTransformer(shared("llama", "greedy"), template=template)
    aspect = "the animals"
    features = module.preprocess(["自然语言" * 200], prompt=aspect)
    read = module.tokenizer.decode(features["input_ids"][0])
    first, last = TEMPLATES[template].replace("{prompt}", aspect).split("{text}")
    assert read.startswith(first)
    assert read.endswith(last)
    assert 230 < features["input_ids"].shape[1] <= 256


def test_a_prompt_that_is_blank_is_refused(shared, backbone_path, tmp_path):
    refused = r"in terms of \{prompt\}: \"' reads a text in terms of a prompt, and no prompt was given: give one"
    model = asked(shared())
    for given in ({}, {"prompt": " "}):
        with pytest.raises(ValueError, match=refused):
            model.encode(TEXTS, **given)
    with pytest.raises(ValueError, match=refused):
        model.encode([in_terms_of("a", "its topic"), "b"])
    built = build(backbone_path("llama"), "prompteol", template="ponte", device="cpu", prompts={"query": "its topic"})
    with pytest.raises(ValueError, match="or export a model for each"):
        save_plain(built, tmp_path, pieces=True)


def test_a_slot_is_given_once_and_conversations_have_none(shared):
    with pytest.raises(ValueError, match=re.escape("has other braces than {text}, one {prompt}")):
        CausalTransformer(shared(), template="{prompt} {text} {prompt}")
    module = CausalTransformer(shared(), template="ponte")
    module.tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match='Input 0 is a conversation, .* use chat="conversation"'):
        module.preprocess([turns], prompt="its topic")
