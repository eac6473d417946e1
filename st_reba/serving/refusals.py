"""Why a request is not answered as it was meant, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

#: OpenAI's name for what a status means; others are "invalid_request_error".
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class RefusedError(Exception):
    """A request that gets an error.

    Args:
        status: Of HTTP.
        message: What was given, what is allowed, what to do.
        param: Which field of the request it is about.
        code: A word for programs.
        retry_after: Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Those that say when to try again, how to log in, or to try it on another connection."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 503:
            headers["Connection"] = "close"
        return headers


def shortened(given: object, length: int = 60) -> str:
    """What was given, in a message: the beginning will do."""
    shown = str(given)
    return shown if len(shown) <= length else f"{shown[:length]}…"
