"""Labelled data in two halves that share no text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.tables import Labelled

#: The fewest pairs, triplets or queries that recipes are told apart by.
LEAST_PAIRS = 30


def split(data: Labelled, seed: int = 0) -> tuple[Labelled, Labelled]:
    """Two parts of nearly one size, in random order; items that have a text in common stay together.

    The documents of a retrieval task are no items: both halves of its queries are among all of them.

    Args:
        data: At least twice :data:`LEAST_PAIRS`.
        seed: Of the shuffle.

    Returns:
        The half to choose on, and the one to report.

    Raises:
        ValueError: If there are too few items, or too many of them hang together.
    """
    if len(data) < 2 * LEAST_PAIRS:
        raise ValueError(
            f"A search chooses on one half of the {data.noun} and reports on the other: {len(data)} {data.noun} are "
            f"too few, give {2 * LEAST_PAIRS} or more."
        )
    generator = np.random.default_rng(seed)
    groups = _groups(data.items())
    halves: tuple[list[int], list[int]] = ([], [])
    for index in generator.permutation(len(groups)):
        min(halves, key=len).extend(groups[index])
    if min(map(len, halves)) < LEAST_PAIRS:
        raise ValueError(
            f"A search needs two halves that share no text, but {max(map(len, groups))} of the {len(data)} {data.noun} "
            f"hang together by texts that they share. Give {data.noun} of more different texts."
        )
    chosen, reported = (data.part(generator.permutation(half).tolist()) for half in halves)
    return chosen, reported


def _groups(items: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Indices of items that hang together by their texts."""
    above: dict[str, str] = {}

    def root(text: str) -> str:
        while (parent := above.setdefault(text, text)) != text:
            # Halving the path keeps chains short.
            above[text] = above[parent]
            text = parent
        return text

    for first, *others in items:
        for other in others:
            above[root(first)] = root(other)
    found: dict[str, list[int]] = {}
    for index, (first, *_) in enumerate(items):
        found.setdefault(root(first), []).append(index)
    return list(found.values())
