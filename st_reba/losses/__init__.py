"""Losses of the papers' trained methods, for sentence-transformers' own trainer."""

from .contrastive_angle import ContrastiveAngleLoss
from .info_nce import InfoNCELoss
from .interaction import InteractionInfoNCELoss
from .jtcse import JTCSELoss
from .log_residual_variance import LogResidualVarianceLoss
from .pair_scores import PairScoreMSELoss
from .reconstruction import ReconstructionLoss
from .tensor_modulus import TensorModulusLoss

__all__ = [
    "ContrastiveAngleLoss",
    "InfoNCELoss",
    "InteractionInfoNCELoss",
    "JTCSELoss",
    "LogResidualVarianceLoss",
    "PairScoreMSELoss",
    "ReconstructionLoss",
    "TensorModulusLoss",
]
