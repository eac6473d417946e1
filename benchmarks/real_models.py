"""Every recipe and its controls on real language models. Hours on a CPU; a stopped run is resumed.

    python benchmarks/real_models.py --data DIR                     # all: what `make real DATA=DIR` does
    python benchmarks/real_models.py --data DIR --models "Gemma 3 270M" --lists slpwc wsd --recipes Classical ReBA-2

Vectors are kept below ``--out``, and scored from there, behind each filter; the scores are written to
``benchmarks/results``. ``DIR`` holds the public sets under the names that ``real/sets.py`` has; they are no part of
this repository. The models come from PyPI. bfloat16 is several times as fast as float32 on processors with units for
it (AMX, AVX-512 BF16), and slower on others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import records
from real import scores
from real.kept import Kept, recipes
from real.models import MODELS, USUAL, RealModel
from real.sets import LISTS, PARTS, WORD_LISTS, Sets
from runs import options, parser
from st_reba.recipes import random_weights

#: The recipes whose word embeddings are measured.
WORDS = ("Classical", "Echo-2", "ReBA-1", "ReBA-2", "ReBA-2, normalised")


def load(model: RealModel, directory: Path, precision: str, weights: str) -> Any:
    """Load a language model, or an embedder."""
    loaded = model.load(directory, precision)
    return random_weights(loaded) if weights == "random" else loaded


def embed(kept: Kept, lists: Sequence[str], languages: Sequence[str], names: Sequence[str]) -> None:
    """Keep the vectors of the lists that a model reads."""
    for texts in (each for each in lists if LISTS[each] in languages):
        for name in kept.poolings(LISTS[texts]):
            fits = texts not in WORD_LISTS or name in WORDS
            if fits and (kept.embedder or name in names):
                kept.embed(texts, name)


def score(kept: Kept, tokens: Callable[[], Any], model: RealModel, shared: records.Record, results: Path) -> None:
    """Score what is kept, and write the results; ``tokens`` loads the model whose tokens tf-idf counts."""
    trained = shared["weights"] == "trained"
    found: list[records.Record] = []
    for language in model.languages:
        for part in PARTS:
            # The overlap of words does not depend on the weights.
            rows = scores.pair_rows(kept, language, part, tokens())
            found += [row for row in rows if trained or row["recipe"] != scores.TF_IDF.recipe]
    for name in WORD_LISTS if "zh" in model.languages and not model.embedder else ():
        found += scores.word_rows(kept, name)
    records.rewrite("scores", [{**shared, **row} for row in found], results)
    print(f"{time.strftime('%H:%M')} {kept.directory.name}: {len(found)} scores", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    names = list(recipes("zh"))
    made = parser(__doc__, out="build/real")
    made.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    made.add_argument("--weights", nargs="+", choices=["trained", "random"], default=["trained", "random"])
    made.add_argument("--lists", nargs="+", choices=LISTS, default=list(LISTS), help="texts to embed")
    made.add_argument("--recipes", nargs="+", choices=names, default=names)
    given = options(made, arguments)
    sets = Sets(given.data)
    for model in map(MODELS.__getitem__, given.models):
        for weights in given.weights if not model.embedder else ["trained"]:
            directory = given.out / f"{model.name}, {given.precision}, {weights}"
            loaded = cache(partial(load, model, given.out / "models", given.precision, weights))
            kept = Kept(directory, sets, loaded, model.name if model.embedder else "")
            embed(kept, given.lists, model.languages, given.recipes)
            # An embedder has no causal tokens: the first model that reads its languages lends its own.
            first = next(each for each in MODELS.values() if set(model.languages) <= set(each.languages))
            other = cache(partial(first.load, given.out / "models", given.precision))
            shared = {"model": model.name, "precision": given.precision, "weights": weights, **records.today()}
            score(kept, other if model.embedder else loaded, model, shared, given.results)


if __name__ == "__main__":
    main()
