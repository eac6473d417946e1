"""Which names mean a GGUF file: told by the name and the first bytes, without what would read the file."""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
#: What every GGUF file begins with; those of Ollama have no suffix.
MAGIC = b"GGUF"

#: ``org/repo/file.gguf``, where the file may lie in folders.
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/((?:[^/\\]+/)*[^/\\]+\.gguf)", re.IGNORECASE)
#: ``org/repo:TAG``, as for llama.cpp's -hf.
HUB_TAG = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")


def is_gguf(name: str) -> bool:
    """Whether a model's name means a GGUF file, here or on the Hub; nothing is asked of the Hub.

    Args:
        name: A path or a Hub reference: see :func:`st_reba.lm.gguf.as_directory`.
    """
    path = Path(name)
    if path.is_dir():
        return False
    if path.is_file():
        return path.suffix.lower() == SUFFIX or begins_as_gguf(path)
    return name.lower().endswith(SUFFIX) or HUB_TAG.fullmatch(name) is not None


def begins_as_gguf(path: Path) -> bool:
    """Whether a file has the first bytes of a GGUF file."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC
