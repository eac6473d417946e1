"""Which layers and heads carry ReBA's gain. One pass a text: the weights of each head are kept, and any set of heads is
scored from them. It goes on where it was stopped.

    python benchmarks/heads.py --data DIR                                        # the models that take an hour
    python benchmarks/heads.py --data DIR --models Qwen2.5-Coder-1.5B-Instruct --questions 100

``--data`` holds the sets of ``real/sets.py``. A model that reads Chinese is asked for the word that means something
else among four sentences, on SLPWC and WSD: heads are chosen on one and shown on the other. One that does not embeds
English pairs by their last token, chosen on STS-B's development part and shown on its test part, and the other way
round. Rows of results/heads.csv have the 95% interval, and that of the paired difference from ReBA-2 with all heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import records
from real.cosines import AHEAD, beside, cosines_of
from real.models import MODELS, RealModel
from real.scores import SPEARMAN
from real.sets import Sets, pairs_of
from runs import kept, options, parser
from st_reba.evaluation import OddOneOutEvaluator, bootstrap
from st_reba.evaluation.bootstrap import Items
from st_reba.lm.attention.observers import Observer
from st_reba.lm.attention.weights import LayerWeights, StoredWeights
from st_reba.modules import CausalModule, CausalTransformer, ReBAModule
from st_reba.reading.words import find_words
from st_reba.text.layout import Layout

Array = NDArray[np.float32]
Heads = NDArray[np.bool_]

#: Texts that are run together, and sets of heads that are scored together.
BATCH, TOGETHER = 16, 32
#: The share of the heads that is chosen, and draws of as many by chance.
SHARE, DRAWS = 10, 20
ALL, ECHO, CLASSICAL, FLAT = "all heads", "Echo-2", "Classical", "equal weights"


@dataclass(eq=False)
class EachHead(Observer):
    """Keeps the weights of each head, from some queries to some keys.

    Attributes:
        keys: A slice of key positions.
        queries: A slice of query positions.
        layers: What was seen, (B, heads, keys, queries) a layer.
    """

    keys: slice
    queries: slice
    layers: list[torch.Tensor] = field(default_factory=list)

    def wants(self, layer: int) -> bool:
        return True

    def observe(self, weights: LayerWeights | StoredWeights) -> None:
        assert isinstance(weights, LayerWeights)
        formed = weights.log_weights(slice(None), slice(None), self.keys, self.queries)
        self.layers.append(formed.transpose(2, 3).flatten(1, 2).exp())


@dataclass(frozen=True)
class Question:
    """Texts whose vectors are read with any set of heads, and what the vectors are scored by.

    Attributes:
        name: Of the set, as tables call it.
        texts: The texts.
        words: The word of each text whose tokens are read; None for the last token of each text.
        scored: From vectors (texts, D) to a score a question, by metric.
        statistic: From these, by set of heads, to resamples.
        language: Of the texts.
    """

    name: str
    texts: list[str]
    words: list[str] | None
    scored: Callable[[Array], Mapping[str, NDArray[Any]]]
    statistic: Callable[[Mapping[str, Any]], Items]
    language: str = "zh"

    @property
    def label(self) -> str:
        """As directories of what is kept call it: the set and how many texts."""
        return f"{self.name}, {len(self.texts)} texts"


def asked(data: Path, languages: Sequence[str], count: int | None) -> list[Question]:
    """The two sets of a model; of each the first so many questions, or pairs drawn once."""
    if "zh" in languages:
        return [of_words(Sets(data).questions(name), name, count) for name in ("SLPWC", "WSD")]
    return [of_pairs(data, part, count or 1000, "en") for part in ("dev", "test")]


def of_words(every: OddOneOutEvaluator, name: str, count: int | None) -> Question:
    """Word senses: how far each question is answered right."""
    some = OddOneOutEvaluator(every.questions[:count])

    def scored(vectors: Array) -> Mapping[str, NDArray[Any]]:
        right = some.correct(vectors.reshape(len(some.questions), 4, -1))
        return {"accuracy, Euclidean": right["euclidean_accuracy"], "accuracy, cosine": right["cosine_accuracy"]}

    return Question(name, *some.inputs(), scored, bootstrap.mean)


def of_pairs(data: Path, part: str, count: int, language: str) -> Question:
    """Pairs of sentences, by cosines."""
    task = pairs_of(data, language, part, count)
    first, second, labels = (np.array(column) for column in zip(*task.pairs, strict=True))

    def scored(vectors: Array) -> Mapping[str, NDArray[Any]]:
        return {SPEARMAN: cosines_of(vectors, first, second)}

    name = f"STS-B {language} {part}"
    return Question(name, task.texts, None, scored, lambda found: bootstrap.spearman(found, labels.tolist()), language)


@dataclass(frozen=True)
class Text:
    """What is kept of one text.

    Attributes:
        weights: (heads of all layers, rows, M): a_ij of each head, for the rows i that are read.
        states: (M, D): v_j of both copies.
        rows: The tokens that are read.
    """

    weights: Array
    states: Array
    rows: NDArray[np.int64]

    def read(self, heads: Heads) -> Array:
        """(K, D): the mean of e_i over the rows, with each of K sets of heads, (K, heads)."""
        largest = np.stack([self.weights[chosen].max(axis=0) for chosen in heads])
        return np.asarray(largest.mean(axis=1) @ self.states)

    def references(self) -> dict[str, Array]:
        """(D,): the same without any head."""
        length = len(self.states) // 2
        later = np.arange(len(self.states)) >= self.rows[:, None]
        return {
            CLASSICAL: self.states[self.rows].mean(axis=0),
            ECHO: self.states[self.rows + length].mean(axis=0),
            FLAT: later.mean(axis=0) @ self.states,
        }


def texts_of(directory: Path, load: Callable[[], CausalModule], question: Question) -> list[Text]:
    """Each text of a question, run once."""
    reba: list[ReBAModule] = []
    found = []
    for number, first in enumerate(range(0, len(question.texts), BATCH)):
        part = slice(first, first + BATCH)

        def run(part: slice = part) -> dict[str, NDArray[Any]]:
            if not reba:
                reba.append(ReBAModule(load()).eval())
            words = None if question.words is None else question.words[part]
            return ran(reba[0], question.texts[part], words)

        arrays = kept(directory / f"{number:04}.npz", run)
        count = len(question.texts[part])
        found += [Text(*(arrays[f"{name} {text}"] for name in ("weights", "states", "rows"))) for text in range(count)]
    return found


@torch.inference_mode()
def ran(reba: ReBAModule, texts: Sequence[str], words: Sequence[str] | None) -> dict[str, NDArray[Any]]:
    """The arrays of :class:`Text` of a few texts, by name and place."""
    layout = Layout.of(reba.preprocess(list(texts)))
    start, end = layout.text_start, layout.input_ids.shape[1]
    heads = EachHead(slice(start, start + layout.longest_text), slice(start, end))
    states = reba.run(layout, observe=heads)[:, start:].float().numpy()
    weights = torch.cat(heads.layers, dim=1).numpy()
    located = None if words is None else find_words(reba, texts, words)
    made: dict[str, NDArray[Any]] = {}
    for text, length in enumerate(layout.text_lengths.tolist()):
        rows = np.array([length - 1] if located is None else located[text].indices)
        query = np.arange(2 * length)
        # Half of what is off the diagonal, as symmetrising makes it; nothing before it.
        factor = np.where(query > rows[:, None], 0.5, (query == rows[:, None]).astype(np.float64))
        # Where a query stands before its key, without a mask, the weight means nothing.
        own = np.where(factor > 0, weights[text][:, rows, : 2 * length] * factor, 0)
        made |= {f"weights {text}": own.astype(np.float32), f"states {text}": states[text, : 2 * length]}
        made[f"rows {text}"] = rows
    return made


def scored(question: Question, texts: Sequence[Text], heads: Mapping[str, Heads]) -> dict[str, dict[str, NDArray[Any]]]:
    """By metric and set of heads, the score of each question or pair; and those of the references."""
    found: dict[str, dict[str, NDArray[Any]]] = {}

    def add(name: str, vectors: Array) -> None:
        for metric, each in question.scored(vectors).items():
            found.setdefault(metric, {})[name] = each

    names = list(heads)
    for first in range(0, len(names), TOGETHER):
        some = names[first : first + TOGETHER]
        vectors = np.stack([text.read(np.stack([heads[name] for name in some])) for text in texts])
        for place, name in enumerate(some):
            add(name, vectors[:, place])
    references = [text.references() for text in texts]
    for name in references[0]:
        add(name, np.stack([each[name] for each in references]))
    return found


def subsets(layers: int, heads: int) -> dict[str, Heads]:
    """Each layer and each head alone and left out, and as many by chance as are chosen."""
    every = np.arange(layers * heads)
    made = {ALL: every >= 0}
    for layer in range(layers):
        made[f"layer {layer}"] = every // heads == layer
    for head in every:
        made[f"head {head // heads}.{head % heads}"] = every == head
    made |= {f"without {name}": ~own for name, own in list(made.items()) if name != ALL}
    # Thirds of the depth, as groups of layers.
    for number, name in enumerate(("lower", "middle", "upper")):
        own = every // heads * 3 // layers == number
        made |= {f"{name} third": own, f"without {name} third": ~own}
    draw = np.random.default_rng(0)
    for number in range(DRAWS):
        own = np.isin(every, draw.choice(every, len(every) // SHARE, replace=False))
        made |= {f"a tenth by chance, {number}": own, f"without a tenth by chance, {number}": ~own}
    return made


def chosen(scores: Mapping[str, float], layers: int, heads: int) -> dict[str, Heads]:
    """What one set says should do on another: sets of heads, by how they were chosen."""
    every = np.arange(layers * heads)
    names = [f"{head // heads}.{head % heads}" for head in every]

    def tenth(values: Sequence[float]) -> Heads:
        return np.isin(every, np.argsort(values, kind="stable")[::-1][: len(every) // SHARE])

    alone = tenth([scores[f"head {name}"] for name in names])
    missed = tenth([scores[ALL] - scores[f"without head {name}"] for name in names])
    best = max(range(layers), key=lambda layer: scores[f"layer {layer}"])
    worst = min(range(layers), key=lambda layer: scores[f"without layer {layer}"])
    harms = [layer for layer in range(layers) if scores[f"without layer {layer}"] > scores[ALL]]
    made = {
        "the tenth that is best alone": alone,
        "without the tenth that is best alone": ~alone,
        "the tenth that is missed most": missed,
        "without the tenth that is missed most": ~missed,
        "the best layer": every // heads == best,
        "without the layer that is missed most": every // heads != worst,
    }
    return made | ({"without the layers that harm": ~np.isin(every // heads, harms)} if 0 < len(harms) < layers else {})


def rows(
    question: Question, scores: Mapping[str, NDArray[Any]], sizes: Mapping[str, int], about: records.Record
) -> Iterator[records.Record]:
    """A row for each set of heads and reference; sets that were drawn by chance are one row, their mean."""
    found = question.statistic(scores)
    names = list(scores)
    drawn = {name for name in names if "by chance" in name}
    groups = {name: [names.index(name)] for name in names if name not in drawn}
    for title in ("a tenth by chance", "without a tenth by chance"):
        own = [names.index(name) for name in names if name.rpartition(", ")[0] == title]
        groups |= {title: own} if own else {}
    for name, own in groups.items():
        row = {**about, "subset": name, "heads": sizes.get(names[own[0]]), **beside(found, own)}
        yield row if name == ALL else {**row, **beside(found, own, [names.index(ALL)], AHEAD)}


def measure(model: RealModel, given: argparse.Namespace) -> Iterator[records.Record]:
    """The rows of a model."""
    loaded: list[CausalModule] = []

    def load() -> CausalModule:
        if not loaded:
            path = str(model.located(given.models_directory))
            loaded.append(CausalTransformer(path, model_kwargs={"dtype": given.precision}))
        return loaded[0]

    config = load().model.config.get_text_config(decoder=True)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    questions = asked(given.data, model.languages, given.questions)[: given.sets]
    every, tried, read = subsets(layers, heads), [], []
    for question in questions:
        read.append(texts_of(given.out / f"{model.name}, {given.precision}, {question.label}", load, question))
        tried.append(scored(question, read[-1], every))
        print(f"{time.strftime('%H:%M')} {model.name}, {question.name}: scored", flush=True)
    for place, question in enumerate(questions):
        about: records.Record = {"model": model.name, "precision": given.precision, "set": question.name}
        about |= {"texts": len(question.texts), **records.today()}
        other = 1 - place
        for metric, scores in tried[place].items():
            shared = {**about, "metric": metric}
            sizes = {name: int(own.sum()) for name, own in every.items()}
            yield from rows(question, scores, sizes, {**shared, "chosen_on": ""})
            if len(questions) == 1:
                continue
            before = questions[other].statistic(tried[other][metric])
            picks = chosen(dict(zip(before.recipes, map(float, before.scores), strict=True)), layers, heads)
            own = scored(question, read[place], {ALL: every[ALL], **picks})[metric]
            sizes = {name: int(each.sum()) for name, each in picks.items()}
            made = rows(question, own, sizes, {**shared, "chosen_on": questions[other].name})
            yield from (row for row in made if row["subset"] in picks)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/heads")
    own = [each.name for each in MODELS.values() if not each.embedder]
    made.add_argument("--models", nargs="+", choices=own, default=[name for name in own if not MODELS[name].slow])
    made.add_argument("--models-directory", type=Path, default=Path("build/real/models"), help="where models lie")
    made.add_argument("--questions", type=int, help="so many of each set; pairs for a model that reads English alone")
    made.add_argument("--sets", type=int, choices=[1, 2], default=2, help="with 1, the first set alone, and no choice")
    given = options(made, arguments)
    for name in given.models:
        records.rewrite("heads", list(measure(MODELS[name], given)), given.results)


if __name__ == "__main__":
    main()
