"""Texts in a template, embedded by a server in OpenAI's form, and a client of such servers."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from time import sleep
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import torch
from sentence_transformers.base.modules import InputModule
from torch import Tensor

from ..settings import check, check_flag, check_int, describe, first_not_none
from ..text.presets import normalized, preset
from ..text.templates import PREPEND, PROMPT, Template
from .stored import StoredModule

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
        except (TypeError, ValueError, KeyError, OverflowError):
            vectors = np.empty(0)
        if vectors.ndim != 2 or not vectors.size or len(answer["data"]) != len(texts):
            raise EndpointError(f"{self.url} gave no vector for each of {len(texts)} texts, of one size, by its index.")
        if not (np.abs(vectors) <= np.finfo(np.float32).max).all():
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
                message, wait = "", error.headers.get("Retry-After", "")
                with suppress(OSError, HTTPException):
                    message = error.read(500).decode(errors="replace")
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


#: Text by whose vector models are recognised.
FINGERPRINTED = "The dog chased the cat; the cat chased the mouse, and nobody chased the dog."
#: Number of that vector's values that are saved, and their largest relative distance: another machine, or another
#: build of the server, moves them by a few hundredths.
FINGERPRINT_VALUES, FINGERPRINT_APART = 32, 0.2

#: Environment variable that names the hosts that a saved model may call, in addition to this machine.
TRUSTED = "ST_REBA_ENDPOINTS"


def _is_url(value: Any) -> bool:
    """Return whether a value is a server's address alone: a name, a password or a query may hold a secret."""
    try:
        parts = urlsplit(value)
        plain = value.isascii() and not (parts.query or parts.fragment or parts.username or parts.password)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and plain
    except (AttributeError, TypeError, ValueError):
        return False


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, list) and any(value) and all(type(row) in (int, float) and abs(row) <= 1 for row in value)


class EndpointTransformer(StoredModule, InputModule):
    r"""Texts in a template, embedded by a server; the module has no weights.

    The server speaks OpenAI's ``/v1/embeddings``, as llama-server, Ollama, vLLM, TEI and Infinity do, and gives each
    text one vector. The module puts the template around each text, and returns ``sentence_embedding``. Filters fit
    behind it as behind any module::

        module = EndpointTransformer("http://127.0.0.1:11434", served_name="qwen3-embedding", template="prompteol")
        plain = SentenceTransformer(modules=[module])
        model = SentenceTransformer(modules=[module, WhiteningTransform.fit(plain, texts), Normalize()])

    A new module asks the server for the vector of one text and keeps its beginning. A saved model refuses a server that
    serves another model by then. It calls another machine only if the environment variable ``ST_REBA_ENDPOINTS`` names
    that host.

    Args:
        url: The server's root, its ``/v1``, or the path itself.
        template: Text with ``{text}`` once or more, or a name in :data:`st_reba.TEMPLATES`.
        served_name: Name of the model in requests; None: the first that the server lists.
        key_variable: Environment variable that has the server's key. Its name is saved, the key never is.
        timeout: Seconds for an answer.
        retries: Number of times that a request is sent again that was not answered, or for which the server had no
            time.
        normalize_text: See :func:`st_reba.text.presets.normalized`. None: as the template's authors do.
        max_characters: Number of characters of a text that are sent, so that the server does not cut the template
            behind it. None: no limit.
        dimension: Number of values of a vector; None: the server is asked, for the fingerprint, too.
        fingerprint: Beginning of one text's vector; None: the server is asked, for the dimension, too.

    Raises:
        ValueError: If a setting is out of range, or there is no key.
        EndpointError: If the server does not answer, or answers with something other than vectors.
    """

    config_keys = [
        *("template", "url", "served_name", "key_variable", "timeout", "retries", "normalize_text", "max_characters"),
        *("dimension", "fingerprint"),
    ]
    #: Settings that 1.0 removed, each with the value in OpenAI's form.
    REMOVED = {"form": "openai", "pool_over": None, "rows": None, "with_end": False, "max_seq_length": None}
    HAS_WEIGHTS = False
    save_in_root = False

    def __init__(
        self,
        url: str,
        *,
        template: str = "{text}",
        served_name: str | None = None,
        key_variable: str | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        normalize_text: bool | None = None,
        max_characters: int | None = None,
        dimension: int | None = None,
        fingerprint: list[float] | None = None,
    ) -> None:
        super().__init__()
        self._template = Template.parse(template)
        self.template = str(self._template)
        check("template", template, PREPEND not in self.template, f"nothing is prepended, so leave {PREPEND} out.")
        check_int("copies of the text in the template", self._template.copies, 1, 1024)
        advice = "give a server's URL that begins with http:// or https://, without a password or a query."
        self.url = check("url", url, _is_url(url), advice)
        is_name = isinstance(served_name, str | None)
        self.served_name = check("served_name", served_name, is_name, "give the server's name of the model.")
        # A saved model must not send another secret than a key.
        is_key = key_variable is None or (str(key_variable).isidentifier() and str(key_variable).endswith("API_KEY"))
        advice = "name the environment variable that has the key, not the key; it ends in API_KEY: ST_REBA_API_KEY."
        self.key_variable = check("key_variable", key_variable, is_key, advice)
        is_time = type(timeout) in (int, float) and 0 < timeout < 1e9
        self.timeout = check("timeout", timeout, is_time, "give seconds for an answer.")
        self.retries = check_int("retries", retries, 0, 20)
        normalizes = first_not_none(normalize_text, preset(template).normalize_text, False)
        self.normalize_text = check_flag("normalize_text", normalizes)
        self.max_characters = None if max_characters is None else check_int("max_characters", max_characters, 1)
        self.dimension = None if dimension is None else check_int("dimension", dimension, 1, 2**20)
        is_vector = fingerprint is None or _is_fingerprint(fingerprint)
        self.fingerprint = check("fingerprint", fingerprint, is_vector, "the module finds it; leave it out.")
        # Whether the URL comes from a file and not from the caller, and whether the server's model is known.
        self._from_file = False
        self._checked = dimension is None or fingerprint is None
        if self._checked:
            self.url = self._endpoint.url
            self.served_name = served_name or self._endpoint.first_model()
            vector = self._first_vector()
            self.dimension = len(vector)
            self.fingerprint = vector[:FINGERPRINT_VALUES].tolist()

    @property
    def _endpoint(self) -> Endpoint:
        """The client, with the key, which no attribute keeps: it would be pickled with the module.

        Raises:
            ValueError: If there is no key, or a saved model may not call the server.
        """
        host = urlsplit(self.url).hostname
        trusted = [name.strip() for name in os.environ.get(TRUSTED, "").split(",")]
        if self._from_file and host not in (*THIS_MACHINE, *trusted):
            problem = f"This saved model sends texts to {self.url}. If you trust that server with them, name it:"
            raise ValueError(f"{problem} set the environment variable {TRUSTED}={host}.")
        key = None if self.key_variable is None else os.environ.get(self.key_variable)
        if self.key_variable is not None and not key:
            raise ValueError(f"{self.url} asks for a key, and the variable {self.key_variable} has none: set it.")
        return Endpoint(self.url, self.served_name, key, self.timeout, self.retries)

    def _first_vector(self) -> np.ndarray:
        [vector] = self._endpoint.embed([FINGERPRINTED])
        if not (length := np.linalg.norm(vector)):
            raise EndpointError(f"{self.url} gave a vector of zeros for a sentence: is it a server of embeddings?")
        return (vector / length).round(6)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the server's vectors (B, D), if it serves the model that this module was made for."""
        known = np.asarray(self.fingerprint)
        if not self._checked:
            apart = np.linalg.norm(np.resize(self._first_vector(), known.shape) - known) / np.linalg.norm(known)
            self._checked = bool(apart <= FINGERPRINT_APART)
        vectors = self._endpoint.embed(texts) if self._checked else None
        if vectors is None or vectors.shape[1] != self.dimension:
            raise EndpointError(
                f"{self.url} serves another model than when this one was made, whose vectors had {self.dimension} "
                "values: serve that model again, or build anew."
            )
        return vectors

    def get_embedding_dimension(self) -> int:
        """Return the number of values of a vector."""
        return int(self.dimension or 0)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Put texts into the template.

        Args:
            inputs: B strings.
            prompt: Text in front of each.
            **kwargs: Not used.

        Returns:
            ``texts``, B strings as they are sent, and ``lengths`` (B,), the number of characters of each text.

        Raises:
            ValueError: If an input is no string.
        """
        if wrong := [index for index, text in enumerate(inputs) if not isinstance(text, str)]:
            raise ValueError(f"Input {wrong[0]} of its batch is a {type(inputs[wrong[0]]).__name__}: give strings.")
        texts = [(normalized(text) if self.normalize_text else text)[: self.max_characters] for text in inputs]
        self._template.check_prompt(prompt or "")
        literals = [literal.replace(PROMPT, prompt or "") for literal in self._template.literals]
        front = "" if self._template.takes_prompt else prompt or ""
        lengths = torch.tensor([len(text.strip()) for text in texts])
        return {"texts": [front + text.join(literals) for text in texts], "lengths": lengths}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Ask the server.

        Args:
            features: Result of :meth:`preprocess`.
            **kwargs: Not used.

        Returns:
            The features with ``sentence_embedding`` (B, D). A text without characters is not sent, and has zeros.

        Raises:
            EndpointError: If the server gives anything other than vectors of the model that this was made for.
        """
        lengths = features["lengths"]
        vectors = torch.zeros(len(lengths), self.get_embedding_dimension())
        if sent := [place for place, length in enumerate(lengths.tolist()) if length]:
            vectors[sent] = torch.from_numpy(self._embed([features["texts"][place] for place in sent])).float()
        return {**features, "sentence_embedding": vectors.to(lengths.device)}

    def extra_repr(self) -> str:
        """Return the settings, by which sentence-transformers' ``merge`` compares two modules."""
        return describe(self, [name for name in self.config_keys if name != "fingerprint"])

    @classmethod
    def from_saved(cls, settings: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        """Make the module from saved settings. The server is not asked before the first text."""
        if missing := [name for name in ("url", "dimension", "fingerprint") if settings.get(name) is None]:
            raise ValueError(f"it has no {missing[0]}. Save the model again")
        module = cls(settings.pop("url"), **settings)
        module._from_file = True
        return module
