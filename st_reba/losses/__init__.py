"""Losses of the papers' trained methods, for sentence-transformers' own trainer."""

from ..jtcse.info_nce import InfoNCELoss
from ..jtcse.interaction import InteractionInfoNCELoss
from ..jtcse.loss import JTCSELoss
from ..jtcse.tensor_modulus import TensorModulusLoss
from .contrastive_angle import ContrastiveAngleLoss
from .cosent import EmbeddingCoSENTLoss
from .log_residual_variance import LogResidualVarianceLoss
from .pair_scores import PairScoreMSELoss
from .reconstruction import ReconstructionLoss

__all__ = [
    "ContrastiveAngleLoss",
    "EmbeddingCoSENTLoss",
    "InfoNCELoss",
    "InteractionInfoNCELoss",
    "JTCSELoss",
    "LogResidualVarianceLoss",
    "PairScoreMSELoss",
    "ReconstructionLoss",
    "TensorModulusLoss",
]
