"""Attention that hooks can watch and change, and the hooks that do."""

from .function import ATTENTION, register
from .hooks import Bidirectional, ExtraKey, HideFirstToken, MeanWeights, RunningMaximum
from .kernels import LogWeights, one_each

__all__ = [
    "ATTENTION",
    "Bidirectional",
    "ExtraKey",
    "HideFirstToken",
    "LogWeights",
    "MeanWeights",
    "RunningMaximum",
    "one_each",
    "register",
]
