"""How much there is to run, in tokens; how fast this machine runs them; and how much memory that takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..lm.backbone import depth
from ..modules import CausalModule, InputEmbeddings
from ..recipes import find

# Two texts, of which one is longer by tokens of text alone.
_SHORT, _LONG = "a", "a b c d e f g h"

#: A speed is measured for about so many seconds, at most.
_MEASURED_SECONDS = 5.0


@dataclass(frozen=True)
class Workload:
    """One way in which texts run through a model.

    Attributes:
        copies: Tokens for each token of a text.
        beside: Tokens besides: a prompt's, but for those that are run once for all texts, and special ones.
        share: Of the layers, how many are run: 1 for all.
        limit: Tokens of a text, at most; None: no limit.
    """

    copies: float
    beside: float
    share: float
    limit: int | None = None

    @classmethod
    def of(cls, module: CausalModule, layers: int) -> Workload:
        """As a module lays its texts out.

        Args:
            module: On any backbone.
            layers: Of the whole backbone.
        """
        if isinstance(module, InputEmbeddings):
            return cls(0, 0, 0)
        tokens, lengths = [], []
        for text in (_SHORT, _LONG):
            layout = module.lay_out([text])
            # What stands before all texts is run once.
            kept = module.prefixes_of(layout, module.rows_per_text) or ()
            tokens.append(int(layout.attention_mask.sum()) - sum(map(len, kept)))
            # Where there are several layouts of a text, each has all of it.
            lengths.append(int(layout.text_lengths[0]))
        more = lengths[1] - lengths[0]
        copies = (tokens[1] - tokens[0]) / more if more else float(module.copies)
        beside = max(0.0, tokens[0] - copies * lengths[0])
        return cls(copies, beside, depth(module.model) / layers, module.max_seq_length)

    def tokens(self, lengths: Sequence[int]) -> float:
        """How many tokens texts of such lengths are; one that runs through half of the layers is half a token."""
        limit = self.limit or max(lengths, default=0)
        return self.share * sum(self.copies * min(length, limit) + self.beside for length in lengths)


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
        """How long it will take."""
        return self.tokens / self.speed

    def __str__(self) -> str:
        plural = "" if self.recipes == 1 else "s"
        return (
            f"{self.recipes} recipe{plural} on {self.texts:,} texts, with controls and timings: "
            f"{_rounded(self.tokens)} tokens at {_rounded(self.speed)} a second here, about {_duration(self.seconds)}. "
            f"Memory: about {self.memory / 1e9:.1f} GB at the peak, of which {self.weights / 1e9:.1f} GB are weights."
        )


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

    # The first one also readies what is made once.
    seconds(ordered[:1])
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
    return weights, int(_overhead(weights) + max(weights, fresh) + states + watched)


def _overhead(weights: int) -> int:
    """What this process holds besides a model's weights; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    if torch.cuda.is_available() or not statm.is_file():
        return 0
    pages = int(statm.read_text().split()[1])
    return max(0, pages * 4096 - weights)


def _rounded(value: float) -> str:
    """To two digits."""
    return f"{float(f'{value:.1e}'):,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
