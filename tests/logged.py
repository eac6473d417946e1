"""What one logger is told: pytest's own capture, which asks every logger that there is six times a test, is off."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages that a logger, and those below it, are told in this block."""
    messages: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Noting(), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
