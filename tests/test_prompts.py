"""The PromptEOL family: CausalTransformer with a template that is read at its very end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from st_reba import TEMPLATES, CausalTransformer, EchoModule, ReBAModule
from st_reba.layout import normalized

from . import oracles
from .backbones import ARCHITECTURES, TEXTS
from .conftest import pipeline, relative_error

RECIPE = {"pool_over": "all", "rows": "last", "normalize_text": True}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("template", ["prompteol", "promptsum-zh"])
def test_oracle(architecture, template, backbone_path, eager, token_ids):
    model = pipeline(CausalTransformer(backbone_path(architecture), template=template, **RECIPE), "lasttoken")
    vectors = model.encode(TEXTS, batch_size=len(TEXTS))
    before, after = map(token_ids, TEMPLATES[template].split("{text}"))
    for text, vector in zip(TEXTS, vectors, strict=True):
        states, _ = oracles.run(eager(architecture), [*before, *token_ids(normalized(text)), *after])
        assert relative_error(vector, states[-1]) < 1e-5, text


@pytest.mark.parametrize("template", ["prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum-zh"])
@pytest.mark.parametrize("kind", ["bytes", "bert", "sentencepiece"])
def test_the_very_last_token_is_read(kind, template, backbone_path):
    """Of the template, or the special token that the tokenizer puts behind it, as it does for everybody."""
    module = CausalTransformer(backbone_path("llama", kind), template=template, **RECIPE)
    for prompt in (None, "query: "):
        features = module.preprocess(TEXTS, prompt=prompt)
        ends = features["input_ids"][torch.arange(len(TEXTS)), features["attention_mask"].sum(dim=1) - 1]
        literal = module.tokenizer(TEMPLATES[template].split("{text}")[1], add_special_tokens=False)["input_ids"]
        expected = 3 if kind == "bert" else literal[-1]
        assert ends.tolist() == [expected] * len(TEXTS)
        assert module(features)["input_ids"].tolist() == [[expected]] * len(TEXTS)


@pytest.mark.parametrize("module_class", [CausalTransformer, EchoModule, ReBAModule])
def test_normalised_texts(module_class, backbone_path):
    texts = ['He said "sit"', "Did it sit?", "你爱猫吗？", "the cat", ""]
    model = pipeline(module_class(backbone_path(), normalize_text=True))
    with pytest.warns(UserWarning, match="A text without tokens"):
        vectors = model.encode(texts, batch_size=len(texts))
    plain = pipeline(module_class(backbone_path()))
    with pytest.warns(UserWarning, match="A text without tokens"):
        expected = plain.encode([normalized(text) for text in texts], batch_size=len(texts))
    assert np.array_equal(vectors, expected)
    assert not vectors[-1].any()


@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_normalised_or_not(value, backbone_path):
    with pytest.raises(ValueError, match=f"normalize_text={value!r}: use True or False"):
        CausalTransformer(backbone_path(), normalize_text=value)
