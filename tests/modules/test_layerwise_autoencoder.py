"""FREEZE: the states of every layer, and the autoencoders that read them."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder, PartwiseWhitening
from st_reba.modules.moments import Moments

from .. import oracles
from ..backbones import TEXTS
from ..conftest import relative_error

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
    # The dot product is the mean of the layers' cosines.
    pairs = zip(*(module.encode_layers(side) for side in states), strict=True)
    cosines = torch.stack([torch.cosine_similarity(one, other, dim=-1) for one, other in pairs], dim=-1)
    assert torch.allclose((first * second).sum(dim=1), cosines.mean(dim=1), atol=1e-6)
    assert torch.allclose(1 - module.distances(first, second), cosines, atol=1e-6)


@pytest.mark.parametrize(
    ("bias", "dtype"),
    [(-1e6, torch.float32), (1e6, torch.bfloat16), (-3, torch.float16), (3, torch.bfloat16)],
)
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


def test_gradients_are_finite_at_identical_sentences(states):
    module = LayerwiseAutoencoder(3, 32)
    embeddings = module.embed(states[0])
    module.scores(embeddings, module.embed(states[0])).sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


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


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((0, 32), {}, "depth=0: give a whole number from 1 to 1024"),
        ((3, 32), {"bottlenecks": 8}, "bottlenecks=8: give a list of widths for equal shares of the 3 layers"),
        ((3, 32), {"bottlenecks": [8, 33]}, "a whole number from 1 to 32, the width of a state"),
        ((3, 32), {"encoders": False, "decoders": True}, "there is nothing to decode"),
        ((3, 32), {"layers": [0, 1]}, "layers=\\[0, 1\\]: give a rising list of layers from 1 to 3"),
        ((3, 32), {"layers": [2, 3], "bottlenecks": [1, 2, 3]}, "equal shares of the 2 layers"),
    ],
)
def test_settings_out_of_range(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        LayerwiseAutoencoder(*arguments, **settings)


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


@pytest.mark.parametrize("pool_over", ["text", "all"])
def test_which_token_is_the_last(pool_over, backbone_path):
    """[CLS] q : the cat ! [SEP]: the text ends before the literal, the layout behind it."""
    module = LayerStates(backbone_path("gpt2", "bert"), template="{text}!", pool_over=pool_over).eval()
    features = module.preprocess(["the cat"], prompt="q:")
    ids = features["input_ids"][0].tolist()[: None if pool_over == "all" else -2]
    with torch.inference_mode():
        expected = oracles.layer_states(module.model, ids)
        assert relative_error(module(features)["layer_states"][0], expected) < 1e-5
