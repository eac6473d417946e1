"""A search over recipes: template, repetition, change, output layer, pooling and filter.

The choice is made on one half of the data and reported on the other.
"""

from .candidates import Candidate, candidates, searched
from .halving import Found, Rung, rung_sizes, search
from .selection import with_selection
from .splitting import LEAST_PAIRS, split

__all__ = [
    "LEAST_PAIRS",
    "Candidate",
    "Found",
    "Rung",
    "candidates",
    "rung_sizes",
    "search",
    "searched",
    "split",
    "with_selection",
]
