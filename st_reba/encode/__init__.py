"""Encoding of text files of any size into files of vectors, with or without ``st-reba encode``."""

from .chunks import Engine, LocalEngine, RayEngine
from .encoder import Encoder
from .job import COPYING, HASHING, UPLOADING, Encoded, encode_file
from .workspace import destination_of

__all__ = [
    "COPYING", "HASHING", "UPLOADING", "Encoded", "Encoder", "Engine", "LocalEngine", "RayEngine", "destination_of",
    "encode_file",
]  # fmt: skip
