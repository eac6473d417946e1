"""Training of the papers' methods with the trainer of sentence-transformers.

Needs the extra ``train``: ``pip install "st-reba[train]"``.
"""

from .bellm import BeLLMTraining, build_bellm, merge_adapter, train_bellm
from .fitting import DivergedError, fit, read_conditional_pairs, read_scored_pairs, read_sentences, read_triplets
from .freeze import FreezeTraining, train_freeze
from .jtcse import JTCSETraining, train_jtcse
from .settings import RunSettings, read_settings

__all__ = [
    "BeLLMTraining", "DivergedError", "FreezeTraining", "JTCSETraining", "RunSettings", "build_bellm", "fit",
    "merge_adapter", "read_conditional_pairs", "read_scored_pairs", "read_sentences", "read_settings", "read_triplets",
    "train_bellm", "train_freeze", "train_jtcse",
]  # fmt: skip
