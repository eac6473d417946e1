"""Files of texts to files of vectors, of any size: what ``st-reba encode`` runs, usable without it."""

from .chunks import Engine, LocalEngine, RayEngine
from .encoder import Encoder
from .job import COPYING, HASHING, UPLOADING, Encoded, encode_file
from .places import place_of

__all__ = [
    "COPYING", "HASHING", "UPLOADING", "Encoded", "Encoder", "Engine", "LocalEngine", "RayEngine", "encode_file",
    "place_of",
]  # fmt: skip
