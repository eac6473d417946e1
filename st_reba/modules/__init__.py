"""Methods, and the modules that follow them."""

from .attention_pooling import AttentionPoolingModule as AttentionPoolingModule
from .attention_pooling import ValueAggregationModule as ValueAggregationModule
from .attention_reranking import AttentionReranker as AttentionReranker
from .attention_reranking import AttentionRerankModule as AttentionRerankModule
from .base import CausalModule as CausalModule
from .bidirectional import BidirectionalLastLayer as BidirectionalLastLayer
from .causal import CausalTransformer as CausalTransformer
from .causal import InputEmbeddings as InputEmbeddings
from .contrastive import ContrastivePromptingModule as ContrastivePromptingModule
from .early_late import EarlyLateModule as EarlyLateModule
from .echo import EchoModule as EchoModule
from .embedding_transforms import AllButTheTop as AllButTheTop
from .embedding_transforms import Centering as Centering
from .embedding_transforms import EmbeddingFilter as EmbeddingFilter
from .embedding_transforms import EmbeddingTransform as EmbeddingTransform
from .embedding_transforms import IdfWeights as IdfWeights
from .embedding_transforms import PartwiseWhitening as PartwiseWhitening
from .embedding_transforms import Standardization as Standardization
from .embedding_transforms import StandardizedSum as StandardizedSum
from .embedding_transforms import WhiteningTransform as WhiteningTransform
from .endpoint import EndpointTransformer as EndpointTransformer
from .kv_rerouting import KVReroutingModule as KVReroutingModule
from .layerwise_autoencoder import LayerStates as LayerStates
from .layerwise_autoencoder import LayerwiseAutoencoder as LayerwiseAutoencoder
from .llama_cpp import LlamaCppTransformer as LlamaCppTransformer
from .meta_eol import MetaEOLModule as MetaEOLModule
from .multi_vector import TokenProjection as TokenProjection
from .no_sink import NoSinkModule as NoSinkModule
from .promptreps import PromptRepsModule as PromptRepsModule
from .reba import ReBAModule as ReBAModule
from .refined_thought import RefinedThoughtModule as RefinedThoughtModule
from .reverse_eol import ReverseEOLModule as ReverseEOLModule
from .token_prepending import TokenPrependingModule as TokenPrependingModule
from .topic import TopicModule as TopicModule
from .twin_tower import TwinTower as TwinTower

#: Bases and models, which no saved model names.
_NOT_SAVED = ("AttentionReranker", "CausalModule", "EmbeddingTransform")

__all__ = sorted(name for name, kind in globals().items() if isinstance(kind, type))

#: Modules that a saved model may name.
SAVED = [name for name in __all__ if name not in _NOT_SAVED]

# Saved models outlive the file of a class, so sentence-transformers writes the package's name into modules.json.
for _name in SAVED:
    globals()[_name].__module__ = __name__
