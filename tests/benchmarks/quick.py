"""A model that takes no time, where a benchmark would train one."""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from ..backbones import tokenizer


def table(seed: int) -> SentenceTransformer:
    """A quick model, another for each seed."""
    words = tokenizer()
    weights = torch.randn(len(words), 8, generator=torch.Generator().manual_seed(seed))
    return SentenceTransformer(
        modules=[StaticEmbedding(words.backend_tokenizer, embedding_weights=weights), Normalize()], device="cpu"
    )
