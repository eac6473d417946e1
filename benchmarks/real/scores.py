"""Scores of kept vectors: rows of ``benchmarks/results/scores.csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from mteb import AbsTask, TaskMetadata
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering
from numpy.typing import NDArray
from scipy.stats import spearmanr

from st_reba.compare.mteb import TaskScores, mteb_estimates, run_tasks
from st_reba.compare.tf_idf import TfIdf
from st_reba.evaluation import bootstrap
from st_reba.modules import CausalModule
from st_reba.recipes.rows import PARTWISE

from .cosines import beside, cosines_of, places
from .kept import Kept, Variant
from .sets import LISTS, Sets

Array = NDArray[np.float64]
Row = dict[str, Any]

TF_IDF = "tf-idf"
SPEARMAN = "Spearman"
#: Filters at every layer; at a recipe's own end there are all.
LAYER_FILTERS = ("", "standardised", "whitened")
#: Behind which titles are classified and clustered, which is slow.
TITLE_FILTERS = ("", "standardised", "whitened", PARTWISE)


@dataclass(frozen=True)
class Pairs:
    """What every reading of a model says about the pairs of one language: cosines on the development and test part.

    Attributes:
        language: Of the pairs.
        names: By part, what tables call them.
        cosines: By part and reading, (pairs,).
        labels: By part.
        overlap: By part, the cosines of tf-idf vectors.
        texts: By part, how many there are.
    """

    language: str
    names: dict[str, str]
    cosines: dict[str, dict[Variant, Array]]
    labels: dict[str, list[float]]
    overlap: dict[str, Array]
    texts: dict[str, int]

    def chosen_layer(self, variant: Variant) -> int | None:
        """The layer at which a recipe behind a filter is best on the development part."""
        scores = {
            each.layer: _spearman(cosines, self.labels["dev"])
            for each, cosines in self.cosines.get("dev", {}).items()
            if each.layer is not None and replace(each, layer=None) == variant
        }
        # Where all texts are one vector, as a prompt's end before the first layer, there is no score.
        proper = {layer: score for layer, score in scores.items() if not np.isnan(score)}
        return max(proper, key=proper.__getitem__, default=None)


def pairs(kept: Kept, sets: Sets, language: str, backbone: CausalModule) -> Pairs:
    """Read every layer of every recipe that was run on the pairs of a language."""
    parts = [part for part in ("dev", "test") if (kept.directory / f"stsb-{language}-{part}").is_dir()]
    named = {part: sets.pairs_name(language, part) for part in parts}
    found = Pairs(language, named, {part: {} for part in parts}, {}, {}, {})
    fit = sets.fit_texts(language)
    columns = {}
    for part in parts:
        labelled = sets.pairs(language, part)
        texts, columns[part] = places(labelled)
        found.labels[part] = labelled.scores
        found.texts[part] = len(texts)
        found.overlap[part] = TfIdf(backbone, fit).cosines(labelled.first, labelled.second)
    names = {part: f"stsb-{language}-{part}" for part in parts}
    available = {part: kept.sources([names[part], f"fit-{language}"]) for part in parts}
    for key in dict.fromkeys(key for part in parts for key in available[part]):
        own = [part for part in parts if key in available[part]]
        source = available[own[0]][key]
        for layer in [*range(source.layers), None] if source.layers else [None]:
            at = source.own_end() if layer is None else layer
            some = {} if layer is None else {"filters": LAYER_FILTERS}
            for filtered, vectors in kept.filtered([names[part] for part in own], source, at, **some):
                for part, each in zip(own, vectors, strict=True):
                    variant = Variant(*key, layer, filtered)
                    found.cosines[part][variant] = cosines_of(each, *columns[part])
    return found


def pair_rows(found: Pairs) -> Iterator[Row]:
    """Scores of the pairs of one language. Intervals at the recipes' own ends, and at the layer that is best on the
    development part; elsewhere the value alone."""
    for part, cosines in found.cosines.items():
        labels = found.labels[part]
        own = {variant for variant in cosines if variant.layer is None}
        chosen = {replace(variant, layer=found.chosen_layer(variant)) for variant in own} if part == "test" else set()
        surely = [variant for variant in cosines if variant in own | chosen]
        named = {str(number): cosines[variant] for number, variant in enumerate(surely)}
        sure = bootstrap.spearman({**named, TF_IDF: found.overlap[part]}, labels)
        beyond = bootstrap.partial_spearman(named, labels, found.overlap[part]) if named else None
        shared = {"set": found.names[part], "metric": SPEARMAN, "texts": found.texts[part]}
        yield {**shared, "recipe": TF_IDF, "pooling": "", "filter": "", **beside(sure, [len(named)])}
        for variant, own_cosines in cosines.items():
            row = {**shared, **asdict(variant)}
            if variant in surely:
                place = [surely.index(variant)]
                names = ("beyond_overlap", "beyond_low", "beyond_high")
                yield {**row, **beside(sure, place), **beside(beyond, place, names=names)}
            elif not np.isnan(score := _spearman(own_cosines, labels)):
                yield {**row, "score": score}


def word_readings(kept: Kept, sets: Sets, name: str) -> dict[str, dict[Variant, Array]]:
    """How far each question is answered right, by distance and reading, after every layer."""
    questions = sets.questions(name.upper())
    correct: dict[str, dict[Variant, Array]] = {}
    for (recipe, pooling), source in kept.sources([name]).items():
        for layer in [*range(source.layers), None]:
            at = source.own_end() if layer is None else layer
            vectors = kept.vectors(name, source, at).reshape(len(questions.questions), 4, -1)
            for metric, each in questions.correct(vectors).items():
                shown = {"euclidean": "Euclidean", "cosine": "cosine"}[metric.removesuffix("_accuracy")]
                correct.setdefault(shown, {})[Variant(recipe, pooling, layer)] = each
    return correct


def word_rows(kept: Kept, sets: Sets, name: str) -> Iterator[Row]:
    """Accuracy of the odd one out, by Euclidean and by cosine distance, after every layer."""
    for distance, scores in word_readings(kept, sets, name).items():
        sure = bootstrap.mean({str(number): each for number, each in enumerate(scores.values())})
        shared = {"set": name.upper(), "metric": f"accuracy, {distance}", "texts": 4 * len(next(iter(scores.values())))}
        for place, variant in enumerate(scores):
            yield {**shared, **asdict(variant), **beside(sure, [place])}


# Titles of news, to classify and to cluster, as tasks of mteb


def _rows(titles: Sequence[tuple[str, str]]) -> Dataset:
    classes = sorted({kind for _, kind in titles})
    return Dataset.from_dict(
        {"text": [text for text, _ in titles], "label": [classes.index(kind) for _, kind in titles]}
    )


def _metadata(name: str, kind: Any, metric: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="Titles of news.", dataset={"path": f"local/{name}", "revision": "1"}, type=kind,
        category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["cmn-Hans"], main_score=metric,
    )  # fmt: skip


class TNews(AbsTaskClassification):
    """Logistic regression on mteb's few training titles a class, ten times."""

    metadata = _metadata("TNews", "Classification", "accuracy")

    def __init__(self, sets: Sets) -> None:
        super().__init__()
        self.dataset = DatasetDict(train=_rows(sets.titles("tnews_train")), test=_rows(sets.titles("tnews_test")))
        self.data_loaded = True

    def _calculate_scores(self, y_test: Any, y_pred: Any) -> Any:
        # A lazy column, which each of many metrics would read from the file again.
        return super()._calculate_scores(list(y_test), y_pred)


class THUCNews(AbsTaskClustering):
    metadata = _metadata("THUCNews", "Clustering", "v_measure")
    # mteb's own fraction, 4%, is meant for larger sets.
    max_fraction_of_documents_to_embed = 1.0

    def __init__(self, sets: Sets) -> None:
        super().__init__()
        titles = _rows(sets.titles("thucnews_titles")).rename_columns({"text": "sentences", "label": "labels"})
        self.dataset = DatasetDict(test=titles)
        self.data_loaded = True


#: By name, with the lists that their texts are in and how their score is called.
TASKS: dict[str, tuple[Callable[[Sets], AbsTask], tuple[str, ...], str]] = {
    "TNews": (TNews, ("tnews-train", "tnews-test"), "accuracy"),
    "THUCNews": (THUCNews, ("thucnews-titles",), "v-measure"),
}


@dataclass(frozen=True)
class Titles:
    """What every reading of a model reaches on titles of news.

    Attributes:
        name: Of the task.
        variants: The readings, by what they are called in ``scores``.
        scores: mteb's.
        texts: How many titles there are.
    """

    name: str
    variants: dict[str, Variant]
    scores: TaskScores
    texts: int


def titles(kept: Kept, sets: Sets, name: str) -> Titles:
    """Titles of news, by mteb: every recipe at its own end, behind some filters."""
    make, lists, _ = TASKS[name]
    texts = [text for each in lists for text in LISTS[each].read(sets)]
    row = {text: index for index, text in enumerate(texts)}
    sources = kept.sources([*lists, "tnews-train"])
    vectors: dict[str, torch.Tensor] = {}
    variants: dict[str, Variant] = {}
    for (recipe, pooling), source in sources.items():
        for filtered, each in kept.filtered(list(lists), source, source.own_end(), TITLE_FILTERS):
            variant = Variant(recipe, pooling, None, filtered)
            key = str(len(variants))
            variants[key], vectors[key] = variant, torch.from_numpy(np.concatenate(each))

    def embed(asked_for: Sequence[str], prompt: str | None) -> dict[str, torch.Tensor]:
        index = [row[text] for text in asked_for]
        return {key: each[index] for key, each in vectors.items()}

    [found] = run_tasks([make(sets)], list(vectors), embed, model="measured", revision="1", batch_size=1024)
    return Titles(name, variants, found, len(texts))


def title_rows(found: Titles) -> Iterator[Row]:
    """Scores of titles of news."""
    shared = {"set": found.name, "metric": TASKS[found.name][2], "texts": found.texts}
    for key, estimate in mteb_estimates(found.scores).items():
        yield {
            **shared,
            **asdict(found.variants[key]),
            "score": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
        }


def _spearman(cosines: Array, labels: Sequence[float]) -> float:
    # What is one number but for rounding, such as a prompt's last state before the first layer, has no order.
    return float(spearmanr(cosines, labels).statistic) if np.ptp(cosines) > 1e-9 else float("nan")
