"""Text embeddings from decoder-only language models, without training, as sentence-transformers modules.

Importing this package makes its modules known: ``SentenceTransformer("path-or-id")`` then loads models that use them.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

#: Whether this process is the command ``st-reba``: the script of that name, or what Windows has in its place.
_IS_THE_COMMAND = bool(sys.argv) and Path(sys.argv[0]).name in ("st-reba", "st-reba.exe")

if TYPE_CHECKING or not _IS_THE_COMMAND:
    # The second gives the first's names, too, but no type checker follows it through two lists.
    from .modules import *  # noqa: F403
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:
    # --help, --version and a mistyped option need no torch, which takes seconds to import. What the command then runs
    # imports `public` itself. Anywhere else `import st_reba` alone must make the modules known.
    def __getattr__(name: str) -> Any:
        return getattr(import_module(f"{__name__}.public"), name)
