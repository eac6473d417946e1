from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """A backbone of as many layers as the papers' models have."""
    from transformers import GPT2Config, GPT2Model

    from st_reba import CausalTransformer

    from .. import backbones

    model = GPT2Model(GPT2Config(vocab_size=384, n_embd=8, n_layer=32, n_head=1, n_positions=256)).eval()
    return CausalTransformer(backbones.save(model, tmp_path_factory.mktemp("deep")))
