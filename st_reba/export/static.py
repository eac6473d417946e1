r"""Static models, which have a vector for each entry of the vocabulary and no language model.

A text's vector is the direction of the whitened, idf-weighted mean of its tokens' vectors,

.. math::
    e = W \Bigl( \frac{\sum_i w_i x_i}{\sum_i w_i} - \mu \Bigr) = \frac{1}{\sum_i w_i} \sum_i w_i W (x_i - \mu).

The model stores :math:`w_i W (x_i - \mu)` for each token. The plain mean of these has the direction of e exactly, as
``Normalize`` removes the factor before the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import embedding_bag, linear, pad
from transformers import PreTrainedTokenizerBase

from ..hub.card import add_static
from ..lm.views import depth
from ..modules import CausalModule, CausalTransformer, IdfWeights, InputEmbeddings, WhiteningTransform
from ..moments import Moments, principal_directions
from ..settings import check_int
from ..text.layout import NOT_TEXT, Layout

#: Batch size for entries of the vocabulary, and for texts.
_BLOCK = 1024

#: Called with the number of finished entries of the vocabulary and of all entries.
Progress = Callable[[int, int], None]


def static_model(
    module: CausalModule,
    texts: Iterable[str],
    *,
    layer: int | None = None,
    dimension: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> SentenceTransformer:
    """Make a static model of a language model, without training.

    Args:
        module: Causal module that runs the whole language model, with a fast tokenizer.
        texts: Plain texts, some hundreds, that the idf weights and the whitening are fitted on.
        layer: Layer whose outputs are the tokens' vectors, from 1. Each entry of the vocabulary is read alone, after
            the special tokens that begin a text. 0 uses the input embeddings, as a bag of input embeddings with
            :class:`IdfWeights` and :class:`WhiteningTransform` does. None: a quarter of the layers.
        dimension: Number k of directions to keep, those of the largest variance of the texts' vectors. None keeps all.
        on_progress: Called after each block of the vocabulary.

    Returns:
        Model of ``StaticEmbedding`` and ``Normalize`` on the CPU, which needs neither st_reba nor the language model,
        and does not truncate texts.

    Raises:
        ValueError: If the tokenizer is not fast, a setting is out of range, or the texts are too few or too similar.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: give an iterable of texts, such as a list or a generator.")
    tokenizer, last = _tokenizer(module), depth(module.model)
    if layer is None:
        # As chosen on STS-B's development set, in English and Chinese.
        layer = max(1, round(last / 4))
    check_int("layer", layer, 0, last, f"give 0 for the input embeddings, or the layer to read after, up to {last}.")
    reader = CausalTransformer(module, output_layer=layer, final_norm=False) if layer else InputEmbeddings(module)
    if dimension is not None:
        check_int("dimension", dimension, 1, reader.get_embedding_dimension())
    texts = list(texts)
    weights = IdfWeights.fit(reader, texts).weights
    vectors = _token_vectors(reader, on_progress)
    whitening = WhiteningTransform.from_moments(_moments(tokenizer, texts, vectors, weights))
    rows = weights[:, None] * linear(vectors - whitening.mean, whitening.weight)
    if dimension is not None:
        # The rows are already centred.
        _, directions = principal_directions(_moments(tokenizer, texts, rows / weights[:, None], weights).covariance)
        rows = rows @ directions[:dimension].mT.to(rows)
    # Entries of the vocabulary without an embedding in the language model get zero vectors.
    missing = tokenizer.get_vocab_size() - len(rows)
    embedding = StaticEmbedding(tokenizer, embedding_weights=pad(rows, (0, 0, 0, max(0, missing))))
    model = SentenceTransformer(modules=[embedding, Normalize()], device="cpu")
    add_static(model, module.model, layer, last, len(texts))
    return model


def _tokenizer(module: CausalModule) -> Tokenizer:
    """Return a copy of a module's tokenizer without truncation and padding."""
    original = cast(PreTrainedTokenizerBase, module.tokenizer)
    if not original.is_fast:
        problem = f"{type(original).__name__} is a slow tokenizer, and sentence-transformers' StaticEmbedding needs"
        raise ValueError(f"{problem} a fast one: use a model that has a tokenizer.json.")
    tokenizer = Tokenizer.from_str(original.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_vectors(reader: CausalModule, on_progress: Progress) -> Tensor:
    """Return the vectors of all entries of the vocabulary, (V, D) in float32 on the CPU."""
    before, size = torch.tensor(reader.layouter.before, dtype=torch.long), reader.lm.vocabulary_size
    blocks = []
    for start in range(0, size, _BLOCK):
        entries = torch.arange(start, min(start + _BLOCK, size))
        ids = torch.cat([before.expand(len(entries), -1), entries[:, None]], dim=1)
        copies = torch.full_like(ids, NOT_TEXT)
        copies[:, -1] = 0
        features = Layout(ids, torch.ones_like(ids, dtype=torch.bool), copies).features()
        with torch.inference_mode():
            blocks.append(reader(features)["token_embeddings"][:, 0].float().cpu())
        on_progress(start + len(entries), size)
    return torch.cat(blocks)


def _moments(tokenizer: Tokenizer, texts: list[str], vectors: Tensor, weights: Tensor) -> Moments:
    """Return mean and covariance of the texts' vectors, the weighted means of their tokens' vectors."""
    moments = Moments(vectors.shape[1])
    for start in range(0, len(texts), _BLOCK):
        encoded = tokenizer.encode_batch(texts[start : start + _BLOCK], add_special_tokens=False)
        ids = [torch.tensor(encoding.ids) for encoding in encoded if encoding.ids]
        if ids:
            flat, lengths = torch.cat(ids), torch.tensor(list(map(len, ids)))
            starts = lengths.cumsum(0) - lengths
            sums = embedding_bag(flat, vectors, starts, mode="sum", per_sample_weights=weights[flat])
            moments.add(sums / embedding_bag(flat, weights[:, None], starts, mode="sum"))
    return moments
