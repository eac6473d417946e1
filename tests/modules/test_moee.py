"""MoEE: the hidden state and, beside it, what the routers say, by what transformers itself hands out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, AutoTokenizer

from st_reba import TEMPLATES, CausalTransformer, MoEEModule, PartwiseWhitening
from st_reba.lm.anatomy import routers
from st_reba.modules.changes import AttendBothWays, BeforeFeedForward
from st_reba.text.templates import normalized

from .. import backbones
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import language_model, read

EXPERTS = {"mixtral_experts": 4, "qwen3_experts": 6, "gpt_oss_sinks": 4}
LAYERS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(architecture)``: a language model with its head, its path and its tokenizer, made once."""
    made = {}

    def get(architecture):
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[architecture] = language_model(path, architecture), str(path), AutoTokenizer.from_pretrained(path)
        return made[architecture]

    return get


def expected(model, tokenizer, text, template="prompteol"):
    """The states (N, D) and router weights (N, L * E) of a text in a template, as transformers gives them."""
    ids = tokenizer(TEMPLATES.get(template, template).replace("{text}", text), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        inner = model.base_model(input_ids=ids, output_router_logits=True)
        whole = model(input_ids=ids, output_router_logits=True)
    weights = torch.cat([logits.softmax(dim=-1) for logits in whole.router_logits], dim=-1)
    return inner.last_hidden_state[0], weights


@pytest.mark.parametrize("architecture", EXPERTS)
def test_by_what_transformers_hands_out(architecture, saved):
    model, path, tokenizer = saved(architecture)
    module = MoEEModule(path, alpha=None)
    assert [*module.routers.values()] == [EXPERTS[architecture]] * LAYERS
    width = max(32, LAYERS * EXPERTS[architecture])
    assert module.get_embedding_dimension() == 2 * width
    # In one batch, behind a prefix that is kept.
    for text, vectors in zip(TEXTS, read(module, TEXTS), strict=True):
        states, weights = expected(model, tokenizer, normalized(text))
        assert vectors.shape == (1, 2 * width)
        assert relative_error(vectors[0, :32], states[-1]) < 1e-5
        assert relative_error(vectors[0, width : width + weights.shape[1]], weights[-1]) < 1e-5
        assert torch.allclose(weights[-1].sum(), torch.tensor(float(LAYERS)))
        assert not vectors[0, width + weights.shape[1] :].any()


@pytest.mark.parametrize("alpha", [1, 0.25])
def test_the_cosine_is_the_papers_sum_of_similarities(alpha, saved):
    model, path, tokenizer = saved("qwen3_experts")
    vectors = pipeline(MoEEModule(path, alpha=alpha), "lasttoken").encode(TEXTS)
    parts = [expected(model, tokenizer, normalized(text)) for text in TEXTS]
    states, weights = (normalize(torch.stack([own[part][-1] for own in parts]), dim=-1) for part in (0, 1))
    wanted = states @ states.T + alpha * weights @ weights.T
    assert np.abs(vectors @ vectors.T * (1 + alpha) - wanted.numpy()).max() < 1e-5
    assert math.isclose(sum(MoEEModule(path, alpha=alpha).shares), 1)


def test_every_token_of_the_text_under_a_change_and_an_early_exit(saved):
    """Wherever the hidden states are read; of the layers that are run."""
    model, path, tokenizer = saved("mixtral_experts")
    module = MoEEModule(path, alpha=None, template="So: {text}!")
    (words,) = read(module, [TEXTS[2]])
    states, weights = expected(model, tokenizer, TEXTS[2], "So: {text}!")
    start, count = len(tokenizer("So: ")["input_ids"]), len(tokenizer(TEXTS[2])["input_ids"])
    assert relative_error(words[:, :32], states[start : start + count]) < 1e-5
    assert relative_error(words[:, 32:44], weights[start : start + count]) < 1e-5
    (short,) = read(MoEEModule(path, alpha=None, template="So: {text}!", output_layer=2), [TEXTS[2]])
    assert relative_error(short[:, 32:40], weights[start : start + count, :8]) < 1e-5
    assert not short[:, 40:].any()
    turned = MoEEModule(path, alpha=None, template="So: {text}!", changes=[AttendBothWays(3)])
    assert relative_error(read(turned, [TEXTS[2]])[0][:, 36:44], words[:, 36:44]) > 1e-2


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_batches_parts_and_what_is_saved(saved, tmp_path):
    _, path, _ = saved("gpt_oss_sinks")
    texts = [*TEXTS, "", "The dog chased the cat. " * 9]
    model = pipeline(MoEEModule(path, alpha=0.5), "lasttoken")
    expected = model.encode(texts, batch_size=1)
    assert not expected[len(TEXTS)].any()
    for each in (
        model,
        pipeline(MoEEModule(path, alpha=0.5, deterministic=True), "lasttoken"),
        pipeline(MoEEModule(CausalTransformer(path), alpha=0.5, prefix_caching=False), "lasttoken"),
    ):
        assert relative_error(each.encode(texts, batch_size=7), expected) < 1e-5
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded[0].alpha == 0.5
    assert loaded[0].shares == model[0].shares
    assert np.array_equal(loaded.encode(texts), model.encode(texts))


def test_each_part_is_standardised_on_its_own(saved):
    """Behind PartwiseWhitening, which does little more than that at its usual shrinkage: each part has its share."""
    _, path, _ = saved("mixtral_experts")
    texts = [f"{text} {number}" for text in TEXTS for number in range(12)]
    pooled = pipeline(MoEEModule(path, alpha=None), "lasttoken")
    whitening = PartwiseWhitening.fit(pooled, texts)
    assert whitening.shares == [0.5, 0.5]
    parts = SentenceTransformer(modules=[*pooled, whitening], device="cpu").encode(texts).reshape(-1, 2, 32)
    assert np.allclose(np.linalg.norm(parts, axis=-1), math.sqrt(0.5), atol=1e-4)
    # The shrinkage is a share of the mean variance of what varies, and not of the zeros behind it.
    raw = pooled.encode(texts, convert_to_tensor=True)[:, 32:44].double()
    own = PartwiseWhitening.fit(SentenceTransformer(modules=[*pooled, _Cut(32, 44)], device="cpu"), texts, shares=[1])
    alone = own({"sentence_embedding": raw.float()})["sentence_embedding"].numpy()
    cosines = 2 * parts[:, 1] @ parts[:, 1].T
    assert np.abs(cosines - alone @ alone.T).max() < 1e-4


class _Cut(torch.nn.Module):
    """Some values of an embedding."""

    def __init__(self, first, last):
        super().__init__()
        self.part = slice(first, last)

    def forward(self, features, **kwargs):
        return {**features, "sentence_embedding": features["sentence_embedding"][:, self.part]}

    def get_embedding_dimension(self):
        return self.part.stop - self.part.start


@pytest.mark.parametrize("architecture", backbones.ARCHITECTURES)
def test_routers_are_found_where_there_are_experts(architecture, shared):
    found = routers(shared(architecture).model)
    experts = EXPERTS.get(architecture)
    assert [*found.values()] == ([experts] * LAYERS if experts else [])
    assert [path.split(".")[1] for path in found] == (["0", "1", "2"] if experts else [])


def test_what_is_refused(shared, saved):
    with pytest.raises(ValueError, match="LlamaModel routes no token to experts: MoEEModule reads a mixture"):
        MoEEModule(shared())
    for alpha in (0, -1, True, "x", math.inf):
        with pytest.raises(ValueError, match="alpha=.*: give a number above 0"):
            MoEEModule("no/such/model", alpha=alpha)
    with pytest.raises(ValueError, match="the router of the last layer stands in its feed-forward part"):
        MoEEModule(saved("qwen3_experts")[1], changes=[BeforeFeedForward()])
    module = MoEEModule(saved("qwen3_experts")[1])
    with pytest.raises(ValueError, match="MoEEModule does not read hidden states of one layer alone"):
        module.forward_all_layers(module.preprocess(["a"]))


def test_a_model_with_its_head_is_read_beneath_it(saved):
    """As everywhere: what is saved with a head loads without it."""
    _, path, tokenizer = saved("qwen3_experts")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    found = pipeline(MoEEModule(loaded, tokenizer=tokenizer), "lasttoken").encode(TEXTS)
    assert relative_error(found, pipeline(MoEEModule(path), "lasttoken").encode(TEXTS)) < 1e-5
