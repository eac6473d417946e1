"""Multi-vector models, and projection of token vectors to fewer dimensions without training."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable, Mapping, Sized
from typing import Any, cast

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase

from ..moments import Moments, fitting_progress, in_chunks, principal_directions
from ..settings import check_int
from .base import CausalModule
from .embedding_transforms import EmbeddingTransform, check_returns_all

_TOKENS = "token_embeddings"


def multi_vector_encoder(
    module: CausalModule,
    *,
    dimension: int | None = None,
    fit_texts: Iterable[str] = (),
    skip_punctuation: bool = True,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    batch_size: int = 32,
) -> MultiVectorEncoder:
    r"""Make a model in which a text has a vector for each token, for search by late interaction.

    The score of a document d for a query q is the sum, over the tokens of q, of the cosine of the most similar token of
    d (MaxSim; Khattab and Zaharia, 2020, arXiv 2004.12832):

    .. math:: s(q, d) = \sum_i \max_j \cos(q_i, d_j)

    The tokens are those that the module returns: with Echo and ReBA one for each token of the text, whatever the
    repetitions, and never one of a prompt.

    Args:
        module: Module that gives tokens their vectors. The model shares its weights.
        dimension: Dimension to which :class:`TokenProjection` projects vectors, such as ColBERT's 128. None: no
            projection.
        fit_texts: Plain texts on which the projection is fitted, read once.
        skip_punctuation: Whether a document's tokens of punctuation or blanks alone are left out, as in ColBERT. A
            query keeps them. Do not use it for texts in which marks have a meaning, such as code.
        normalize: Whether vectors have length 1, so that their products are cosines.
        prompts: Texts that precede a ``"query"`` and a ``"document"`` as context; their tokens have no vectors.
        batch_size: Number of ``fit_texts`` that are encoded at a time.

    Returns:
        sentence-transformers' ``MultiVectorEncoder``, on the module's device.

    Raises:
        ValueError: If the module returns one vector a text, or the projection cannot be fitted.
    """
    check_returns_all(module, 'late interaction needs all of them, so use rows="all".')
    words = punctuation_tokens(module.layouter.tokenizer) if skip_punctuation else []
    mask = MultiVectorMask(skiplist_words=words)

    def model(*parts: nn.Module) -> MultiVectorEncoder:
        device = str(module.model.device)
        return MultiVectorEncoder(modules=[*parts, mask], prompts=dict(prompts or {}), device=device)

    def unit() -> list[nn.Module]:
        return [Normalize(module_input_name=_TOKENS)] if normalize else []

    parts: list[nn.Module] = [module, *unit()]
    if dimension is not None:
        with fitting_progress(module, len(fit_texts) if isinstance(fit_texts, Sized) else None):
            projection = TokenProjection.fit(model(*parts), fit_texts, dimension=dimension, batch_size=batch_size)
        parts += [projection.to(module.model.device), *unit()]
    return model(*parts)


class TokenProjection(EmbeddingTransform):
    r"""Projects each token's vector onto the k principal directions of a collection's token vectors.

    .. math:: e'_i = U_k (e_i - \mu), \qquad \Sigma = U^\top \Lambda U

    with mean :math:`\mu` and covariance :math:`\Sigma` of the vectors of the collection's tokens. ColBERT trains a
    linear layer for this. A zero vector, as of a text without tokens, remains one.

    It precedes ``MultiVectorMask`` in a ``MultiVectorEncoder``, between two ``Normalize("token_embeddings")``. Unlike
    ``Dense``, it is deterministic if the first module is.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (k, D), orthonormal rows.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    SHAPES = {"mean": "D", "directions": "kD"}
    MAPPED = _TOKENS

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        super().__init__(mean=mean, directions=directions)

    @classmethod
    def fit(cls, model: Any, texts: Iterable[str], *, dimension: int, **encode_kwargs: Any) -> TokenProjection:
        """Fit on the vectors that a model gives the tokens of texts. They are never in memory together.

        Args:
            model: ``MultiVectorEncoder`` without a projection, whose ``encode_document`` gives the vectors. Tokens that
                its mask leaves out do not count.
            texts: Strings; no labels are needed. Some hundreds are enough.
            dimension: Number of directions to keep, k, those of largest variance.
            **encode_kwargs: Arguments of ``model.encode_document``, such as ``batch_size`` and ``prompt``.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, a setting is out of range, or the tokens are too few.
        """
        settings = {"show_progress_bar": False, **encode_kwargs}
        moments = Moments(model.get_embedding_dimension())
        for chunk in in_chunks(texts):
            for vectors in model.encode_document(chunk, **settings):
                moments.add(vectors[vectors.any(dim=1)])
        return cls.from_moments(moments, dimension=dimension)

    @classmethod
    def from_moments(cls, moments: Moments, *, dimension: int) -> TokenProjection:
        """Fit on mean and covariance of token vectors.

        Args:
            moments: Moments of token vectors (D,).
            dimension: Number of directions to keep, k.

        Raises:
            ValueError: If ``dimension`` is out of range, or there were too few vectors.
        """
        check_int("dimension", dimension, 1, len(moments.mean))
        if moments.count <= dimension:
            raise ValueError(f"{moments.count} tokens are too few for {dimension} directions: give more texts.")
        _, directions = principal_directions(moments.covariance)
        return cls(moments.mean, directions[:dimension])

    def _transform(self, vectors: Tensor) -> Tensor:
        return linear(vectors - self.mean.to(vectors.dtype), self.directions.to(vectors.dtype))


def punctuation_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens of punctuation and blanks alone, as the vocabulary writes them, in the order of their ids.

    These include ``" ("``, ``"),"`` and ``"..."``, which many tokenizers have as one token. Punctuation is Unicode's of
    any language, and :data:`string.punctuation`, such as ``"$"``.
    """
    special = set(tokenizer.all_special_ids)
    ids = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    texts = tokenizer.batch_decode([[token] for token in ids])
    marks = [token for token, text in zip(ids, texts, strict=True) if all(map(_is_mark_or_blank, text))]
    return cast("list[str]", tokenizer.convert_ids_to_tokens(marks))


def _is_mark_or_blank(character: str) -> bool:
    return character.isspace() or character in string.punctuation or unicodedata.category(character).startswith("P")
