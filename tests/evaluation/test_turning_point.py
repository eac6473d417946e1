from __future__ import annotations

import csv
import math
import sys

import numpy as np
import pytest
import sentence_transformers
import torch
from packaging.version import Version
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator, SequentialEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    TripletEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import CausalTransformer, ReBAModule
from st_reba.evaluation import OddOneOutEvaluator, Question, TurningPointEvaluator

from ..backbones import TEXTS
from ..conftest import first, pipeline

#: Of integers, ST before 6.2 takes no norm: its evaluator ends so with any model.
SCORES_INT8 = pytest.mark.skipif(
    Version(sentence_transformers.__version__) < Version("6.2"), reason="ST before 6.2 scores no int8"
)

PAIRS = [*zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True), (TEXTS[0], TEXTS[2]), (TEXTS[1], TEXTS[3])]
FIRST, SECOND = ([pair[side] for pair in PAIRS] for side in (0, 1))
LABELS = [0.1, 0.9, 0.4, 0.3, 0.8, 0.2, 0.7]


def similarity(**kwargs):
    return EmbeddingSimilarityEvaluator(FIRST, SECOND, LABELS, **{"main_similarity": "cosine", **kwargs})


@pytest.fixture
def model(backbone_path):
    return pipeline(CausalTransformer(backbone_path()))


def naive_scores(eager, token_ids) -> list[float]:
    """One text at a time, mean pooling, Spearman by SciPy."""

    def layers(text):
        with torch.inference_mode():
            output = eager()(input_ids=torch.tensor([token_ids(text)]), output_hidden_states=True)
            states = [*map(eager().norm, output.hidden_states[:-1]), output.last_hidden_state]
        return [layer[0].mean(0).double().numpy() for layer in states]

    scores = []
    for layer in range(4):
        cosines = []
        for one, other in PAIRS:
            a, b = layers(one)[layer], layers(other)[layer]
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        scores.append(spearmanr(cosines, LABELS).statistic)
    return scores


@pytest.mark.parametrize("batch_size", first([3, 1, 32], 1))
def test_the_score_after_each_layer(batch_size, model, eager, token_ids):
    evaluator = TurningPointEvaluator(similarity(batch_size=batch_size))
    metrics = evaluator(model)
    expected = naive_scores(eager, token_ids)
    assert list(metrics) == [*(f"layer_{layer}_spearman_cosine" for layer in range(4)), "turning_point"]
    assert list(metrics.values())[:-1] == pytest.approx(expected, abs=1e-6)
    assert metrics["turning_point"] == np.argmax(expected)
    assert evaluator.primary_metric == "layer_3_spearman_cosine"
    assert metrics[evaluator.primary_metric] == pytest.approx(similarity()(model)["spearman_cosine"], abs=1e-6)


def test_each_text_passes_once(model):
    evaluator = TurningPointEvaluator(similarity(batch_size=2), on_step=(steps := []).append)
    rows = []
    model[0].model.layers[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    evaluator(model)
    # The layers and the final norm are known: the model was looked at when its module was made.
    assert sum(rows) == len(set(TEXTS))
    assert sum(steps) == len(set(TEXTS))


def test_names(model):
    evaluator = TurningPointEvaluator(similarity(name="sts"))
    for _ in range(2):
        metrics = evaluator(model)
        assert "sts_layer_0_spearman_cosine" in metrics
        assert "sts_turning_point" in metrics
        assert evaluator.primary_metric == "sts_layer_3_spearman_cosine"
    renamed = TurningPointEvaluator(similarity(name="sts"), name="mine")
    assert set(renamed(model)) == {f"mine_{name.removeprefix('sts_')}" for name in metrics}
    assert model.model_card_data.eval_results_dict[renamed] == renamed(model)
    assert len(model.model_card_data.eval_results_dict) == 2


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: TripletEvaluator(TEXTS[:3], TEXTS[1:4], TEXTS[2:5]),
        lambda: InformationRetrievalEvaluator(
            {"q1": "the bank", "q2": "a dog"},
            dict(zip("abcde", TEXTS, strict=True)),
            {"q1": {"a"}, "q2": {"c"}},
            write_csv=False,
            **{key: [2] for key in ("mrr_at_k", "ndcg_at_k", "accuracy_at_k", "precision_recall_at_k", "map_at_k")},
        ),
        lambda: similarity(main_similarity=None, similarity_fn_names=["cosine", "dot", "euclidean"]),
        lambda: similarity(truncate_dim=8),
        pytest.param(lambda: similarity(precision="int8"), marks=SCORES_INT8),
        lambda: SequentialEvaluator([similarity(name="one"), similarity(name="two", main_similarity="dot")]),
    ],
    ids=["triplet", "retrieval", "several similarities", "truncated", "int8", "sequence"],
)
def test_any_evaluator(wrapped, backbone_path):
    """The last layer's score is what the evaluator gives the model itself, prompts and similarity included."""
    module = CausalTransformer(backbone_path())
    parts = [module, Pooling(module.get_embedding_dimension(), "mean"), Normalize()]
    model = SentenceTransformer(
        modules=parts, device="cpu", prompts={"query": "ask: ", "document": "read: "}, similarity_fn_name="euclidean"
    )
    evaluator = TurningPointEvaluator(wrapped())
    metrics = evaluator(model)
    direct = wrapped()
    expected = direct(model)[direct.primary_metric]
    assert metrics[evaluator.primary_metric] == pytest.approx(expected, abs=1e-5)
    assert len(metrics) == 5


class Scores(BaseEvaluator):
    """Gives what it is told, a score a layer."""

    def __init__(self, scores, greater_is_better=True):
        super().__init__()
        self.scores, self.greater_is_better = scores, greater_is_better

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        assert output_path is None
        return self.scores.pop(0)


@pytest.mark.parametrize(
    ("scores", "greater", "best"),
    [([1, 3, 2, 0], True, 1), ([2, 1, 3, 4], False, 1), ([1, 2, 2, 1], True, 1), ([math.nan, 1, math.nan, 2], True, 3)],
)
def test_the_best_layer(scores, greater, best, model):
    evaluator = TurningPointEvaluator(Scores(list(scores), greater))
    metrics = evaluator(model)
    assert evaluator.greater_is_better is greater
    assert metrics["turning_point"] == evaluator.turning_point == best
    assert evaluator.primary_metric == "layer_3_score"


def test_csv_and_plot(model, tmp_path):
    evaluator = TurningPointEvaluator(similarity(name="sts"))
    metrics = evaluator(model, str(tmp_path / "results"), epoch=1, steps=20)
    (path,) = (tmp_path / "results").iterdir()
    assert path.name == "turning_point_sts_epoch_1_steps_20_results.csv"
    rows = list(csv.reader(path.open(encoding="utf-8")))
    assert rows[0] == ["layer", "spearman_cosine"]
    assert [(int(layer), float(score)) for layer, score in rows[1:]] == [
        (layer, metrics[f"sts_layer_{layer}_spearman_cosine"]) for layer in range(4)
    ]
    evaluator.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    evaluator.draw(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_a_plot_with_a_gap(model, tmp_path):
    evaluator = TurningPointEvaluator(Scores([math.nan, 1.0, 2.0, 1.5]))
    evaluator(model)
    evaluator.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size


def test_without_matplotlib(model, tmp_path, monkeypatch):
    evaluator = TurningPointEvaluator(Scores([1.0, 2.0, 3.0, 4.0]))
    evaluator(model)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'Drawing needs matplotlib: pip install "st-reba\[report\]"'):
        evaluator.draw(tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_errors(model, shared, tmp_path):
    evaluator = TurningPointEvaluator(similarity())
    for act in (lambda: evaluator.turning_point, lambda: evaluator.draw(tmp_path / "a.png"),
                lambda: evaluator.write_csv(tmp_path / "a.csv")):  # fmt: skip
        with pytest.raises(RuntimeError, match="Nothing has been evaluated yet: call the evaluator with a model"):
            act()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="first module is ReBAModule"):
        evaluator(pipeline(ReBAModule(shared())))
    with pytest.raises(ValueError, match=r"Scores gives no number \(NaN\) after any layer"):
        TurningPointEvaluator(Scores([math.nan] * 4))(model)
    with pytest.raises(ValueError, match=r"Scores says that its primary metric is None and gives \['accuracy'\]"):
        TurningPointEvaluator(Scores([{"accuracy": 1.0}]))(model)
    words = OddOneOutEvaluator([Question("a", ("a b", "a c", "a d", "a e"), 0)])
    with pytest.raises(ValueError, match="words need one of st_reba's modules"):
        TurningPointEvaluator(words)(model)
