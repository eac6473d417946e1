"""The modules, under the names that saved models refer to: ``st_reba.modules.<Class>``.

ST writes ``type(module).__module__`` into modules.json. Saved models outlive the file that a class lives in, so each
class that a saved model may name says ``__module__ = "st_reba.modules"`` in its own body.
"""

from .base import CausalModule as CausalModule
from .embedding_filter import EmbeddingFilter
from .embedding_transforms import AllButTheTop, Centering, Standardization, WhiteningTransform
from .embedding_transforms import EmbeddingTransform as EmbeddingTransform
from .idf_weights import IdfWeights
from .partwise_whitening import PartwiseWhitening
from .token_projection import TokenProjection
from .trained.layer_states import LayerStates
from .trained.layerwise_autoencoder import LayerwiseAutoencoder
from .trained.twin_tower import TwinTower
from .training_free.attention_pooling import AttentionPoolingModule
from .training_free.bidirectional import BidirectionalLastLayer
from .training_free.causal import CausalTransformer, InputEmbeddings
from .training_free.contrastive_prompting import ContrastivePromptingModule
from .training_free.early_late import EarlyLateModule
from .training_free.echo import EchoModule
from .training_free.echo_layers import EchoLayersModule
from .training_free.hierarchical_token_prepending import HierarchicalTokenPrependingModule
from .training_free.kv_rerouting import KVReroutingModule
from .training_free.meta_eol import MetaEOLModule
from .training_free.promptreps import PromptRepsModule
from .training_free.reba import ReBAModule
from .training_free.refined_thought import RefinedThoughtModule
from .training_free.reranking import RerankModule
from .training_free.token_prepending import TokenPrependingModule
from .training_free.value_aggregation import ValueAggregationModule

#: What a saved model may name. The two bases of other people's modules are public, too, and no model has them.
__all__ = [
    "AllButTheTop",
    "AttentionPoolingModule",
    "BidirectionalLastLayer",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
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
    "Standardization",
    "TokenPrependingModule",
    "TokenProjection",
    "TwinTower",
    "ValueAggregationModule",
    "WhiteningTransform",
]
