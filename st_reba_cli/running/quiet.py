"""What libraries say while a command runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.text import Text
from transformers.utils import logging as transformers_logging

from ..printing import notes


@contextmanager
def quiet() -> Iterator[None]:
    """What a command has to say, it says itself: a warning becomes a line, and what libraries log, with their bars, is
    left out. It would stand before errors, once for each time a model is loaded."""
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    of_st = logging.getLogger("sentence_transformers")
    level = of_st.level
    of_st.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _noted
            yield
    finally:
        of_st.setLevel(level)
        transformers_logging.set_verbosity(before)


def _noted(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """A warning without the place in the code that gave it; those that are for programmers are left out."""
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning)):
        notes.print(Text.assemble(("Note:", "yellow"), f" {message}"), soft_wrap=True)
