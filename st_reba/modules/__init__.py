"""The modules, under the names that saved models refer to: ``st_reba.modules.<Class>``.

ST writes ``type(module).__module__`` into modules.json. Saved models outlive the file that a class lives in, so each
class that a saved model may name says ``__module__ = "st_reba.modules"`` in its own body.

ST refuses module classes from outside its namespace unless ``trust_remote_code=True``, which would also let the
backbone run code from the repository. ``import st_reba`` is the user's own statement of trust in this package and in
nothing else, so exactly these classes are made known to ST, and those that a package which the user imports registers
(:func:`st_reba.register`). Nothing is imported on a configuration's behalf.
"""

from ..hub import compat
from .attention_pooling import AttentionPoolingModule
from .attention_reranking import AttentionReranker as AttentionReranker
from .attention_reranking import AttentionRerankModule
from .bidirectional import BidirectionalLastLayer
from .causal_module import CausalModule as CausalModule
from .causal_transformer import CausalTransformer, InputEmbeddings
from .contrastive_prompting import ContrastivePromptingModule
from .early_late import EarlyLateModule
from .echo import EchoModule
from .embedding_filter import EmbeddingFilter
from .embedding_transforms import AllButTheTop, Centering, Standardization, WhiteningTransform
from .embedding_transforms import EmbeddingTransform as EmbeddingTransform
from .endpoint import EndpointTransformer
from .idf_weights import IdfWeights
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

#: What a saved model may name. The two bases of other people's modules are public, too, and no model has them.
__all__ = [
    "AllButTheTop",
    "AttentionPoolingModule",
    "AttentionRerankModule",
    "BidirectionalLastLayer",
    "CausalTransformer",
    "Centering",
    "ContrastivePromptingModule",
    "EarlyLateModule",
    "EchoModule",
    "EmbeddingFilter",
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

compat.make_known(*(globals()[name] for name in __all__))
