"""Attention pooling equals its definition."""

import pytest
import torch

from st_reba import AttentionPoolingModule

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mistral_window", "gpt_oss_sinks"])
def test_oracle(architecture, shared, eager, token_ids):
    vectors = pipeline(AttentionPoolingModule(shared(architecture)), "lasttoken").encode(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        states, maps = oracles.run(eager(architecture), token_ids(text))
        weights = torch.as_tensor(maps[-1])[:, -1].mean(dim=0)
        assert relative_error(vector, weights @ states / weights.sum()) < 1e-5


def test_attention_that_cannot_be_watched(shared):
    with pytest.raises(ValueError, match="The attention of BloomModel's last layer cannot be watched"):
        AttentionPoolingModule(shared("bloom"))
