"""What recipes cost: seconds a text, each run alone, and what a whole comparison will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from ..evaluation import OddOneOutEvaluator
from ..modules import CausalModule
from ..recipes import Recipe, find
from .recipes import Recipes, listed_of, tokens

#: How many batches each recipe is timed on, of how many texts at most, and how often: enough to tell recipes apart, few
#: enough not to wait for.
TIMED_BATCHES = 3
TIMED_TEXTS = 16
TIMED_ROUNDS = 2
#: A first round that takes longer is enough: a moment in which something else ran does not show in it.
TIMED_SECONDS = 5.0

#: How many recipes are run on random weights at most: it takes as long as with the trained ones.
FINALISTS = 3

# A speed is measured for about so many seconds, at most.
_MEASURED_SECONDS = 5.0
# A run of more seconds than these is worth a word on how it takes less.
_LONG = 600.0


def unit_of_cost(pooling: str) -> Recipe:
    """What a cost under this pooling is a multiple of."""
    return replace(find("classical"), pooling=pooling)


def seconds_of(recipes: Recipes, texts: Sequence[str], timed: Sequence[Recipe]) -> dict[str, float]:
    """What each recipe takes for a text like these, run alone, by result: see :func:`costs`.

    The classical embedding is timed under every pooling that there is, compared or not: it is the unit.

    Args:
        recipes: On one model.
        texts: Like those to embed.
        timed: Which of the recipes.
    """
    units = [unit_of_cost(pooling) for pooling in dict.fromkeys(recipe.pooling for recipe in timed)]
    models = {unit.result: unit.model(recipes.backbone) for unit in units}
    models |= {recipe.result: recipes.model(recipe.result) for recipe in timed}
    batches = timed_batches(texts, recipes.batch_size)
    run = [text for batch in batches for text in batch]
    counted = {key: tokens(model[0], run, recipes.backbone) for key, model in models.items()}
    on_cpu = recipes.backbone.model.device.type == "cpu"
    return costs(models, batches, lambda key: recipes.on_progress("Timing", counted[key]), on_cpu=on_cpu)


def costs(
    models: Mapping[str, SentenceTransformer],
    batches: Sequence[list[str]],
    on_model: Callable[[str], None] = lambda name: None,
    *,
    on_cpu: bool = True,
) -> dict[str, float]:
    """Seconds that each model takes for a text, on average over batches.

    On a CPU they are those of the processor, which hardly depend on what else runs there. Elsewhere they are those of
    the clock, and so on Windows, which counts the processor's in ticks of 16 ms: a batch may take none.

    In rounds in which all take turns, in one if that takes long; of each batch the fastest counts.

    Args:
        models: By name.
        batches: As :func:`timed_batches` gives them.
        on_model: Called with a model's name after each of its rounds; one that is not run counts as done.
        on_cpu: Whether the models run there.
    """
    clock = time.process_time if on_cpu and sys.platform != "win32" else time.perf_counter
    fastest = {key: [float("inf")] * len(batches) for key in models}
    begun = time.perf_counter()
    for done in range(TIMED_ROUNDS):
        enough = done and time.perf_counter() - begun > TIMED_SECONDS
        for key, model in models.items():
            for index, batch in enumerate(() if enough else batches):
                start = clock()
                model.encode(batch, batch_size=len(batch), show_progress_bar=False)
                fastest[key][index] = min(fastest[key][index], clock() - start)
            on_model(key)
    texts = sum(map(len, batches))
    return {key: sum(spent) / texts for key, spent in fastest.items()}


def timed_batches(texts: Sequence[str], batch_size: int) -> list[list[str]]:
    """Batches that stand for all of these texts: from the middle of the longest, the middling and the shortest third.

    A batch holds neighbours in length, as ``encode`` makes them, so that as much of it is padding as of the whole. Few
    texts are all taken.
    """
    size = min(batch_size, TIMED_TEXTS)
    ordered = sorted(texts, key=len, reverse=True)
    starts: Sequence[int] = range(0, len(ordered), size)
    if len(starts) > TIMED_BATCHES:
        part = len(ordered) / TIMED_BATCHES
        starts = [int((index + 0.5) * part - size / 2) for index in range(TIMED_BATCHES)]
    return [ordered[start : start + size] for start in starts]


# Before anything runs


@dataclass(frozen=True)
class Forecast:
    """What a comparison will take.

    Attributes:
        recipes: How many, controls left out.
        texts: How many.
        tokens: To run, of all recipes, controls and timings.
        speed: Tokens a second, as measured here.
        weights: Of the model, in bytes.
        memory: In bytes, at the peak.
    """

    recipes: int
    texts: int
    tokens: float
    speed: float
    weights: int
    memory: int

    @property
    def seconds(self) -> float:
        """Of the clock."""
        return self.tokens / self.speed

    def __str__(self) -> str:
        plural = "" if self.recipes == 1 else "s"
        long = " Fewer recipes, or a part of the data, take less." if self.seconds > _LONG else ""
        return (
            f"{self.recipes} recipe{plural} on {self.texts:,} texts, with controls and timings: "
            f"{_rounded(self.tokens)} tokens at {_rounded(self.speed)} a second here, "
            f"about {_duration(self.seconds)}. "
            f"Memory: about {self.memory / 1e9:.1f} GB at the peak, of which {self.weights / 1e9:.1f} GB are weights."
            f"{long}"
        )


def forecast(
    recipes: Recipes, texts: Sequence[str], words: OddOneOutEvaluator | None = None, random: bool = True
) -> Forecast:
    """What a comparison will take, after a moment of measuring.

    Args:
        recipes: What is compared.
        texts: What is embedded, each once.
        words: Word-sense questions, if any are asked.
        random: Whether the best are run on random weights, too; which ones is not known yet: the dearest count.
    """
    lengths = recipes.lengths(texts)
    asked = [recipe for recipe in listed_of(recipes.asked) if not recipe.control]
    copies = max((recipe.copies or 1 for recipe in asked), default=1)
    weights, peak = memory(recipes.backbone, max(lengths), recipes.batch_size, copies, random)
    measured = speed(recipes.backbone, list(zip(lengths, texts, strict=True)), recipes.batch_size)
    return Forecast(len(asked), len(texts), total_tokens(recipes, texts, words, random), measured, weights, peak)


def total_tokens(
    recipes: Recipes, texts: Sequence[str], words: OddOneOutEvaluator | None = None, random: bool = True
) -> float:
    """How many tokens a comparison will report the progress of, about: see :func:`forecast`."""
    sentences = [] if words is None else words.inputs()[0]
    timed = [text for batch in timed_batches(texts, recipes.batch_size) for text in batch]
    found, by_pass, there = 0.0, [], set(texts)
    for run in recipes.passes:
        own = run.tokens(texts)
        if run.words:
            own += run.tokens(sentences)
        # What is embedded anyway is fitted on for nothing.
        for fitted in recipes.fitted_on(run) if not there.issuperset(chain(*recipes.fitted_on(run))) else ():
            own += run.tokens(fitted)
        for recipe in listed_of(run.recipes):
            found += TIMED_ROUNDS * tokens(recipe.build(recipes.backbone), timed, recipes.backbone)
        by_pass.append(own)
    return found + sum(by_pass) + (sum(sorted(by_pass)[-FINALISTS:]) if random else 0)


def speed(backbone: CausalModule, lengths: Sequence[tuple[int, str]], batch_size: int) -> float:
    """Tokens a second in which the classical embedding reads texts like these here.

    Measured on batches of middling length, each four times as large as the one before, until one is as large as they
    will be, or some seconds are over; the best counts. Of a slow model that is one text, and it reads many together
    somewhat faster.

    Args:
        backbone: The loaded model.
        lengths: Texts, each after its number of tokens.
        batch_size: Texts at a time.
    """
    model = find("classical").model(backbone)
    ordered = sorted(lengths)
    largest = min(batch_size, len(ordered))

    def seconds(batch: Sequence[tuple[int, str]]) -> float:
        begun = time.perf_counter()
        model.encode([text for _, text in batch], batch_size=batch_size, show_progress_bar=False)
        return time.perf_counter() - begun

    # The first one also readies what is made once, and weights that lie on the disk: it says nothing of the speed.
    middle = len(ordered) // 2
    seconds(ordered[middle : middle + 1])
    size, best, left = 1, 0.0, _MEASURED_SECONDS
    while True:
        start = (len(ordered) - size) // 2
        batch = ordered[start : start + size]
        spent = seconds(batch)
        best, left = max(best, sum(length for length, _ in batch) / spent), left - spent
        if size == largest or left <= 0:
            return best
        size = min(4 * size, largest)


def memory(backbone: CausalModule, longest: int, batch_size: int, copies: float, random: bool) -> tuple[int, int]:
    """Bytes of a model's weights, and of all at the peak.

    Args:
        backbone: The loaded model.
        longest: Tokens of the longest text.
        batch_size: Texts at a time.
        copies: Of a text, at most.
        random: Whether fresh weights are made, once these are set aside: transformers makes them in float32.
    """
    parameters = list(backbone.model.parameters())
    weights = sum(weight.numel() * weight.itemsize for weight in parameters)
    fresh = 4 * sum(weight.numel() for weight in parameters) if random else 0
    config = backbone.model.config.get_text_config()
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    length = longest * copies
    # States and what attention and the feed-forward layer make of them; the weights of attention that are watched.
    states = batch_size * length * (8 * width + 3 * inner) * parameters[0].itemsize
    watched = 2 * 4 * batch_size * longest * length
    statm = Path("/proc/self/statm")
    beside = 0
    if statm.is_file() and not torch.cuda.is_available():
        # What this process holds besides the weights; 0 where the system does not tell.
        beside = max(0, int(statm.read_text().split()[1]) * 4096 - weights)
    return weights, int(beside + max(weights, fresh) + states + watched)


def _rounded(value: float) -> str:
    """To two digits."""
    return f"{float(f'{value:.1e}'):,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
