"""Methods, and the modules that follow them."""

from .attention_pooling import AttentionPoolingModule
from .attention_reranking import AttentionReranker, AttentionRerankModule
from .base import CausalModule
from .bidirectional import BidirectionalLastLayer
from .causal import CausalTransformer
from .contrastive import ContrastivePromptingModule
from .early_late import EarlyLateModule
from .echo import EchoModule
from .embedding_filter import EmbeddingFilter
from .embedding_transforms import AllButTheTop, Centering, EmbeddingTransform, Standardization, WhiteningTransform
from .endpoint import EndpointTransformer
from .idf_weights import IdfWeights
from .input_embeddings import InputEmbeddings
from .kv_rerouting import KVReroutingModule
from .layer_states import LayerStates
from .layerwise_autoencoder import LayerwiseAutoencoder
from .llama_cpp import LlamaCppTransformer
from .meta_eol import MetaEOLModule
from .multi_vector import TokenProjection
from .no_sink import NoSinkModule
from .partwise import PartwiseWhitening, StandardizedSum
from .promptreps import PromptRepsModule
from .reba import ReBAModule
from .refined_thought import RefinedThoughtModule
from .token_prepending import TokenPrependingModule
from .topic import TopicModule
from .twin_tower import TwinTower
from .value_aggregation import ValueAggregationModule

#: Bases and models, which no saved model names.
_NOT_SAVED = ("AttentionReranker", "CausalModule", "EmbeddingTransform")

__all__ = [
    "AllButTheTop",
    "AttentionPoolingModule",
    "AttentionRerankModule",
    "AttentionReranker",
    "BidirectionalLastLayer",
    "CausalModule",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
    "EarlyLateModule",
    "EchoModule",
    "EmbeddingFilter",
    "EmbeddingTransform",
    "EndpointTransformer",
    "IdfWeights",
    "InputEmbeddings",
    "KVReroutingModule",
    "LayerStates",
    "LayerwiseAutoencoder",
    "LlamaCppTransformer",
    "MetaEOLModule",
    "NoSinkModule",
    "PartwiseWhitening",
    "PromptRepsModule",
    "ReBAModule",
    "RefinedThoughtModule",
    "Standardization",
    "StandardizedSum",
    "TokenPrependingModule",
    "TokenProjection",
    "TopicModule",
    "TwinTower",
    "ValueAggregationModule",
    "WhiteningTransform",
]

#: Modules that a saved model may name.
SAVED = [name for name in __all__ if name not in _NOT_SAVED]

# Saved models outlive the file of a class, so sentence-transformers writes the package's name into modules.json.
for _name in SAVED:
    globals()[_name].__module__ = __name__
