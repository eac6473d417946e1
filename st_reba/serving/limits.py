"""What a server takes at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What bounds the memory of a server, and how long a request may wait.

    Args:
        body_bytes: Of a request.
        body_seconds: In which a request's body has to arrive.
        inputs: Texts, or documents to order, of a request.
        batch_tokens: Of a batch, padding included: its texts times the longest one's tokens. A longer text runs alone.
        batch_texts: Of a batch.
        queue_tokens: That may wait. A request beyond that is refused, unless nothing waits.
        truncate: Whether a text that is too long for the model is cut, as ``encode`` does, or refused.

    Raises:
        ValueError: If one is below 1.
    """

    body_bytes: int = 8 * 2**20
    body_seconds: int = 60
    inputs: int = 2048
    batch_tokens: int = 8192
    batch_texts: int = 256
    queue_tokens: int = 2**20
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("body_bytes", "body_seconds", "inputs", "batch_tokens", "batch_texts", "queue_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: give a whole number from 1.")
