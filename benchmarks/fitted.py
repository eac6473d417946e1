"""Worth of the texts that a recipe is fitted on: rows of ``benchmarks/results/fitted.csv``.

The sets are the pairs of ``compared.py``. Each is scored by halves that share no text: a half's vectors have the
statistics of the other half's texts, of the package's sentences, of another set's training texts, or of so many of its
own training texts. A score is the mean of the two halves of a split; nothing is chosen. A stopped run is resumed::

    python benchmarks/fitted.py --data DIR --labelled DIR
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

import records
from compared import FOLDERS, MODEL, TOKENS, sets
from real.cosines import AHEAD, SCORE, Drawn, beside, cosines_of, mean_of, places
from real.kept import behind
from real.models import MODELS
from real.sets import texts_by_class
from runs import kept, options, parser, pooled
from st_reba.compare.splits import CrossFit, Splits
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation.tasks import task_of
from st_reba.modules import CausalTransformer
from st_reba.recipes import find

RECIPES = ("echo-topic", "topic", "early-late")
#: The texts of a fit; the others are held against the first.
OWN, PACKAGE, OTHER = "the other half", "the package's sentences", "another set"
#: Numbers of texts of the set's training part, and of another set's.
COUNTS, OTHERS = (50, 100, 200, 1000), 200
MEAN = "mean"


@dataclass(frozen=True)
class Domain:
    """A set of pairs, and plain texts of its training part that are in no pair."""

    name: str
    language: str
    pairs: Pairs
    train: list[str]


def domains(given: argparse.Namespace) -> Iterator[Domain]:
    """Yield the sets."""
    # A posting of 20NG is longer than a field may be by default.
    csv.field_size_limit(1_000_000)
    for name, language, path in sets(given.data, given.labelled, given.out / "pairs"):
        pairs, folder = read_pairs(path), name.partition(",")[0]
        if folder in FOLDERS[language]:
            of_class = texts_by_class(given.labelled / folder / "origin_data" / "train.tsv")
            train = [" ".join(text.split()) for own in of_class.values() for text in own]
        else:
            train = read_pairs(given.data / f"stsb_{language}_train.tsv").texts()
        left = sorted(set(train) - set(pairs.texts()))
        yield Domain(name, language, pairs, random.Random(0).sample(left, min(max(COUNTS), len(left))))


def split(pairs: Pairs) -> Splits:
    """Return one split of pairs into two halves."""
    splits = Splits.of(pairs)
    return replace(splits, halves=splits.halves[:2])


def fits(own: Domain, splits: Splits, other: Domain | None, package: Sequence[str]) -> dict[str, list[Sequence[str]]]:
    """Return the texts that each half is fitted on, by their name in tables."""
    parts = [splits.data.part(half.tolist()) for half in splits.halves]
    found: dict[str, list[Sequence[str]]] = {OWN: [part.texts() for part in reversed(parts)]}
    found[PACKAGE] = [package] * 2
    if other is not None:
        found[OTHER] = [other.train[:OTHERS]] * 2
    return found | {f"{count:,} training texts": [own.train[:count]] * 2 for count in COUNTS if count <= len(own.train)}


def by_fit(
    splits: Splits,
    fitted: Mapping[str, Sequence[Sequence[str]]],
    filtered: Callable[[Sequence[str], Sequence[str]], Tensor],
) -> Drawn:
    """Return the score of each fit, the mean of the two halves'.

    Args:
        splits: Of labelled pairs.
        fitted: The texts of each fit, by half.
        filtered: Returns the vectors of some texts behind a filter that is fitted on others.
    """
    parts = [splits.data.part(half.tolist()) for half in splits.halves]
    score = task_of(splits.data).scores[0]
    fit, rows = CrossFit(splits, score.kind, score.labels), []
    for own in fitted.values():

        def cosines(choosing: int, half: int, own: Sequence[Sequence[str]] = own) -> NDArray[np.float64]:
            part = parts[half]
            assert isinstance(part, Pairs)
            texts, columns = places(part)
            return cosines_of(filtered(texts, own[half]).numpy(), *columns)[None]

        rows.append(fit.row(cosines))
    return Drawn(np.array([row.score for row in rows]), np.stack([row.drawn for row in rows]))


def rows_of(names: Sequence[str], found: Drawn, about: records.Record) -> Iterator[records.Record]:
    """Yield each fit alone, and how far it is ahead of the other half's texts."""
    own = names.index(OWN)
    for place, name in enumerate(names):
        ahead = beside(found, [place], [own], AHEAD) if place != own else {}
        yield {**about, "fitted_on": name, **beside(found, [place], names=SCORE), **ahead}


def measure(language: str, key: str, own: Sequence[Domain], given: argparse.Namespace) -> Iterator[records.Record]:
    """Yield the rows of a recipe, on the sets of a language."""
    model, row = MODELS[MODEL[language]], find(key).row
    row = row.in_chinese() if language == "zh" else row
    part = row.post_processor
    assert part is not None, f"{key} is fitted on nothing."

    @cache
    def reader() -> SentenceTransformer:
        path, dtype = str(model.located(given.models)), {"dtype": given.precision}
        return pooled(row.build(CausalTransformer(path, model_kwargs=dtype, max_seq_length=TOKENS)), row.poolings[0])

    def embedded(texts: Sequence[str]) -> dict[str, np.ndarray]:
        vectors = reader().encode(list(texts), batch_size=32, convert_to_tensor=True, show_progress_bar=False)
        return {"vectors": vectors.float().cpu().numpy(), "shares": np.array(reader()[0].part_weights)}

    lists = {"package": part.drawn(demo_sentences())}
    for each in own:
        lists |= {f"{each.name}, pairs": tuple(each.pairs.texts()), f"{each.name}, train": tuple(each.train)}
    vectors: dict[str, Tensor] = {}
    for name, texts in lists.items():
        file = given.out / model.name / given.precision / key / f"{name}.npz"
        there = kept(file, partial(embedded, texts))
        vectors |= zip(texts, torch.from_numpy(there["vectors"]), strict=True)

    def filtered(texts: Sequence[str], fit: Sequence[str]) -> Tensor:
        some, seen = (torch.stack([vectors[text] for text in each]) for each in (texts, fit))
        return behind(part.name, some, seen, there["shares"].tolist())

    about: records.Record = {"model": model.name, "precision": given.precision, "recipe": key, **records.today()}
    found: list[dict[str, Drawn]] = []
    for place, each in enumerate(own):
        splits, other = split(each.pairs), own[(place + 1) % len(own)] if len(own) > 1 else None
        fitted = fits(each, splits, other, lists["package"])
        scored = by_fit(splits, fitted, filtered)
        found.append({name: Drawn(*(part[[at]] for part in scored)) for at, name in enumerate(fitted)})
        metric = task_of(each.pairs).scores[0].column.metric
        for line in rows_of(list(fitted), scored, {**about, "set": each.name, "metric": metric}):
            yield {**line, "texts": len(fitted[str(line["fitted_on"])][0])}
    if len(found) > 1:
        names = [name for name in found[0] if all(name in each for each in found)]
        means = [mean_of([each[name] for each in found]) for name in names]
        mean = Drawn(*(np.concatenate(parts) for parts in zip(*means, strict=True)))
        yield from rows_of(names, mean, {**about, "set": MEAN, "metric": MEAN, "sets": len(found)})


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/fitted", labelled=True, models="build/models")
    made.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    given = options(made, arguments)
    # The next set, whose texts a set is fitted on, has texts of about the same length.
    every = sorted(domains(given), key=lambda own: sum(map(len, own.train)))
    for key in given.recipes:
        for language in MODEL:
            own = [each for each in every if each.language == language]
            records.rewrite("fitted", list(measure(language, key, own, given)), given.results)


if __name__ == "__main__":
    main()
