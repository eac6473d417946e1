"""A pooling that a method is not made for is said when the pipeline is complete."""

from __future__ import annotations

import warnings

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import CausalTransformer, EchoModule, ReBAModule, RefinedThoughtModule

from ..conftest import pipeline


def warned(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize(
    ("module_class", "settings", "pooling", "advice"),
    [
        (RefinedThoughtModule, {"iterations": 2}, "mean", 'Use Pooling("lasttoken")'),
        (RefinedThoughtModule, {"iterations": 2}, "cls", 'Use Pooling("lasttoken")'),
        (RefinedThoughtModule, {"iterations": 2}, ("lasttoken", "mean"), 'Use Pooling("lasttoken")'),
        (ReBAModule, {}, "cls", 'Use Pooling("mean") or Pooling("lasttoken")'),
    ],
)
def test_what_does_not_fit(module_class, settings, pooling, advice, shared, tmp_path):
    module = module_class(shared(), **settings)
    made = []
    [message] = warned(lambda: made.append(pipeline(module, pooling)))
    assert message.startswith(f"{module_class.__name__} stands before Pooling(")
    assert message.endswith(f"{advice}.")
    made[0].save_pretrained(str(tmp_path))
    # Once: not with every text, and for the saved model again, whose user may be another.
    assert not warned(lambda: made[0].encode(["the cat", "a"]))
    assert warned(lambda: SentenceTransformer(str(tmp_path), device="cpu")) == [message]


@pytest.mark.parametrize(
    ("module_class", "settings", "pooling"),
    [
        (RefinedThoughtModule, {"iterations": 2}, "lasttoken"),
        (RefinedThoughtModule, {"iterations": 1}, "mean"),
        (ReBAModule, {}, ("mean", "lasttoken")),
        (EchoModule, {}, "mean"),
        (CausalTransformer, {}, "weightedmean"),
    ],
)
def test_what_fits(module_class, settings, pooling, shared):
    assert not warned(lambda: pipeline(module_class(shared(), **settings), pooling))


def test_wherever_the_pooling_stands(shared):
    parts = [ReBAModule(shared()), Normalize(), Pooling(32, "cls")]
    assert len(warned(lambda: SentenceTransformer(modules=parts, device="cpu"))) == 1
