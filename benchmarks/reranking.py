"""In-context reranking of BM25's first documents, against BM25's own order and the pointwise reranker.

    python benchmarks/reranking.py --data DIR                                    # a run that was stopped goes on
    python benchmarks/reranking.py --data DIR --models "Gemma 3 270M" --sets HotpotQA --readings apart pointwise
    python benchmarks/reranking.py --data DIR --steps score                      # from what is kept

What each head pays to each token is kept below ``--out``, a file a query. Which layers and heads count is then a
choice in the scoring, and costs no further pass. Windows of layers and heads are chosen on the development queries of
another collection than the one that is reported (see CHOSEN_ON). ``DIR/retrieval`` holds the collections under the
names that ``real/sets.py`` has. Queries are drawn at even steps from a part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig

import records
from real.contenders import BATCH, bm25
from real.cosines import beside
from real.models import MODELS, RealModel
from real.sets import COLLECTIONS, PARTS, Collection
from retrieval import CHOICES
from runs import device, kept, now, options, parser
from st_reba.data.tables import Retrieval
from st_reba.evaluation import bootstrap
from st_reba.evaluation.rankings import Hits, reranked
from st_reba.evaluation.tasks import RetrievalTask
from st_reba.modules import AttentionRerankModule, RerankModule
from st_reba.modules.attention_reranking import MIDDLE, TEMPLATE, calibrated, middle
from st_reba.modules.reranking import CHOICE, cross_encoder

#: Documents that BM25 finds for a query.
FOUND = 100
#: The prompt, in the language of the texts.
TEMPLATES = {
    "en": TEMPLATE,
    "zh": "以下是一些段落：{documents}\n\n请在以上段落中找出与下面的问题有关的内容。\n\n问题：{query}",
}
#: On whose development queries layers and heads are chosen, for each collection that is reported.
CHOSEN_ON = {"HotpotQA": "MuSiQue", "MuSiQue": "HotpotQA", "Cranfield": "HotpotQA", "CMRC 2018, sentences": "HotpotQA"}
#: Heads that are chosen.
HEADS = 8
#: How the documents are read: whether together, and from which shares of the list on, if so.
READINGS: dict[str, tuple[bool, tuple[float, ...]]] = {
    "apart": (False, (0.0,)),
    "together": (True, (0.0,)),
    "together, reversed": (True, (0.0,)),
    "together, 4 rotations": (True, (0.0, 0.25, 0.5, 0.75)),
    "pointwise": (False, ()),
}
#: Attention weights are kept in half precision, times this, so that small ones do not vanish.
SCALE = 1024

#: What counts of what was read: by name, which of the (layers, heads) do.
Counted = dict[str, np.ndarray]


@dataclass(frozen=True)
class Measured:
    """One model on one collection."""

    model: RealModel
    collection: Collection
    options: argparse.Namespace

    @cached_property
    def parts(self) -> dict[str, Retrieval]:
        found = {}
        for part in PARTS:
            every = self.collection.part(self.options.data, part)
            count = min(len(every), self.options.queries if part == "test" else self.options.choosing)
            found[part] = every.part([place * len(every) // count for place in range(count)])
        return found

    @cached_property
    def documents(self) -> list[str]:
        return list(self.parts["test"].documents.values())

    @cached_property
    def hits(self) -> dict[str, list[Hits]]:
        return {
            part: bm25(list(own.queries.values()), self.documents, self.collection.language, FOUND)
            for part, own in self.parts.items()
        }

    def file(self, reading: str, depth: int, part: str, query: str) -> Path:
        model = f"{self.model.name}, {self.options.precision}, {self.options.max_tokens} tokens"
        return Path(self.options.out) / model / self.collection.name / f"{reading}, {depth}" / f"{part}-{query}.npz"


def read(measured: Measured, backbone: Callable[[], AttentionRerankModule]) -> None:
    """Keep what the heads pay, query by query, where it is not kept yet."""
    given = measured.options
    for reading in given.readings:
        together, shares = READINGS[reading]
        chooses = reading in given.chosen_by and measured.collection.name in CHOSEN_ON.values()
        for part in PARTS if chooses else ("test",):
            for depth in given.depths if part == "test" else given.depths[:1]:
                model: Any = None
                names = measured.parts[part].queries
                for (name, query), hits in zip(names.items(), measured.hits[part], strict=True):
                    file = measured.file(reading, depth, part, name)
                    if file.is_file():
                        continue
                    if model is None:
                        model = made(measured, backbone(), together, pointwise=not shares)
                    listed = [measured.documents[place] for place, _ in hits[:depth]]
                    if reading.endswith("reversed"):
                        listed.reverse()
                    kept(file, partial(paid, model, query, listed, shares))


def made(measured: Measured, backbone: AttentionRerankModule, together: bool, *, pointwise: bool) -> Any:
    """What reads, on the weights of a backbone."""
    language = measured.collection.language
    if pointwise:
        chooser = RerankModule(backbone, template=CHOICES.get(language, CHOICE))
        chooser.max_seq_length = measured.options.max_tokens
        return cross_encoder(chooser, device=device())
    layers: Any = "all" if (run := measured.options.run_layers) is None else [*range(run)]
    module = AttentionRerankModule(backbone, template=TEMPLATES[language], layers=layers, together=together)
    module.max_seq_length = measured.options.max_tokens
    return module


def paid(model: Any, query: str, documents: Sequence[str], shares: Sequence[float]) -> dict[str, Any]:
    """What is kept of a query; the seconds are those of all layers, as often as the list is read."""
    pairs, start = [(query, document) for document in documents], now(device())
    if not shares:
        scores = model.predict(pairs, batch_size=BATCH, show_progress_bar=False)
        return {"scores": scores, "seconds": now(device()) - start, "threads": torch.get_num_threads()}
    features, found = model.preprocess(pairs), {}
    for number, share in enumerate(shares):
        first = int(share * len(pairs))
        order = [*range(first, len(pairs)), *range(first)]
        weights = model.token_weights(features, order)
        found[f"order_{number}"] = np.array(order)
        found[f"lengths_{number}"] = np.array([each.shape[1] for each in weights])
        found[f"weights_{number}"] = (torch.cat(weights, dim=1) * SCALE).half().cpu().numpy()
    return {**found, "seconds": now(device()) - start, "threads": torch.get_num_threads()}


def scores(there: Mapping[str, np.ndarray], counts: np.ndarray) -> list[float]:
    """Of each document, from the heads that count, (heads,): as AttentionRerankModule has it."""
    if "scores" in there:
        return list(map(float, there["scores"]))
    rounds = sum(name.startswith("order_") for name in there)
    found = np.zeros((rounds, len(there["order_0"])))
    for number in range(rounds):
        # Of a run through all layers, those that are asked about.
        weights = there[f"weights_{number}"][: len(counts)]
        paid = torch.from_numpy(weights[counts].astype(np.float32).sum(axis=0) / SCALE)
        each = [float(calibrated(own)) for own in paid.split(there[f"lengths_{number}"].tolist())]
        found[number, there[f"order_{number}"]] = each
    return [*map(float, found.mean(axis=0))]


@cache
def loaded(file: Path) -> dict[str, np.ndarray]:
    """What is kept of a query."""
    with np.load(file) as there:
        return dict(there)


def ndcg(measured: Measured, part: str, ranked: Sequence[Hits]) -> np.ndarray:
    """nDCG@10 of each query."""
    # The rankings are there already.
    own = SimpleNamespace(nearest=lambda queries, documents, count: ranked)
    return np.asarray(RetrievalTask(measured.parts[part]).measure(cast(Any, own))["ndcg"])


def ordered(measured: Measured, reading: str, depth: int, part: str, counts: np.ndarray) -> list[Hits]:
    """BM25's rankings with the first documents in a new order."""
    found = []
    for name, hits in zip(measured.parts[part].queries, measured.hits[part], strict=True):
        own = scores(loaded(measured.file(reading, depth, part, name)), counts)
        found.append(reranked(hits, own[::-1] if reading.endswith("reversed") else own))
    return found


def is_kept(measured: Measured, reading: str, depth: int, part: str) -> bool:
    return all(measured.file(reading, depth, part, name).is_file() for name in measured.parts[part].queries)


def counted(measured: Measured, reading: str, part: str) -> Counted:
    """What may count: all layers, those in the middle, and what is best on another collection's development queries.

    Of development queries nothing that was chosen is reported.
    """
    config = measured.options.configs[measured.model.name]
    depth, heads = config.num_hidden_layers, config.num_attention_heads
    layer = np.repeat(np.arange(measured.options.run_layers or depth), heads)
    found = {"middle layers": np.isin(layer, middle(config))}
    first = max(0, (depth - MIDDLE) // 2)
    plain = (layer >= first) & (layer < first + MIDDLE)
    if not np.array_equal(plain, found["middle layers"]):
        found["middle layers, with windows"] = plain
    found["all layers" if layer[-1] == depth - 1 else f"the first {layer[-1] + 1} layers"] = layer >= 0
    other = Measured(measured.model, COLLECTIONS[CHOSEN_ON[measured.collection.name]], measured.options)
    on = next((each for each in (reading, "apart") if is_kept(other, each, measured.options.depths[0], "dev")), None)
    if on is not None and part == "test":
        tried = partial(ordered, other, on, measured.options.depths[0], "dev")

        def dev(counts: np.ndarray) -> float:
            return float(ndcg(other, "dev", tried(counts)).mean())

        windows = [(layer >= start) & (layer < start + MIDDLE) for start in range(layer[-1] - MIDDLE + 2)]
        found["four layers, chosen"] = max(windows, key=dev)
        alone = np.array([dev(np.arange(len(layer)) == head) for head in range(len(layer))])
        found[f"{HEADS} heads, chosen"] = np.isin(np.arange(len(layer)), np.argsort(-alone, kind="stable")[:HEADS])
    return found


def rows(measured: Measured, part: str) -> Iterator[records.Record]:
    """nDCG@10 of each order, and how far it is ahead of BM25's, on the same resamples of the queries."""
    given = measured.options
    own = measured.parts[part]
    found: dict[tuple[int, str, str], tuple[np.ndarray, str, float | None]] = {
        (0, "BM25", ""): (ndcg(measured, part, measured.hits[part]), "", None)
    }
    heads = given.configs[measured.model.name].num_attention_heads
    for reading in READINGS:
        for depth in given.depths:
            if not is_kept(measured, reading, depth, part):
                continue
            files = [measured.file(reading, depth, part, name) for name in own.queries]
            seconds = float(np.mean([float(np.load(file)["seconds"]) for file in files]))
            choices = {"": np.zeros(0, bool)} if reading == "pointwise" else counted(measured, reading, part)
            for name, counts in choices.items():
                of = ndcg(measured, part, ordered(measured, reading, depth, part, counts))
                spent = None if counts.size and not counts.all() else seconds
                found[depth, reading, name] = (of, described(counts, heads), spent)
    if len(found) == 1:
        # BM25 alone is in retrieval.csv.
        return
    sure = bootstrap.mean({", ".join(map(str, key)): values for key, (values, _, _) in found.items()})
    for place, ((depth, reading, name), (_, layers, spent)) in enumerate(found.items()):
        ahead = {} if not place else beside(sure, [place], [0], ("ahead", "ahead_low", "ahead_high"))
        yield {
            "model": measured.model.name, "precision": given.precision, "max_tokens": given.max_tokens,
            "set": f"{measured.collection.name} {part}", "queries": len(own),
            "documents": len(measured.documents), "depth": depth, "reading": reading, "counted": name, "layers": layers,
            **beside(sure, [place]), **ahead, "seconds": spent,
            "machine": records.machine(device(), given.threads), **records.today(),
        }  # fmt: skip


def described(counts: np.ndarray, heads: int) -> str:
    """The layers, or the layers and heads, that count."""
    by_layer = counts.reshape(-1, heads)
    if (by_layer.all(axis=1) == by_layer.any(axis=1)).all():
        layers = np.flatnonzero(by_layer.all(axis=1))
        if len(layers) > MIDDLE or not len(layers):
            return ""
        return f"layers {', '.join(map(str, layers))}"
    return " ".join(f"{place // heads}-{place % heads}" for place in np.flatnonzero(counts))


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/reranking")
    made.add_argument("--packages", type=Path, default=Path("build/real/models"), help="directory of the models")
    made.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M-Instruct", "Gemma 3 270M"])
    made.add_argument("--sets", nargs="+", choices=CHOSEN_ON, default=list(CHOSEN_ON))
    made.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    made.add_argument("--chosen-by", nargs="+", choices=READINGS, default=["apart", "together"])
    made.add_argument("--depths", nargs="+", type=int, default=[20], help="how many of BM25's documents are reranked")
    made.add_argument("--queries", type=int, default=48, help="of the test part")
    made.add_argument("--choosing", type=int, default=24, help="of the development part")
    made.add_argument("--max-tokens", type=int, default=128, help="of a document")
    made.add_argument("--run-layers", type=int, help="run the first so many layers alone; default: all")
    made.add_argument("--steps", nargs="+", choices=["read", "score"], default=["read", "score"])
    given = options(made, arguments)
    given.configs = {}
    for name in given.models:
        model = MODELS[name]
        loaded: list[AttentionRerankModule] = []

        def backbone(model: RealModel = model, loaded: list[AttentionRerankModule] = loaded) -> AttentionRerankModule:
            if not loaded:
                path = str(model.located(given.packages))
                loaded.append(AttentionRerankModule(path, layers="all", model_kwargs={"dtype": given.precision}))
                loaded[0].to(device())
            return loaded[0]

        weights = model.located(given.packages)
        packed = {"gguf_file": weights.name} if weights.suffix == ".gguf" else {}
        config = AutoConfig.from_pretrained(weights.parent if packed else weights, **packed)
        given.configs[name] = config.get_text_config(decoder=True)
        for collection in map(COLLECTIONS.__getitem__, given.sets):
            if collection.language in model.languages:
                measured = Measured(model, collection, given)
                if "read" in given.steps:
                    read(measured, backbone)
                if "score" in given.steps:
                    found = [row for part in PARTS for row in rows(measured, part)]
                    records.rewrite("rerank", found, given.results)
                    for row in found:
                        print(*(row[key] for key in ("model", "set", "depth", "reading", "counted", "score", "ahead")
                                if row.get(key) is not None), sep="; ", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
