"""Contrastive prompting and value aggregation, which read and change what the output projections of attention do."""

from __future__ import annotations

import pytest
import torch

from st_reba import ContrastivePromptingModule, ValueAggregationModule

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE, read


@pytest.mark.parametrize("layer", range(3))
def test_values_are_the_aligned_sum_of_value_vectors(layer, shared, eager, token_ids):
    module = ValueAggregationModule(shared(), layers=[layer], template="{text}", pool_over="text")
    for text, states in zip(TEXTS, read(module, TEXTS), strict=True):
        wanted = oracles.aligned_values(eager(), token_ids(text), layer).detach()
        assert relative_error(states[0], wanted) < TOLERANCE


def test_values_of_a_shortened_model(shared):
    """All layers are then all that are left."""
    short, chosen = ({"output_layer": 2}, {"layers": [0, 1]})
    vectors = [pipeline(ValueAggregationModule(shared(), **own)).encode(TEXTS) for own in (short, chosen)]
    assert relative_error(*vectors) < TOLERANCE


def ran(module) -> list[str]:
    """The parts of a model that run for one text, behind a prompt whose states are kept already."""
    pipeline(module, "lasttoken").encode(TEXTS[0])
    names: list[str] = []
    for name, part in module.model.named_modules():
        part.register_forward_pre_hook(lambda module, args, name=name: names.append(name))
    pipeline(module, "lasttoken").encode(TEXTS[0])
    return names


def test_nothing_above_the_values_is_run(shared):
    names = ran(ValueAggregationModule(shared(), layers=[0, 1]))
    assert names[-1] == "layers.1.self_attn.o_proj"  # nothing behind it, in its own layer either
    assert "layers.0.mlp" in names


def test_the_contrasting_pass_ends_where_it_is_read(shared):
    names = ran(ContrastivePromptingModule(shared(), contrast_layer=1, output_layer=-1))
    assert names.count("layers.0.mlp") == names.count("layers.1.self_attn.v_proj") == 2
    assert names.count("layers.1.mlp") == names.count("layers.2") == 1


def test_where_both_prompts_say_the_same_nothing_is_left(shared, eager):
    for scale in (0.5, "norm"):
        settings = {"template": "x {text}", "auxiliary_template": "x {text}", "contrast_layer": 2, "scale": scale}
        module = ContrastivePromptingModule(shared(), **settings)
        ids = module.tokenizer("x the cat")["input_ids"]
        with torch.no_grad(), oracles.changed(eager(), "layers.2.self_attn.o_proj", before=lambda states: states * 0):
            expected = oracles.seen(eager(), "layers.2", ids, "after")[-1]
        assert relative_error(pipeline(module, "lasttoken").encode("the cat"), expected) < TOLERANCE
