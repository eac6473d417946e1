from __future__ import annotations

import torch

from st_reba import CausalTransformer
from st_reba.fingerprint import fingerprint


def test_the_same_model_wherever_it_lies(backbone_path, tmp_path):
    module = CausalTransformer(backbone_path())
    mark = fingerprint(module)
    assert len(mark) == 16
    assert int(mark, 16) >= 0
    module.model.save_pretrained(tmp_path)
    module.tokenizer.save_pretrained(tmp_path)
    assert fingerprint(CausalTransformer(str(tmp_path))) == mark


def test_another_model(backbone_path):
    mark = fingerprint(CausalTransformer(backbone_path()))
    shorter = CausalTransformer(backbone_path())
    shorter.max_seq_length = 20
    trained = CausalTransformer(backbone_path())
    with torch.no_grad():
        for parameter in trained.model.layers[0].parameters():
            parameter.mul_(1.001)
    coarser = CausalTransformer(backbone_path(), model_kwargs={"dtype": torch.bfloat16})
    other = CausalTransformer(backbone_path("qwen2"))
    assert len({mark, *map(fingerprint, (shorter, trained, coarser, other))}) == 5
