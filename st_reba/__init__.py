"""Text embeddings from decoder-only language models, without training, as sentence-transformers modules.

After ``import st_reba``, ``SentenceTransformer("path-or-id")`` loads models with these modules.
"""

from . import modules
from .build import build
from .data.demo import demo_model
from .hub.compat import make_known
from .lm.attention import function
from .modules import AllButTheTop as AllButTheTop
from .modules import AttentionPoolingModule as AttentionPoolingModule
from .modules import AttentionReranker as AttentionReranker
from .modules import AttentionRerankModule as AttentionRerankModule
from .modules import BidirectionalLastLayer as BidirectionalLastLayer
from .modules import CausalTransformer as CausalTransformer
from .modules import Centering as Centering
from .modules import ContrastivePromptingModule as ContrastivePromptingModule
from .modules import EarlyLateModule as EarlyLateModule
from .modules import EchoModule as EchoModule
from .modules import EmbeddingFilter as EmbeddingFilter
from .modules import EndpointTransformer as EndpointTransformer
from .modules import IdfWeights as IdfWeights
from .modules import InputEmbeddings as InputEmbeddings
from .modules import KVReroutingModule as KVReroutingModule
from .modules import LayerStates as LayerStates
from .modules import LayerwiseAutoencoder as LayerwiseAutoencoder
from .modules import LlamaCppTransformer as LlamaCppTransformer
from .modules import MetaEOLModule as MetaEOLModule
from .modules import NoSinkModule as NoSinkModule
from .modules import PartwiseWhitening as PartwiseWhitening
from .modules import PromptRepsModule as PromptRepsModule
from .modules import ReBAModule as ReBAModule
from .modules import RefinedThoughtModule as RefinedThoughtModule
from .modules import ReverseEOLModule as ReverseEOLModule
from .modules import Standardization as Standardization
from .modules import StandardizedSum as StandardizedSum
from .modules import TokenPrependingModule as TokenPrependingModule
from .modules import TokenProjection as TokenProjection
from .modules import TopicModule as TopicModule
from .modules import TwinTower as TwinTower
from .modules import ValueAggregationModule as ValueAggregationModule
from .modules import WhiteningTransform as WhiteningTransform
from .reading.chunks import DocumentChunks, encode_chunks
from .reading.words import encode_words
from .recipes import Row, register
from .text.presets import META_TASKS, TEMPLATES, in_context, in_terms_of
from .version import __version__

#: Public names, without subpackages.
__all__ = ["META_TASKS", "TEMPLATES", "DocumentChunks", "Row", "__version__", "build", "demo_model", "encode_chunks"]
__all__ += ["encode_words", "in_context", "in_terms_of", "register", *(globals().keys() & modules.__all__)]

function.register()
make_known(*(getattr(modules, name) for name in modules.SAVED))
