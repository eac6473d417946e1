"""In-context reranking of BM25's first documents, beside BM25's own order.

    python benchmarks/reranking.py --data DIR                                    # a stopped run is resumed
    python benchmarks/reranking.py --data DIR --models "Gemma 3 270M" --sets Cranfield --readings together

The scores of the documents are kept below ``--out``, a file a query. ``DIR/retrieval`` holds the collections under the
names that ``real/sets.py`` has; the queries are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import records
from real.contenders import bm25, of_queries
from real.cosines import beside
from real.models import MODELS, RealModel
from real.sets import COLLECTIONS, Collection
from runs import device, kept, now, options, parser
from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import Hits
from st_reba.modules import AttentionRerankModule
from st_reba.modules.attention_reranking import TEMPLATE

#: Number of documents that BM25 finds for a query.
FOUND = 100
#: The prompt, in the language of the texts.
TEMPLATES = {
    "en": TEMPLATE,
    "zh": "以下是一些段落：{documents}\n\n请在以上段落中找出与下面的问题有关的内容。\n\n问题：{query}",
}
READINGS = ("together", "together, reversed")


def scored(
    reranker: Callable[[], AttentionRerankModule], query: str, documents: Sequence[str], reading: str
) -> dict[str, Any]:
    """Return the scores of documents, and the seconds that they took."""
    module, start = reranker(), now(device())
    listed = [*reversed(documents)] if reading.endswith("reversed") else [*documents]
    with torch.inference_mode():
        scores = module(module.preprocess([(query, document) for document in listed]))["scores"][:, 0].float().cpu()
    seconds = now(device()) - start
    return {"scores": (scores.flip(0) if reading.endswith("reversed") else scores).numpy(), "seconds": seconds}


def measure(model: RealModel, collection: Collection, given: argparse.Namespace) -> Iterator[records.Record]:
    """Yield nDCG@10 of each order, and how far it is ahead of BM25's, on the same resamples of the queries."""
    data = collection.some(given.data, "test", given.queries)
    documents = list(data.documents.values())
    hits = bm25(list(data.queries.values()), documents, collection.language, FOUND)
    found, seconds = {"BM25": of_queries(data, hits)["ndcg"]}, {}

    @cache
    def reranker() -> AttentionRerankModule:
        path, dtype = str(model.located(given.packages)), {"dtype": given.precision}
        template = TEMPLATES[collection.language]
        module = AttentionRerankModule(path, model_kwargs=dtype, template=template).to(device())
        module.max_seq_length = given.max_tokens
        return module

    directory = given.out / f"{model.name}, {given.precision}, {given.max_tokens} tokens" / collection.name
    for reading in given.readings:
        there = []
        for (name, query), own in zip(data.queries.items(), hits, strict=True):
            listed = [documents[place] for place, _ in own[: given.depth]]
            file = directory / f"{reading}, {given.depth}" / f"{name}.npz"
            there.append(kept(file, partial(scored, reranker, query, listed, reading)))
        ranked = [reranked(own, each["scores"].tolist()) for own, each in zip(hits, there, strict=True)]
        found[reading] = of_queries(data, ranked)["ndcg"]
        seconds[reading] = float(np.mean([float(each["seconds"]) for each in there]))
    sure = bootstrap.mean(found)
    for place, reading in enumerate(found):
        ahead = beside(sure, [place], [0], ("ahead", "ahead_low", "ahead_high")) if place else {}
        yield {
            "model": model.name, "precision": given.precision, "max_tokens": given.max_tokens,
            "set": f"{collection.name} test, {len(data)} queries", "documents": len(documents),
            "depth": given.depth if place else 0, "reading": reading, **beside(sure, [place]), **ahead,
            "seconds": seconds.get(reading), "machine": records.machine(device(), given.threads), **records.today(),
        }  # fmt: skip


def reranked(hits: Hits, scores: Sequence[float]) -> Hits:
    """Return the first documents in the order of new scores, followed by the others."""
    order = np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")
    indices = [hits[position][0] for position in order] + [index for index, _ in hits[len(scores) :]]
    return [(index, -float(rank)) for rank, index in enumerate(indices)]


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/reranking")
    made.add_argument("--packages", type=Path, default=Path("build/real/models"), help="directory of the models")
    made.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    made.add_argument("--sets", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
    made.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    made.add_argument("--depth", type=int, default=20, help="number of BM25's documents that are reranked")
    made.add_argument("--queries", type=int, default=48, help="of the test part")
    made.add_argument("--max-tokens", type=int, default=128, help="of a document")
    given = options(made, arguments)
    for model in map(MODELS.__getitem__, given.models):
        for collection in map(COLLECTIONS.__getitem__, given.sets):
            if collection.language in model.languages:
                records.rewrite("rerank", measure(model, collection, given), given.results)


if __name__ == "__main__":
    main()
