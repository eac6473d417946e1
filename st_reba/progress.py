"""Progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from torch import nn
from tqdm import tqdm

#: Seconds between two lines of progress without a terminal.
SECONDS = 10.0


class _Lines:
    """File that gets each state of a bar as a line."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self.flush = file, file.flush

    def write(self, text: str) -> None:
        if text := text.strip():
            self._file.write(f"{text}\n")


def bar(what: str, total: float | None, unit: str, *, done: float = 0, file: IO[str] | None = None) -> tqdm:
    """Return a progress bar, which without a terminal writes a line at most every ten seconds."""
    file = file or sys.stderr
    interval = 0.25 if file.isatty() else SECONDS
    return tqdm(
        desc=what, initial=done, total=total, unit=f" {unit}", leave=False, mininterval=interval, delay=interval,
        file=file if file.isatty() else _Lines(file),
    )  # fmt: skip


@contextmanager
def reading(module: nn.Module, texts: int | None) -> Iterator[None]:
    """Show the progress of fitting on texts, by the batches of a model's first module."""

    def update(_module: nn.Module, _args: Any, features: dict[str, Any]) -> None:
        progress.update(len(features["token_embeddings"]))

    with bar("Fitting", texts, "texts") as progress:
        hook = module.register_forward_hook(update)
        try:
            yield
        finally:
            hook.remove()
