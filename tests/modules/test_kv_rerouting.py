from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import CausalTransformer, KVReroutingModule
from st_reba.modules.changes import middle_third
from st_reba.reading.layers import LayerReader

from .. import oracles
from ..backbones import ARCHITECTURES, OWN_ATTENTION, TEXTS, third
from ..conftest import paired, pipeline, relative_error

ARCHITECTURES = tuple(name for name in ARCHITECTURES if name not in OWN_ATTENTION)
TOLERANCE = 1e-5


@pytest.fixture
def tokens(eager, token_ids):
    """``tokens(architecture, text, layers, bias)``: the states of text and what follows it, by the definition."""

    def states(architecture, text, layers, bias=0.0):
        before, after = token_ids("Context: "), token_ids(" Compress the Context in one word:")
        with oracles.rerouted(eager(architecture), layers, bias):
            return oracles.run(eager(architecture), [*before, *token_ids(text), *after])[0][len(before) :]

    return states


@pytest.mark.parametrize(
    ("architecture", "settings"),
    paired(third(2, ARCHITECTURES), [([1], 0.0), ([0, 1, 2], 0.0), ([0, 2], 1.5), ([2], -2.0)]),
)
def test_oracle(architecture, settings, shared, tokens):
    layers, bias = settings
    module = KVReroutingModule(shared(architecture), layers=layers, prefix_bias=bias, hybrid=False)
    encoded = pipeline(module).encode(TEXTS, output_value="token_embeddings", batch_size=len(TEXTS))
    for text, value in zip(TEXTS, encoded, strict=True):
        assert relative_error(value, tokens(architecture, text, layers, bias)) < TOLERANCE, text


@pytest.mark.parametrize("architecture", ["llama", "mistral_window", "gemma2_softcap", "gpt_oss_sinks"])
def test_it_changes_the_first_token_and_is_none_where_it_is_not(architecture, shared, tokens, eager):
    """Otherwise the oracle would prove nothing; with a hopeless prefix the model is the classical one."""
    plain = tokens(architecture, TEXTS[0], [])
    assert relative_error(tokens(architecture, TEXTS[0], [1])[0], plain[0]) > 1e-3
    module = KVReroutingModule(shared(architecture), layers=[0, 1, 2], prefix_bias=-1e4, hybrid=False)
    value = pipeline(module).encode(TEXTS[0], output_value="token_embeddings")
    assert relative_error(value, plain) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_the_papers_pooling(architecture, shared, tokens):
    module = KVReroutingModule(shared(architecture))
    parts = [module, Pooling(32, "mean"), Normalize()]
    vectors = SentenceTransformer(modules=parts, device="cpu").encode(TEXTS, batch_size=3)
    last = pipeline(module, "lasttoken").encode(TEXTS)
    mean = pipeline(module, "cls").encode(TEXTS)
    for number, text in enumerate(TEXTS):
        states = tokens(architecture, text, [1])
        expected = (states.mean(dim=0) + states[-1]) / 2
        assert relative_error(vectors[number], expected / expected.norm()) < TOLERANCE
        assert relative_error(last[number], states[-1]) < TOLERANCE
        assert relative_error(mean[number], states.mean(dim=0)) < TOLERANCE


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("pool_over", ["text", "all"])
def test_readouts_agree(hybrid, pool_over, backbone_path):
    """Of the tokens, of the last alone, and of the two vectors."""
    path = backbone_path("qwen3")
    every = KVReroutingModule(path, hybrid=False, pool_over=pool_over)
    if hybrid:
        other = KVReroutingModule(path, pool_over=pool_over)
        mean, last = (pipeline(every, pooling).encode(TEXTS) for pooling in ("mean", "lasttoken"))
        assert relative_error(pipeline(other).encode(TEXTS), (mean + last) / 2) < 1e-6
    else:
        other = KVReroutingModule(path, hybrid=False, pool_over=pool_over, rows="last")
    expected = pipeline(every, "lasttoken").encode(TEXTS)
    assert relative_error(pipeline(other, "lasttoken").encode(TEXTS), expected) < 1e-6
    assert other(other.preprocess(TEXTS))["token_embeddings"].shape == (5, 2 if hybrid else 1, 32)


@pytest.mark.parametrize(("depth", "layers"), [(1, [0]), (2, [0, 1]), (3, [1]), (8, [2, 3, 4, 5]), (12, [4, 5, 6, 7])])
def test_the_middle_third(depth, layers):
    assert list(middle_third(depth)) == layers


def test_layers_are_what_was_asked_for(shared):
    assert KVReroutingModule(shared()).layers == [1]
    assert KVReroutingModule(shared(), layers=[-1, 0, 2]).layers == [0, 2]
    assert KVReroutingModule(shared(), layers=range(1, 3)).layers == [1, 2]
    assert KVReroutingModule(shared(), output_layer=2).layers == [0, 1]


def test_an_earlier_end(shared, eager, tokens):
    """What layers above do is of no account to the layers below."""
    short = KVReroutingModule(shared(), layers=[0, 1], output_layer=2, hybrid=False)
    whole = LayerReader(pipeline(KVReroutingModule(shared(), layers=[0, 1], hybrid=False), "lasttoken"))
    expected = whole.embeddings(TEXTS)[2]
    assert relative_error(pipeline(short, "lasttoken").encode(TEXTS), expected) < TOLERANCE


def test_with_bidirectional_layers(shared, eager, tokens):
    module = KVReroutingModule(shared(), layers=[1, 2], bidirectional_layers=1, hybrid=False)
    encoded = pipeline(module).encode(TEXTS, output_value="token_embeddings", batch_size=len(TEXTS))
    for text, value in zip(TEXTS, encoded, strict=True):
        with oracles.both_ways(eager(), 1):
            assert relative_error(value, tokens("llama", text, [1, 2])) < TOLERANCE


def test_gradients_are_those_of_the_definition(backbone_path, eager, token_ids):
    module = KVReroutingModule(backbone_path(), layers=[0, 1], hybrid=False)
    model = pipeline(module, "lasttoken")
    model(model.preprocess(TEXTS[:1]))["sentence_embedding"].pow(2).sum().backward()
    oracle = eager()
    ids = [*token_ids("Context: "), *token_ids(TEXTS[0]), *token_ids(" Compress the Context in one word:")]
    oracle.zero_grad()
    with oracles.rerouted(oracle, [0, 1]):
        oracle(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].pow(2).sum().backward()
    for name, parameter in module.model.named_parameters():
        expected = oracle.get_parameter(name).grad
        assert relative_error(parameter.grad, expected) < 1e-4, name
    oracle.zero_grad()


def test_gradient_checkpointing_changes_no_gradient(backbone_path):
    gradients = []
    for checkpointing in (False, True):
        model = pipeline(KVReroutingModule(backbone_path())).train()
        if checkpointing:
            model[0].model.gradient_checkpointing_enable()
        model(model.preprocess(TEXTS))["sentence_embedding"].pow(2).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert relative_error(*gradients) < 1e-5


def test_a_shared_backbone_is_not_changed(backbone_path):
    classical = CausalTransformer(backbone_path())
    before = pipeline(classical).encode(TEXTS)
    routed = pipeline(KVReroutingModule(classical)).encode(TEXTS)
    assert relative_error(pipeline(classical).encode(TEXTS), before) < 1e-6
    assert np.array_equal(routed, pipeline(KVReroutingModule(backbone_path())).encode(TEXTS))


def test_two_threads_with_one_backbone(shared):
    classical = CausalTransformer(shared())
    models = [pipeline(classical), pipeline(KVReroutingModule(classical, layers=[0, 1]))]
    alone = [model.encode(TEXTS) for model in models]
    failures = []

    def work(model, expected):
        for _ in range(8):
            if relative_error(model.encode(TEXTS, batch_size=2), expected) > 1e-6:
                failures.append(model)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("architecture", OWN_ATTENTION)
def test_architectures_that_cannot(architecture, backbone_path):
    classical = CausalTransformer(backbone_path(architecture))
    before = classical.model.config._attn_implementation
    with pytest.raises(ValueError, match=r"keys and values of layers \[1\] of .* cannot be re-routed, because"):
        KVReroutingModule(classical)
    assert classical.model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": []}, r"layers=\[\]: the model has 3 layers; give a list of one or more of their indices, -3 to 2"),
        ({"layers": [3]}, r"layers=\[3\]: the model has 3 layers"),
        ({"layers": [-4]}, r"layers=\[-4\]: the model has 3 layers"),
        ({"layers": [True]}, r"layers=\[True\]: the model has 3 layers"),
        ({"layers": "all"}, "layers='all': the model has 3 layers"),
        ({"layers": 1}, "layers=1: the model has 3 layers"),
        ({"prefix_bias": float("nan")}, "prefix_bias=nan: give a finite number; 0 changes no logit"),
        ({"prefix_bias": "1"}, "prefix_bias='1': give a finite number"),
        ({"prefix_bias": True}, "prefix_bias=True: give a finite number"),
        ({"hybrid": 1}, "hybrid=1: use True or False"),
        ({"rows": "last"}, 'rows="last" hands on the last token alone, and hybrid=True needs the mean of all of them'),
        ({"template": "{text}{text}"}, "has 2 slots: KVReroutingModule reads one copy"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        KVReroutingModule(shared(), **settings)
