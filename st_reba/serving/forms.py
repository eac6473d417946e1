"""What requests hold: fields, their types, and a sentence for each that is not as it should be."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from .refusals import RefusedError, shortened


def _texts_or_tokens(given: str | list[Any]) -> str | list[Any]:
    """Refuse what is neither texts nor tokens.

    Raises:
        ValueError: Saying which part it is.
    """
    if isinstance(given, str):
        return given
    if not given:
        raise ValueError("'input' is an empty list")
    if _are_tokens(given):
        return given
    kind = type(given[0])
    for index, value in enumerate(given):
        if type(value) is not kind or kind not in (str, list):
            raise ValueError(f"'input'[{index}] is {_called(value)}, and not like the first")
        if kind is list and not _are_tokens(value):
            raise ValueError(
                f"'input'[{index}] is {'a list of other things than tokens' if value else 'an empty list'}"
            )
    return given


def _are_tokens(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _called(value: object) -> str:
    names = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = Field(description="A name of `/v1/models`; `name:query` reads texts as queries.")


class EmbeddingsForm(_Form):
    """Of ``/v1/embeddings``, as OpenAI has it, and ``input_type``, as others have it."""

    input: Annotated[str | list[Any], AfterValidator(_texts_or_tokens)] = Field(
        description="A text, a list of texts, the token ids of one, or a list of lists of token ids."
    )
    dimensions: int | None = Field(None, description="Keep a vector's first values.")
    encoding_format: Literal["float", "base64"] | None = None
    input_type: str | None = Field(None, description="`query`, `document`, or the name of one of the model's prompts.")
    user: str | None = Field(None, description="Is not used.")

    @property
    def items(self) -> list[str | list[int]]:
        """Texts, or the token ids of texts."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


class Document(BaseModel):
    """As Jina has it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    text: str


#: For the page of the paths, which has no place for definitions of our own.
_DOCUMENTS: dict[str, Any] = {
    "description": "Texts, or objects with a `text`.",
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["text"]}]},
}


class RerankForm(_Form):
    """Of ``/rerank``, as Cohere and Jina have it."""

    query: str
    documents: Annotated[list[str | Document], FailFast(), WithJsonSchema(_DOCUMENTS)] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


FormT = TypeVar("FormT", bound=_Form)


def read(form: type[FormT], body: bytes) -> FormT:
    """What a request's body says.

    Raises:
        RefusedError: If it is no JSON object of that form.
    """
    try:
        given = from_json(body)
    except ValueError as error:
        raise RefusedError(400, f"The request's body is no JSON that can be read: {shortened(error, 200)}.") from None
    if not isinstance(given, dict):
        raise RefusedError(400, f"The request's body is {_called(given)}: send a JSON object.")
    for name in given:
        if name not in form.model_fields:
            name = shortened(name)
            raise RefusedError(400, f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _refused(error) from None


#: What a field may hold, where pydantic's words are about our types and not about the request.
_ALLOWED = {
    "input": "give a text, a list of texts, the token ids of one, or a list of lists of token ids",
    "documents": "give a list of texts, or of objects with a text",
}


def _refused(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False, include_input=False)[0]
    param, *inside = first["loc"]
    param = str(param)
    if first["type"] == "missing" and not inside:
        return RefusedError(
            400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if param not in _ALLOWED:
        return RefusedError(400, f"'{param}': {first['msg'][0].lower()}{first['msg'][1:]}.", param=param)
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
    else:
        said = "is not what it should be"
        said = f"'{param}'[{inside[0]}] {said}" if inside and isinstance(inside[0], int) else f"'{param}' {said}"
    return RefusedError(400, f"{said}: {_ALLOWED[param]}.", param=param)
