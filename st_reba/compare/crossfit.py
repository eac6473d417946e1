"""One score a recipe: its free parts are chosen on one half of the items and scored on the other, and averaged.

.. math:: s_r = \\frac{1}{|D|} \\sum_{(A, B) \\in D} s_B(c_A), \\qquad c_A = \\arg\\max_c s_A(c)

over the candidates c of recipe r and the directions D of all splits. A bootstrap replicate weighs the items and chooses
anew, so that its spread includes that of choosing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..evaluation.bootstrap import EXACT, Array, Indices, Kind, draw_weights, scorer
from .splits import Splits

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
    """

    score: float
    drawn: Array
    chosen: tuple[int, ...] = (0,)
    built: int = 0


class CrossFit:
    """Scores recipes on the halves of some items, all on the same bootstrap replicates.

    Args:
        splits: Of the items.
        kind: Statistic of the items' values.
        labels: (n,), where the statistic needs them.

    Attributes:
        whole: Number that stands for all items in place of a half, and for filters that are fitted on all of them.
    """

    def __init__(self, splits: Splits, kind: Kind, labels: ArrayLike | None = None) -> None:
        self.splits, self.kind = splits, kind
        self.labels = None if labels is None else np.asarray(labels, dtype=np.float64)
        self.whole = len(splits.halves)
        self._weights = draw_weights(splits.groups)
        self._scorers: dict[int, Callable[[Array], Array]] = {}

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
                scores[key] = self._score(half, values(choosing, half))
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
        built = 0
        if candidates > 1:
            on_all = scorer(self.kind, self._weights[:1], () if self.labels is None else self.labels)
            built = int(_best(on_all(values(self.whole, self.whole)))[0])
        return CrossFitted(float(total[0]), total[1:], tuple(chosen), built)

    def _score(self, half: int, values: Array) -> Array:
        """Return the scores of (C, n) values of a half, (C, 1 + B)."""
        if half not in self._scorers:
            items = self.splits.halves[half]
            labels = () if self.labels is None else self.labels[items]
            prepared = scorer(self.kind, self._weights[:, items], labels)
            # The weights of many items are too large to be kept for each half.
            if self._weights.shape[1] > EXACT:
                return prepared(values)
            self._scorers[half] = prepared
        return self._scorers[half](values)


def _best(scores: Array) -> Indices:
    """Return the best candidate of (C, B) scores, (B,); the first of equals."""
    return np.asarray(np.where(np.isnan(scores), -np.inf, scores).argmax(axis=0))
