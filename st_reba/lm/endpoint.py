"""A server that a language model runs in: it embeds texts, or gives the states of tokens, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from time import sleep
from typing import Any, Literal, TypeAlias

import numpy as np

#: What a server is asked in: OpenAI's ``/v1/embeddings``, TEI's ``/embed``, Ollama's ``/api/embed``, which give a text
#: one vector; and ``/embedding`` of a llama-server started with ``--pooling none``, which gives each token its state.
#: ``"auto"``: by the URL's path; without one, OpenAI's or TEI's, whichever is there.
Form = Literal["auto", "openai", "tei", "ollama", "llama.cpp"]
#: The same, known.
KnownForm = Literal["openai", "tei", "ollama", "llama.cpp"]
#: The tokens of a string: their ids, and what each spells.
ServerTokens: TypeAlias = tuple[list[int], list[bytes]]

#: The paths, the longer one first where one ends in another.
_PATHS: dict[KnownForm, str] = {
    "openai": "/v1/embeddings", "ollama": "/api/embed", "tei": "/embed", "llama.cpp": "/embedding",
}  # fmt: skip
_OPENAI = "/embeddings"
#: What says that a path is not there.
_NO_PATH = (404, 405)
#: What may be another answer a moment later.
_PASSING = (408, 429, 502, 503, 504)
#: Seconds before a request is sent again, the first time; each time twice as many, up to the most.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
#: Strings that are tokenised at a time: a request has one.
_AT_A_TIME = 8


class EndpointError(OSError):
    """A server that does not answer, or answers something else than vectors.

    Args:
        said: In a sentence.
        status: Of HTTP, if it answered.
        passing: Whether the same request may be answered a moment later.
        wait: Seconds after which the server wants to be asked again; None: it does not say.
    """

    def __init__(self, said: str, status: int | None = None, passing: bool = False, wait: float | None = None) -> None:
        super().__init__(said)
        self.status, self.passing, self.wait = status, passing, wait

    @property
    def is_refusal(self) -> bool:
        """Whether the server does not take this text, rather than any."""
        return self.status is not None and self.status not in (401, 403, *_NO_PATH, 429, 503)


class Endpoint:
    """Where to send texts.

    Args:
        url: The server's root, or its path.
        model: What it calls the model, in OpenAI's form and Ollama's; None: the first that it lists.
        form: Of its requests; ``"auto"``: by the URL, else OpenAI's or TEI's, whichever is there.
        key: That it asks for.
        timeout: Seconds for an answer.
        retries: How often a request is sent again that is not answered, or that the server has no time for; after half
            a second at first, then after twice as long each time, or as long as the server says.

    Raises:
        EndpointError: If it does not answer.
        ValueError: If the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        form: Form = "auto",
        key: str | None = None,
        timeout: float = 60.0,
        retries: int = 0,
    ) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("The API key has other characters than printable ASCII: give the one of the server.")
        self._key, self._timeout, self._retries = key, timeout, retries
        self.url, self.form = self._found(url.rstrip("/"), form)
        self.model = model
        if model is None and self.form in ("openai", "ollama"):
            self.model = self._first_model()

    # Vectors of texts

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """A vector for each text.

        Raises:
            EndpointError: If that is not what comes back.
        """
        rows: Any
        if self.form == "tei":
            rows = self._ask(self.url, {"inputs": list(texts), "truncate": True})
        elif self.form == "ollama":
            answer = self._ask(self.url, {"model": self.model, "input": list(texts)})
            rows = answer.get("embeddings") if isinstance(answer, dict) else None
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

    # States of tokens

    def states(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The last hidden state of each token, (n, D) for a row of n token ids, which are run as they are.

        Raises:
            EndpointError: If that is not what comes back.
        """
        answer = self._ask(self.url, {"content": [list(row) for row in rows], "embd_normalize": -1})
        try:
            found = {int(part["index"]): np.asarray(part["embedding"], dtype=np.float64) for part in answer}
            states = [found[place] for place in range(len(rows))]
        except (TypeError, ValueError, KeyError):
            states = []
        if [state.shape[:1] for state in states] != [(len(row),) for row in rows] or any(
            state.ndim != 2 or not state.size for state in states
        ):
            raise EndpointError(
                f"{self.url} gave no state for each token of {len(rows)} rows: start llama-server with --embeddings "
                "--pooling none."
            )
        return states

    def tokenized(self, strings: Sequence[str], special: bool = False) -> list[ServerTokens]:
        """The tokens of each string, as the server's model has them: their ids, and what each spells.

        Args:
            strings: What to tokenise.
            special: Whether with the tokens that the model has around a text.

        Raises:
            EndpointError: If that is not what comes back.
        """

        def one(string: str) -> ServerTokens:
            url = f"{self._root}/tokenize"
            answer = self._ask(url, {"content": string, "add_special": special, "with_pieces": True})
            try:
                pieces = [token["piece"] for token in answer["tokens"]]
                spelled = [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces]
                return [int(token["id"]) for token in answer["tokens"]], spelled
            except (TypeError, ValueError, KeyError):
                said = f"{url} gave no tokens with their pieces: give the URL of a llama-server of 2025 or later."
                raise EndpointError(said) from None

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return list(pool.map(one, strings))

    def context(self) -> int | None:
        """How many tokens a llama-server reads at most; None: it does not say."""
        try:
            return int(self._ask(f"{self._root}/props")["default_generation_settings"]["n_ctx"])
        except EndpointError as error:
            if error.status is None:
                raise
        except (KeyError, TypeError, ValueError):
            pass
        return None

    # Asking

    @property
    def _root(self) -> str:
        return self.url.removesuffix(_PATHS[self.form])

    def _found(self, url: str, form: Form) -> tuple[str, KnownForm]:
        if url.endswith(_OPENAI):
            return url, "openai"
        for known, path in _PATHS.items():
            if url.endswith(path):
                return url, known
        root = url.removesuffix("/v1")
        if form == "auto":
            form = "openai"
            try:
                # An empty request tells whether the path is there.
                self._ask(root + _PATHS["openai"], {})
            except EndpointError as error:
                if error.status is None:
                    raise
                form = "tei" if error.status in _NO_PATH else "openai"
        return root + _PATHS[form], form

    def _first_model(self) -> str | None:
        try:
            if self.form == "ollama":
                return str(self._ask(f"{self._root}/api/tags")["models"][0]["name"])
            return str(self._ask(f"{self.url.removesuffix(_OPENAI)}/models")["data"][0]["id"])
        except (EndpointError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, EndpointError) and error.status is None:
                raise
            raise EndpointError(
                f"{self.url}: the server does not list its models: give the one to ask for, --served-name NAME."
            ) from None

    def _ask(self, url: str, sent: object = None) -> Any:
        """What a server answers; asked again where that may help."""
        for attempt in range(self._retries):
            try:
                return self._ask_once(url, sent)
            except EndpointError as error:
                if not error.passing:
                    raise
                sleep(min(_FIRST_WAIT * 2**attempt if error.wait is None else error.wait, _LONGEST_WAIT))
        return self._ask_once(url, sent)

    def _ask_once(self, url: str, sent: object) -> Any:
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(url, None if sent is None else json.dumps(sent).encode(), headers)
            if self._key is not None:
                # Where the server sends us on to another one, the key stays here.
                request.add_unredirected_header("Authorization", f"Bearer {self._key}")
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said, wait = error.read(500).decode(errors="replace"), error.headers.get("Retry-After", "")
            raise EndpointError(
                f"{url} answered {error.code}: {said}",
                error.code,
                passing=error.code in _PASSING,
                wait=float(wait) if wait.isdecimal() else None,
            ) from None
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            said = f"{url} does not answer ({reason}): check the URL, and that the server runs."
            if isinstance(reason, TimeoutError):
                said = (
                    f"{url} gave no answer within {self._timeout:g} seconds: check that the server runs. If it is "
                    "slow, give --timeout more seconds, or the long text fewer tokens with --max-tokens."
                )
            raise EndpointError(said, passing=True) from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            said = f"{url} answered with something else than JSON: is it a server of embeddings?"
            raise EndpointError(said) from None
        except ValueError as error:
            raise EndpointError(f"{url} is no URL that can be asked ({error}): check it.") from None
