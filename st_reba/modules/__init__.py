"""The modules, under the names that saved models refer to: ``st_reba.modules.<Class>``.

Which there are says :mod:`st_reba.catalogue.rows`; importing st_reba puts them here.
"""

from typing import TYPE_CHECKING

from .after_pooling.transform import EmbeddingTransform as EmbeddingTransform
from .base import CausalModule as CausalModule

if TYPE_CHECKING:
    from ..catalogue.rows import *  # noqa: F403
