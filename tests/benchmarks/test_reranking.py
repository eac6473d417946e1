"""What is kept of in-context reranking is scored as the module scores it."""

import numpy as np
import pytest
import torch

import reranking
from st_reba import AttentionRerankModule

from .. import backbones
from ..backbones import TEXTS


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return backbones.save(backbones.backbone("llama"), tmp_path_factory.mktemp("lm"))


@pytest.mark.parametrize(("together", "shares", "rotations"), [(False, [0.0], 1), (True, [0.0, 0.5], 2)])
def test_layers_are_chosen_after_the_pass(together, shares, rotations, path):
    """One layer alone, of what is kept of a pass through all of them."""
    settings = {"template": "Of:{documents}\nFor {query}:", "together": together}
    kept = reranking.paid(AttentionRerankModule(path, layers="all", **settings), "the dog", TEXTS[:4], shares)
    layer = np.repeat(np.arange(3), 4)
    module = AttentionRerankModule(path, layers=[1], rotations=rotations, **settings)
    expected = module(module.preprocess([("the dog", text) for text in TEXTS[:4]]))["scores"][:, 0]
    assert torch.allclose(torch.tensor(reranking.scores(kept, layer == 1)), expected, atol=2e-3)
    # Of fewer layers, those that were run.
    fewer = reranking.scores(kept, (layer == 1)[:8])
    assert fewer == reranking.scores(kept, layer == 1)


def test_what_was_chosen_is_said():
    layer = np.repeat(np.arange(9), 4)
    assert reranking.described((layer >= 2) & (layer < 6), 4) == "layers 2, 3, 4, 5"
    assert reranking.described(np.isin(np.arange(36), [1, 35]), 4) == "0-1 8-3"
