"""Cost of recipes: seconds a text, each run alone, and the forecast of a whole comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..evaluation import OddOneOutEvaluator
from ..modules import CausalModule
from ..recipes import Recipe
from .recipes import ModulePass, Recipes, classical, listed_of, raise_if_fatal, tokens
from .results import measured

#: Number of texts, at most, that each recipe is timed on, and how often: enough to tell recipes apart within a tenth,
#: few enough to take a small part of a comparison.
TIMED_TEXTS = 16
TIMED_ROUNDS = 2
#: No second round follows a first one of more seconds: a moment in which something else ran does not show in it.
TIMED_SECONDS = 5.0

#: Number of recipes that are run on random weights, at most: it takes as long as with the trained ones.
FINALISTS = 3

# A speed is measured for so many seconds, at most.
_MEASURED_SECONDS = 2.0
# Runs of more seconds get a hint on how to take less.
_LONG = 600.0


def seconds_of(recipes: Recipes, texts: Sequence[str], timed: Sequence[Recipe]) -> dict[str, float]:
    """Return the seconds a text that each recipe takes, run alone, by result; a recipe that fails has none.

    On a CPU they are seconds of the processor, which hardly depend on what else runs there. Elsewhere they are seconds
    of the clock, and so on Windows, which counts the processor's in ticks of 16 ms: a batch may take none.

    All take turns in each round, and the fastest round counts. The classical embedding is timed under every pooling,
    compared or not: it is the unit.

    Args:
        recipes: Recipes on one model.
        texts: Texts like those to embed.
        timed: The recipes to time.
    """
    units = [classical(pooling) for pooling in dict.fromkeys(recipe.pooling for recipe in timed)]
    on_cpu = recipes.backbone.model.device.type == "cpu"
    clock = time.process_time if on_cpu and sys.platform != "win32" else time.perf_counter
    batch = timed_batch(texts, TIMED_TEXTS if on_cpu else recipes.batch_size)
    models, fastest = {}, dict[str, float]()
    for recipe in [*units, *timed]:
        try:
            models[recipe.result] = recipes.model(recipe), tokens(recipes.modules.of(recipe), batch, recipes.backbone)
        except Exception as error:
            raise_if_fatal(error)
    begun = time.perf_counter()
    for done in range(TIMED_ROUNDS):
        enough = done > 0 and time.perf_counter() - begun > TIMED_SECONDS
        for key, (model, count) in list(models.items()):
            if not enough:
                try:
                    start = clock()
                    model.encode(batch, batch_size=len(batch), show_progress_bar=False)
                    fastest[key] = min(fastest.get(key, float("inf")), clock() - start)
                except Exception as error:
                    raise_if_fatal(error)
                    del models[key]
            recipes.on_progress("Timing", count)
    return {key: fastest[key] / len(batch) for key in models}


def timed_batch(texts: Sequence[str], size: int) -> list[str]:
    """Return texts of neighbouring lengths, around the mean length of all.

    A recipe's time is nearly linear in the length of texts. As in ``encode``, little of the batch is padding.
    """
    ordered = sorted(texts, key=len, reverse=True)
    mean = sum(map(len, ordered)) / len(ordered)
    longer = sum(len(text) > mean for text in ordered)
    start = max(0, min(longer - size // 2, len(ordered) - size))
    return ordered[start : start + size]


# Before anything runs


@dataclass(frozen=True)
class Forecast:
    """Time and memory that a comparison will take.

    Attributes:
        recipes: Number of recipes, controls left out.
        texts: Number of texts.
        tokens: Number of tokens to run, of all recipes, controls and timings.
        speed: Tokens a second of the clock, as measured here, while other programs may run.
        weights: Bytes of the model.
        memory: Bytes at the peak.
        processor_seconds: Seconds of the processor, on all its cores together.
    """

    recipes: int
    texts: int
    tokens: float
    speed: float
    weights: int
    memory: int
    processor_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the clock."""
        return self.tokens / self.speed

    def __str__(self) -> str:
        plural = "" if self.recipes == 1 else "s"
        long = " Fewer recipes, or a part of the data, take less." if self.seconds > _LONG else ""
        return (
            f"{self.recipes} recipe{plural} on {self.texts:,} texts, with timings and any controls: "
            f"{measured(self.tokens)} tokens at {measured(self.speed)} a second here, "
            f"about {_duration(self.seconds)}, of the processor's time {_duration(self.processor_seconds)}. "
            f"Memory: about {self.memory / 1e9:.1f} GB at the peak, of which {self.weights / 1e9:.1f} GB are weights."
            f"{long}"
        )


def forecast(
    recipes: Recipes, texts: Sequence[str], words: OddOneOutEvaluator | None = None, random: bool = True
) -> Forecast:
    """Return what a comparison will take, after a moment of measuring.

    Args:
        recipes: Recipes to compare.
        texts: Texts to embed, each once.
        words: Word-sense questions, if any are asked.
        random: Whether the best are run on random weights, too.
    """
    asked = [recipe for recipe in listed_of(recipes.asked) if not recipe.control]
    copies = max((recipe.copies or 1 for recipe in asked), default=1)
    weights, peak = memory(recipes.backbone, max(recipes.lengths(texts)), recipes.batch_size, copies, random)
    total, (clock, processor) = total_tokens(recipes, texts, words, random), speed(recipes, texts)
    return Forecast(len(asked), len(texts), total, clock, weights, peak, total / processor)


def total_tokens(
    recipes: Recipes, texts: Sequence[str], words: OddOneOutEvaluator | None = None, random: bool = True
) -> float:
    """Return the number of tokens that a comparison will report the progress of, about.

    It is not known yet which recipes are run on random weights: the dearest count.
    """
    sentences = [] if words is None else words.inputs()[0]
    timed = timed_batch(texts, TIMED_TEXTS)
    total, by_row, embedded = 0.0, dict[str, float](), set(texts)
    for run in recipes.passes:
        fitted = recipes.texts_to_fit(run.recipes)
        # Filters reuse embeddings of the texts that are compared.
        count = run.tokens(texts) + (0.0 if embedded.issuperset(fitted) else run.tokens(fitted))
        total += count + TIMED_ROUNDS * len(listed_of(run.recipes)) * run.tokens(timed)
        for recipe in run.recipes:
            row = recipe.candidate_of or recipe.result
            by_row[row] = max(by_row.get(row, 0.0), count)
    total += sum(tokens(recipes.modules.of(recipe), sentences, recipes.backbone) for recipe in recipes.with_words)
    return total + (sum(sorted(by_row.values())[-FINALISTS:]) if random else 0)


def speed(recipes: Recipes, texts: Sequence[str]) -> tuple[float, float]:
    """Return the tokens that run in a second of the clock, and in one of the processor, on texts like these here.

    They are measured in a pass of middling cost.

    Args:
        recipes: Recipes to compare.
        texts: Texts to embed.
    """
    ordered = sorted(texts, key=len)
    counts = {run: run.tokens(ordered) for run in recipes.passes}
    passes = sorted((run for run in counts if counts[run]), key=lambda run: counts[run])
    for run in sorted(passes, key=lambda run: abs(passes.index(run) - len(passes) // 2)):
        try:
            return _speed_of(run, ordered, recipes.batch_size)
        except Exception as error:
            raise_if_fatal(error)
    return 1.0, 1.0


def _speed_of(run: ModulePass, ordered: Sequence[str], batch_size: int) -> tuple[float, float]:
    """Measure one pass on real batches of several lengths; on smaller ones if the model is slow."""
    spent: list[tuple[float, float, float]] = []
    size = 1
    # The first run readies what is made once, and weights on the disk. The second gives the size of the others.
    for number, place in enumerate((0.5, 0.5, 0.5, 0.25, 0.75, 0.1, 0.9)):
        if number > 2 and sum(clock for _, clock, _ in spent[2:]) >= _MEASURED_SECONDS:
            break
        start = int(place * (len(ordered) - size))
        batch = ordered[start : start + size]
        clock, processor = time.perf_counter(), time.process_time()
        run.encode(batch, None, batch_size)
        spent.append((run.tokens(batch), time.perf_counter() - clock, time.process_time() - processor))
        if number == 1:
            size = max(1, min(batch_size, len(ordered), int(_MEASURED_SECONDS / max(spent[1][1], 1e-9))))
    counted, clock, processor = map(sum, zip(*spent[2:], strict=True))
    return counted / max(clock, 1e-9), counted / max(processor, 1e-9)


def memory(backbone: CausalModule, longest: int, batch_size: int, copies: float, random: bool) -> tuple[int, int]:
    """Return the bytes of a model's weights, and of all at the peak.

    Args:
        backbone: The loaded model.
        longest: Number of tokens of the longest text.
        batch_size: Number of texts at a time.
        copies: Number of copies of a text, at most.
        random: Whether fresh weights are made while these are set aside: transformers makes them in float32.
    """
    parameters = list(backbone.model.parameters())
    weights = sum(weight.numel() * weight.itemsize for weight in parameters)
    fresh = 4 * sum(weight.numel() for weight in parameters) if random else 0
    config = backbone.model.config.get_text_config()
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    length = longest * copies
    # States, what attention and the feed-forward layer make of them, and observed attention weights.
    states = batch_size * length * (8 * width + 3 * inner) * parameters[0].itemsize
    observed = 2 * 4 * batch_size * longest * length
    statm = Path("/proc/self/statm")
    other = 0
    if statm.is_file() and not torch.cuda.is_available():
        # Memory of this process apart from the weights; 0 where the system has no such file.
        other = max(0, int(statm.read_text().split()[1]) * 4096 - weights)
    return weights, int(other + max(weights, fresh) + states + observed)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"
