"""The attention sink hidden or weakened, under several recipes: layers are chosen on development parts, and shown on
others. It goes on where it was stopped.

    python benchmarks/sinks.py --data DIR                                        # the models that take an hour
    python benchmarks/sinks.py --data DIR --models Qwen2.5-Coder-1.5B-Instruct --pairs 100 --shown 200 --questions 50

``--data`` holds the sets of ``real/sets.py``. Each way to read a model is tried on pairs of STS-B's development part,
and the best of each kind is shown on the test part, beside the same recipe as it is. For word senses, ways are chosen
on SLPWC and shown on WSD. Rows of results/sinks.csv have the 95% interval, and that of the paired difference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import records
from heads import Question, of_pairs, of_words
from real.cosines import AHEAD, beside
from real.models import MODELS, RealModel
from real.sets import Sets
from runs import kept, options, parser, pooled
from st_reba.lm.backbone import depth
from st_reba.modules import CausalModule, CausalTransformer
from st_reba.modules.changes import Change, HideSink, WeakenSink
from st_reba.reading.layers import massive_layer
from st_reba.reading.words import encode_words
from st_reba.recipes import find, random_weights

BATCH = 32
#: Of the first token's values, how many are set to 0.
SHARES = (0.02, 0.1)
AS_IT_IS, HIDDEN, WEAKENED, BOTH_WAYS, BOTH = (
    "as it is", "sink hidden", "sink weakened", "both ways", "both ways, sink hidden",
)  # fmt: skip
#: The row of the recipes that does both.
ROW = "both ways, no sink"
OF_WEIGHTS = "weights without the sink"
#: By key, the poolings that are read.
RECIPES = {"classical": ("mean", "last"), "reba-2": ("mean", "last"), "prompteol": ("last",)}
CHINESE = {"prompteol": "prompteol-zh"}


@dataclass(frozen=True)
class Way:
    """One way to read a model.

    Attributes:
        recipe: Its key.
        change: What is changed; of several ways with one change, one is chosen.
        layers: Where, in words.
        changes: The same as changes.
        turned: How many of the last layers attend both ways.
        settings: Further settings of the module.
    """

    recipe: str
    change: str = AS_IT_IS
    layers: str = ""
    changes: tuple[Change, ...] = ()
    turned: int = 0
    settings: tuple[tuple[str, Any], ...] = ()

    def made(self, backbone: CausalModule, language: str) -> CausalModule:
        row = find(CHINESE.get(self.recipe, self.recipe) if language == "zh" else self.recipe).row
        settings = {**row.settings, **dict(self.settings), "bidirectional_layers": self.turned}
        return row.module(backbone, **settings, changes=self.changes)


def ways(layers: int, massive: int) -> Iterator[Way]:
    """All that are tried.

    Args:
        layers: Of the model.
        massive: The layer that makes the first token's massive activation.
    """
    hidden = {
        "all": range(layers),
        "above the massive one": range(massive + 1, layers),
        "right above the massive one": [min(massive + 1, layers - 1)],
        "last 2": range(layers - 2, layers),
    }
    for recipe in RECIPES:
        yield Way(recipe)
        for name, own in hidden.items():
            yield Way(recipe, HIDDEN, name, (HideSink(tuple(own)),))
        for share in SHARES:
            change = WeakenSink(min(massive + 1, layers - 1), share)
            yield Way(recipe, WEAKENED, f"right above the massive one, {share:.0%}", (change,))
    yield Way("reba-2", OF_WEIGHTS, "all", settings=(("without_sink", True),))
    half = layers // 2
    quarter = HideSink(tuple(range(layers - half // 2, layers)))
    yield Way("classical", ROW, "half, hidden in the last quarter", (quarter,), half)
    few = {1, 2, layers // 4, layers // 3, half, 2 * layers // 3}
    for recipe in RECIPES:
        for turned in sorted(few if recipe == "classical" else {half}):
            yield Way(recipe, BOTH_WAYS, f"last {turned}", turned=turned)
            for top in sorted({min(2, turned), max(1, turned // 2), turned}):
                hide = HideSink(tuple(range(layers - top, layers)))
                yield Way(recipe, BOTH, f"last {turned}, hidden in the last {top}", (hide,), turned)


def turned_alone(layers: int) -> Way:
    """What turns as many layers as the recipe, and hides nothing."""
    return Way("classical", BOTH_WAYS, f"last {layers // 2}", turned=layers // 2)


def vectors_of(
    directory: Path, way: Way, backbone: Callable[[], CausalModule], question: Question
) -> Mapping[str, NDArray[Any]]:
    """(texts, D) by pooling; of words, by none."""

    def run() -> dict[str, NDArray[Any]]:
        module = way.made(backbone(), question.language)
        if question.words is not None:
            model = pooled(module, "mean")
            return {"": encode_words(model, question.texts, question.words, batch_size=BATCH)}
        poolings = RECIPES[way.recipe]
        encode = pooled(module, *poolings).encode
        vectors = encode(question.texts, batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)
        return dict(zip(poolings, np.split(vectors.float().cpu().numpy(), len(poolings), axis=1), strict=True))

    return kept(directory / f"{way.recipe}, {way.change}, {way.layers}.npz", run)


Scores = dict[str, dict[tuple[Way, str], NDArray[Any]]]


def scored(directory: Path, some: Sequence[Way], backbone: Callable[[], CausalModule], question: Question) -> Scores:
    """By metric, what each way and pooling gives for each question or pair."""
    found: Scores = {}
    for way in some:
        for pooling, vectors in vectors_of(directory, way, backbone, question).items():
            for metric, each in question.scored(vectors).items():
                found.setdefault(metric, {})[way, pooling] = each
    return found


def chosen(question: Question, scores: Mapping[tuple[Way, str], NDArray[Any]]) -> list[tuple[Way, str]]:
    """The best way of each recipe, change and pooling; and what turns as many layers as one that hides, too."""
    items = question.statistic({str(place): each for place, each in enumerate(scores.values())})
    value = dict(zip(scores, map(float, items.scores), strict=True))
    best: dict[tuple[str, str, str], tuple[Way, str]] = {}
    for way, pooling in scores:
        key = way.recipe, way.change, pooling
        best[key] = max(best.get(key, (way, pooling)), (way, pooling), key=value.__getitem__)
    beside_it = [
        (other, pooling)
        for way, pooling in best.values() if way.change in (BOTH, ROW)
        for other, _ in scores if (other.recipe, other.change, other.turned) == (way.recipe, BOTH_WAYS, way.turned)
    ]  # fmt: skip
    return list(dict.fromkeys([*best.values(), *beside_it]))


def rows(
    question: Question, scores: Mapping[tuple[Way, str], NDArray[Any]], about: records.Record, differences: bool = True
) -> Iterator[records.Record]:
    """A row for each way, and one for each that it is held against."""
    found = question.statistic({str(place): each for place, each in enumerate(scores.values())})
    keys = list(scores)
    for place, (way, pooling) in enumerate(keys):
        row: records.Record = {**about, "recipe": way.recipe, "change": way.change, "layers": way.layers}
        row |= {"pooling": pooling, "against": "", **beside(found, [place])}
        yield row
        for other, (theirs, same) in enumerate(keys):
            plain = theirs.change == AS_IT_IS and way.change != AS_IT_IS
            turned = theirs.change == BOTH_WAYS and way.change in (BOTH, ROW) and theirs.turned == way.turned
            if differences and (theirs.recipe, same) == (way.recipe, pooling) and (plain or turned):
                yield {**row, "against": theirs.change, **beside(found, [place], [other], AHEAD)}


def tasks(data: Path, languages: Sequence[str], given: argparse.Namespace) -> Iterator[tuple[Question, Question]]:
    """What ways are chosen on, and what they are shown on."""
    for language in (each for each in given.languages if each in languages):
        yield of_pairs(data, "dev", given.pairs, language), of_pairs(data, "test", given.shown, language)
    if "zh" in languages and given.questions:
        first, second = (of_words(Sets(data).questions(name), name, given.questions) for name in ("SLPWC", "WSD"))
        yield first, second


def measure(model: RealModel, given: argparse.Namespace) -> Iterator[records.Record]:
    """The rows of a model."""
    loaded: dict[str, CausalModule] = {}

    def load(weights: str = "trained") -> CausalModule:
        if weights not in loaded:
            path = str(model.located(given.models_directory))
            own = CausalTransformer(path, model_kwargs={"dtype": given.precision})
            loaded[weights] = own if weights == "trained" else random_weights(own)
        return loaded[weights]

    for first, second in tasks(given.data, model.languages, given):
        directory = given.out / f"{model.name}, {given.precision}"
        module = load()
        layers, massive = depth(module.model), massive_layer(module, first.texts[:BATCH])
        print(f"{time.strftime('%H:%M')} {model.name}, {first.name}: massive layer {massive} of {layers}", flush=True)
        # A word is read by its own tokens, of which a prompt has none.
        readable = {name for name in given.recipes if first.words is None or name != "prompteol"}
        every = [way for way in ways(layers, massive) if way.recipe in readable]
        about: records.Record = {"model": model.name, "precision": given.precision, "massive": str(massive)}
        about |= records.today()
        if given.unchosen:
            some = [way for way in every if way.change in (AS_IT_IS, ROW, OF_WEIGHTS) or way == turned_alone(layers)]
            shared = {**about, "set": second.name, "texts": len(second.texts), "chosen_on": "nothing"}
            for metric, each in scored(directory / second.label, some, load, second).items():
                yield from rows(second, each, {**shared, "metric": metric, "weights": "trained"})
            continue
        tried = scored(directory / first.label, every, load, first)
        for metric, each in tried.items():
            shared = {**about, "set": first.name, "metric": metric, "texts": len(first.texts), "chosen_on": ""}
            yield from rows(first, each, {**shared, "weights": "trained"}, differences=False)
            picks = chosen(first, each)
            for weights in given.weights:
                # Without training there is no sink: what a change does then, it does by itself. One recipe shows it.
                some = list(dict.fromkeys(way for way, _ in picks))
                some = some if weights == "trained" else [way for way in some if way.recipe == "classical"]
                place = directory / (second.label if weights == "trained" else f"{second.label}, random weights")
                shown = scored(place, some, lambda weights=weights: load(weights), second)[metric]  # type: ignore[misc]
                shared |= {"set": second.name, "texts": len(second.texts), "chosen_on": first.name}
                picked = {key: value for key, value in shown.items() if key in picks}
                yield from rows(second, picked, {**shared, "weights": weights})
        print(f"{time.strftime('%H:%M')} {model.name}, {second.name}: shown", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, out="build/sinks")
    own = [each.name for each in MODELS.values() if not each.embedder]
    made.add_argument("--models", nargs="+", choices=own, default=[name for name in own if not MODELS[name].slow])
    made.add_argument("--models-directory", type=Path, default=Path("build/real/models"), help="where models lie")
    made.add_argument("--weights", nargs="+", choices=["trained", "random"], default=["trained", "random"])
    made.add_argument("--unchosen", action="store_true", help="try nothing: show the recipe and what stands beside it")
    made.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    made.add_argument("--languages", nargs="*", choices=["en", "zh"], default=["en", "zh"], help="of pairs")
    made.add_argument("--pairs", type=int, default=200, help="that ways are chosen on")
    made.add_argument("--shown", type=int, default=1000, help="pairs that they are shown on")
    made.add_argument("--questions", type=int, default=300, help="of each set of word senses")
    given = options(made, arguments)
    torch.set_grad_enabled(False)
    for name in given.models:
        records.rewrite("sinks", list(measure(MODELS[name], given)), given.results)


if __name__ == "__main__":
    main()
