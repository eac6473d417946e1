"""The fastest precision, and whether a model says the same in another one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sentence_transformers.util import cos_sim
from torch import Tensor

from ..compare.sweep import RecipeSweep
from ..modules import CausalModule

#: Texts that precisions are held against each other on.
SAMPLE = 24
#: Two precisions agree where the cosines of one are in the order of those of the other, up to so much.
AGREED = 0.99
#: Units of processors that multiply bfloat16, as PyTorch names them.
_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")


def fastest_on_cpu() -> torch.dtype:
    """bfloat16 where this processor multiplies it in units of its own, else float32.

    PyTorch releases that do not tell what a processor has count as one without them.
    """
    told: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if any(told.get(unit) for unit in _BFLOAT16_UNITS) else torch.float32


def sampled(texts: Sequence[str]) -> list[str]:
    """A few texts, evenly drawn."""
    return list(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])


def cosines(backbone: CausalModule, texts: Sequence[str]) -> NDArray[np.float32]:
    """Those of all pairs of T texts under the classical embedding, by mean and by last token: (2, T (T - 1) / 2)."""
    vectors = RecipeSweep(backbone, repetitions=1).encode(texts)
    return np.concatenate([pairwise_cosines(own) for (recipe, _), own in vectors.items() if recipe == "Classical"])


def pairwise_cosines(vectors: Tensor) -> NDArray[np.float32]:
    """Those of all pairs of T vectors (T, D): (1, T (T - 1) / 2)."""
    pairs = torch.triu_indices(len(vectors), len(vectors), offset=1)
    found: NDArray[np.float32] = cos_sim(vectors, vectors)[pairs[0], pairs[1]].float().cpu().numpy()[None]
    return found


def agreement(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """How alike two precisions order the same pairs: the lower of the two rank correlations; 1 is the same order."""
    with warnings.catch_warnings():
        # Where all cosines are one number there is no order: they do not agree.
        warnings.simplefilter("ignore")
        found = [spearmanr(own, other).statistic for own, other in zip(first, second, strict=True)]
    return float(np.nan_to_num(found).min())
