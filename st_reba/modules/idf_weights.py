"""Pooling with idf weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..moments import in_chunks
from .base import CausalModule
from .stored import FixedWeights


class IdfWeights(FixedWeights):
    r"""Weights each token's vector by its inverse document frequency, so that ``Pooling("mean")`` is the weighted mean.

    .. math:: e = \frac{\sum_i idf(w_i) \, e_i}{\sum_i idf(w_i)}, \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    over N texts, df(w) of which have the token w. It precedes ``Pooling``, to which it gives the sum of the weights as
    ``token_weights_sum``, as sentence-transformers' ``WordWeights`` does for words. Poolings other than the mean do not
    divide by the sum: do not use them.

    Use :meth:`fit`.

    Args:
        weights: (V,), for each token id; 0 or more.

    Raises:
        ValueError: If they are not a vector, or one is below 0.
    """

    SHAPES = {"weights": "V"}
    SIZES = ("vocabulary_size",)
    config_keys: list[str] = [*SIZES]

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__(weights=weights)
        if (self.weights < 0).any():
            raise ValueError("A weight is below 0: give 0 or more for each token id.")
        self.vocabulary_size = len(weights)

    @classmethod
    def fit(cls, module: CausalModule, texts: Iterable[str], *, chunk_size: int = 1024) -> IdfWeights:
        """Count the texts that contain each token, in one pass. The language model does not run.

        A token that is in none of the texts gets the largest weight. Texts without tokens do not count.

        Args:
            module: The module that precedes this one. The tokens that it returns are counted, with those of its
                template.
            texts: Strings, for instance a generator over the lines of a file. They are read once.
            chunk_size: Number of texts that are tokenized at a time.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, ``chunk_size`` is below 1, or the module returns one
                token alone.
        """
        check_returns_all(module, "there is nothing to weigh.")
        total, counts = 0, torch.zeros(module.lm.vocabulary_size, dtype=torch.float64)
        for chunk in in_chunks(texts, chunk_size):
            layout = module.lay_out(chunk)[0]
            counted = module.selected(layout) & ~layout.is_empty[:, None]
            total += int(counted.any(dim=1).sum())
            for ids, of_text in zip(layout.input_ids, counted, strict=True):
                counts[ids[of_text].unique()] += 1
        if not total:
            raise ValueError("No texts with tokens were given: it is in them that tokens are counted.")
        # The smooth form that scikit-learn uses: a token that is in every text has 1.
        return cls(torch.log((1 + total) / (1 + counts)) + 1)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Weight the tokens.

        Args:
            features: With ``token_embeddings`` (B, n, D), and ``input_ids`` and ``attention_mask`` (B, n) to match.
            **kwargs: Ignored.

        Returns:
            The features with the weighted ``token_embeddings``, in the precision of the given ones, and
            ``token_weights_sum`` (B,).

        Raises:
            ValueError: If a token id has no weight.
        """
        states: Tensor = features["token_embeddings"]
        ids: Tensor = features["input_ids"]
        if int(ids.max()) >= self.vocabulary_size:
            raise ValueError(
                f"{type(self).__name__} has weights for {self.vocabulary_size} token ids and was given the id "
                f"{int(ids.max())}: put it right behind the module that it was made for."
            )
        weights = self.weights.float()[ids] * features["attention_mask"]
        wide = torch.promote_types(states.dtype, torch.float32)
        return {
            **features,
            "token_embeddings": (states.to(wide) * weights[..., None]).to(states.dtype),
            # Rounding the sum changes the length of the mean, not its direction.
            "token_weights_sum": weights.sum(dim=1).to(states.dtype),
        }


def check_returns_all(module: CausalModule, consequence: str) -> None:
    """Raise if a module returns the last token alone.

    Raises:
        ValueError: If it does. The message ends in ``consequence``.
    """
    if module.rows == "last":
        raise ValueError(f'{type(module).__name__} returns one token alone, rows="last": {consequence}')
