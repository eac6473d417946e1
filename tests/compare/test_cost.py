from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from st_reba import CausalTransformer
from st_reba.compare import cost
from st_reba.compare.cost import Forecast, memory, speed, timed_batch
from st_reba.compare.recipes import tokens
from st_reba.lm.views import depth
from st_reba.recipes import find

from ..backbones import TEXTS


@pytest.fixture(scope="module")
def backbone(roomy_path):
    return CausalTransformer(roomy_path)


@pytest.mark.parametrize(
    "name", ["classical", "reba-2", "prompteol", "knowledge", "value-aggregation", "early-late", "classical@1"]
)
def test_the_tokens_of_a_pass_are_those_that_run(backbone, name):
    """Counted where they enter each layer."""
    module = find(name).build(backbone)
    ran = []

    def note(layer, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        if type(layer).__name__ == "LlamaDecoderLayer":
            ran.append(states.shape[0] * states.shape[1])

    with torch.inference_mode():
        # What stands before all texts is run here, once.
        module(module.preprocess([TEXTS[0]]))
    hooks = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for part in module.model.modules()
        if type(part).__name__ == "LlamaDecoderLayer"
    ]
    try:
        with torch.inference_mode():
            for text in TEXTS:
                module(module.preprocess([text]))
    finally:
        for hooked in hooks:
            hooked.remove()
    assert tokens(module, TEXTS, backbone) == pytest.approx(sum(ran) / depth(backbone.model), rel=0.1)
    # Of many texts some are counted.
    assert tokens(module, 40 * TEXTS, backbone) == pytest.approx(40 * tokens(module, TEXTS, backbone), rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        # The first readies what is made once; one text says how many are measured, for some seconds.
        (0.01, [1, 1, 8, 8, 8, 8, 8]),
        (0.2, [1, 1, 8, 8]),
        (0.8, [1, 1, 2, 2]),
        (4.0, [1, 1, 1]),
    ],
)
def test_a_speed_is_measured_in_a_moment(monkeypatch, seconds, sizes):
    """``seconds`` a text of 3 tokens, on a machine that does something else half of the time."""
    embedded: list[int] = []
    clock = [0.0]

    class Pass:
        def tokens(self, texts):
            return 3 * len(texts)

        def encode(self, texts, prompt, batch_size):
            embedded.append(len(texts))
            clock[0] += seconds * len(texts)

    class Failing(Pass):
        def encode(self, texts, prompt, batch_size):
            raise IndexError

    monkeypatch.setattr(
        cost, "time", SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: 0.5 * clock[0])
    )
    recipes = SimpleNamespace(passes=[Failing(), Pass()], batch_size=8)
    found = speed(recipes, [f"text {number}" for number in range(20)])
    assert found == pytest.approx((3 / seconds, 6 / seconds))
    assert embedded == sizes


@pytest.mark.parametrize(("longest", "expected"), [(20, [11, 10, 9]), (400, [20, 19, 18])])
def test_recipes_are_timed_on_texts_of_mean_length(longest, expected):
    texts = [length * "a" for length in [*range(1, 20), longest]]
    assert [len(text) for text in timed_batch(texts, 3)] in (expected, [400, 19, 18])
    assert timed_batch(texts[:2], 8) == ["aa", "a"]


def test_memory_grows_with_the_model_and_what_is_made_on_the_way(backbone):
    weights, peak = memory(backbone, 20, 32, 2, random=False)
    assert weights == 4 * sum(parameter.numel() for parameter in backbone.model.parameters())
    assert peak > weights
    assert memory(backbone, 200, 32, 2, random=False)[1] > peak


@pytest.mark.parametrize(
    ("tokens", "duration", "twice"),
    [
        (30_000, "about 30 seconds", "60 seconds"),
        (300_000, "about 5 minutes", "10 minutes"),
        (9e6, "about 2.5 hours", "5.0 hours"),
    ],
)
def test_what_is_told(tokens, duration, twice):
    told = str(Forecast(8, 1955, tokens, 1000.0, 270_000_000, 1_250_000_000, 2 * tokens / 1000))
    assert told.startswith("8 recipes on 1,955 texts, with controls and timings: ")
    assert f"tokens at 1,000 a second here, {duration}, of the processor's time {twice}. Memory: about 1.2 GB" in told
    assert "at the peak, of which 0.3 GB" in told
