"""Text embeddings from decoder-only language models, without training, as sentence-transformers modules.

Importing this package makes its modules known: ``SentenceTransformer("path-or-id")`` then loads models that use them.
"""

from .lm.attention import function
from .modules import (
    AllButTheTop,
    AttentionPoolingModule,
    BidirectionalLastLayer,
    CausalTransformer,
    Centering,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoLayersModule,
    EchoModule,
    EmbeddingFilter,
    HierarchicalTokenPrependingModule,
    IdfWeights,
    InputEmbeddings,
    KVReroutingModule,
    LayerStates,
    LayerwiseAutoencoder,
    MetaEOLModule,
    PartwiseWhitening,
    PromptRepsModule,
    ReBAModule,
    RefinedThoughtModule,
    RerankModule,
    Standardization,
    TokenPrependingModule,
    TokenProjection,
    TwinTower,
    ValueAggregationModule,
    WhiteningTransform,
)
from .reading.chunks import DocumentChunks, encode_chunks
from .reading.words import encode_words
from .recipes import Row, register
from .text.templates import META_TASKS, TEMPLATES, in_context
from .version import __version__

function.register()

__all__ = [
    "META_TASKS",
    "TEMPLATES",
    "AllButTheTop",
    "AttentionPoolingModule",
    "BidirectionalLastLayer",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
    "DocumentChunks",
    "EarlyLateModule",
    "EchoLayersModule",
    "EchoModule",
    "EmbeddingFilter",
    "HierarchicalTokenPrependingModule",
    "IdfWeights",
    "InputEmbeddings",
    "KVReroutingModule",
    "LayerStates",
    "LayerwiseAutoencoder",
    "MetaEOLModule",
    "PartwiseWhitening",
    "PromptRepsModule",
    "ReBAModule",
    "RefinedThoughtModule",
    "RerankModule",
    "Row",
    "Standardization",
    "TokenPrependingModule",
    "TokenProjection",
    "TwinTower",
    "ValueAggregationModule",
    "WhiteningTransform",
    "__version__",
    "encode_chunks",
    "encode_words",
    "in_context",
    "register",
]
