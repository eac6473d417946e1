"""How embeddings lie in space: what can be measured without labels (JTCSE, section V.A; Wang & Isola, 2020)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.tables import LEAST_TEXTS
from .evaluator import TabulatedEvaluator

Array = NDArray[np.float64]

# A Chinese character or kana, or a run of anything else without spaces; with the spaces before it.
_HAN = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNIT = re.compile(rf"\s*(?:[{_HAN}]|[^\s{_HAN}]+)")
_UNITS_A_CUT = 10

# Rows of the matrix of all pairs at a time.
_ROWS = 256


class EmbeddingGeometryEvaluator(TabulatedEvaluator):
    r"""Alignment, uniformity and anisotropy of the embeddings of plain texts. All three are better when lower.

    .. math::
        \mathrm{alignment} = \mathbb{E}_x \lVert f(x) - f(x^+) \rVert^2, \qquad
        \mathrm{uniformity} = \log \mathbb{E}_{x \ne y} e^{-t \lVert f(x) - f(y) \rVert^2}, \qquad
        \mathrm{anisotropy} = \mathbb{E}_{x \ne y} f(x) \cdot f(y)

    for embeddings f of length 1 (JTCSE, Equations 16 and 17, in the form of Wang & Isola, whose t = 2 is the default).
    Expectations over x and y run over all N (N - 1) / 2 pairs of different texts; nothing is sampled.

    A positive :math:`x^+` is the text with one unit in ten left out, at least one, evenly spread: see :func:`perturb`.

    The primary metric weighs the first two as InfoNCE at temperature 1 / (2 t) does: ``contrastive_loss`` is
    t alignment + uniformity.

    These are proxies. They say whether a small change of the text moves its embedding little and whether different
    texts are kept apart, and nothing about meaning: a bag of words does well on them, and leaving words out is kind to
    whatever ignores their order. Trust labels where there are any.

    Args:
        texts: What is embedded. Each counts once; those of fewer than two characters have no positive and are left out.
        t: Of the uniformity, greater than 0.
        name: Prefix of the metrics.
        batch_size: Texts at a time.
        show_progress_bar: As in ``model.encode``.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.

    Raises:
        ValueError: If fewer than three texts remain, or t is not greater than 0.
    """

    metric = "contrastive_loss"
    file = "embedding_geometry"

    def __init__(
        self,
        texts: Sequence[str],
        *,
        t: float = 2.0,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, write_csv=write_csv)
        #: The N texts that are embedded, and the positive of each.
        self.texts = [text for text in dict.fromkeys(texts) if len(text.strip()) > 1]
        if len(self.texts) < LEAST_TEXTS:
            raise ValueError(
                f"EmbeddingGeometryEvaluator needs {LEAST_TEXTS} different texts of two characters or more, but "
                f"{len(self.texts)} of the {len(texts)} given are."
            )
        if not 0 < t < math.inf:
            raise ValueError(f"t={t!r}: give a number greater than 0; 2 is usual.")
        self.positives = [perturb(text) for text in self.texts]
        self.t = t
        self.show_progress_bar = show_progress_bar
        self.greater_is_better = False

    def metrics_of(self, model: Any) -> dict[str, float]:
        embeddings = model.encode(
            [*self.texts, *self.positives], batch_size=self.batch_size, show_progress_bar=self.show_progress_bar
        )
        return self.score(embeddings[: len(self.texts)], embeddings[len(self.texts) :])

    @property
    def pairs(self) -> int:
        """How many pairs of different texts uniformity and anisotropy look at."""
        return len(self.texts) * (len(self.texts) - 1) // 2

    def score(self, embeddings: np.ndarray, positives: np.ndarray) -> dict[str, float]:
        """The metrics of given embeddings, (N, D) each, of ``texts`` and ``positives``."""
        return {metric: float(shares.mean()) for metric, shares in self.shares(embeddings, positives).items()}

    def shares(self, embeddings: np.ndarray, positives: np.ndarray) -> dict[str, Array]:
        """For each metric (N,), what each text contributes: their mean is the metric, and they can be resampled.

        Args:
            embeddings: (N, D), of ``texts``; of any length, they are normalised here.
            positives: (N, D), of ``positives``.

        Raises:
            ValueError: If the embeddings have another shape, or are not finite.
        """
        for given in (embeddings, positives):
            if np.ndim(given) != 2 or len(given) != len(self.texts):
                raise ValueError(f"({len(self.texts)}, D) embeddings are scored, not {np.shape(given)}.")
        aligned = alignment(embeddings, positives)
        uniform = uniformity(embeddings, self.t)
        return {
            "contrastive_loss": self.t * aligned + uniform,
            "alignment": aligned,
            "uniformity": uniform,
            "anisotropy": anisotropy(embeddings),
        }

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        return {"t": self.t}


def perturb(text: str) -> str:
    """A text with one unit in ten left out, at least one, evenly spread and the same each time.

    A unit is a Chinese character or kana, or what stands between spaces; a character where there is only one such unit.
    The gaps lie all over the text because of what a causal model makes of it: the states before a gap do not change at
    all, so that a text cut at its end would be aligned for nothing under mean pooling, and one cut at its start under
    last-token pooling.

    Raises:
        ValueError: If the text has fewer than two characters.
    """
    units = _UNIT.findall(text.strip())
    if len(units) < 2:
        units = list(text.strip())
    if len(units) < 2:
        raise ValueError(f"{text!r} has fewer than two characters, so nothing can be left out of it.")
    gaps = math.ceil(len(units) / _UNITS_A_CUT)
    left_out = {int((gap + 0.5) * len(units) / gaps) for gap in range(gaps)}
    return "".join(unit for index, unit in enumerate(units) if index not in left_out).strip()


def alignment(embeddings: np.ndarray, positives: np.ndarray) -> Array:
    """(N,): the squared distance of each embedding to its positive's, both of length 1; (N, D) each."""
    return ((unit_vectors(embeddings) - unit_vectors(positives)) ** 2).sum(axis=1)


def uniformity(embeddings: np.ndarray, t: float = 2.0) -> Array:
    """(N,): what each embedding contributes to the log of the mean Gaussian potential of all pairs.

    The time grows with the square of N: a second or so for ten thousand embeddings.

    Args:
        embeddings: (N, D), at least three; of any length, they are normalised here.
        t: Greater than 0.
    """
    unit = unit_vectors(embeddings)
    squares = (unit**2).sum(axis=1)
    means = np.empty(len(unit))
    for start in range(0, len(unit), _ROWS):
        rows = slice(start, start + _ROWS)
        potentials = np.exp(-t * (squares[rows, None] + squares - 2 * unit[rows] @ unit.T))
        np.fill_diagonal(potentials[:, rows], 0)
        means[rows] = potentials.sum(axis=1) / (len(unit) - 1)
    mean = means.mean()
    return np.log(mean) + (_pair_shares(means) - mean) / mean


def anisotropy(embeddings: np.ndarray) -> Array:
    """(N,): what each embedding contributes to the mean cosine of all pairs; (N, D), at least three."""
    unit = unit_vectors(embeddings)
    return _pair_shares((unit @ unit.sum(axis=0) - (unit**2).sum(axis=1)) / (len(unit) - 1))


def _pair_shares(means: Array) -> Array:
    """What each of N items contributes to a mean over pairs, from its mean over the pairs that it is in.

    These are the jackknife's pseudo-values. Their mean is the mean over pairs, and over resamples it varies as the mean
    over pairs does from sample to sample. The means themselves would vary half as much, each pair having two items.
    """
    count = len(means)
    mean = means.mean()
    return mean + 2 * (count - 1) / (count - 2) * (means - mean)


def unit_vectors(embeddings: np.ndarray, called: str = "embeddings") -> Array:
    """(..., D), of length 1; zero vectors stay.

    Raises:
        ValueError: If some are not finite, by what they are called.
    """
    vectors = np.asarray(embeddings, dtype=np.float64)
    if not np.isfinite(vectors).all():
        raise ValueError(f"Some {called} are not finite. Half precision may have overflowed: use float32 or bfloat16.")
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)
