"""The public names, and what makes them known: all that ``import st_reba`` gives. Importing this imports torch."""

from . import modules
from .catalogue import PUBLIC_MODULES, Row, register
from .lm.attention import function
from .modules import *  # noqa: F403
from .modules import registry
from .readers.chunks import DocumentChunks, encode_chunks
from .readers.words import encode_words
from .text.templates import META_TASKS, TEMPLATES, in_context
from .version import __version__

function.register()
registry.register(*PUBLIC_MODULES)

__all__ = [
    "META_TASKS",
    "TEMPLATES",
    "DocumentChunks",
    "Row",
    "__version__",
    "encode_chunks",
    "encode_words",
    "in_context",
    "register",
]
__all__ += modules.__all__
