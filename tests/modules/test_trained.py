"""What is trained: JTCSE's twin tower, written out token by token, and FREEZE's states and autoencoders."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from st_reba import CausalTransformer, LayerStates, LayerwiseAutoencoder, PartwiseWhitening, TwinTower
from st_reba.moments import Moments

from .. import backbones, oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error


def freeze_embedding(autoencoder, states):
    """One text's embedding from its states (L, D): the encodings, each of length 1, one after another."""
    parts = []
    layers = autoencoder.layers or range(1, len(states) + 1)
    for place, layer in enumerate(layers):
        state = states[layer - 1]
        if autoencoder.encoders:
            norm, linear, _ = autoencoder.encoder[place]
            deviation = ((state - state.mean()) ** 2).mean().add(norm.eps).sqrt()
            state = (state - state.mean()) / deviation * norm.weight + norm.bias
            state = torch.tanh(linear.weight @ state + linear.bias)
        parts.append(state / (state @ state).sqrt())
    return torch.cat(parts) / len(layers) ** 0.5


def freeze_score(autoencoder, first, second):
    """The similarity of two texts from their states, (L, D) each: sigmoid(MLP(c) - log d)."""
    one, other = freeze_embedding(autoencoder, first), freeze_embedding(autoencoder, second)
    cosines, start = [], 0
    for width in autoencoder.widths:
        u, v = one[start : start + width], other[start : start + width]
        cosines.append(u @ v / (u @ u).sqrt() / (v @ v).sqrt())
        start += width
    distance = 1 - sum(cosines) / len(cosines)
    return torch.sigmoid(autoencoder.head.mlp(torch.stack(cosines))[0] - torch.log(distance))


@pytest.mark.parametrize(("cross_every", "family"), [(1, "bert"), (0, "roberta"), (2, "bert"), (4, "roberta")])
def test_oracle(family, cross_every, encoder_paths):
    """In a padded batch, which the oracle never sees."""
    module = TwinTower(*encoder_paths(family), cross_every=cross_every)
    texts = [TEXTS[0], "the cat"]
    with torch.no_grad():
        found = module.eval()(module.preprocess(texts), tower_outputs=True, cross_stream=True)
    for row, text in enumerate(texts):
        ids = module.tokenizer(text)["input_ids"]
        with torch.no_grad():
            states, streams, pooled, _ = oracles.twin_tower(*module.towers, ids, cross_every)
        assert relative_error(found["token_embeddings"][row, : len(ids)], states[0] + states[1]) < 1e-5
        for tower in (0, 1):
            assert relative_error(found["cls_states"][row, tower], states[tower][0]) < 1e-5
            assert relative_error(found["pooler_outputs"][row, tower], pooled[tower]) < 1e-5
            if cross_every:
                assert relative_error(found["cross_states"][row, tower], streams[tower][0]) < 1e-5
    assert ("cross_states" in found) == bool(cross_every)


def test_towers_of_two_shapes_are_tncse(encoder_paths):
    first, other = encoder_paths()[0], encoder_paths(num_hidden_layers=2)[0]
    module = TwinTower(first, other, cross_every=0)
    assert pipeline(module, "cls").encode(TEXTS).shape == (5, 32)
    with pytest.raises(ValueError, match="cross_every=2: .* needs towers of one shape .* or cross_every=0"):
        TwinTower(first, other)


def test_each_saved_tower_is_an_encoder(encoder_paths, tmp_path):
    model = pipeline(TwinTower(*encoder_paths("roberta"), cross_every=4, max_seq_length=9), "cls")
    model.save_pretrained(str(tmp_path))
    assert TwinTower(encoder_paths("roberta")[0]).max_seq_length == backbones.POSITIONS - 1
    assert "**JTCSE**" in (tmp_path / "README.md").read_text()
    for subfolder, tower in zip(("0_TwinTower", "0_TwinTower/tower_2"), model[0].towers, strict=True):
        encoder = AutoModel.from_pretrained(tmp_path, subfolder=subfolder).state_dict()
        assert all(torch.equal(value, encoder[name]) for name, value in tower.state_dict().items())


def test_gradient_checkpointing_changes_nothing(encoder_paths):
    gradients = []
    for checkpointed in (False, True):
        module = TwinTower(*encoder_paths(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
        for tower in module.towers:
            if checkpointed:
                tower.gradient_checkpointing_enable()
        module(module.preprocess(TEXTS), tower_outputs=True, cross_stream=True)["cross_states"].sum().backward()
        gradients.append(module.model.embeddings.word_embeddings.weight.grad)
    assert relative_error(*gradients) < 1e-5


def test_bad_settings(encoder_paths):
    said = "cross_every=5: give a number of layers from 1 to 4, or 0 for no cross-attention"
    with pytest.raises(ValueError, match=said):
        TwinTower(encoder_paths()[0], cross_every=5)
    with pytest.raises(ValueError, match="'../x': tower II of a saved TwinTower is in 'tower_2'"):
        TwinTower(encoder_paths()[0], second_subfolder="../x")


def test_other_architectures_are_refused(backbone_path, encoder_paths):
    with pytest.raises(ValueError, match=r"'bert', or a decoder: .* with is_decoder false"):
        TwinTower(encoder_paths(is_decoder=True)[0])
    message = (
        "is of the architecture 'llama', .*: TwinTower takes encoders of the architectures bert, camembert, roberta"
    )
    with pytest.raises(ValueError, match=message):
        TwinTower(backbone_path())
    with pytest.raises(ValueError, match=message):
        TwinTower(encoder_paths()[0], backbone_path())


def test_towers_with_other_tokens_are_refused(encoder_paths, tmp_path):
    first, _ = encoder_paths()
    with pytest.raises(ValueError, match="300 tokens and 32 dimensions, not 384 and 32"):
        TwinTower(first, encoder_paths(vocab_size=300)[0])
    backbones.encoder("bert").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(first)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has other tokens than the first tower"):
        TwinTower(first, str(tmp_path))


@pytest.fixture
def states():
    torch.manual_seed(0)
    return torch.randn(2, 6, 3, 32) * torch.tensor([1.0, 30, 900])[:, None]


AUTOENCODERS = [
    {},
    {"bottlenecks": [3, 4, 7], "head_dimension": 2},
    {"encoders": False},
    {"layers": [1, 3], "bottlenecks": [4, 5]},
]


@pytest.mark.parametrize("settings", AUTOENCODERS)
def test_embeddings_and_scores_are_the_papers(settings, states):
    torch.manual_seed(1)
    module = LayerwiseAutoencoder(3, 32, **settings)
    first, second = (module.embed(side) for side in states)
    expected = torch.stack([freeze_embedding(module, own) for own in states[0]])
    assert torch.allclose(first, expected, atol=1e-6)
    scores = torch.stack([freeze_score(module, *pair) for pair in zip(*states, strict=True)])
    assert torch.allclose(module.scores(first, second), scores, atol=1e-5)
    assert torch.allclose(module.score_pairs(first.detach().numpy(), second), scores.detach(), atol=1e-5)
    # The dot product is the mean of the layers' cosines.
    pairs = zip(*(module.encode_layers(side) for side in states), strict=True)
    cosines = torch.stack([torch.cosine_similarity(one, other, dim=-1) for one, other in pairs], dim=-1)
    assert torch.allclose((first * second).sum(dim=1), cosines.mean(dim=1), atol=1e-6)
    assert torch.allclose(1 - module.distances(first, second), cosines, atol=1e-6)


BIASES = [(-1e6, torch.float32), (1e6, torch.bfloat16), (-3, torch.float16), (3, torch.bfloat16)]


@pytest.mark.parametrize(("bias", "dtype"), BIASES)
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


OUT_OF_RANGE = [
    (0, {}, "depth=0: give a whole number from 1 to 1024"),
    (3, {"bottlenecks": 8}, "bottlenecks=8: give a list of widths for equal shares of the 3 layers"),
    (3, {"bottlenecks": [8, 33]}, "a whole number from 1 to 32, the width of a state"),
    (3, {"encoders": False, "decoders": True}, "there is nothing to decode"),
    (3, {"layers": [0, 1]}, "layers=\\[0, 1\\]: give a rising list of layers from 1 to 3"),
    (3, {"layers": [2, 3], "bottlenecks": [1, 2, 3]}, "equal shares of the 2 layers"),
]


@pytest.mark.parametrize(("depth", "settings", "message"), OUT_OF_RANGE)
def test_settings_out_of_range(depth, settings, message):
    with pytest.raises(ValueError, match=message):
        LayerwiseAutoencoder(depth, 32, **settings)


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
        expected = oracles.layer_states(module.model, "gpt2", ids)
        assert relative_error(module(features)["layer_states"][0], expected) < 1e-5
