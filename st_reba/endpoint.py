"""Client of a server of embeddings in OpenAI's form."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

#: Names of this machine, which no proxy is for.
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
#: Statuses of HTTP after which the same request may succeed.
_PASSING = (408, 429, 502, 503, 504)
#: Seconds before a request is sent again, the first time; doubled each time up to the second number.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0


class EndpointError(OSError):
    """Error of a server that does not answer, or answers with something other than vectors.

    Args:
        message: The error in a sentence.
        status: HTTP status, if the server answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Client of a server's ``/v1/embeddings``.

    Args:
        url: The server's root, its ``/v1``, or the path itself.
        model: Name of the model in requests; see :meth:`first_model`.
        key: API key that the server asks for.
        timeout: Seconds for an answer.
        retries: Number of times that a request is sent again that was not answered, or for which the server had no
            time: after half a second at first, then twice as long each time, or as long as the server says.

    Raises:
        ValueError: If the key cannot be sent.
    """

    def __init__(
        self, url: str, model: str | None = None, key: str | None = None, timeout: float = 60.0, retries: int = 0
    ) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("The API key has other characters than printable ASCII: give the one of the server.")
        self.url = url.rstrip("/").removesuffix("/embeddings").removesuffix("/v1") + "/v1/embeddings"
        self.model, self._key, self._timeout, self._retries = model, key, timeout, retries
        # A proxy does not reach this machine's own addresses.
        direct = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in THIS_MACHINE else []
        self._opener = urllib.request.build_opener(*direct)

    def first_model(self) -> str | None:
        """Return the first model that the server lists; None if it has no list.

        Raises:
            EndpointError: If it does not answer.
        """
        try:
            return str(self._ask(self.url.replace("/v1/embeddings", "/v1/models"))["data"][0]["id"])
        except (EndpointError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, EndpointError) and error.status not in (404, 405):
                raise
        return None

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of texts, (B, D).

        Raises:
            EndpointError: If the server gives anything else.
        """
        answer = self._ask(self.url, {"model": self.model, "input": list(texts), "encoding_format": "float"})
        try:
            rows = {row["index"]: np.asarray(row["embedding"], dtype=np.float64) for row in answer["data"]}
            vectors = np.stack([rows[index] for index in range(len(texts))])
        except (TypeError, ValueError, KeyError):
            vectors = np.empty(0)
        if vectors.ndim != 2 or not vectors.size or len(answer["data"]) != len(texts):
            raise EndpointError(f"{self.url} gave no vector for each of {len(texts)} texts, of one size, by its index.")
        if not np.isfinite(vectors).all():
            raise EndpointError(f"{self.url} gave a vector with a value that is no number: see the server's log.")
        return vectors

    def _ask(self, url: str, body: object = None) -> Any:
        """Return the server's answer; ask again if that may help."""
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
        if self._key is not None:
            # A redirect to another server does not take the key along.
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        for attempt in range(self._retries + 1):
            wait = ""
            try:
                with self._opener.open(request, timeout=self._timeout) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                message, wait = error.read(500).decode(errors="replace"), error.headers.get("Retry-After", "")
                failure = EndpointError(f"{url} answered {error.code}: {message}", error.code)
                if error.code not in _PASSING:
                    break
            except (OSError, HTTPException) as error:
                why = getattr(error, "reason", error)
                why = f"nothing within {self._timeout:g} seconds" if isinstance(why, TimeoutError) else why
                failure = EndpointError(f"{url} does not answer ({why}): check the URL, and that the server runs.")
            except (ValueError, RecursionError):
                failure = EndpointError(f"{url} answered with something else than JSON: is it a server of embeddings?")
                break
            if attempt < self._retries:
                sleep(min(float(wait) if wait.isdecimal() else _FIRST_WAIT * 2**attempt, _LONGEST_WAIT))
        raise failure
