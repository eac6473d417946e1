"""Retrieval that nobody here wrote: vectors, tokens, words and order on real language models. Hours on a CPU.

    python benchmarks/retrieval.py --data DIR                                    # all; a run that was stopped goes on
    python benchmarks/retrieval.py --data DIR --models "Gemma 3 270M" --sets "CMRC 2018, sentences" --steps embed
    python benchmarks/retrieval.py --data DIR --steps rerank                     # 20 documents of what was best so far
    python benchmarks/retrieval.py --data DIR --steps score                      # from what is kept

What was embedded is kept below ``--out``, a file for some hundred texts with the seconds that they took, the
processor's or a GPU's by the clock: rankings, filters, fusions and scores are then computed from that, and written to
``benchmarks/results/retrieval.csv``.
``DIR/retrieval`` holds the collections under the names that ``real/collections.py`` has; they are no part of this
repository. A document is read up to ``--max-tokens`` tokens of a copy, 256 as all-MiniLM-L6-v2 does; tf-idf and BM25
see it whole; for BM25, `pip install bm25s`. What is fused and what is reranked is chosen on the development queries and
reported on the test queries.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import records
from devices import device, now
from real.collections import COLLECTIONS, PARTS, Collection
from real.contenders import CONTENDERS, Contender, Dense, bm25
from real.models import MODELS, USUAL, RealModel
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.tables import Retrieval
from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import Hits, fused, reranked
from st_reba.evaluation.tasks import RetrievalTask
from st_reba.files import atomic_file
from st_reba.modules import CausalModule, CausalTransformer, RerankModule
from st_reba.modules.reranking import CHOICE, cross_encoder

BATCH = 16
#: Texts of a file: what is lost when a run is stopped.
BLOCK = 128
#: Documents that are looked at for a query.
FOUND = 100
#: Documents of a query that are reranked.
RERANKED = 20
#: The trained embedder that stands beside.
EMBEDDER = "all-MiniLM-L6-v2"
STEPS = ["embed", "rerank", "score"]
#: The question of the reranker, in the language of the texts.
CHOICES = {
    "zh": "问题：{query}\n文档：{document}\n以下两种说法哪一种成立？\nA. 文档回答了这个问题。\n"
    "B. 文档没有回答这个问题。\n答案："
}
METRICS = {"ndcg": "nDCG@10", "recall": "recall@100"}

#: Recipe, pooling and filter.
Key = tuple[str, str, str]
#: By these, for the queries of a part what was found.
Rankings = dict[Key, dict[str, list[Hits]]]


@dataclass(frozen=True)
class Measured:
    """One model in one precision, on one collection."""

    model: RealModel
    path: Path
    collection: Collection
    options: argparse.Namespace

    @property
    def precision(self) -> str:
        return "float32" if self.model.embedder else str(self.options.precision)

    @property
    def directory(self) -> Path:
        named = f"{self.model.name}, {self.precision}, {self.options.max_tokens} tokens"
        return Path(self.options.out) / named / self.collection.name

    @cached_property
    def parts(self) -> dict[str, Retrieval]:
        return {part: self.collection.part(self.options.data, part) for part in PARTS}

    @cached_property
    def backbone(self) -> CausalModule:
        module = CausalTransformer(str(self.path), model_kwargs={"dtype": self.precision}).to(device())
        module.max_seq_length = self.options.max_tokens
        return module

    def texts(self, where: str) -> list[str]:
        """The documents, or the queries of a part."""
        if where == "documents":
            return list(self.parts["test"].documents.values())
        return list(self.parts[where].queries.values())

    def made(self, contender: Contender) -> Any:
        """The model of a contender."""
        if not self.model.embedder:
            return contender.make(self.backbone, self.collection.language)
        embedder = SentenceTransformer(str(self.path))
        embedder.max_seq_length = min(self.options.max_tokens, embedder.max_seq_length)
        return embedder

    @property
    def contenders(self) -> list[Contender]:
        """Those that are asked for; an embedder is run as it is."""
        if self.model.embedder:
            return [Dense(self.model.name, "", lambda backbone, language: None, ("",))]
        return [CONTENDERS[name] for name in self.options.contenders]

    def reranked(self, first: Key) -> Path:
        """Where scores of pairs are kept, by what found the documents."""
        return self.directory / f"Reranked, {described(first)}"

    def block(self, contender: Contender, where: str, number: int) -> Path:
        return self.directory / contender.directory / where / f"{number:04}.npz"

    def blocks(self, contender: Contender, where: str) -> list[dict[str, Any]] | None:
        """What is kept of some texts; None if that is not all of them."""
        paths = [self.block(contender, where, number) for number in range(-(-len(self.texts(where)) // BLOCK))]
        return [dict(np.load(path)) for path in paths] if all(path.is_file() for path in paths) else None


def embed(measured: Measured) -> None:
    """Embed what is not kept yet, block by block."""
    for contender in measured.contenders:
        model = None
        for where in (*PARTS, "documents"):
            texts = measured.texts(where)
            for number, first in enumerate(range(0, len(texts), BLOCK)):
                path = measured.block(contender, where, number)
                if not path.is_file():
                    model = model or measured.made(contender)
                    role = "document" if where == "documents" else "query"
                    keep(path, contender, model, texts[first : first + BLOCK], role)
        print(f"{time.strftime('%H:%M')} {measured.directory / contender.directory}: kept", flush=True)


def keep(path: Path, contender: Contender, model: Any, texts: Sequence[str], role: str) -> None:
    """Embed some texts, those of a length together, and keep them in their order."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    start = now(device())
    with torch.inference_mode():
        ordered = [texts[index] for index in order]
        parts = [contender.embed(model, ordered[at : at + BATCH], role) for at in range(0, len(ordered), BATCH)]
    seconds = now(device()) - start
    arrays: dict[str, Any] = dict(contender.in_order(contender.joined(parts), np.argsort(order)))
    arrays |= {"seconds": seconds, "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        np.savez(file, **arrays)
    print(f"{time.strftime('%H:%M')} {path}: {seconds:.0f} s", flush=True)


def rankings(measured: Measured) -> tuple[Rankings, dict[Key, float]]:
    """For each recipe, pooling and filter the rankings of each part; and the seconds that 1,000 documents took."""
    found: Rankings = {}
    seconds: dict[Key, float] = {}
    for contender in measured.contenders:
        kept = {where: measured.blocks(contender, where) for where in (*PARTS, "documents")}
        documents = kept["documents"]
        if documents is None:
            continue
        spent = 1000 * sum(float(block["seconds"]) for block in documents) / len(measured.texts("documents"))
        for part in PARTS:
            asked = kept[part]
            if asked is None:
                continue
            seen = contender.joined(kept["dev"] or asked)
            ranked = contender.rank(contender.joined(asked), contender.joined(documents), FOUND, seen)
            for name, hits in ranked.items():
                key = (contender.name, contender.pooling, name)
                found.setdefault(key, {})[part] = hits
                seconds[key] = spent
    return {key: own for key, own in found.items() if own.keys() == set(PARTS)}, seconds


def words_alone(measured: Measured) -> Rankings:
    """What needs no model: tf-idf of the model's tokens, and BM25."""
    documents = measured.texts("documents")
    tf_idf = TfIdf(measured.backbone, documents)
    language = measured.collection.language
    asked = {part: measured.texts(part) for part in PARTS}
    return {
        ("tf-idf", "", ""): {part: tf_idf.nearest(texts, documents, FOUND) for part, texts in asked.items()},
        ("BM25", "", ""): {part: bm25(texts, documents, language, FOUND) for part, texts in asked.items()},
    }


def of_queries(measured: Measured, found: Rankings, part: str) -> dict[str, dict[Key, Any]]:
    """nDCG@10 and recall@100 of each query, by what ranks."""
    task = RetrievalTask(measured.parts[part])
    scores: dict[str, dict[Key, Any]] = {name: {} for name in METRICS}
    for key, ranked in found.items():
        if part in ranked:
            for name, values in task.measure(_Found(ranked[part])).items():
                scores[name][key] = values
    return scores


@dataclass(frozen=True)
class _Found:
    """Rankings that are there already."""

    hits: list[Hits]

    def nearest(self, queries: Sequence[str], documents: Sequence[str], count: int) -> list[Hits]:
        return [own[:count] for own in self.hits]


def chosen(measured: Measured, found: Rankings) -> Key:
    """What is best on the development queries."""
    scores = of_queries(measured, found, "dev")["ndcg"]
    return max(scores, key=lambda key: float(np.mean(scores[key])))


def rerank(measured: Measured) -> None:
    """Ask the language model about the first documents of what is best on the development queries, a file a query."""
    if measured.model.embedder:
        return
    found, _ = rankings(measured)
    found |= words_alone(measured)
    first = chosen(measured, found)
    template = CHOICES.get(measured.collection.language, CHOICE)
    model = cross_encoder(RerankModule(measured.backbone, template=template), device=device())
    documents = measured.texts("documents")
    for number, (query, hits) in enumerate(zip(measured.texts("test"), found[first]["test"], strict=True)):
        path = measured.reranked(first) / f"{number:04}.npz"
        if not path.is_file():
            pairs = [(query, documents[index]) for index, _ in hits[:RERANKED]]
            start = now(device())
            scores = model.predict(pairs, batch_size=BATCH, show_progress_bar=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                np.savez(file, seconds=now(device()) - start, scores=scores)
    print(f"{time.strftime('%H:%M')} {measured.reranked(first)}: kept", flush=True)


def reranking(measured: Measured, found: Rankings) -> tuple[dict[Key, list[Hits]], dict[Key, float]]:
    """The test queries' rankings with the first documents in the language model's order, where all are kept."""
    first = chosen(measured, found)
    paths = [measured.reranked(first) / f"{number:04}.npz" for number in range(len(measured.texts("test")))]
    if not all(path.is_file() for path in paths):
        return {}, {}
    kept = [dict(np.load(path)) for path in paths]
    key = (f"Reranked: {described(first)}", "", "")
    hits = [reranked(own, each["scores"].tolist()) for own, each in zip(found[first]["test"], kept, strict=True)]
    asked = sum(len(each["scores"]) for each in kept)
    return {key: hits}, {key: 1000 * sum(float(each["seconds"]) for each in kept) / asked}


def described(key: Key) -> str:
    return ", ".join(filter(None, key))


def fusions(measured: Measured, found: Rankings, alone: Rankings) -> Rankings:
    """The best dense ranking on the development queries, fused with tokens and with words."""
    dense = {key: own for key, own in found.items() if isinstance(_named(measured, key), Dense)}
    if not dense:
        return {}
    first = chosen(measured, dense)
    others = {key: own for key, own in {**found, **alone}.items() if key not in dense and key[0] != "tf-idf"}
    return {
        (f"Hybrid: {described(first)} + {described(key)}", "", ""): {
            part: [fused(pair)[:FOUND] for pair in zip(dense[first][part], own[part], strict=True)] for part in PARTS
        }
        for key, own in others.items()
    }


def mixtures(measured: Measured, found: Rankings, alone: Rankings) -> Rankings:
    """The vectors of each contender with BM25: a weighted sum of scores, whose weight and filter are best on the
    development queries.

    The scores of a query are scaled to 0 to 1 over what was found; what was not found has 0.
    """
    words, tried = alone["BM25", "", ""], defaultdict[str, Rankings](dict)
    for key, own in found.items():
        if isinstance(_named(measured, key), Dense):
            for weight in np.arange(0.1, 1, 0.1):
                tried[key[0] + key[1]][f"{weight:.1f} BM25 + {1 - weight:.1f} {key[0]}", *key[1:]] = {
                    part: [_mixed(*pair, weight) for pair in zip(words[part], own[part], strict=True)] for part in PARTS
                }
    return {(best := chosen(measured, own)): own[best] for own in tried.values()}


def _mixed(first: Hits, second: Hits, weight: float) -> Hits:
    scores: dict[int, float] = defaultdict(float)
    for hits, share in ((first, weight), (second, 1 - weight)):
        least, most = hits[-1][1], hits[0][1]
        for document, score in hits:
            scores[document] += share * (score - least) / max(most - least, 1e-12)
    return sorted(scores.items(), key=lambda hit: -hit[1])[:FOUND]


def _named(measured: Measured, key: Key) -> Contender | None:
    return next((each for each in measured.contenders if (each.name, each.pooling) == key[:2]), None)


def rows(measured: Measured, found: Rankings, seconds: dict[Key, float]) -> Iterator[records.Record]:
    """Scores of every ranking on both parts, all on the same resamples of the queries."""
    for part in PARTS:
        data = measured.parts[part]
        for name, scores in of_queries(measured, found, part).items():
            sure = bootstrap.estimate(bootstrap.mean({str(number): own for number, own in enumerate(scores.values())}))
            for key, estimate in zip(scores, sure.values(), strict=True):
                recipe, pooling, filtered = key
                yield {
                    "model": measured.model.name, "precision": measured.precision,
                    "set": f"{measured.collection.name} {part}", "metric": METRICS[name], "recipe": recipe,
                    "pooling": pooling, "filter": filtered, "score": estimate.value, "low": estimate.low,
                    "high": estimate.high, "seconds": seconds.get(key), "max_tokens": measured.options.max_tokens,
                    "queries": len(data.queries), "documents": len(data.documents),
                    "date": time.strftime("%Y-%m-%d"), "machine": records.machine(device(), torch.get_num_threads()),
                    "versions": records.versions(),
                }  # fmt: skip


def score(measured: Measured) -> None:
    """Rank and fuse what is kept, and write the results."""
    found, seconds = rankings(measured)
    if not measured.model.embedder:
        alone = words_alone(measured)
        ordered, spent = reranking(measured, {**found, **alone})
        seconds |= spent
        found = {**alone, **found, **fusions(measured, found, alone), **mixtures(measured, found, alone)}
        # Of the development queries nothing is reranked.
        found |= {key: {"test": hits} for key, hits in ordered.items()}
    made = list(rows(measured, found, seconds))
    records.rewrite("retrieval", made, measured.options.results)
    for key, scores in of_queries(measured, found, "test")["ndcg"].items():
        print(f"{measured.model.name}, {measured.collection.name}, {described(key)}: {np.mean(scores):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--out", type=Path, default=Path("build/retrieval"), help="directory of what is kept")
    parser.add_argument("--packages", type=Path, default=Path("build/real/models"), help="directory of the models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--sets", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--max-tokens", type=int, default=256, help="of one copy of a text")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="directory of the CSV files")
    options = parser.parse_args()
    logging.disable_progress_bar()
    for name in options.sets:
        collection = COLLECTIONS[name]
        for model in map(MODELS.__getitem__, options.models):
            if collection.language not in model.languages:
                continue
            measured = Measured(model, model.located(options.packages), collection, options)
            if "embed" in options.steps:
                embed(measured)
            if "rerank" in options.steps:
                rerank(measured)
            if "score" in options.steps:
                score(measured)


if __name__ == "__main__":
    main()
