from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder, PartwiseWhitening
from st_reba.modules.moments import Moments

from .. import oracles
from ..backbones import TEXTS

CASES = {
    "paper": {},
    "one width": {"bottlenecks": [5]},
    "a width a layer": {"bottlenecks": [3, 4, 7], "head_dimension": 2},
    "raw cosines": {"encoders": False},
    "some layers": {"layers": [1, 3], "bottlenecks": [4, 5]},
}


def freeze(path, **settings) -> SentenceTransformer:
    torch.manual_seed(1)
    modules = [LayerStates(path), LayerwiseAutoencoder(3, 32, **settings)]
    return SentenceTransformer(modules=modules, device="cpu")


@pytest.fixture
def states():
    torch.manual_seed(0)
    return torch.randn(2, 6, 3, 32) * torch.tensor([1.0, 30, 900])[:, None]


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_embeddings_and_scores_are_the_papers(settings, states):
    torch.manual_seed(1)
    module = LayerwiseAutoencoder(3, 32, **settings)
    first, second = (module.embed(side) for side in states)
    expected = torch.stack([oracles.freeze_embedding(module, own) for own in states[0]])
    assert torch.allclose(first, expected, atol=1e-6)
    scores = torch.stack([oracles.freeze_score(module, *pair) for pair in zip(*states, strict=True)])
    assert torch.allclose(module.scores(first, second), scores, atol=1e-5)
    assert torch.allclose(module.score_pairs(first.detach().numpy(), second), scores.detach(), atol=1e-5)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_dot_product_is_the_mean_of_the_layers_cosines(settings, states):
    module = LayerwiseAutoencoder(3, 32, **settings)
    first, second = (module.embed(side) for side in states)
    assert first.shape == (6, module.get_embedding_dimension())
    assert torch.allclose(first.norm(dim=1), torch.ones(6))
    pairs = zip(*(module.encode_layers(side) for side in states), strict=True)
    cosines = torch.stack([torch.cosine_similarity(one, other, dim=-1) for one, other in pairs], dim=-1)
    assert torch.allclose((first * second).sum(dim=1), cosines.mean(dim=1), atol=1e-6)
    assert torch.allclose(1 - module.distances(first, second), cosines, atol=1e-6)


@pytest.mark.parametrize("bias", [-1e6, -3, 0, 3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identical_sentences_score_one_whatever_the_weights(bias, dtype, states):
    module = LayerwiseAutoencoder(3, 32)
    torch.nn.init.constant_(module.head.mlp[-1].bias, bias)
    module.to(dtype)
    embeddings = module.embed(states[0])
    assert torch.equal(module.score_pairs(embeddings, embeddings), torch.ones(6))
    others = module.score_pairs(embeddings, embeddings.flip(0))
    assert bool(((others >= 0) & (others <= 1)).all())
    if abs(bias) == 3:
        assert bool((others < 1).all())


def test_identical_texts_from_different_batches_score_one(shared):
    model = freeze(shared())
    alone = np.concatenate([model.encode([text]) for text in TEXTS])
    scores = model[-1].score_pairs(model.encode(TEXTS), alone)
    assert torch.allclose(scores, torch.ones(len(TEXTS)), atol=1e-6)


def test_gradients_are_finite_at_identical_sentences(states):
    module = LayerwiseAutoencoder(3, 32)
    embeddings = module.embed(states[0])
    module.scores(embeddings, module.embed(states[0])).sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


def test_gradients_of_the_head():
    torch.manual_seed(0)
    head = LayerwiseAutoencoder(3, 4, head_dimension=5).double().head
    distances = torch.cat([torch.rand(4, 3), torch.zeros(1, 3)]).double().requires_grad_()
    assert torch.autograd.gradcheck(head, distances)


@pytest.mark.parametrize(
    ("depth", "hidden_size", "widths"),
    [(24, 1024, [256] * 12 + [512] * 12), (32, 4096, [256] * 16 + [512] * 16), (3, 32, [8, 8, 16]), (1, 2, [1])],
)
def test_default_bottlenecks(depth, hidden_size, widths):
    with torch.device("meta"):
        module = LayerwiseAutoencoder(depth, hidden_size)
    assert module.widths == widths
    assert module.get_embedding_dimension() == sum(widths)


def test_reconstruction(states):
    module = LayerwiseAutoencoder(3, 32, decoders=True)
    errors = module.reconstruction_errors(states[0])
    assert torch.allclose(errors, oracles.reconstruction_error(module, states[0]), atol=1e-5)
    bare = module.without_decoders()
    assert torch.equal(bare.embed(states[0]), module.embed(states[0]))
    with pytest.raises(ValueError, match="make the module with decoders=True"):
        bare.reconstruction_errors(states[0])


@pytest.mark.parametrize("layers", [None, [2]])
def test_encoders_can_begin_as_a_whitening(layers, states):
    module = LayerwiseAutoencoder(3, 32, bottlenecks=[32], layers=layers)
    texts = states.flatten(0, 1)
    module.whiten(torch.cat([texts, torch.zeros(1, 3, 32)]))
    for encode, layer in zip(module.encoder, layers or [1, 2, 3], strict=True):
        normed = torch.nn.functional.layer_norm(texts[:, layer - 1], (32,))
        moments = Moments(32)
        moments.add(normed)
        expected = PartwiseWhitening.from_moments(moments, shares=[1.0])({"sentence_embedding": normed})
        found = torch.nn.functional.normalize(encode(texts[:, layer - 1]).atanh(), dim=-1)
        assert torch.allclose(found, expected["sentence_embedding"], atol=1e-4)
    with pytest.raises(ValueError, match="There are no encoders to begin as a whitening"):
        LayerwiseAutoencoder(3, 32, encoders=False).whiten(texts)


def test_an_empty_text_is_a_zero_vector(shared):
    model = freeze(shared())
    with pytest.warns(UserWarning, match="embedded as a zero vector"):
        embeddings = model.encode(["", "the cat"])
    assert not embeddings[0].any()
    assert np.linalg.norm(embeddings[1]) == pytest.approx(1)


@pytest.mark.parametrize("settings", [*CASES.values(), {"decoders": True}], ids=[*CASES, "decoders"])
def test_save_and_load(settings, shared, tmp_path):
    model = freeze(shared(), **settings)
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "modules.json").read_text())[1]["type"] == "st_reba.modules.LayerwiseAutoencoder"
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded[1].get_config_dict() == model[1].get_config_dict()
    expected, found = model.encode(TEXTS), loaded.encode(TEXTS)
    assert np.array_equal(found, expected)
    assert torch.equal(
        loaded[-1].score_pairs(found, found[::-1].copy()), model[-1].score_pairs(expected, expected[::-1].copy())
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((0, 32), {}, "depth=0: give a whole number from 1 to 1024"),
        ((3, 32.0), {}, "hidden_size=32.0: give a whole number"),
        ((3, 32), {"head_dimension": -1}, "head_dimension=-1"),
        ((3, 32), {"bottlenecks": 8}, "bottlenecks=8: give a list of widths for equal shares of the 3 layers"),
        ((3, 32), {"bottlenecks": 5.5}, "bottlenecks=5.5: give a list of widths"),
        ((3, 32), {"bottlenecks": {8: 8}}, "give a list of widths"),
        ((3, 32), {"bottlenecks": []}, "bottlenecks=\\[\\]: give a list"),
        ((3, 32), {"bottlenecks": [1, 2, 3, 4]}, "at most 3"),
        ((3, 32), {"bottlenecks": [8, 33]}, "a whole number from 1 to 32, the width of a state"),
        ((3, 32), {"bottlenecks": ["8"]}, "a whole number from 1 to 32"),
        ((3, 32), {"encoders": False, "decoders": True}, "there is nothing to decode"),
        ((3, 32), {"layers": [0, 1]}, "layers=\\[0, 1\\]: give a rising list of layers from 1 to 3"),
        ((3, 32), {"layers": [3, 2]}, "give a rising list"),
        ((3, 32), {"layers": []}, "give a rising list"),
        ((3, 32), {"layers": 2.5}, "give a rising list"),
        ((3, 32), {"layers": [2, 3], "bottlenecks": [1, 2, 3]}, "equal shares of the 2 layers"),
    ],
)
def test_settings_out_of_range(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        LayerwiseAutoencoder(*arguments, **settings)


def test_a_configuration_that_lacks_a_setting(tmp_path):
    LayerwiseAutoencoder(3, 32).save(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["depth"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is not a saved LayerwiseAutoencoder: .* argument: 'depth'"):
        LayerwiseAutoencoder.load(str(tmp_path))


def test_what_it_cannot_read(shared, states):
    module = LayerwiseAutoencoder(3, 32)
    model = SentenceTransformer(modules=[CausalTransformer(shared()), module], device="cpu")
    with pytest.raises(ValueError, match="There are no layer_states to encode: put st_reba's LayerStates at the head"):
        model.encode(TEXTS)
    with pytest.raises(ValueError, match="of 2 layers and width 32 were given, but these encoders are for 3 layers"):
        module.embed(states[0, :, :2])
    embeddings = module.embed(states[0])
    for first, second in ((embeddings, embeddings[:3]), (embeddings[:, :9], embeddings[:, :9])):
        with pytest.raises(ValueError, match="score_pairs takes pairs of whole embeddings, \\(B, 32\\) each"):
            module.score_pairs(first, second)


def test_modules_outside_of_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a module lies inside its model"):
        LayerwiseAutoencoder.load(str(tmp_path), "../other")
