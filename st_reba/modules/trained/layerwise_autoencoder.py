"""The former name of :mod:`st_reba.modules.layerwise_autoencoder`."""

import warnings

from ..layerwise_autoencoder import LayerwiseAutoencoder  # noqa: F401

warnings.warn(
    f"{__name__} is now st_reba.modules.layerwise_autoencoder: import from there.", DeprecationWarning, stacklevel=2
)
