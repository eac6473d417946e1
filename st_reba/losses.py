"""The former name of :mod:`st_reba.training.losses`."""

import warnings

from .training.losses import (  # noqa: F401
    ContrastiveAngleLoss,
    EmbeddingCoSENTLoss,
    InfoNCELoss,
    InteractionInfoNCELoss,
    JTCSELoss,
    LogResidualVarianceLoss,
    PairScoreMSELoss,
    ReconstructionLoss,
    TensorModulusLoss,
)

warnings.warn(f"{__name__} is now st_reba.training.losses: import from there.", DeprecationWarning, stacklevel=2)
