"""What requests hold, and why one is refused, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

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
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

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


def _text(document: dict[str, Any]) -> str:
    """The text of a document, as Jina has it."""
    if not isinstance(text := document.get("text"), str):
        raise ValueError("a document without a text")
    return text


#: The first wrong element is enough: a list may have a million.
_Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1)]
_Document = str | Annotated[dict[str, Any], AfterValidator(_text)]


_Model = Annotated[str, Field(description="A name of `/v1/models`; `name:query` reads texts as queries.")]
_Texts = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True, min_length=1)]
    | _Tokens
    | Annotated[list[_Tokens], Field(fail_fast=True, min_length=1)],
    Field(
        description="A text, a list of texts, the token ids of one, or a list of lists of token ids.",
        union_mode="left_to_right",
    ),
]


def _items(given: Any) -> list[Any]:
    """Texts, or the token ids of texts."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EmbeddingsForm(_Form):
    """Of ``/v1/embeddings``, as OpenAI has it, and ``input_type``, as others have it."""

    model: _Model
    input: _Texts
    dimensions: int | None = Field(None, description="Keep a vector's first values.")
    encoding_format: Literal["float", "base64"] | None = None
    input_type: str | None = Field(None, description="`query`, `document`, or the name of one of the model's prompts.")
    user: str | None = Field(None, description="Is not used.")

    @property
    def items(self) -> list[Any]:
        """Texts, or the token ids of texts."""
        return _items(self.input)


class TextsForm(_Form):
    """Of ``/embed_sparse`` and ``/embed_all``, as Text Embeddings Inference has them."""

    inputs: _Texts
    prompt_name: str | None = Field(None, description="`query`, `document`, or the name of one of the model's prompts.")
    truncate: bool | None = Field(None, description="Whether texts that are too long are cut, or refused.")
    truncation_direction: Literal["right", "Right"] | None = None

    @property
    def items(self) -> list[Any]:
        """Texts, or the token ids of texts."""
        return _items(self.inputs)


class RerankForm(_Form):
    """Of ``/rerank``, as Cohere and Jina have it."""

    model: _Model
    query: str
    documents: Annotated[
        list[_Document], Field(fail_fast=True, min_length=1, description="Texts, or objects with a text.")
    ]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


FormT = TypeVar("FormT", bound=_Form)

#: What a field may hold, where pydantic's words are about our types and not about the request.
_ALLOWED = {
    **dict.fromkeys(
        ("input", "inputs"), "give a text, a list of texts, the token ids of one, or a list of lists of token ids"
    ),
    "documents": "give a list of texts, or of objects with a text",
}


def read(form: type[FormT], body: bytes) -> FormT:
    """What a request's body says.

    Raises:
        RefusedError: If it is no JSON object of that form.
    """
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    # An unknown field comes last, and may be a known one that is mistyped.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    kind, param, code = first["type"], shortened(first["loc"][0]) if first["loc"] else None, None
    if kind == "json_invalid":
        said = f"The request's body is no JSON that can be read: {shortened(first['ctx']['error'], 200)}."
    elif param is None:
        said = "The request's body is no JSON object: send one."
    elif kind == "extra_forbidden":
        said, code = f"Unknown parameter: '{param}'.", "unknown_parameter"
    elif kind == "missing":
        said, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
    elif param in _ALLOWED:
        # The kind of list that the first elements are of fails last.
        places = [part for each in errors if each["loc"][0] == param for part in each["loc"][1:3]]
        numbers = [part for part in places if isinstance(part, int)]
        where = f"[{max(numbers)}]" if numbers else ""
        said = f"'{param}'{where} is not what it should be: {_ALLOWED[param]}."
    else:
        said = f"'{param}': {first['msg'][0].lower()}{first['msg'][1:]}."
    raise RefusedError(400, said, param=param, code=code)
