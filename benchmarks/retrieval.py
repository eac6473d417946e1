"""Retrieval that nobody here wrote: vectors, tokens, words and order on real language models. Hours on a CPU.

    python benchmarks/retrieval.py --data DIR                                    # all; a run that was stopped goes on
    python benchmarks/retrieval.py --data DIR --models "Gemma 3 270M" --sets "CMRC 2018, sentences" --steps embed
    python benchmarks/retrieval.py --data DIR --steps rerank                     # 20 documents of what was best so far
    python benchmarks/retrieval.py --data DIR --steps score                      # from what is kept

What was embedded is kept below ``--out``, a file for some hundred texts with the seconds that they took, the
processor's or a GPU's by the clock: rankings, filters, fusions and scores are then computed from that, and written to
``benchmarks/results/retrieval.csv``.
``DIR/retrieval`` holds the collections under the names that ``real/sets.py`` has; they are no part of this
repository. A document is read up to ``--max-tokens`` tokens of a copy, 256 as all-MiniLM-L6-v2 does; tf-idf and BM25
see it whole; for BM25, `pip install bm25s`. What is fused and what is reranked is chosen on the development queries and
reported on the test queries.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

import records
from real.contenders import BATCH, CONTENDERS, Contender, Dense, bm25
from real.cosines import beside
from real.models import MODELS, USUAL, RealModel
from real.sets import COLLECTIONS, PARTS, Collection
from runs import device, kept, now, options, parser
from st_reba.compare.tf_idf import TfIdf
from st_reba.data.tables import Retrieval
from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import Hits, fused, reranked
from st_reba.evaluation.tasks import RetrievalTask
from st_reba.modules import CausalModule, CausalTransformer, RerankModule
from st_reba.modules.reranking import CHOICE, cross_encoder

#: Texts of a file: what is lost when a run is stopped.
BLOCK = 128
#: Documents that are looked at for a query.
FOUND = 100
#: Documents of a query that are reranked.
RERANKED = 20
#: The trained embedder that stands beside.
EMBEDDER = "all-MiniLM-L6-v2"
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
        # Made where something is missing.
        model = cache(partial(measured.made, contender))
        for where in (*PARTS, "documents"):
            texts, role = measured.texts(where), "document" if where == "documents" else "query"
            for number, first in enumerate(range(0, len(texts), BLOCK)):
                own = texts[first : first + BLOCK]
                kept(measured.block(contender, where, number), partial(embedded, contender, model, own, role))


def embedded(contender: Contender, make: Callable[[], Any], texts: Sequence[str], role: str) -> dict[str, Any]:
    """What is kept of some texts, in their order; with the seconds that they took."""
    model, start = make(), now(device())
    with torch.inference_mode():
        arrays = contender.embed(model, texts, role)
    return {**arrays, "seconds": now(device()) - start, "threads": torch.get_num_threads()}


def rankings(measured: Measured) -> tuple[Rankings, dict[Key, float]]:
    """For each recipe, pooling and filter the rankings of each part; and the seconds that 1,000 documents took."""
    found: Rankings = {}
    seconds: dict[Key, float] = {}
    for contender in measured.contenders:
        there = {where: measured.blocks(contender, where) for where in (*PARTS, "documents")}
        documents = there["documents"]
        if documents is None:
            continue
        spent = 1000 * sum(float(block["seconds"]) for block in documents) / len(measured.texts("documents"))
        for part in PARTS:
            asked = there[part]
            if asked is None:
                continue
            seen = contender.joined(there["dev"] or asked)
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
            # The rankings are there already.
            own = SimpleNamespace(nearest=lambda queries, documents, count, hits=ranked[part]: hits)
            for name, values in task.measure(cast(Any, own)).items():
                scores[name][key] = values
    return scores


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
        pairs = [(query, documents[index]) for index, _ in hits[:RERANKED]]

        def asked(pairs: list[tuple[str, str]] = pairs) -> dict[str, Any]:
            start = now(device())
            scores = model.predict(pairs, batch_size=BATCH, show_progress_bar=False)
            return {"seconds": now(device()) - start, "scores": scores}

        kept(measured.reranked(first) / f"{number:04}.npz", asked)


def reranking(measured: Measured, found: Rankings) -> tuple[dict[Key, list[Hits]], dict[Key, float]]:
    """The test queries' rankings with the first documents in the language model's order, where all are kept."""
    first = chosen(measured, found)
    paths = [measured.reranked(first) / f"{number:04}.npz" for number in range(len(measured.texts("test")))]
    if not all(path.is_file() for path in paths):
        return {}, {}
    there = [dict(np.load(path)) for path in paths]
    key = (f"Reranked: {described(first)}", "", "")
    hits = [reranked(own, each["scores"].tolist()) for own, each in zip(found[first]["test"], there, strict=True)]
    asked = sum(len(each["scores"]) for each in there)
    return {key: hits}, {key: 1000 * sum(float(each["seconds"]) for each in there) / asked}


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
    shared: records.Record = {
        "model": measured.model.name, "precision": measured.precision, "max_tokens": measured.options.max_tokens,
        "documents": len(measured.texts("documents")), **records.today(),
        "machine": records.machine(device(), torch.get_num_threads()),
    }  # fmt: skip
    for part in PARTS:
        about: records.Record = {
            **shared, "set": f"{measured.collection.name} {part}", "queries": len(measured.texts(part))
        }  # fmt: skip
        for name, scores in of_queries(measured, found, part).items():
            sure = bootstrap.mean({str(number): own for number, own in enumerate(scores.values())})
            for place, (recipe, pooling, filtered) in enumerate(scores):
                yield {
                    **about, "metric": METRICS[name], "recipe": recipe, "pooling": pooling, "filter": filtered,
                    **beside(sure, [place]), "seconds": seconds.get((recipe, pooling, filtered)),
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


STEPS = {"embed": embed, "rerank": rerank, "score": score}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/retrieval")
    made.add_argument("--packages", type=Path, default=Path("build/real/models"), help="directory of the models")
    made.add_argument("--models", nargs="+", choices=MODELS, default=USUAL)
    made.add_argument("--sets", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
    made.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    made.add_argument("--max-tokens", type=int, default=256, help="of one copy of a text")
    made.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    given = options(made, arguments)
    for collection in map(COLLECTIONS.__getitem__, given.sets):
        for model in map(MODELS.__getitem__, given.models):
            if collection.language in model.languages:
                measured = Measured(model, model.located(given.packages), collection, given)
                for step in given.steps:
                    STEPS[step](measured)


if __name__ == "__main__":
    main()
