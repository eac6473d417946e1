"""Every recipe and its controls on real language models. Hours on a CPU; a run that was stopped goes on.

    python benchmarks/real_models.py --data DIR                     # all: what `make real DATA=DIR` does
    python benchmarks/real_models.py --data DIR --models "Gemma 3 270M" --lists slpwc wsd --passes repeated

Vectors are kept below ``--out``: scores, poolings, layers and filters are then computed from them, and written to
``benchmarks/results``, from which ``make tables`` makes the tables. ``DIR`` holds the public sets under the names that
``real/sets.py`` has; they are no part of this repository. The models come from PyPI. bfloat16 is several times as fast
as float32 on processors with units for it (AMX, AVX-512 BF16), and slower on others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sentence_transformers import SentenceTransformer

import records
from real import claims, kept, scores
from real.models import MODELS, USUAL, RealModel
from real.passes import PASSES, Pass, Run
from real.scores import TASKS
from real.sets import LISTS, Sets
from runs import device, options, parser
from st_reba.modules import CausalModule, CausalTransformer, EmbeddingFilter
from st_reba.recipes import random_weights

#: What is scored: the pairs of a language, word senses, titles.
WORDS = ("slpwc", "wsd")
WHAT = ("en", "zh", *WORDS, *TASKS)


@dataclass(frozen=True)
class Measured:
    """One model, in one precision, with its own weights or fresh ones."""

    model: RealModel
    path: Path
    precision: str
    random: bool
    some: int | None = None

    @property
    def weights(self) -> str:
        return "random" if self.random else "trained"

    def directory(self, out: Path) -> Path:
        some = "" if self.some is None else f", {self.some} pairs"
        return out / f"{self.model.name}, {self.precision}, {self.weights}{some}"

    @cached_property
    def backbone(self) -> CausalModule:
        loaded = CausalTransformer(str(self.path), model_kwargs={"dtype": self.precision}).to(device())
        return random_weights(loaded) if self.random else loaded

    @cached_property
    def embedder(self) -> SentenceTransformer:
        return SentenceTransformer(str(self.path), model_kwargs={"dtype": self.precision})

    def run(self, chosen: Pass, language: str) -> Run:
        """What embeds a batch."""
        if not self.model.embedder:
            return chosen.make(self.backbone, language)
        return lambda texts, words: {
            self.model.name: self.embedder.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        }


def embed(measured: Measured, given: argparse.Namespace) -> None:
    """Run passes over lists, and keep what comes out."""
    own = [Pass("as it is", PASSES["repeated"].make)]
    passes = own if measured.model.embedder else [PASSES[name] for name in given.passes]
    for chosen in passes:
        for texts_of in map(LISTS.__getitem__, given.lists):
            unfit = texts_of.words and not chosen.words
            fits = texts_of.language in chosen.languages and texts_of.language in measured.model.languages
            directory = measured.directory(given.out) / texts_of.name / chosen.name
            if fits and not unfit and not kept.blocks(directory):
                kept.blocks.cache_clear()
                kept.embed(directory, measured.run(chosen, texts_of.language), texts_of, Sets(given.data, given.some))


def score(measured: Measured, tokens: CausalModule, given: argparse.Namespace) -> None:
    """Score what was kept, and write the results.

    Args:
        measured: What was run.
        tokens: Whose tokens the overlap of two texts is counted in.
        given: As typed.
    """
    sets, directory = Sets(given.data, given.some), measured.directory(given.out)
    own = not measured.random and not measured.model.embedder
    vectors = kept.Kept(directory, EmbeddingFilter.from_language_model(tokens) if own else None, tokens)
    when = records.today()
    of_claims = {"model": measured.model.name, "precision": measured.precision, "date": when["date"]}
    shared = {**of_claims, **when, "weights": measured.weights}
    for what in given.what:
        # Word senses and titles are Chinese.
        if (what if what == "en" else "zh") not in measured.model.languages:
            continue
        claimed: Iterable[scores.Row] = ()
        if what in ("en", "zh"):
            pairs = scores.pairs(vectors, sets, what, tokens)
            rows, claimed = scores.pair_rows(pairs), claims.pair_claims(pairs)
        elif what in TASKS:
            titles = scores.titles(vectors, sets, what)
            rows, claimed = scores.title_rows(titles), claims.title_claims(titles)
        else:
            rows = scores.word_rows(vectors, sets, what)
            claimed = claims.word_claims(vectors, sets, [what, next(each for each in WORDS if each != what)])
        found = [{**shared, **row} for row in rows if own or row["recipe"] != scores.TF_IDF]
        records.rewrite("scores", found, given.results)
        if own:
            records.rewrite("claims", [{**of_claims, **row} for row in claimed], given.results)
        print(f"{time.strftime('%H:%M')} {directory.name}, {what}: {len(found)} scores", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/real")
    made.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    made.add_argument("--weights", nargs="+", choices=["trained", "random"], default=["trained", "random"])
    made.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS), help="what to embed")
    made.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="how to read it")
    made.add_argument("--some", type=int, help="so many pairs of each part of STS-B in the place of all")
    made.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="what to score")
    made.add_argument("--steps", nargs="+", choices=["embed", "score"], default=["embed", "score"])
    given = options(made, arguments)
    for model in map(MODELS.__getitem__, given.models):
        path = model.located(given.out / "models")
        # An embedder has no causal tokens: those of the first model that reads its languages count overlap there, too.
        first = next(each for each in MODELS.values() if set(model.languages) <= set(each.languages))
        tokens = first.located(given.out / "models") if model.embedder else path
        for weights in given.weights if not model.embedder else ["trained"]:
            measured = Measured(model, path, given.precision, weights == "random", given.some)
            if "embed" in given.steps:
                embed(measured, given)
            if "score" in given.steps:
                score(measured, CausalTransformer(str(tokens)), given)


if __name__ == "__main__":
    main()
