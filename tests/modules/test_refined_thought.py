"""What refined thought has of its own, besides its oracle: the cache, EOS, and when it stops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import processors

from st_reba import CausalTransformer, RefinedThoughtModule
from st_reba.lm import anatomy

from .. import backbones
from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE

EOS = 0


@pytest.mark.parametrize("architecture", ["qwen2"])
def test_no_pass_copies_the_cache(architecture, shared, monkeypatch):
    """Keys and values are not repeated for the heads that share them."""
    module = RefinedThoughtModule(shared(architecture), iterations=3)
    assert module._reuses_cache
    assert module.model.config.num_key_value_heads < module.model.config.num_attention_heads

    def repeated(states, times):
        raise AssertionError("keys and values were repeated")

    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", repeated)
    assert np.isfinite(pipeline(module, "lasttoken").encode(TEXTS[:1])).all()


def test_a_cache_that_cannot_be_reused(backbone_path, monkeypatch):
    expected = pipeline(RefinedThoughtModule(backbone_path()), "lasttoken").encode(TEXTS)
    # As where a model makes a cache of its own.
    monkeypatch.setattr(anatomy, "DynamicCache", lambda: None)
    with pytest.warns(UserWarning, match="The cache of LlamaModel cannot be reused, so every pass runs over the whole"):
        module = RefinedThoughtModule(backbone_path())
    assert relative_error(pipeline(module, "lasttoken").encode(TEXTS), expected) < TOLERANCE


def test_one_pass_is_the_base_model_to_the_bit(tmp_path):
    """Beside a CausalTransformer whose tokenizer appends EOS itself."""
    model = backbones.backbone("llama")
    model.save_pretrained(tmp_path)
    tokenizer = backbones.tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path)
    ours = pipeline(RefinedThoughtModule(str(tmp_path), iterations=1), "lasttoken").encode(TEXTS)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", EOS)]
    )
    tokenizer.save_pretrained(tmp_path)
    base = pipeline(CausalTransformer(str(tmp_path), pool_over="all"), "lasttoken").encode(TEXTS)
    assert np.array_equal(ours, base)


def test_eos_is_the_tokenizers_end(shared):
    for kind, end in (("bytes", 0), ("bert", 3), ("sentencepiece", 2)):
        features = RefinedThoughtModule(shared("llama", kind), iterations=1).preprocess(["a", "the cat"])
        lengths = features["attention_mask"].sum(dim=1)
        assert [row[length - 1] for row, length in zip(features["input_ids"], lengths, strict=True)] == [end, end]


def test_settled_texts_stop(shared):
    def passes(tolerance, texts=TEXTS):
        model = pipeline(RefinedThoughtModule(shared(), iterations=6, tolerance=tolerance), "lasttoken")
        items = model.encode(texts, output_value=None, batch_size=len(texts))
        return [int(item["passes"]) for item in items], [item["sentence_embedding"] for item in items]

    assert passes(None)[0] == passes(0)[0] == [6] * 5
    assert passes(1.99)[0] == [2] * 5
    models = [pipeline(RefinedThoughtModule(shared(), iterations=t), "lasttoken") for t in range(1, 7)]
    steps = [model.encode(TEXTS, convert_to_tensor=True) for model in models]
    moved = torch.stack([1 - torch.cosine_similarity(a, b) for a, b in pairwise(steps)])
    # Between two texts, so that rounding does not decide.
    tolerance = float(moved[2].sort().values[1:3].mean())
    taken, vectors = passes(tolerance)
    for text, (count, vector) in enumerate(zip(taken, vectors, strict=True)):
        settled = (moved[:, text] < tolerance).nonzero()
        assert count == (int(settled[0]) + 2 if len(settled) else 6)
        # Rounding grows with every pass, and the batches differ.
        assert relative_error(vector, steps[count - 1][text]) < 10 * TOLERANCE
        alone = passes(tolerance, [TEXTS[text]])
        assert alone[0] == [count]
        assert relative_error(alone[1][0], vector) < 10 * TOLERANCE
    assert len(set(taken)) > 1


def test_further_passes_on_trained_weights():
    """They multiply no rounding, as random ones do."""
    module = RefinedThoughtModule(str(DEMO_MODEL), iterations=4, model_kwargs={"dtype": "float32"})
    encode = pipeline(module, "lasttoken").encode
    assert relative_error(encode(TEXTS, batch_size=5), encode(TEXTS, batch_size=1)) < TOLERANCE


class TestForwardArguments:
    @pytest.fixture(params=[True, False], ids=["cached", "whole"])
    def module(self, request, shared):
        module = RefinedThoughtModule(shared(), iterations=3)
        module._reuses_cache = request.param
        return module

    def test_what_every_pass_can_take_reaches_every_pass(self, module, monkeypatch):
        seen = []
        forward = module.model.forward
        monkeypatch.setattr(module.model, "forward", lambda **kwargs: seen.append(kwargs) or forward(**kwargs))
        features = module.preprocess(TEXTS)
        expected = module(dict(features))["token_embeddings"]
        assert len(seen) == 3
        assert not any("output_attentions" in kwargs for kwargs in seen)
        found = module(dict(features), output_attentions=False, task="query")["token_embeddings"]
        assert [kwargs.get("output_attentions") for kwargs in seen[3:]] == [False] * 3
        # What ST keeps from a backbone is kept from it in every pass.
        assert not any("task" in kwargs for kwargs in seen)
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"position_ids": torch.arange(9)}, "position_ids"),
            ({"use_cache": False}, "use_cache"),
            ({"token_type_ids": torch.zeros(5, 9)}, "token_type_ids"),
            ({"use_cache": True, "past_key_values": None}, "past_key_values, use_cache"),
        ],
    )
    def test_what_belongs_to_the_tokens_of_one_pass_is_refused(self, given, named, module):
        with pytest.raises(ValueError, match=f"forward was given {named}: with iterations=3 each pass reads other"):
            module(module.preprocess(TEXTS), **given)


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_a_tokenizer_without_an_end(architecture, tmp_path):
    """It is refused when the module is made, also where the model has no limit of positions, as BLOOM."""
    model = backbones.backbone(architecture)
    model.save_pretrained(tmp_path)
    tokenizer = backbones.tokenizer("bytes")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no end-of-sequence token: set tokenizer.eos_token"):
        RefinedThoughtModule(str(tmp_path), iterations=1)
