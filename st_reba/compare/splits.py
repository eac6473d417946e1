"""Splits of labelled data into halves: recipes' settings are chosen on one half and scored on the other.

.. math:: s_r = \\frac{1}{|D|} \\sum_{(A, B) \\in D} s_B(c_A), \\qquad c_A = \\arg\\max_c s_A(c)

over the candidates c of recipe r and the directions D of all splits. A bootstrap replicate weighs the items and chooses
anew, so that its spread includes that of choosing.

Items that share a text stay in one half, and are drawn together by the bootstrap. Halves are stratified: by the labels
of two classes, by classes, or by fifths of the scores of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..data.tables import Classes, Labelled, Pairs, Retrieval
from ..evaluation.bootstrap import Array, Indices, Kind, draw_weights, scorer
from ..evaluation.tasks import NO_LABELS, ClassesTask, Task, task_of

#: Number of splits; each has two halves that choose and score in turn.
SPLITS = 5
#: Least number of texts that a filter is fitted on; where a half has fewer, sentences of the package are taken.
LEAST_TEXTS = 50

# Least number of items in a half: of either of two classes, of each class of texts, of anything else.
_OF_EITHER = 8
_OF_CLASS = 5
_OF_HALF = 20
# Least number of groups of items that the bootstrap draws, and the largest share of items that one group may have.
_LEAST_GROUPS = 20
_MOST_SHARED = 0.2
# Number of halvings that are tried for each split where groups of items are of different sizes.
_TRIES = 20


@dataclass(frozen=True)
class Splits:
    """Labelled data, and the halves that choose and score.

    Attributes:
        data: The items in an order of their own, copies once.
        groups: (n,), the group of each item, from 0: items of a group share texts.
        halves: Indices of the items of each half, the two of a split one after the other; one entry, all items, where
            nothing is chosen.
        sure: Whether there are enough groups for intervals.
        notes: Sentences that say what is not done, and why.
    """

    data: Labelled
    groups: Indices
    halves: tuple[Indices, ...]
    sure: bool = True
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Labelled, *, choose: bool = True, seed: int = 0) -> Splits:
        """Split data.

        Args:
            data: Labelled items. Their order changes nothing; a copy of an item counts once.
            choose: Whether anything is to be chosen.
            seed: Seed of the splits.

        Raises:
            ValueError: If the texts have no labels.
        """
        if not isinstance(data, Labelled):
            raise ValueError(NO_LABELS)
        ordered = in_order(data)
        notes = []
        if copies := len(data) - len(ordered):
            notes.append(f"{copies} of {len(data)} {data.noun} are copies of others and count once.")
        groups = groups_of(ordered)
        sizes, every = np.bincount(groups), np.arange(len(ordered))
        if sizes.max() > max(1, _MOST_SHARED * len(ordered)):
            why = f"{sizes.max()} of {len(ordered)} {data.noun} hang together by texts that they share"
            notes.append(f"{why}: nothing is chosen, and there are no intervals. Give {data.noun} of more texts.")
            return cls(ordered, groups, (every,), False, tuple(notes))
        sure = len(sizes) >= _LEAST_GROUPS
        if not sure:
            notes.append(f"There are no intervals: {len(sizes)} groups of {data.noun} that share no text are too few.")
        halves = _halves(ordered, groups, np.random.default_rng(seed)) if choose else ()
        if choose and not halves:
            needs = f"To choose their settings each half needs {_least(data)}: give more {data.noun}."
            notes.append(f"Recipes are compared as they are. {needs}")
        return cls(ordered, groups, halves or (every,), sure, tuple(notes))

    @property
    def chooses(self) -> bool:
        """Whether settings are chosen on halves."""
        return len(self.halves) > 1

    @property
    def directions(self) -> list[tuple[int, int]]:
        """Indices of the half that chooses and of the half that scores."""
        return [(half, half ^ 1) for half in range(len(self.halves))] if self.chooses else [(0, 0)]

    @cached_property
    def tasks(self) -> list[Task]:
        """Task of each half, and of all items; texts in classes have one number of neighbours."""
        parts = [*(self.data.part(half.tolist()) for half in self.halves), self.data]
        tasks = [task_of(part) for part in parts]
        count = min((task.neighbours for task in tasks if isinstance(task, ClassesTask)), default=None)
        return [task_of(part, neighbours=count) for part in parts]

    @cached_property
    def fit_on(self) -> list[tuple[str, ...]]:
        """Texts of each half, and of all items; empty where they are too few, or nothing is chosen."""
        texts = [tuple(task.data.texts()) for task in self.tasks]
        return texts if self.chooses and min(map(len, texts)) >= LEAST_TEXTS else []


def in_order(data: Labelled) -> Labelled:
    """Return the same items in an order that the file's order does not change, each once."""
    places: dict[Any, int] = {}
    for place, key in enumerate(zip(data.items(), _labels(data), strict=True)):
        places.setdefault(key, place)
    part = data.part([places[key] for key in sorted(places)])
    if isinstance(part, Retrieval):
        part = replace(part, documents=dict(sorted(part.documents.items(), key=lambda entry: entry[::-1])))
    return part


def _labels(data: Labelled) -> Sequence[object]:
    """Return labels that distinguish items with the same texts."""
    if isinstance(data, Pairs):
        return data.scores
    if isinstance(data, Retrieval):
        return [tuple(sorted(data.documents[name] for name in data.relevant[query])) for query in data.queries]
    return [""] * len(data)


def groups_of(data: Labelled) -> Indices:
    """Return the group of each item, (n,), from 0: items that share a text, or queries a relevant document."""
    items = data.items()
    if isinstance(data, Retrieval):
        items = [(text, *data.relevant[query]) for query, text in data.queries.items()]
    count, places = len(items), {text: place for place, text in enumerate({text for item in items for text in item})}
    edges = [(index, count + places[text]) for index, item in enumerate(items) for text in item]
    graph = coo_array((np.ones(len(edges)), tuple(np.transpose(edges))), shape=(count + len(places),) * 2)
    connected = connected_components(graph, directed=False)[1][:count]
    # Numbered in the order of the items, whatever the order of the texts.
    _, first, groups = np.unique(connected, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[groups]


def _strata(data: Labelled) -> Indices:
    """Return the stratum of each item, (n,): its class, or the fifth of its score."""
    if isinstance(data, Classes):
        return np.unique(list(data.labels.values()), return_inverse=True)[1]
    if isinstance(data, Pairs):
        scores = np.array(data.scores)
        if data.two_classes:
            return (scores == scores.max()).astype(np.int64)
        return np.argsort(np.argsort(scores, kind="stable")) * 5 // len(scores)
    return np.zeros(len(data), dtype=np.int64)


def _halves(data: Labelled, groups: Indices, generator: np.random.Generator) -> tuple[Indices, ...]:
    """Return the halves of each split; none where they cannot be scored."""
    strata = _strata(data)
    by_group = np.zeros((groups.max() + 1, strata.max() + 1))
    np.add.at(by_group, (groups, strata), 1)
    halves: list[Indices] = []
    for _ in range(SPLITS):
        for _ in range(_TRIES):
            side = _sides(by_group, generator)[groups]
            two = [np.flatnonzero(side == half) for half in (0, 1)]
            if all(_can_be_scored(data, strata, half) for half in two):
                halves += two
                break
        else:
            return ()
    return tuple(halves)


def _sides(by_group: Array, generator: np.random.Generator) -> Indices:
    """Return the half of each group, 0 or 1: the largest groups first, each where its strata have fewer items."""
    order = generator.permutation(len(by_group))
    order = order[np.argsort(-by_group[order].sum(axis=1), kind="stable")]
    # Positive where the second half has fewer.
    balance, sides = np.zeros(by_group.shape[1]), np.zeros(len(by_group), dtype=np.int64)
    coins = generator.integers(2, size=len(by_group))
    for group in order:
        counts = by_group[group]
        lead = float(balance @ counts) or float(balance.sum())
        sides[group] = int(lead > 0) if lead else coins[group]
        balance += counts if sides[group] == 0 else -counts
    return sides


def _can_be_scored(data: Labelled, strata: Indices, half: Indices) -> bool:
    sizes = np.bincount(strata[half], minlength=strata.max() + 1)
    if isinstance(data, Classes):
        return len(sizes) > 1 and sizes.min() >= _OF_CLASS
    if isinstance(data, Pairs) and data.two_classes:
        return len(sizes) > 1 and sizes.min() >= _OF_EITHER
    varied = not isinstance(data, Pairs) or len({data.scores[index] for index in half}) > 1
    return len(half) >= _OF_HALF and varied


def _least(data: Labelled) -> str:
    if isinstance(data, Classes):
        return f"{_OF_CLASS} texts of each class"
    if isinstance(data, Pairs) and data.two_classes:
        return f"{_OF_EITHER} pairs of either kind"
    return f"{_OF_HALF} {data.noun}"


# Scores from these halves

#: Item values of all candidates, (C, n): from what filters are fitted on and the half to score, both as numbers of
#: :class:`CrossFit`.
Values = Callable[[int, int], Array]


@dataclass(frozen=True)
class CrossFitted:
    """Cross-fitted scores of one recipe.

    Attributes:
        score: On the items as they are.
        drawn: On each replicate, (B,).
        chosen: The candidate that each direction chose, in the order of :attr:`.splits.Splits.directions`.
        built: The candidate that is chosen on all items.
        every: Score of each candidate on all items; empty for one candidate.
    """

    score: float
    drawn: Array
    chosen: tuple[int, ...] = (0,)
    built: int = 0
    every: tuple[float, ...] = ()


class CrossFit:
    """Scores recipes on the halves of some items, all on the same bootstrap replicates.

    Args:
        splits: Of the items.
        kind: Statistic of the items' values.
        labels: (n,), where the statistic needs them.

    Attributes:
        whole: Index of all items, after those of the halves, and of filters that are fitted on all of them.
    """

    def __init__(self, splits: Splits, kind: Kind, labels: ArrayLike | None = None) -> None:
        self.splits, self.kind = splits, kind
        self.labels = None if labels is None else np.asarray(labels, dtype=np.float64)
        self.whole = len(splits.halves)
        self._items = [*splits.halves, np.arange(len(splits.data))]
        self._weights = draw_weights(splits.groups)

    def row(self, values: Values, candidates: int = 1, *, fitted: bool = True) -> CrossFitted:
        """Score one recipe.

        Args:
            values: Item values of its candidates, the recipe as it is first.
            candidates: C.
            fitted: Whether the values depend on what filters are fitted on; if not, each half is scored once.
        """
        scores: dict[tuple[int, int], Array] = {}

        def scored(choosing: int, half: int) -> Array:
            key = (choosing if fitted else 0, half)
            if key not in scores:
                scores[key] = self._score(half, values(choosing, half), self._weights)
            return scores[key]

        total, chosen = np.zeros(len(self._weights)), []
        for choosing, scoring in self.splits.directions:
            on_half = scored(choosing, scoring)
            chosen_there: Indices = np.zeros(len(total), dtype=np.int64)
            if candidates > 1:
                chosen_there = _best(scored(choosing, choosing))
            chosen.append(int(chosen_there[0]))
            total += np.take_along_axis(on_half, chosen_there[None], axis=0)[0]
        total /= len(chosen)
        built, every = 0, ()
        if candidates > 1:
            on_all = self._score(self.whole, values(self.whole, self.whole), self._weights[:1])
            built, every = int(_best(on_all)[0]), tuple(on_all[:, 0].tolist())
        return CrossFitted(float(total[0]), total[1:], tuple(chosen), built, every)

    def _score(self, half: int, values: Array, weights: Array) -> Array:
        """Return the scores of (C, n) values of a half, or of all items, under weights (B, n) of all items, (C, B)."""
        items = self._items[half]
        labels = () if self.labels is None else self.labels[items]
        return scorer(self.kind, weights[:, items], labels)(values)


def _best(scores: Array) -> Indices:
    """Return the best candidate of (C, B) scores, (B,); the first of equals."""
    return np.asarray(np.where(np.isnan(scores), -np.inf, scores).argmax(axis=0))
