"""BeLLM's evaluators: the score after each layer, and how much a sentence's tokens share there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator, SequentialEvaluator
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, AutoTokenizer, BertConfig

from st_reba import CausalTransformer, ReBAModule
from st_reba.evaluation import DependencyEvaluator, OddOneOutEvaluator, Question, TurningPointEvaluator
from st_reba.evaluation.layers import LayerReader, sentence_correlations

from .. import backbones
from ..backbones import TEXTS
from ..conftest import forward_passes, pipeline

PAIRS = [*zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True), (TEXTS[0], TEXTS[2]), (TEXTS[1], TEXTS[3])]
FIRST, SECOND = ([pair[side] for pair in PAIRS] for side in (0, 1))
LABELS = [0.1, 0.9, 0.4, 0.3, 0.8, 0.2, 0.7]


def similarity(**kwargs):
    return EmbeddingSimilarityEvaluator(FIRST, SECOND, LABELS, **{"main_similarity": "cosine", **kwargs})


@pytest.fixture
def model(backbone_path):
    return pipeline(CausalTransformer(backbone_path()))


def test_the_score_after_each_layer(model, backbone_path, tmp_path):
    """As of a model that ends there; what that embeds has its own tests."""
    evaluator = TurningPointEvaluator(similarity(name="sts"))
    with forward_passes() as passes:
        metrics = evaluator(model, str(tmp_path), epoch=1, steps=20)
    assert len(passes) == 1, "each text passes once"
    assert list(metrics) == [*(f"sts_layer_{layer}_spearman_cosine" for layer in range(4)), "sts_turning_point"]
    for layer in (1, 2, 3):
        ends_there = pipeline(CausalTransformer(backbone_path(), output_layer=layer))
        expected = similarity()(ends_there)["spearman_cosine"]
        assert metrics[f"sts_layer_{layer}_spearman_cosine"] == pytest.approx(expected, abs=1e-6)
    assert metrics["sts_turning_point"] == np.argmax(evaluator.scores)
    assert evaluator.primary_metric == "sts_layer_3_spearman_cosine"
    assert list(model.model_card_data.eval_results_dict) == [evaluator]
    assert (tmp_path / "turning_point_sts_results.csv").read_text().startswith("epoch,steps,layer_0_")


def test_any_evaluator(backbone_path):
    """The last layer's score is what the evaluator gives the model itself, prompts and similarity included."""
    model = pipeline(CausalTransformer(backbone_path()))
    model.prompts, model.similarity_fn_name = {"query": "ask: ", "document": "read: "}, "euclidean"
    documents = dict(zip("abcde", TEXTS, strict=True))
    retrieval = InformationRetrievalEvaluator(
        {"q1": "the bank", "q2": "a dog"}, documents, {"q1": {"a"}, "q2": {"c"}}, write_csv=False
    )
    wrapped = SequentialEvaluator([similarity(name="one"), retrieval])
    evaluator = TurningPointEvaluator(wrapped)
    metrics = evaluator(model)
    assert metrics[evaluator.primary_metric] == pytest.approx(wrapped(model)[wrapped.primary_metric], abs=1e-5)
    assert len(metrics) == 5


class Scores(BaseEvaluator):
    """Gives what it is told, a score a layer."""

    def __init__(self, scores, greater_is_better=True):
        super().__init__()
        self.scores, self.greater_is_better = scores, greater_is_better

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        return self.scores.pop(0)


def test_the_best_layer(model):
    """The lowest of equals."""
    for scores, greater, best in (([2, 1, 3, 4], False, 1), ([1, 2, 2, 1], True, 1), ([math.nan, 1, 0, 2], True, 3)):
        evaluator = TurningPointEvaluator(Scores(list(scores), greater))
        metrics = evaluator(model)
        assert evaluator.greater_is_better is greater
        assert metrics["turning_point"] == best
        assert evaluator.primary_metric == "layer_3_score"


def test_errors(model, shared):
    words = OddOneOutEvaluator([Question("a", ("a b", "a c", "a d", "a e"), 0)])
    last_row = pipeline(ReBAModule(shared(), rows="last"), "lasttoken")
    for evaluator, evaluated, message in (
        (TurningPointEvaluator(Scores([math.nan] * 4)), model, r"Scores gives no number \(NaN\) after any layer"),
        (TurningPointEvaluator(Scores([{"a": 1.0}])), model, r"Scores has the primary metric None and returns"),
        (TurningPointEvaluator(words), model, "words need a module of st_reba"),
        (DependencyEvaluator(["a", ""]), model, "None of the 2 sentences has two tokens in what CausalTransformer"),
        (DependencyEvaluator(TEXTS), last_row, 'rows="all"|returns every token'),
    ):
        with pytest.raises(ValueError, match=message):
            evaluator(evaluated)


LONG = [text for text in TEXTS if len(text) > 1]


def naive(states, pivot=-1) -> float:
    """(n, D) to the mean Spearman correlation of one token with each of the others, by SciPy."""
    states = np.asarray(states, dtype=np.float64)
    pivot %= len(states)
    return np.mean([spearmanr(states[pivot], state).statistic for j, state in enumerate(states) if j != pivot])


@pytest.mark.parametrize("pivot", ["last", "first"])
def test_correlations_with_padding_on_either_side(pivot):
    # bfloat16 has many equals.
    states = torch.randn(4, 5, 200).bfloat16().float()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    found = sentence_correlations(states, mask, pivot)
    expected = [naive(states[i][mask[i]], -1 if pivot == "last" else 0) for i in range(3)]
    assert found[:3].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[3].isnan()


def test_the_dependency_of_every_layer(model, tmp_path):
    evaluator = DependencyEvaluator(TEXTS, layers="all", batch_size=3, name="tiny")
    metrics = evaluator(model, str(tmp_path))
    read = [LayerReader(model).features([text]) for text in LONG]
    for layer, texts in enumerate(zip(*read, strict=True)):
        values = [naive(features["token_embeddings"][0]) for features in texts]
        assert metrics[f"tiny_layer_{layer}_mean"] == pytest.approx(np.mean(values), abs=1e-4)
        for name, percent in (("first_quartile", 25), ("median", 50), ("third_quartile", 75)):
            assert metrics[f"tiny_layer_{layer}_{name}"] == pytest.approx(np.percentile(values, percent), abs=1e-4)
    assert evaluator.primary_metric == "tiny_layer_3_mean"
    assert evaluator.correlations.shape == (4, len(LONG)), "one token has nothing to be correlated with"
    assert (tmp_path / "dependency_tiny_results.csv").exists()


def test_a_bert_and_its_first_token(tmp_path):
    """The paper's other arm: an encoder, pivot CLS."""
    torch.manual_seed(0)
    config = BertConfig(**backbones.SIZE, intermediate_size=48)
    path = backbones.save(backbones.randomize(AutoModel.from_config(config).eval()), tmp_path, "bert")
    model = SentenceTransformer(modules=[Transformer(path), Pooling(32, "cls")], device="cpu")
    backbone, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        states = [backbone(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    expected = np.mean([naive(tokens, 0) for tokens in states])
    assert DependencyEvaluator(TEXTS, pivot="first")(model)["mean"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sentences": []}, "give at least one sentence"),
        ({"pivot": "cls"}, "pivot='cls': use 'last' or 'first'"),
        ({"layers": 3}, "layers=3: use 'last' or 'all'"),
        ({"batch_size": 0}, "batch_size=0: give a whole number of 1 or more"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DependencyEvaluator(**{"sentences": TEXTS, **settings})
