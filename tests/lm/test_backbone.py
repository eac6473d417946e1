from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from st_reba import ReBAModule
from st_reba.lm import backbone

from ..backbones import config, randomize, save
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize(("name", "expected"), [("llama", 256), ("gpt2", 256), ("mpt", 256), ("bloom", None)])
def test_positions_under_any_name(name, expected):
    assert backbone.positions(AutoModel.from_config(config(name))) == expected


def test_long_range_rotary_embeddings_do_not_make_a_batch_matter(tmp_path):
    """One text beyond the length that the model was first trained on would change how all others are read."""
    phi3 = config("phi3")
    phi3.original_max_position_embeddings = 32
    half = phi3.hidden_size // phi3.num_attention_heads // 2
    phi3.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    torch.manual_seed(0)
    path = save(randomize(AutoModel.from_config(phi3).eval()), tmp_path)
    module = ReBAModule(path)
    assert module.max_seq_length == 16
    model = pipeline(module)
    assert relative_error(model.encode(["a cat", "word " * 90])[0], model.encode("a cat")) < 1e-5
