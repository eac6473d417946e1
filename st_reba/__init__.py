"""Text embeddings from decoder-only language models, without training, as sentence-transformers modules.

Importing this package makes its modules known: ``SentenceTransformer("path-or-id")`` then loads models that use them.
"""

from .lm.attention import function
from .modules import (
    AllButTheTop,
    BidirectionalLastLayer,
    CausalTransformer,
    Centering,
    ContrastivePromptingModule,
    EarlyLateModule,
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
    ReBAModule,
    RefinedThoughtModule,
    Standardization,
    TokenPrependingModule,
    TwinTower,
    ValueAggregationModule,
    WhiteningTransform,
    registry,
)
from .readers.words import encode_words
from .text.templates import META_TASKS, TEMPLATES, in_context
from .version import __version__

function.register()
registry.register()

__all__ = [
    "META_TASKS",
    "TEMPLATES",
    "AllButTheTop",
    "BidirectionalLastLayer",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
    "EarlyLateModule",
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
    "ReBAModule",
    "RefinedThoughtModule",
    "Standardization",
    "TokenPrependingModule",
    "TwinTower",
    "ValueAggregationModule",
    "WhiteningTransform",
    "__version__",
    "encode_words",
    "in_context",
]
