"""Texts in a recipe's prompt, embedded by a server that runs elsewhere and may generate, too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

import numpy as np
import torch
from sentence_transformers.base.modules import InputModule
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..lm.endpoint import Endpoint, EndpointError, Form, ServerTokens
from ..settings import Setting, choice, described, flag, optional, tokens, whole
from ..text.layout import Layout
from ..text.layouts import lay_out
from ..text.templates import PROMPT, PoolOver, Rows, Template, normalized, preset
from ..text.tokens import spans_of
from .causal_module import POOL_OVER, ROWS, chosen, repetitions_from
from .checkpoints import note_requirement, saved_settings
from .token_vectors import last_of, picked, without_empty

#: A text whose vector tells one model from another.
FINGERPRINTED = "The dog chased the cat; the cat chased the mouse, and nobody chased the dog."
#: How many of that vector's values are kept, and how far apart they may be, as a share of their length: another
#: machine, or another build of the server, moves them by a few hundredths.
FINGERPRINT_VALUES, FINGERPRINT_APART = 32, 0.2

#: Of how many strings, at most, a module remembers the tokens.
REMEMBERED = 4096

#: The environment variable that names the servers that a saved model may call, besides those of this machine.
TRUSTED = "ST_REBA_ENDPOINTS"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
#: What a key's variable is called, at the least: what a saved model names must not be some other secret.
_KEY = "API_KEY"


def _is_url(value: Any) -> bool:
    """Whether this is the address of a server and nothing else: a name, a password or a query may hold a secret."""
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        plain = not (parts.query or parts.fragment or parts.username or parts.password)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and plain
    except ValueError:
        return False


URL: Setting[str] = Setting(
    "url", _is_url, "give a server's URL, which begins with http:// or https://, without a password and a query."
)
FORM: Setting[Form] = choice("form", "auto", "openai", "tei", "ollama", "llama.cpp")
SERVED_NAME: Setting[str | None] = optional(
    Setting(
        "served_name", lambda value: isinstance(value, str) and bool(value), "give what the server calls the model."
    )
)
KEY_VARIABLE: Setting[str | None] = optional(
    Setting(
        "key_variable",
        lambda value: isinstance(value, str) and value.endswith(_KEY) and value.isidentifier(),
        f"give the name of the environment variable that has the key, not the key; it ends in {_KEY}, such as "
        f"ST_REBA_{_KEY}.",
    )
)
TIMEOUT: Setting[float] = Setting(
    "timeout",
    lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    "give the seconds that an answer may take.",
)
RETRIES = whole("retries", 0, 20)
WITH_END = flag("with_end")
NORMALIZE_TEXT = flag("normalize_text")
MAX_CHARACTERS = optional(whole("max_characters", 1, 2**31, "give a number of characters, 1 or more, or None."))
DIMENSION = optional(whole("dimension", 1, 2**20))
FINGERPRINT: Setting[Sequence[float] | None] = optional(
    Setting(
        "fingerprint",
        lambda value: (
            isinstance(value, list)
            and all(type(each) in (int, float) and abs(each) <= 1 for each in value)
            and any(value)
        ),
        "it is a list of numbers that the module finds itself; leave it out.",
    )
)
_OF_THE_SERVER = (URL, FORM, SERVED_NAME, KEY_VARIABLE, TIMEOUT, RETRIES, DIMENSION, FINGERPRINT)
_OF_STATES = ("pool_over", "rows", "with_end", "max_seq_length")


class EndpointTransformer(InputModule):
    r"""Texts in a template, embedded by a server; no weights are here.

    A llama-server started with ``--embeddings --pooling none`` gives the state of every token: the module lays texts
    out as the modules of this package do, in tokens of the server's own tokenizer, and hands on token vectors, for
    ``Pooling``. The same server generates. Any other server gives a text one vector: the module puts the template's
    words before and behind the text, and hands on ``sentence_embedding``. What is fitted stands behind both as ever::

        module = EndpointTransformer("http://127.0.0.1:11434", form="ollama", template="prompteol")
        plain = SentenceTransformer(modules=[module])
        model = SentenceTransformer(modules=[module, WhiteningTransform.fit(plain, texts), Normalize()])

    What is made here asks the server for the vector of one text, and keeps its beginning: a saved model refuses a
    server that serves another model by then. A saved model calls a server on another machine only where the
    environment variable ``ST_REBA_ENDPOINTS`` names its host.

    Args:
        server: A server's URL, its root or its path; or another module, whose server is then shared.
        form: ``"openai"``, ``"tei"``, ``"ollama"`` or ``"llama.cpp"``; ``"auto"``: by the URL's path, else OpenAI's or
            TEI's, whichever is there.
        template: Text with ``{text}`` once or more, or a name in :data:`st_reba.TEMPLATES`, which brings how its
            authors read it in ``pool_over``, ``rows`` and ``normalize_text``. It is read at the server's end: behind
            its last layer, normed.
        served_name: What the server calls the model; None: the first that it lists.
        key_variable: The environment variable that has the server's key. Its name is saved, the key never is.
        timeout: Seconds for an answer.
        retries: How often a request is sent again that was not answered, or that the server had no time for.
        normalize_text: See :func:`st_reba.text.templates.normalized`.
        max_characters: Of a text, where the server gives it one vector: what is longer is cut before the template is
            put around it, so that the server does not cut the template. None: no limit.
        pool_over: Of token vectors, ``"text"``: those of the last copy of the text; ``"all"``: from there to the end.
        rows: Of these, ``"all"``, or the ``"last"`` alone.
        with_end: Whether the state of the template's last token stands behind each of them, as for ``echo-topic``:
            vectors are then (2D,), two parts.
        max_seq_length: Tokens of one copy of a text. None: as many as the server has room for.
        dimension: D; None: it is asked for, and so is the fingerprint.
        fingerprint: The beginning of one text's vector; None: it is asked for, and so is the dimension.

    Raises:
        ValueError: If a setting is out of range, or means nothing to such a server, or there is no key.
        EndpointError: If the server does not answer, or answers something else than vectors.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [
        *(setting.name for setting in _OF_THE_SERVER), "template", "normalize_text", "max_characters", *_OF_STATES,
    ]  # fmt: skip
    save_in_root = False

    pool_over: PoolOver | None
    rows: Rows | None

    def __init__(
        self,
        server: str | EndpointTransformer,
        *,
        form: Form = "auto",
        template: str = "{text}",
        served_name: str | None = None,
        key_variable: str | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        normalize_text: bool | None = None,
        max_characters: int | None = None,
        pool_over: PoolOver | None = None,
        rows: Rows | None = None,
        with_end: bool = False,
        max_seq_length: int | None = None,
        dimension: int | None = None,
        fingerprint: list[float] | None = None,
    ) -> None:
        super().__init__()
        self._template = Template.parse(template)
        repetitions_from(1).check(self._template.copies)
        self.template, known = str(self._template), preset(template)
        self.normalize_text = NORMALIZE_TEXT.check(chosen(normalize_text, known.normalize_text, False))
        self.max_characters = MAX_CHARACTERS.check(max_characters)
        self.with_end = WITH_END.check(with_end)
        self.max_seq_length = tokens("max_seq_length").check(max_seq_length)
        asked: dict[str, Any] = {
            "url": server, "form": form, "served_name": served_name, "key_variable": key_variable, "timeout": timeout,
            "retries": retries, "dimension": dimension, "fingerprint": fingerprint,
        }  # fmt: skip
        shared = server if isinstance(server, EndpointTransformer) else None
        if shared is not None:
            asked = {name: getattr(shared, name) for name in asked}
        for setting in _OF_THE_SERVER:
            setting.check(asked[setting.name])
        self.url: str = asked["url"]
        self.form: Form = asked["form"]
        self.served_name: str | None = asked["served_name"]
        self.key_variable: str | None = asked["key_variable"]
        self.timeout: float = asked["timeout"]
        self.retries: int = asked["retries"]
        self.dimension: int = asked["dimension"]
        self.fingerprint: list[float] = asked["fingerprint"]
        # What the server makes of strings, such as the words of the template, which stand in every batch.
        self._tokens: dict[tuple[str, bool], ServerTokens] = {}
        # Whether the URL comes from a file, and not from who runs this.
        self._of_a_file: bool = shared is not None and shared._of_a_file
        # Whether the server was seen to serve the model that this was made for.
        self._seen: bool = shared is not None and shared._seen
        if shared is None and None in (dimension, fingerprint):
            self._note_server()
        if self.form == "llama.cpp":
            self.pool_over = POOL_OVER.check(chosen(pool_over, known.pool_over, "text"))
            self.rows = ROWS.check(chosen(rows, known.rows, "all"))
            if max_characters is not None:
                raise ValueError("max_characters is for servers that give a text one vector: use max_seq_length.")
        else:
            given = {"pool_over": pool_over, "rows": rows, "with_end": with_end, "max_seq_length": max_seq_length}
            if named := [name for name, value in given.items() if value]:
                raise ValueError(
                    f"{', '.join(named)}: {self.url} gives a text one vector, so no tokens are read. Leave out what is "
                    'for tokens, or give the URL of a llama-server and form="llama.cpp".'
                )
            self.pool_over = self.rows = None
        #: How much each part of a vector counts where :class:`st_reba.StandardizedSum` stands behind.
        self.shares = (0.5, 0.5) if with_end else (1.0,)

    # The server

    @property
    def gives_states(self) -> bool:
        """Whether the server gives the state of each token; else each text one vector."""
        return self.form == "llama.cpp"

    @property
    def _endpoint(self) -> Endpoint:
        """The server, with its key, which no attribute keeps: it would be pickled with the module.

        Raises:
            ValueError: If there is no key, or a saved model's server is not one of those that it may call.
        """
        host = urlsplit(self.url).hostname
        trusted = [name.strip() for name in os.environ.get(TRUSTED, "").split(",")]
        if self._of_a_file and host not in (*_THIS_MACHINE, *trusted):
            raise ValueError(
                f"This saved model sends texts to {self.url}. If you trust that server with them, name it: set the "
                f"environment variable {TRUSTED}={host}."
            )
        key = None if self.key_variable is None else os.environ.get(self.key_variable)
        if self.key_variable is not None and not key:
            raise ValueError(
                f"{self.url} asks for a key, and the environment variable {self.key_variable} has none: set it."
            )
        return Endpoint(self.url, self.served_name, self.form, key, self.timeout, self.retries)

    def _note_server(self) -> None:
        """Ask the server what it serves, and note it."""
        endpoint = self._endpoint
        self.url, self.form, self.served_name = endpoint.url, endpoint.form, endpoint.model
        vector = self._first_values(endpoint)
        self.dimension, self.fingerprint = len(vector), vector[:FINGERPRINT_VALUES].tolist()
        self._seen = True

    def _first_values(self, endpoint: Endpoint) -> np.ndarray:
        """The vector of one text that stands in no template, scaled to length 1."""
        if self.gives_states:
            [(ids, _)] = endpoint.tokenized([FINGERPRINTED])
            [states] = endpoint.states([ids])
            vector = states[-1]
        else:
            [vector] = endpoint.embed([FINGERPRINTED])
        self._check_numbers([vector])
        length = np.linalg.norm(vector)
        if not length:
            raise EndpointError(f"{self.url} gave a vector of zeros for a sentence: is it a server of embeddings?")
        return (vector / length).round(6)

    def apart(self, endpoint: Endpoint) -> float:
        """How far a server's vector of one text is from that of the model that this was made for, as a share of it.

        Infinite where it has another dimension.
        """
        found, known = self._first_values(endpoint), np.asarray(self.fingerprint)
        if len(found) != self.dimension:
            return float("inf")
        return float(np.linalg.norm(found[: len(known)] - known) / np.linalg.norm(known))

    def _check_server(self, endpoint: Endpoint) -> None:
        """Refuse a server that serves another model than when this was made.

        Raises:
            EndpointError: If it does.
        """
        if not self._seen and (apart := self.apart(endpoint)) > FINGERPRINT_APART:
            told = f"the vector of one text is {apart:.2g} of its length away"
            if apart == float("inf"):
                told = f"its vectors have not {self.dimension} values any more"
            raise EndpointError(
                f"{self.url} serves another model than when this one was made: {told}. Serve that model again, or "
                "build anew."
            )
        self._seen = True

    def _check_numbers(self, vectors: Sequence[np.ndarray]) -> None:
        if not all(np.isfinite(vector).all() for vector in vectors):
            raise EndpointError(f"{self.url} gave a vector with a value that is no number: see what the server says.")

    def _check_width(self, vectors: Sequence[np.ndarray]) -> None:
        self._check_numbers(vectors)
        widths = {vector.shape[-1] for vector in vectors} - {self.dimension}
        if widths:
            raise EndpointError(
                f"{self.url} gave a vector of {min(widths)} values, and {self.dimension} before: it serves another "
                "model by now."
            )

    # Text in

    def get_embedding_dimension(self) -> int:
        """D, or 2D with the template's end."""
        return self.dimension * len(self.shares)

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Put texts into the template.

        Args:
            inputs: B strings.
            prompt: What stands before each.
            **kwargs: What ST passes to every module; none of it means anything here.

        Returns:
            Of a server that gives states, a layout: ``input_ids``, ``attention_mask`` and ``copy_index``, each (B, N),
            see :class:`st_reba.text.layout.Layout`. Else ``texts``, B strings as they are sent, and ``lengths``, (B,),
            the characters of each text.

        Raises:
            ValueError: If an input is no string, or there is no room for text.
        """
        if not inputs:
            return {}
        for index, given in enumerate(inputs):
            if not isinstance(given, str):
                raise ValueError(f"Input {index} is a {type(given).__name__}: {type(self).__name__} embeds strings.")
        texts = [normalized(text) for text in inputs] if self.normalize_text else list(inputs)
        if self.gives_states:
            return self._lay_out(texts, prompt or "").features()
        cut = [text[: self.max_characters] for text in texts]
        lengths = torch.tensor([len(text.strip()) for text in cut])
        self._template.check_prompt(prompt or "")
        literals = [literal.replace(PROMPT, prompt or "") for literal in self._template.literals]
        front = "" if self._template.takes_prompt else prompt or ""
        return {"texts": [front + text.join(literals) for text in cut], "lengths": lengths}

    def _lay_out(self, texts: Sequence[str], prompt: str) -> Layout:
        endpoint = self._endpoint
        self._check_server(endpoint)
        tokenizer = cast(PreTrainedTokenizerBase, _ServerTokenizer(endpoint, self._tokens))
        [layout] = lay_out(
            [self._template],
            tokenizer,
            texts,
            prompt=prompt,
            max_tokens=self.max_seq_length,
            positions=endpoint.context(),
        )
        return layout

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text's tokens in the server's tokenizer; of a server that gives states alone."""
        return [ids for ids, _ in self._endpoint.tokenized(texts)]

    # Vectors out

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Ask the server.

        Args:
            features: What :meth:`preprocess` returned.
            **kwargs: Not used.

        Returns:
            The features with ``token_embeddings`` (B, n, D), and ``attention_mask`` and ``input_ids`` (B, n) to match;
            or with ``sentence_embedding`` (B, D). A text without characters, or tokens, has zeros and is not sent.

        Raises:
            EndpointError: If the server gives anything else than vectors of the model that this was made for.
        """
        if not self.gives_states:
            lengths = features["lengths"]
            vectors = torch.zeros(len(lengths), self.dimension)
            if sent := [place for place, length in enumerate(lengths.tolist()) if length]:
                endpoint = self._endpoint
                self._check_server(endpoint)
                found = endpoint.embed([features["texts"][place] for place in sent])
                self._check_width(found)
                vectors[sent] = torch.from_numpy(np.stack(found)).float()
            return {**features, "sentence_embedding": vectors.to(lengths.device)}
        layout = Layout.of(features)
        states = self._states(layout)
        read = picked(states, layout.input_ids, self._selected(layout))
        if self.with_end:
            ends = states[torch.arange(len(states)), layout.ends][:, None].expand_as(read.states)
            read = read._replace(states=torch.cat([read.states, ends], dim=-1))
        vectors, mask = without_empty(read.states, read.mask, layout.text_lengths == 0)
        device = features["input_ids"].device
        found_features = {"token_embeddings": vectors, "attention_mask": mask.long(), "input_ids": read.ids}
        rest = {name: value for name, value in features.items() if name not in layout.features()}
        return {**rest, **{name: value.to(device) for name, value in found_features.items()}}

    def _states(self, layout: Layout) -> Tensor:
        """The last hidden state of each token, (B, N, D); zeros in padding, and where there is no text."""
        states = torch.zeros(*layout.input_ids.shape, self.dimension)
        if sent := (layout.text_lengths > 0).nonzero()[:, 0].tolist():
            endpoint = self._endpoint
            self._check_server(endpoint)
            rows = [layout.input_ids[row][layout.attention_mask[row]].tolist() for row in sent]
            found = endpoint.states(rows)
            self._check_width(found)
            for row, own in zip(sent, found, strict=True):
                states[row, : len(own)] = torch.from_numpy(own).float()
        return states

    def _selected(self, layout: Layout) -> Tensor:
        """(B, N): the tokens that ``pool_over`` and ``rows`` name, of the text's last copy."""
        if self.pool_over == "whole":
            selected = layout.attention_mask
        else:
            selected = layout.copy_index == self._template.copies - 1
            if self.pool_over == "all":
                selected = (selected.cummax(dim=1).values) & layout.attention_mask
        return last_of(selected) if self.rows == "last" else selected

    # On disk

    def extra_repr(self) -> str:
        """The settings, by which ST's ``merge`` tells whether two modules are alike."""
        return described(self, self.config_keys)

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.get_config_dict().items() if name != "fingerprint"}
        return f"{type(self).__name__}({shown})"

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the settings, and note in the pipeline's configuration that st_reba is needed to load it."""
        self.save_config(output_path)
        note_requirement(Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a saved module; the server is not asked before the first text.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json.
            **kwargs: ``token``, ``cache_folder``, ``revision`` and ``local_files_only``, of a model on the Hub.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, or a setting is out of range or none of this class's.
        """
        settings, _, place = saved_settings(cls, model_name_or_path, subfolder, kwargs)
        if missing := [name for name in ("url", "dimension", "fingerprint") if settings.get(name) is None]:
            raise ValueError(f"{place} is not a saved {cls.__name__}: it has no {missing[0]}. Save the model again.")
        try:
            module = cls(settings.pop("url"), **settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place} is not a saved {cls.__name__}: {str(error).rstrip('.')}.") from error
        module._of_a_file = True
        return module


class _ServerTokenizer:
    """A server's tokenizer, as far as texts are laid out with one of transformers'.

    Args:
        endpoint: The server.
        known: What it made of strings before, by the string and whether with special tokens; what is new is added.
    """

    is_fast = True
    truncation_side = "right"
    eos_token_id = None

    def __init__(self, endpoint: Endpoint, known: dict[tuple[str, bool], ServerTokens]) -> None:
        self._endpoint, self._known = endpoint, known

    def num_special_tokens_to_add(self) -> int:
        # Whether there are any, texts show.
        return 1

    def __call__(
        self, strings: Sequence[str], add_special_tokens: bool = True, **kwargs: Any
    ) -> Mapping[str, list[Any]]:
        if len(self._known) > REMEMBERED:
            self._known.clear()
        new = [string for string in dict.fromkeys(strings) if (string, add_special_tokens) not in self._known]
        for string, tokens_of_it in zip(new, self._endpoint.tokenized(new, add_special_tokens), strict=True):
            self._known[string, add_special_tokens] = tokens_of_it
        found = [self._known[string, add_special_tokens] for string in strings]
        spans = [spans_of(spelling, string) for (_, spelling), string in zip(found, strings, strict=True)]
        return {"input_ids": [ids for ids, _ in found], "offset_mapping": spans}
