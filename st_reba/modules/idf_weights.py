"""idf-weighted pooling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..lm.backbone import vocabulary_size
from ..text.words import DocumentFrequencies
from .causal_module import CausalModule
from .moments import in_chunks
from .stored import FixedWeights


class IdfWeights(FixedWeights):
    r"""Weighs each token's vector by how few texts have that token, so that ``Pooling("mean")`` is the weighted mean.

    .. math:: e = \frac{\sum_i idf(w_i) \, e_i}{\sum_i idf(w_i)}, \qquad idf(w) = \ln \frac{1 + N}{1 + df(w)} + 1

    over N texts, df(w) of which have the token w. Stands between a module and ST's ``Pooling``, to which it hands the
    sum of the weights as ``token_weights_sum``, as ST's ``WordWeights`` does; that one takes words, this one the token
    ids that the module hands on. Poolings other than the mean do not divide by the sum: do not use them.

    Use :meth:`fit`.

    Args:
        weights: (V,), for each token id; 0 or more.

    Raises:
        ValueError: If they are no vector, or one is below 0.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    SIZES = ("vocabulary_size",)
    config_keys: list[str] = [*SIZES]

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        if weights.ndim != 1 or not len(weights):
            raise ValueError(f"weights is {tuple(weights.shape)}: give (V,), one for each token id.")
        super().__init__(weights=weights)
        if (self.weights < 0).any():
            raise ValueError("A weight is below 0: give 0 or more for each token id.")
        self.vocabulary_size = len(weights)

    @classmethod
    def fit(cls, module: CausalModule, texts: Iterable[str], *, chunk_size: int = 1024) -> IdfWeights:
        """Count in how many texts each token occurs, in one pass; the language model is not run.

        A token that none of the texts has gets the largest weight. Texts without tokens do not count.

        Args:
            module: What it will stand behind: the tokens that it hands on are counted, its template's among them.
            texts: Any iterable of strings, a generator over a file for instance; read once.
            chunk_size: How many texts are tokenised at a time.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, ``chunk_size`` is below 1, or the module hands on one
                token alone.
        """
        if getattr(module, "rows", "all") == "last":
            raise ValueError(
                f'{type(module).__name__} hands on one token alone, rows="last": there is nothing to weigh.'
            )
        frequencies = DocumentFrequencies(vocabulary_size(module.model))
        for chunk in in_chunks(texts, chunk_size):
            layout = module.lay_out(chunk)
            read = module.selected(layout) & (layout.text_lengths > 0)[:, None]
            frequencies.add(read.nonzero()[:, 0], layout.input_ids[read])
        if not frequencies.texts:
            raise ValueError("No texts with tokens were given: it is in them that tokens are counted.")
        return cls(frequencies.idf)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Weigh the tokens.

        Args:
            features: With ``token_embeddings`` (B, n, D), and ``input_ids`` and ``attention_mask`` (B, n) to match.
            **kwargs: Not used.

        Returns:
            The features with the weighted ``token_embeddings``, in the precision that they had, and
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
            # The rounding of the sum scales the mean, and does not turn it.
            "token_weights_sum": weights.sum(dim=1).to(states.dtype),
        }
