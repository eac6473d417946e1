"""The modules, under the names that saved models refer to: ``st_reba.modules.<Class>``."""

from .all_but_the_top import AllButTheTop
from .base import CausalModule
from .bidirectional import BidirectionalLastLayer
from .causal import CausalTransformer, InputEmbeddings
from .contrastive_prompting import ContrastivePromptingModule
from .early_late import EarlyLateModule
from .echo import EchoModule
from .embedding_filter import EmbeddingFilter
from .hierarchical_token_prepending import HierarchicalTokenPrependingModule
from .idf_weights import IdfWeights
from .kv_rerouting import KVReroutingModule
from .layer_states import LayerStates
from .layerwise_autoencoder import LayerwiseAutoencoder
from .meta_eol import MetaEOLModule
from .partwise_whitening import PartwiseWhitening
from .published import publish
from .reba import ReBAModule
from .refined_thought import RefinedThoughtModule
from .standardization import Centering, Standardization
from .token_prepending import TokenPrependingModule
from .transform import EmbeddingTransform
from .twin_tower import TwinTower
from .value_aggregation import ValueAggregationModule
from .whitening import WhiteningTransform

#: What a modules.json may name.
PUBLIC_MODULES = (
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
    MetaEOLModule,
    LayerStates,
    LayerwiseAutoencoder,
    PartwiseWhitening,
    ReBAModule,
    RefinedThoughtModule,
    Standardization,
    TokenPrependingModule,
    ValueAggregationModule,
    TwinTower,
    WhiteningTransform,
)

publish(*PUBLIC_MODULES)

__all__ = [
    "PUBLIC_MODULES",
    "AllButTheTop",
    "BidirectionalLastLayer",
    "CausalModule",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
    "EarlyLateModule",
    "EchoModule",
    "EmbeddingFilter",
    "EmbeddingTransform",
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
]
