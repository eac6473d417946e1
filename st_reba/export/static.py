r"""A static model: a vector for each entry of the vocabulary, and no language model any more.

A text's vector is the direction of the whitened, idf-weighted mean of its tokens' vectors,

.. math::
    e = W \Bigl( \frac{\sum_i w_i x_i}{\sum_i w_i} - \mu \Bigr) = \frac{1}{\sum_i w_i} \sum_i w_i W (x_i - \mu),

so that :math:`w_i W (x_i - \mu)` can be kept for each token, and the plain mean of these has the direction of e
exactly: what stands before the sum is a length, which ``Normalize`` takes away.
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
from ..lm import backbone
from ..modules import CausalModule
from ..modules.causal_transformer import CausalTransformer, InputEmbeddings
from ..modules.embedding_transforms import WhiteningTransform, check_count
from ..modules.idf_weights import IdfWeights
from ..modules.moments import Moments, principal_directions
from ..text.layout import NOT_TEXT, Layout
from ..text.tokens import special_tokens

#: Entries of the vocabulary that the language model reads at a time, and texts that are summed at a time.
_BLOCK = 1024

#: Told how many entries of the vocabulary have been read, and of how many.
Progress = Callable[[int, int], None]


def usual_layer(module: CausalModule) -> int:
    """A quarter of a model's layers: chosen on STS-B's development part, English on SmolLM2, Chinese on Gemma 3."""
    return max(1, round(backbone.depth(module.model) / 4))


def static_model(
    module: CausalModule,
    texts: Iterable[str],
    *,
    layer: int | None = None,
    dimension: int | None = None,
    vectors: Tensor | None = None,
    on_progress: Progress = lambda done, total: None,
) -> SentenceTransformer:
    """Make one of a language model, without training.

    Args:
        module: Any causal module that runs the whole language model, with a fast tokenizer.
        texts: Plain texts that the idf weights and the whitening are fitted on, some hundreds; read once.
        layer: After which layer the vectors of tokens are read, counted from 1: each entry of the vocabulary alone,
            behind what the tokenizer puts before a text. 0: the input embeddings, so that the model is that of the bag
            of input embeddings behind :class:`IdfWeights` and :class:`WhiteningTransform`. None: :func:`usual_layer`.
        dimension: k, the directions to keep, those in which the vectors of the texts vary most. None: as many as the
            language model has.
        vectors: What :func:`token_vectors` has read after this layer, which takes longest; read anew if None.
        on_progress: Told after each block of the vocabulary.

    Returns:
        sentence-transformers' ``StaticEmbedding`` and ``Normalize``, on the CPU: a model that needs neither st_reba nor
        the language model. Texts are read whole, however long.

    Raises:
        ValueError: If the tokenizer is not a fast one, a setting is out of range, or the texts are too few or too much
            alike.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: give an iterable of texts, such as a list or a generator.")
    tokenizer = _tokenizer(module)
    layer = usual_layer(module) if layer is None else layer
    reader = _reader(module, layer)
    check_count("dimension", dimension, 1, reader.get_embedding_dimension(), "the directions to keep")
    texts = list(texts)
    weights = IdfWeights.fit(reader, texts).weights
    if vectors is None:
        vectors = token_vectors(module, layer, on_progress)
    whitening = WhiteningTransform.from_moments(_moments(tokenizer, texts, vectors, weights))
    rows = weights[:, None] * linear(vectors - whitening.mean, whitening.weight)
    if dimension is not None:
        # Already centred, and divided by the sum of the weights again.
        _, directions = principal_directions(_moments(tokenizer, texts, rows / weights[:, None], weights).covariance)
        rows = rows @ directions[:dimension].mT.to(rows)
    # Entries that were added to the vocabulary after the language model was made mean nothing to it.
    missing = tokenizer.get_vocab_size() - len(rows)
    embedding = StaticEmbedding(tokenizer, embedding_weights=pad(rows, (0, 0, 0, max(0, missing))))
    model = SentenceTransformer(modules=[embedding, Normalize()], device="cpu")
    add_static(model, module.model, layer, backbone.depth(module.model), len(texts))
    return model


def _tokenizer(module: CausalModule) -> Tokenizer:
    """A copy of a module's own, as it tokenises a text without special tokens, whole."""
    given = cast(PreTrainedTokenizerBase, module.tokenizer)
    if not given.is_fast:
        raise ValueError(
            f"{type(given).__name__} is a slow tokenizer, and sentence-transformers' StaticEmbedding takes fast ones: "
            "use a model that has a tokenizer.json."
        )
    tokenizer = Tokenizer.from_str(given.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_vectors(module: CausalModule, layer: int, on_progress: Progress = lambda done, total: None) -> Tensor:
    """(V, D), float32, on the CPU: the vector of each entry of the vocabulary, from which static models are made.

    Args:
        module: As for :func:`static_model`.
        layer: After which layer; 0: the input embeddings.
        on_progress: Told after each block of the vocabulary.

    Raises:
        ValueError: If there is no such layer.
    """
    reader = _reader(module, layer)
    before, _ = special_tokens(cast(PreTrainedTokenizerBase, reader.tokenizer))
    size = backbone.vocabulary_size(reader.model)
    blocks = []
    for start in range(0, size, _BLOCK):
        entries = torch.arange(start, min(start + _BLOCK, size))
        ids = torch.cat([torch.tensor(before, dtype=torch.long).expand(len(entries), -1), entries[:, None]], dim=1)
        copies = torch.full_like(ids, NOT_TEXT)
        copies[:, -1] = 0
        features = Layout(ids, torch.ones_like(ids, dtype=torch.bool), copies).features()
        with torch.inference_mode():
            blocks.append(reader(features)["token_embeddings"][:, 0].float().cpu())
        on_progress(start + len(entries), size)
    return torch.cat(blocks)


def _reader(module: CausalModule, layer: int) -> CausalModule:
    depth = backbone.depth(module.model)
    check_count("layer", layer, 0, depth, "0 for the input embeddings, or the layer to read after")
    if layer == 0:
        return InputEmbeddings(module)
    return CausalTransformer(module, output_layer=layer, final_norm=False)


def _moments(tokenizer: Tokenizer, texts: list[str], vectors: Tensor, weights: Tensor) -> Moments:
    """Those of the weighted means of the texts' tokens."""
    moments = Moments(vectors.shape[1])
    for start in range(0, len(texts), _BLOCK):
        encoded = tokenizer.encode_batch(texts[start : start + _BLOCK], add_special_tokens=False)
        ids = [torch.tensor(own.ids) for own in encoded if own.ids]
        if ids:
            flat, lengths = torch.cat(ids), torch.tensor(list(map(len, ids)))
            starts = lengths.cumsum(0) - lengths
            sums = embedding_bag(flat, vectors, starts, mode="sum", per_sample_weights=weights[flat])
            moments.add(sums / embedding_bag(flat, weights[:, None], starts, mode="sum"))
    return moments
