from __future__ import annotations

import numpy as np
import pytest
import torch

from st_reba import CausalTransformer, ValueAggregationModule
from st_reba.text.templates import normalized

from .. import oracles
from ..backbones import TEXTS, third
from ..conftest import paired, pipeline, relative_error

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def prompted(token_ids):
    """Ids of a text under the usual prompt."""
    return lambda text: token_ids(f'This sentence : "{normalized(text)}" means in one word:"')


@pytest.mark.parametrize(("architecture", "layers"), paired(third(2), ["all", [0], [-1, 1]]))
def test_oracle(architecture, layers, shared, eager, prompted):
    module = ValueAggregationModule(shared(architecture), layers=layers)
    vectors = pipeline(module, "lasttoken").encode(TEXTS, batch_size=len(TEXTS))
    counted = range(3) if layers == "all" else [layer % 3 for layer in layers]
    for text, vector in zip(TEXTS, vectors, strict=True):
        expected = oracles.value_aggregation(eager(architecture), architecture, prompted(text), counted)
        assert relative_error(vector, expected) < TOLERANCE, text


@pytest.mark.parametrize("layer", range(3))
def test_it_is_the_aligned_sum_of_value_vectors(layer, shared, eager, prompted):
    encode = pipeline(ValueAggregationModule(shared(), layers=[layer]), "lasttoken").encode
    for text in TEXTS:
        assert relative_error(encode(text), oracles.aligned_values(eager(), prompted(text), layer)) < TOLERANCE


def test_the_last_token_of_the_text(shared, eager, token_ids):
    module = ValueAggregationModule(shared(), template="{text}!", pool_over="text")
    vectors = pipeline(module, "lasttoken").encode([*TEXTS, ""], batch_size=6)
    for text, vector in zip(TEXTS, vectors, strict=False):
        expected = oracles.value_aggregation(eager(), "llama", token_ids(text), range(3))
        assert relative_error(vector, expected) < TOLERANCE
    assert not vectors[-1].any()


def test_nothing_above_is_run(shared):
    module = ValueAggregationModule(shared(), layers=[0, 1])
    ran = []
    for name, part in module.model.named_modules():
        part.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    pipeline(module, "lasttoken").encode(TEXTS[0])
    assert ran[-1] == "layers.1.self_attn.o_proj"  # nothing behind it, in its own layer either
    assert "layers.0.mlp" in ran


def test_handed_on_is_one_vector(shared):
    module = ValueAggregationModule(shared())
    item = pipeline(module).encode("the cat", output_value=None)
    assert item["token_embeddings"].shape == (1, 32)
    assert module.tokenizer.decode(item["input_ids"]).endswith('"')


def test_layers_of_a_shortened_model(shared):
    """All layers are then all that are left."""
    short = pipeline(ValueAggregationModule(shared(), output_layer=2), "lasttoken").encode(TEXTS)
    expected = pipeline(ValueAggregationModule(shared(), layers=[0, 1]), "lasttoken").encode(TEXTS)
    assert relative_error(short, expected) < TOLERANCE


def test_a_shared_backbone_is_as_before(shared):
    classical = CausalTransformer(shared())
    before = pipeline(classical).encode(TEXTS)
    module = ValueAggregationModule(classical)
    assert all(one is other for one, other in zip(module.model.parameters(), classical.model.parameters(), strict=True))
    pipeline(module).encode(TEXTS)
    assert np.array_equal(pipeline(classical).encode(TEXTS), before)


def test_gradients_are_those_of_the_definition(backbone_path, eager, prompted):
    model = pipeline(ValueAggregationModule(backbone_path(), layers=[1]), "lasttoken").train()
    model(model.preprocess(TEXTS[:1]))["sentence_embedding"].sum().backward()
    reference = eager()
    reference.zero_grad()
    found = []
    hook = reference.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, output: found.append(output))
    reference(input_ids=torch.tensor([prompted(TEXTS[0])]))
    hook.remove()
    found[0][0, -1].sum().backward()
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.v_proj", "layers.1.self_attn.o_proj"):
        ours, expected = (whole.get_submodule(name).weight.grad for whole in (model[0].model, reference))
        assert relative_error(ours, expected) < 1e-4
    assert model[0].model.layers[2].self_attn.v_proj.weight.grad is None
    reference.zero_grad()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": []}, r'layers=\[\]: use "all" or a list of layer indices'),
        ({"layers": [3]}, r"layers=\[3\]: the model has 3 layers, so 3 is out of range; use -3 to 2"),
        ({"template": "{text}{text}"}, "has 2 slots: ValueAggregationModule reads one copy"),
        ({"template": "{prepend}{text}"}, r"has \{prepend\}, and nothing is prepended"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        ValueAggregationModule(shared(), **settings)
