"""A module as a multi-vector model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from sentence_transformers.sentence_transformer.modules import Normalize
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..hub import compat
from ..text.words import punctuation_tokens
from .causal_module import CausalModule
from .token_projection import TokenProjection

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

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
        ImportError: If sentence-transformers has no ``MultiVectorEncoder``, as before 6.0.
        ValueError: If the module hands on one vector a text, or a projection cannot be fitted.
    """
    library = compat.multi_vector()
    if getattr(module, "rows", "all") == "last":
        raise ValueError(
            f'{type(module).__name__} hands on one token alone, rows="last", and late interaction needs all: use '
            'rows="all".'
        )
    words = punctuation_tokens(cast(PreTrainedTokenizerBase, module.tokenizer)) if skip_punctuation else []
    mask = library.modules.MultiVectorMask(skiplist_words=words)

    def model(*parts: nn.Module) -> Any:
        made = [*parts, mask]
        return library.MultiVectorEncoder(modules=made, prompts=dict(prompts or {}), device=str(module.model.device))

    def unit() -> list[nn.Module]:
        return [Normalize(module_input_name=_TOKENS)] if normalize else []

    parts: list[nn.Module] = [module, *unit()]
    if dimension is not None:
        projection = TokenProjection.fit(model(*parts), fit_texts, dimension=dimension, batch_size=batch_size)
        parts += [projection.to(module.model.device), *unit()]
    return model(*parts)
