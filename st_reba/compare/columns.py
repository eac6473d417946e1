"""What every recipe scores on one task, and how sure that is: a column of the table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import ConstantInputWarning
from torch import Tensor

from ..evaluation import EmbeddingGeometryEvaluator, OddOneOutEvaluator, bootstrap
from ..evaluation.bootstrap import Estimate, Statistic
from ..evaluation.store import EmbeddingStore, stand_in
from ..evaluation.tasks import Task, Vectors
from ..recipes import Recipe
from ..recipes.lookup import TF_IDF_RESULT
from .mteb import TaskScores, mteb_estimates, score_statistic
from .results import Measure
from .runner import Recipes
from .tf_idf import TfIdf

#: Texts to embed, each once, and the prompt that stands before them.
Inputs = Sequence[tuple[str | None, Sequence[str]]]


@dataclass(frozen=True)
class ScoreColumn:
    """What every recipe scored on one task.

    Attributes:
        task: Which.
        estimates: By the results' names; a recipe that the task does not apply to is missing.
        statistic: The same scores as functions of the items, for paired differences; None if nothing can be resampled.
    """

    task: Measure
    estimates: dict[str, Estimate]
    statistic: Statistic | None = None


@dataclass(frozen=True)
class Embedded:
    """What there is to look up once all texts have been embedded.

    Attributes:
        recipes: What embedded them, controls among them.
        stores: By the results' names, where each one's embeddings are.
        words: By the recipes' names, the embedding of the word in each of the word-sense sentences.
    """

    recipes: list[Recipe]
    stores: dict[str, EmbeddingStore]
    words: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __or__(self, other: Embedded) -> Embedded:
        return Embedded(self.recipes + other.recipes, self.stores | other.stores, self.words | other.words)

    def look_up(self, key: str, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """The embeddings of B texts behind a prompt, (B, D)."""
        return self.stores[key].look_up(key, texts, prompt)

    def similarity(self, key: str, task: Task) -> Vectors:
        """How alike one recipe finds the texts of a task."""
        return Vectors(lambda texts, role: self.look_up(key, texts, task.prompt(role)))


def embed(recipes: Recipes, inputs: Inputs, words: OddOneOutEvaluator | None, store: EmbeddingStore) -> Embedded:
    """Embed everything that will be looked up.

    Args:
        recipes: On one model.
        inputs: What is scored.
        words: Questions whose words are wanted, too, if any.
        store: Is given the texts, embedded by all recipes.
    """
    for prompt, texts in inputs:
        store.add(texts, prompt)
    return Embedded(
        recipes.all,
        dict.fromkeys(recipes.keys, store),
        {} if words is None else recipes.words(*words.inputs()),
    )


def task_columns(embedded: Embedded, task: Task, tf_idf: TfIdf | None) -> list[ScoreColumn]:
    """The scores of a task, by ST's evaluator, the one that decides first.

    Args:
        embedded: The task's texts.
        task: What is scored.
        tf_idf: The control without any model; None: there is neither that nor what is beyond it.
    """
    keys = [recipe.result for recipe in embedded.recipes]
    evaluator = task.evaluator()
    with warnings.catch_warnings():
        # What is all alike has no correlation: the answer says so.
        warnings.simplefilter("ignore", ConstantInputWarning)
        of_st: dict[str, Any] = {
            key: evaluator(stand_in(embedded.stores[key], key, prompts=task.prompts)) for key in keys
        }
    measured = {key: task.measure(embedded.similarity(key, task)) for key in keys}
    overlap = None if tf_idf is None else task.measure(tf_idf)
    columns = []
    for metric in task.metrics(overlap):
        values = {key: float(found[metric.of_st]) for key, found in of_st.items() if metric.of_st in found}
        without_model = {} if overlap is None or metric.beyond else {TF_IDF_RESULT: overlap}
        counted = f", counted on {tf_idf.texts} texts." if tf_idf is not None and metric.beyond else ""
        column = Measure(
            metric.name, f"{metric.metric} x 100", chance=metric.chance, note=f"{metric.note}{counted}", unit=task.unit
        )
        statistic = metric.statistic({**without_model, **measured})
        columns.append(_column(column, statistic, values, [TF_IDF_RESULT, *_controls(embedded.recipes)]))
    return columns


def word_sense_column(embedded: Embedded, evaluator: OddOneOutEvaluator) -> ScoreColumn:
    """Accuracy of the odd one out, for the recipes that have word embeddings."""
    correct = {}
    for recipe in embedded.recipes:
        if recipe.words and recipe.name in embedded.words:
            vectors = embedded.words[recipe.name].reshape(len(evaluator.questions), 4, -1)
            correct[recipe.result] = evaluator.correct(vectors)["euclidean_accuracy"]
    note = (
        f"Odd one out: which of four sentences uses a word in another sense, {len(evaluator.questions)} questions, "
        "Euclidean distance; the same under every pooling."
    )
    task = Measure("Word sense", "accuracy x 100", chance=0.25, note=note, unit="questions")
    return _mean_column(task, correct, embedded.recipes)


def geometry_columns(embedded: Embedded, evaluator: EmbeddingGeometryEvaluator) -> list[ScoreColumn]:
    """What can be said without labels: alignment, uniformity, anisotropy. Proxies, all of them lower when better."""
    shares: dict[str, dict[str, ArrayLike]] = {}
    for recipe in embedded.recipes:
        texts, positives = (embedded.look_up(recipe.result, texts) for texts in (evaluator.texts, evaluator.positives))
        for metric, share in evaluator.shares(texts.numpy(), positives.numpy()).items():
            shares.setdefault(metric, {})[recipe.result] = share
    return [
        _mean_column(
            Measure(name, metric.replace("_", " "), scale=1.0, greater_is_better=False, proxy=True, note=note),
            shares[metric],
            embedded.recipes,
        )
        for name, metric, note in _PROXIES
    ]


_PROXIES = (
    (
        "Contrastive loss",
        "contrastive_loss",
        "2 x alignment + uniformity: InfoNCE at temperature 1/4, in the limit of many negatives. A proxy: no labels.",
    ),
    (
        "Alignment",
        "alignment",
        "Squared distance of a text to itself with one unit in ten left out (a word, or a Chinese character).",
    ),
    ("Uniformity", "uniformity", "Log of the mean Gaussian potential (t = 2) of all pairs of different texts."),
    ("Anisotropy", "anisotropy", "Mean cosine of all pairs of different texts."),
)


def mteb_columns(recipes: Sequence[Recipe], found: Sequence[TaskScores]) -> list[ScoreColumn]:
    """mteb's main scores, after their mean where there are several; and the ReBA paper's metric where it is another.

    The mean's interval resamples the tasks: it says how the mean would vary with other tasks of the same kind.
    """
    columns = []
    for scores in found:
        samples = {key: score.samples for key, score in scores.scores.items()}
        controls = [key for key in _controls(recipes) if key in scores.scores]
        estimates = mteb_estimates(scores, controls=controls)
        columns.append(ScoreColumn(scores.task, estimates, score_statistic(samples) if all(samples.values()) else None))
    if len(columns) > 1:
        # A control whose data did not load for one of the tasks has no mean.
        values = {
            recipe.result: [column.estimates[recipe.result].value for column in columns]
            for recipe in recipes
            if all(recipe.result in column.estimates for column in columns)
        }
        note = f"The mean of the main scores of {len(columns)} tasks; the interval resamples the tasks."
        columns.insert(
            0, _mean_column(Measure("Mean of tasks", "main score x 100", note=note, unit="tasks"), values, recipes)
        )
    for scores in found:
        paper = {key: score.paper for key, score in scores.scores.items() if score.paper is not None}
        if scores.paper_metric != scores.metric and paper:
            name = f"{scores.task.name}, {scores.paper_metric}"
            task = Measure(
                name, f"{scores.paper_metric} x 100", note="The metric of the ReBA paper for this type of task."
            )
            columns.append(ScoreColumn(task, {key: Estimate(value, nan, nan) for key, value in paper.items()}))
    return columns


def _controls(recipes: Sequence[Recipe]) -> list[str]:
    """The results of those that are there to be beaten, by name."""
    return [recipe.result for recipe in recipes if recipe.control]


def _mean_column(task: Measure, scores: Mapping[str, ArrayLike], recipes: Sequence[Recipe]) -> ScoreColumn:
    return _column(task, bootstrap.mean(scores), {}, _controls(recipes))


def _column(task: Measure, statistic: Statistic, values: Mapping[str, float], controls: list[str]) -> ScoreColumn:
    """A task's column: the values that an evaluator gave, where one did, with the intervals of the statistic."""
    estimates = bootstrap.estimate(
        statistic,
        controls=[key for key in controls if key in statistic.recipes],
        greater_is_better=task.greater_is_better,
    )
    given = {key: replace(found, value=values.get(key, found.value)) for key, found in estimates.items()}
    return ScoreColumn(task, given, statistic)
