"""Echo over layers equals its definition."""

import pytest
import torch

from st_reba import EchoLayersModule

from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "bloom"])
def test_oracle(architecture, shared, eager, token_ids):
    module = EchoLayersModule(shared(architecture), last_layers=3)
    for text, ids in ((text, token_ids(text)) for text in TEXTS):
        # transformers' last one comes with the final norm, the others without.
        _, one, two, last = eager(architecture)(torch.tensor([2 * ids]), output_hidden_states=True).hidden_states
        expected = (module._every_norm(one) + 2 * module._every_norm(two) + 3 * last)[0, len(ids) :].detach() / 6
        assert relative_error(pipeline(module).encode(text, output_value="token_embeddings"), expected) < 1e-5


def test_there_are_so_many_layers(shared):
    with pytest.raises(ValueError, match="last_layers=4: the model runs 3 layers; give 1 to 3"):
        EchoLayersModule(shared(), last_layers=4)
