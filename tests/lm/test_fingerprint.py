from __future__ import annotations

import pytest
import torch
from transformers import ByT5Tokenizer

from st_reba import CausalTransformer
from st_reba.lm.fingerprint import fingerprint as of_model
from st_reba.lm.fingerprint import fingerprint_of_weight
from st_reba.modules.lm_head import head_blocks


def fingerprint(module) -> str:
    return of_model(module.model, module.tokenizer, module.max_seq_length)


def test_the_same_model_wherever_it_lies(backbone_path, tmp_path):
    module = CausalTransformer(backbone_path())
    mark = fingerprint(module)
    assert len(mark) == 16
    assert int(mark, 16) >= 0
    module.model.save_pretrained(tmp_path)
    module.tokenizer.save_pretrained(tmp_path)
    assert fingerprint(CausalTransformer(str(tmp_path))) == mark


def test_one_value_of_one_weight(backbone_path):
    """Every value counts: a sample of each weight would not show an edit."""
    module = CausalTransformer(backbone_path())
    mark = fingerprint(module)
    weight = module.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[1] += 0.5
        assert fingerprint(module) != mark
        weight.view(-1)[1] -= 0.5
    assert fingerprint(module) == mark


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_another_tokenizer(kind, backbone_path):
    module = CausalTransformer(backbone_path(kind=kind))
    mark = fingerprint(module)
    module.preprocess(["a long text", "b"], processing_kwargs={"text": {"max_length": 2}})
    module.tokenizer("one more text", truncation=True, max_length=2)
    assert fingerprint(module) == mark
    module.tokenizer.add_tokens(["cat"])
    assert fingerprint(module) != mark


def test_another_model_or_a_tokenizer_in_python(backbone_path):
    modules = [
        CausalTransformer(backbone_path()),
        CausalTransformer(backbone_path(), max_seq_length=20),
        CausalTransformer(backbone_path(), model_kwargs={"dtype": torch.bfloat16}),
        CausalTransformer(backbone_path("qwen2")),
    ]
    marks = [*map(fingerprint, modules)]
    for extra in (0, 0, 5):
        modules[0].processor = ByT5Tokenizer(extra_ids=extra)
        marks.append(fingerprint(modules[0]))
    assert marks[4] == marks.pop(5)
    assert len(set(marks)) == len(marks) == 6


def test_heads(backbone_path):
    module = CausalTransformer(backbone_path("qwen2"))
    module.model.config.tie_word_embeddings = True
    marks = [fingerprint_of_weight("head", head_blocks(module))]
    with torch.no_grad():
        module.model.get_input_embeddings().weight[3, 1] += 1
    assert fingerprint_of_weight("head", head_blocks(module)) != marks[0]
