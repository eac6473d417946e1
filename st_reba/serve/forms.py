"""Forms of requests, and refusals in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

#: OpenAI's names for errors, by status; all others are "invalid_request_error".
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class RefusedError(Exception):
    """Error of one request.

    Args:
        status: HTTP status.
        message: What was given, what is allowed, what to do.
        param: Field of the request.
        code: Name of the error, for programs.
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
        """Body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: when to try again, and how to log in."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def shortened(value: object, length: int = 60) -> str:
    """Return the beginning of a value, for a message."""
    shown = str(value)
    return shown if len(shown) <= length else f"{shown[:length]}…"


def _has_text(document: dict[str, Any]) -> str:
    """Return the text of a document in Jina's form."""
    if not isinstance(text := document.get("text"), str):
        raise ValueError("a document without a text")
    return text


# An empty text has no vector.
_Text = Annotated[str, Field(min_length=1)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EmbeddingsForm(_Form):
    """Form of ``/v1/embeddings``."""

    model: str
    # The first wrong element is enough: a list may have a million.
    input: _Text | Annotated[list[_Text], Field(fail_fast=True, min_length=1)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class RerankForm(_Form):
    """Form of ``/rerank``, as Cohere and Jina have it."""

    model: str
    query: _Text
    documents: Annotated[
        list[str | Annotated[dict[str, Any], AfterValidator(_has_text)]], Field(fail_fast=True, min_length=1)
    ]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


FormT = TypeVar("FormT", bound=_Form)

#: What a field may hold, if pydantic's message is about types and not about the request.
_ALLOWED = {
    "input": "give a text, or a list of texts; token ids are not read (LangChain: check_embedding_ctx_length=False)",
    "documents": "give a list of texts, or of objects with a text",
}


def read(form: type[FormT], body: bytes) -> FormT:
    """Return a request's body in its form.

    Raises:
        RefusedError: If it is no JSON object of that form.
    """
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    # An unknown field comes last, and may be a known one with a typing error.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    kind, param = first["type"], shortened(first["loc"][0]) if first["loc"] else None
    if param is None:
        raise RefusedError(400, f"The request's body is no JSON object: {shortened(first['msg'], 200)}.")
    if kind == "extra_forbidden":
        raise RefusedError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        raise RefusedError(400, message, param=param, code="missing_required_parameter")
    if empty := next((each["loc"] for each in errors if each["type"] == "string_too_short"), None):
        place = f"[{empty[-1]}]" if isinstance(empty[-1], int) else ""
        raise RefusedError(400, f"'{param}'{place} is empty: give a text with a character or more.", param=param)
    raise RefusedError(400, f"'{param}': {_ALLOWED.get(param, first['msg'].lower())}.", param=param)
