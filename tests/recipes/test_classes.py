"""What the class of a recipe says of itself is true: forgotten, it would be what the class above it says."""

from __future__ import annotations

import pytest
import torch

from st_reba.modules import CausalModule
from st_reba.recipes import every_row

from ..conftest import relative_error

#: The first recipe of each class.
ROWS = list({row.module: row for row in reversed(every_row())}.values())

#: Its own prompts are too long for the tests' backbones.
SHORTER = {"metaeol": {"templates": ["{text} is", "in a word, {text}:"]}}

LONG = "The dog chased the cat; the cat chased the mouse, and nobody chased the dog."

each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.module.__name__)


def made(row, backbone, **more):
    return row.module(backbone, **(dict(row.settings) | SHORTER.get(row.key, {}) | more))


def read(module):
    with torch.no_grad():
        return module.eval()(module.preprocess([LONG]))


@each
def test_a_class_that_reads_in_its_own_way_has_a_name_and_an_equation_of_its_own(row):
    """Model cards have them."""
    above = [other for other in row.module.__mro__[1:] if issubclass(other, CausalModule)]
    if any("_read" in vars(other) for other in above):
        for name in ("method", "equation"):
            said = getattr(row.module, name)
            assert all(said != getattr(other, name, None) for other in above), f"{row.module.__name__}.{name}"


@each
def test_a_text_that_has_fewer_vectors_than_tokens_has_none_for_its_chunks(row, shared):
    module = made(row, shared())
    if module.rows == "all" and read(module)["token_embeddings"].shape[1] < int(module.lay_out([LONG]).text_lengths[0]):
        assert module.no_chunks


@each
def test_states_of_every_layer_are_read_alike_or_refused(row, shared, backbone_path):
    """Beside the last layer's, the others may not change what is read."""
    usual = read(made(row, shared()))
    module = made(row, backbone_path(), config_kwargs={"output_hidden_states": True})
    if not module.reads_hidden_states:
        with pytest.raises(ValueError, match="does not read hidden states of one layer alone"):
            read(module)
        return
    found = read(module)
    assert relative_error(found["token_embeddings"], usual["token_embeddings"]) < 1e-5
    assert len(found["all_layer_embeddings"]) == module.model.config.num_hidden_layers + 1
