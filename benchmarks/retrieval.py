"""Retrieval on public collections: vectors, tokens and words on real language models. Hours on a CPU.

    python benchmarks/retrieval.py --data DIR                                    # all; a stopped run is resumed
    python benchmarks/retrieval.py --data DIR --models "Gemma 3 270M" --sets "CMRC 2018, sentences"

Rankings are kept below ``--out`` with the seconds that they took, the processor's or a GPU's by the clock, and scored
from there: rows of ``benchmarks/results/retrieval.csv``. ``DIR/retrieval`` holds the collections under the names that
``real/sets.py`` has; they are no part of this repository. A document is read up to ``--max-tokens`` tokens of a copy,
256 as all-MiniLM-L6-v2 does; tf-idf and BM25 see it whole; for BM25, `pip install bm25s`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import records
from real.contenders import CONTENDERS, Key, bm25, of_queries
from real.cosines import beside
from real.models import MODELS, USUAL, RealModel
from real.sets import COLLECTIONS, Collection
from runs import device, kept, now, options, parser
from st_reba.data.tables import Retrieval
from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import ByModel, Hits, TfIdf

#: Number of documents that are found for a query.
FOUND = 100
METRICS = {"ndcg": "nDCG@10", "recall": "recall@100"}
#: Number of documents that filters are fitted on, without any label; and of texts that are encoded together.
FIT_DOCUMENTS, BATCH = 400, 16


def load(model: RealModel, precision: str, given: argparse.Namespace) -> Any:
    """Load a model that reads so many tokens of a text, or fewer."""
    loaded = model.load(given.packages, precision)
    own = (loaded.max_seq_length if model.embedder else None) or given.max_tokens
    loaded.max_seq_length = min(given.max_tokens, own)
    return loaded


def ranked(model: Callable[[], Any], data: Retrieval) -> dict[str, Any]:
    """Return the rankings of a model as an array, and the seconds that 1,000 texts took."""
    queries, documents = list(data.queries.values()), list(data.documents.values())
    loaded, start = model(), now(device())
    hits = ByModel(loaded, BATCH).nearest(queries, documents, FOUND)
    seconds = 1000 * (now(device()) - start) / (len(queries) + len(documents))
    return {"seconds": seconds, "hits": np.array(hits)}


def measure(model: RealModel, collection: Collection, given: argparse.Namespace) -> Iterator[records.Record]:
    """Rank by every contender, and yield the scores, all on the same resamples of the queries."""
    data = collection.part(given.data, "test")
    precision = "float32" if model.embedder else given.precision
    directory = given.out / f"{model.name}, {precision}, {given.max_tokens} tokens" / collection.name
    found: dict[Key, list[Hits]] = {}
    seconds: dict[Key, float] = {}
    loaded = cache(partial(load, model, precision, given))
    contenders: dict[Key, Callable[[], Any]] = {(model.name, "", ""): loaded}
    if not model.embedder:
        queries, documents = list(data.queries.values()), list(data.documents.values())
        found["tf-idf", "", ""] = TfIdf(loaded(), documents).nearest(queries, documents, FOUND)
        found["BM25", "", ""] = bm25(queries, documents, collection.language, FOUND)
        fit = random.Random(0).sample(documents, min(FIT_DOCUMENTS, len(documents)))
        named = {key: make for key, make in CONTENDERS.items() if not given.contenders or key[0] in given.contenders}
        contenders = {key: partial(lambda own: own(loaded(), fit), make) for key, make in named.items()}
    for key, make in contenders.items():
        there = kept(directory / f"{', '.join(filter(None, key))}.npz", partial(ranked, make, data))
        found[key] = [[(int(place), score) for place, score in own] for own in there["hits"].tolist()]
        seconds[key] = float(there["seconds"])
    about: records.Record = {
        "model": model.name, "precision": precision, "max_tokens": given.max_tokens, "set": f"{collection.name} test",
        "queries": len(data), "documents": len(data.documents), **records.today(),
        "machine": records.machine(device(), torch.get_num_threads()),
    }  # fmt: skip
    scores = [of_queries(data, hits) for hits in found.values()]
    for metric in METRICS:
        sure = bootstrap.mean({str(place): own[metric] for place, own in enumerate(scores)})
        for place, key in enumerate(found):
            row = {**about, "metric": METRICS[metric], "recipe": key[0], "pooling": key[1], "filter": key[2]}
            yield {**row, **beside(sure, [place]), "seconds": seconds.get(key)}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/retrieval")
    made.add_argument("--packages", type=Path, default=Path("build/real/models"), help="directory of the models")
    made.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    made.add_argument("--sets", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
    made.add_argument("--contenders", nargs="+", help="names in tables; default: all")
    made.add_argument("--max-tokens", type=int, default=256, help="of one copy of a text")
    given = options(made, arguments)
    for collection in map(COLLECTIONS.__getitem__, given.sets):
        for model in map(MODELS.__getitem__, given.models):
            if collection.language in model.languages:
                records.rewrite("retrieval", measure(model, collection, given), given.results)


if __name__ == "__main__":
    main()
