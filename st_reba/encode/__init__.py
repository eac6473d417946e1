"""Files of texts to files of vectors, of any size: what ``st-reba encode`` runs, usable without it."""

from .chunks import Engine, LocalEngine, RayEngine
from .encoder import Encoder
from .job import COPYING, HASHING, Encoded, encode_file

__all__ = ["COPYING", "HASHING", "Encoded", "Encoder", "Engine", "LocalEngine", "RayEngine", "encode_file"]
