"""Training of the papers' methods with the trainer of sentence-transformers.

Needs the extra ``train``: ``pip install "st-reba[train]"``.
"""

from .bellm import BeLLMTraining as BeLLMTraining
from .bellm import build_bellm as build_bellm
from .bellm import merge_adapter as merge_adapter
from .bellm import train_bellm as train_bellm
from .fitting import DivergedError as DivergedError
from .fitting import fit as fit
from .fitting import read_conditional_pairs as read_conditional_pairs
from .fitting import read_scored_pairs as read_scored_pairs
from .fitting import read_sentences as read_sentences
from .fitting import read_triplets as read_triplets
from .freeze import FreezeTraining as FreezeTraining
from .freeze import train_freeze as train_freeze
from .jtcse import JTCSETraining as JTCSETraining
from .jtcse import train_jtcse as train_jtcse
from .settings import RunSettings as RunSettings
from .settings import read_settings as read_settings
