"""Progress of what takes long, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from torch import nn
from tqdm import tqdm

#: Seconds between two lines where there is no terminal.
SECONDS = 10.0


class _Lines:
    """A file in which each state of a bar is a line."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self.flush = file, file.flush

    def write(self, text: str) -> None:
        if text := text.strip():
            self._file.write(f"{text}\n")


def bar(what: str, total: float | None, unit: str, *, done: float = 0, file: IO[str] | None = None) -> tqdm:
    """Return a bar; where there is no terminal, such as in a log, it writes a line at most every ten seconds."""
    file = file or sys.stderr
    often = 0.25 if file.isatty() else SECONDS
    return tqdm(
        desc=what, initial=done, total=total, unit=f" {unit}", leave=False, mininterval=often, delay=often,
        file=file if file.isatty() else _Lines(file),
    )  # fmt: skip


@contextmanager
def reading(module: nn.Module, texts: int | None) -> Iterator[None]:
    """Show how many of the texts that something is fitted on a model's first module has read."""

    def read(_module: nn.Module, _args: Any, features: dict[str, Any]) -> None:
        shown.update(len(features["token_embeddings"]))

    with bar("Fitting", texts, "texts") as shown:
        hook = module.register_forward_hook(read)
        try:
            yield
        finally:
            hook.remove()
