"""A module as a multi-vector model, and a projection of token vectors to fewer dimensions, without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, cast

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase

from ..progress import reading
from ..text.words import punctuation_tokens
from .causal_module import CausalModule
from .embedding_transforms import EmbeddingTransform, check_count, check_rows
from .moments import Moments, in_chunks, principal_directions

#: The dimension of ColBERT's vectors, and of most indices that are made for them.
DIMENSION = 128

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
    r"""The model in which a text is the vectors of its tokens, for search by late interaction.

    A document d scores for a query q the sum, over the tokens of q, of the cosine of the most similar token of d
    (MaxSim; Khattab and Zaharia, 2020, arXiv 2004.12832):

    .. math:: s(q, d) = \sum_i \max_j \cos(q_i, d_j)

    The tokens are those that the module hands on: of Echo and ReBA one for each token of the text, whatever the
    repetitions, and never one of a prompt.

    Args:
        module: What gives tokens their vectors; it shares its weights with what is made.
        dimension: To which vectors are projected, by :class:`TokenProjection`; :data:`DIMENSION` is usual. None: as the
            module has them.
        fit_texts: Plain texts that the projection is fitted on, read once.
        skip_punctuation: Whether a document's tokens that are nothing but punctuation or blanks are left out, as in
            ColBERT. A query keeps them. Not for texts in which marks mean something, such as code.
        normalize: Whether vectors have the length 1, so that their products are cosines.
        prompts: What stands before a ``"query"`` and a ``"document"``, as context: none of its tokens has a vector.
        batch_size: Texts at a time, of ``fit_texts``.

    Returns:
        sentence-transformers' ``MultiVectorEncoder``, on the module's device: ``encode_query``, ``encode_document``,
        ``similarity``, ``save_pretrained``.

    Raises:
        ValueError: If the module hands on one vector a text, or a projection cannot be fitted.
    """
    if getattr(module, "rows", "all") == "last":
        raise ValueError(
            f'{type(module).__name__} hands on one token alone, rows="last", and late interaction needs all: use '
            'rows="all".'
        )
    words = punctuation_tokens(cast(PreTrainedTokenizerBase, module.tokenizer)) if skip_punctuation else []
    mask = MultiVectorMask(skiplist_words=words)

    def model(*parts: nn.Module) -> MultiVectorEncoder:
        made = [*parts, mask]
        return MultiVectorEncoder(modules=made, prompts=dict(prompts or {}), device=str(module.model.device))

    def unit() -> list[nn.Module]:
        return [Normalize(module_input_name=_TOKENS)] if normalize else []

    parts: list[nn.Module] = [module, *unit()]
    if dimension is not None:
        with reading(module, len(fit_texts) if isinstance(fit_texts, Sized) else None):
            projection = TokenProjection.fit(model(*parts), fit_texts, dimension=dimension, batch_size=batch_size)
        parts += [projection.to(module.model.device), *unit()]
    return model(*parts)


class TokenProjection(EmbeddingTransform):
    r"""Gives each token's vector its coordinates in the k principal directions of a collection's token vectors.

    .. math:: e'_i = U_k (e_i - \mu), \qquad \Sigma = U^\top \Lambda U

    with mean :math:`\mu` and covariance :math:`\Sigma` of the vectors of the collection's tokens: what ColBERT's linear
    layer is trained to do, by PCA. A vector of zeros, which is how a text without tokens is embedded, stays one.

    Stands before ``MultiVectorMask`` in a ``MultiVectorEncoder``, between two ``Normalize("token_embeddings")``. Where
    the module in front is ``deterministic``, so is this, which ST's ``Dense`` is not.

    Use :meth:`fit` or :meth:`from_moments`.

    Args:
        mean: (D,).
        directions: (k, D), orthonormal rows.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    MAPPED = _TOKENS

    mean: Tensor
    directions: Tensor

    def __init__(self, mean: Tensor, directions: Tensor) -> None:
        check_rows(mean, directions, "directions", fewest=1)
        super().__init__(mean=mean, directions=directions)
        self.out_features, self.in_features = directions.shape

    @classmethod
    def fit(
        cls, model: Any, texts: Iterable[str], *, dimension: int, chunk_size: int = 1024, **encode_kwargs: Any
    ) -> TokenProjection:
        """Fit on the vectors that a model gives the tokens of texts, in one pass: they are never held together.

        Args:
            model: A ``MultiVectorEncoder`` without a projection, whose ``encode_document`` gives the vectors: those of
                tokens that its mask leaves out do not count.
            texts: Any iterable of strings; no labels are needed. Some hundreds are enough.
            dimension: k, the directions to keep, those of largest variance.
            chunk_size: How many texts are encoded at a time.
            **encode_kwargs: For ``model.encode_document``: ``batch_size``, ``prompt`` and so on.

        Raises:
            ValueError: If ``texts`` is a string or has no tokens, a setting is out of range, or the tokens are too few.
        """
        settings = {"show_progress_bar": False, **encode_kwargs}
        moments = Moments(model.get_embedding_dimension())
        for chunk in in_chunks(texts, chunk_size):
            for vectors in model.encode_document(chunk, **settings):
                moments.add(vectors[vectors.any(dim=1)])
        return cls.from_moments(moments, dimension=dimension)

    @classmethod
    def from_moments(cls, moments: Moments, *, dimension: int) -> TokenProjection:
        """Fit on the mean and covariance of token vectors.

        Args:
            moments: Of token vectors (D,).
            dimension: k, as for :meth:`fit`.

        Raises:
            ValueError: If ``dimension`` is out of range, or there were too few vectors.
        """
        check_count("dimension", dimension, 1, len(moments.mean), "the principal directions to keep")
        if moments.count <= dimension:
            raise ValueError(
                f"{moments.count} tokens vary in at most {max(0, moments.count - 1)} directions, and {dimension} are "
                "to be kept: give more texts, or a lower dimension."
            )
        _, directions = principal_directions(moments.covariance)
        return cls(moments.mean, directions[:dimension])

    def _transform(self, vectors: Tensor) -> Tensor:
        return linear(vectors - self.mean.to(vectors.dtype), self.directions.to(vectors.dtype))
