"""Request bodies, and errors in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

#: OpenAI's types of errors by status; the default is "invalid_request_error".
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class RefusedError(Exception):
    """Error of one request.

    Args:
        status: HTTP status.
        message: Message with the value, the allowed values and a remedy.
        param: Field of the request.
        code: OpenAI's code of the error.
        retry_after: Seconds before the next attempt.
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
        """Headers of the answer, for retries and authentication."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def shorten(value: object, length: int = 60) -> str:
    """Return the beginning of a value, for a message."""
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _has_text(document: dict[str, Any]) -> str:
    """Return the text of a document in Jina's format."""
    if not isinstance(text := document.get("text"), str):
        raise ValueError("a document without a text")
    return text


# An empty text has no vector.
_Text = Annotated[str, Field(min_length=1)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EmbeddingsForm(_Form):
    """Body of ``/v1/embeddings``."""

    model: str
    # fail_fast: a list may have a million wrong elements.
    input: _Text | Annotated[list[_Text], Field(fail_fast=True, min_length=1)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class RerankForm(_Form):
    """Body of ``/rerank``, in the format of Cohere and Jina."""

    model: str
    query: _Text
    documents: Annotated[
        list[str | Annotated[dict[str, Any], AfterValidator(_has_text)]], Field(fail_fast=True, min_length=1)
    ]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


FormT = TypeVar("FormT", bound=_Form)

#: Messages that replace pydantic's, which are about Python types.
_ALLOWED = {
    "input": "give a text, or a list of texts; token ids are not read (LangChain: check_embedding_ctx_length=False)",
    "documents": "give a list of texts, or of objects with a text",
}


def parse(form: type[FormT], body: bytes) -> FormT:
    """Parse and check the body of a request.

    Raises:
        RefusedError: If it is not a JSON object with the fields of the form.
    """
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    # Unknown fields come last, but may be misspelt known fields, which would be reported as missing.
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    kind, param = first["type"], shorten(first["loc"][0]) if first["loc"] else None
    if param is None:
        raise RefusedError(400, f"The body is not a JSON object: {shorten(first['msg'], 200)}.")
    if kind == "extra_forbidden":
        raise RefusedError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        raise RefusedError(400, message, param=param, code="missing_required_parameter")
    if empty := next((entry["loc"] for entry in errors if entry["type"] == "string_too_short"), None):
        index = f"[{empty[-1]}]" if isinstance(empty[-1], int) else ""
        raise RefusedError(400, f"'{param}'{index} is empty: give a text of at least one character.", param=param)
    raise RefusedError(400, f"'{param}': {_ALLOWED.get(param, first['msg'].lower())}.", param=param)
