"""Labelled pairs in two halves that share no text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.tables import Pairs

#: The fewest pairs that recipes are told apart by.
LEAST_PAIRS = 30


def split(pairs: Pairs, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Two halves, near enough, in random order; pairs that have a text in common stay together.

    Args:
        pairs: At least twice :data:`LEAST_PAIRS`.
        seed: Of the shuffle.

    Returns:
        The half to choose on, and the one to report.

    Raises:
        ValueError: If there are too few pairs, or too many of them hang together.
    """
    if len(pairs) < 2 * LEAST_PAIRS:
        raise ValueError(
            f"A search chooses on one half of the pairs and reports on the other: {len(pairs)} pairs are too few, give "
            f"{2 * LEAST_PAIRS} or more."
        )
    generator = np.random.default_rng(seed)
    groups = _groups(pairs)
    halves: tuple[list[int], list[int]] = ([], [])
    for index in generator.permutation(len(groups)):
        min(halves, key=len).extend(groups[index])
    if min(map(len, halves)) < LEAST_PAIRS:
        raise ValueError(
            f"A search needs two halves that share no text, but {max(map(len, groups))} of the {len(pairs)} pairs hang "
            "together by texts that they share. Give pairs of more different texts."
        )
    chosen, reported = (_part(pairs, generator.permutation(half).tolist()) for half in halves)
    return chosen, reported


def _groups(pairs: Pairs) -> list[list[int]]:
    """Indices of pairs that hang together by their texts."""
    above: dict[str, str] = {}

    def root(text: str) -> str:
        while (parent := above.setdefault(text, text)) != text:
            # Halving the path keeps chains short.
            above[text] = above[parent]
            text = parent
        return text

    for first, second in zip(pairs.first, pairs.second, strict=True):
        above[root(first)] = root(second)
    found: dict[str, list[int]] = {}
    for index, first in enumerate(pairs.first):
        found.setdefault(root(first), []).append(index)
    return list(found.values())


def _part(pairs: Pairs, indices: Sequence[int]) -> Pairs:
    return Pairs(
        [pairs.first[index] for index in indices],
        [pairs.second[index] for index in indices],
        [pairs.scores[index] for index in indices],
    )
