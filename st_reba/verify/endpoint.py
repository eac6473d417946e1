"""A server that embeds, in OpenAI's form or in that of Text Embeddings Inference."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, Literal

import numpy as np

Form = Literal["auto", "openai", "tei"]

_OPENAI, _TEI = "/embeddings", "/embed"
#: What says that a path is not there.
_NO_PATH = (404, 405)


class EndpointError(OSError):
    """A server that does not answer, or answers something else than vectors.

    Args:
        said: In a sentence.
        status: Of HTTP, if it answered.
    """

    def __init__(self, said: str, status: int | None = None) -> None:
        super().__init__(said)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server does not take this text, rather than any."""
        return self.status is not None and self.status not in (401, 403, *_NO_PATH, 429, 503)


class Endpoint:
    """Where to send texts.

    Args:
        url: The server's root, or its path.
        model: What it calls the model, in OpenAI's form; None: the first that it lists.
        form: Of its requests; ``"auto"``: by the URL, else whichever is there, OpenAI's first.
        key: That it asks for.
        timeout: Seconds for an answer.

    Raises:
        EndpointError: If it does not answer.
        ValueError: If the key cannot be sent.
    """

    def __init__(
        self, url: str, model: str | None = None, form: Form = "auto", key: str | None = None, timeout: float = 60.0
    ) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("The API key has other characters than printable ASCII: give the one of the server.")
        self._key, self._timeout = key, timeout
        self.url, self.form = self._found(url.rstrip("/"), form)
        self.model = model
        if model is None and self.form == "openai":
            self.model = self._first_model()

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """A vector for each text.

        Raises:
            EndpointError: If that is not what comes back.
        """
        if self.form == "tei":
            rows = self._ask(self.url, {"inputs": list(texts), "truncate": True})
        else:
            answer = self._ask(self.url, {"model": self.model, "input": list(texts), "encoding_format": "float"})
            data = answer.get("data") if isinstance(answer, dict) else None
            rows = [row.get("embedding") for row in data] if isinstance(data, list) else None
        try:
            vectors = [np.asarray(row, dtype=np.float64) for row in rows or ()]
        except (TypeError, ValueError):
            vectors = []
        if len(vectors) != len(texts) or any(vector.ndim != 1 or not len(vector) for vector in vectors):
            said = f"{self.url} gave no vector for each of {len(texts)} texts: is it a server of embeddings?"
            raise EndpointError(said)
        return vectors

    def _found(self, url: str, form: Form) -> tuple[str, Literal["openai", "tei"]]:
        if url.endswith(_OPENAI):
            return url, "openai"
        if url.endswith(_TEI):
            return url, "tei"
        openai = f"{url.removesuffix('/v1')}/v1{_OPENAI}"
        tei = f"{url.removesuffix('/v1')}{_TEI}"
        if form == "auto":
            form = "openai"
            try:
                # An empty request tells whether the path is there.
                self._ask(openai, {})
            except EndpointError as error:
                if error.status is None:
                    raise
                form = "tei" if error.status in _NO_PATH else "openai"
        return (openai, "openai") if form == "openai" else (tei, "tei")

    def _first_model(self) -> str | None:
        try:
            listed = self._ask(f"{self.url.removesuffix(_OPENAI)}/models")
            return str(listed["data"][0]["id"])
        except (EndpointError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, EndpointError) and error.status is None:
                raise
            raise EndpointError(
                f"{self.url}: the server does not list its models: give the one to ask for, --served-name NAME."
            ) from None

    def _ask(self, url: str, sent: object = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(url, None if sent is None else json.dumps(sent).encode(), headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise EndpointError(f"{url} answered {error.code}: {said}", error.code) from None
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            said = f"{url} does not answer ({reason}): check the URL, and that the server runs."
            if isinstance(reason, TimeoutError):
                said = (
                    f"{url} gave no answer within {self._timeout:g} seconds: check that the server runs. If it is "
                    "slow, give --timeout more seconds, or the long text fewer tokens with --max-tokens."
                )
            raise EndpointError(said) from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            said = f"{url} answered with something else than JSON: is it a server of embeddings?"
            raise EndpointError(said) from None
        except ValueError as error:
            raise EndpointError(f"{url} is no URL that can be asked ({error}): check it.") from None
