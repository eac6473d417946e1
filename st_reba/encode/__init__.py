"""Files of texts to files of vectors, of any size: what ``st-reba encode`` runs, usable without it."""

from .encoder import Encoder
from .engines import Engine, LocalEngine
from .job import COPYING, HASHING, Encoded, encode_file
from .ray_engine import RayEngine

__all__ = ["COPYING", "HASHING", "Encoded", "Encoder", "Engine", "LocalEngine", "RayEngine", "encode_file"]
