"""``st-reba verify``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .checks import check_model
from .common import DeviceOption, Dtype, DtypeOption, command


class FormName(StrEnum):
    auto = "auto"
    openai = "openai"
    tei = "tei"


@command("verify")
def verify_command(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A server: its root, or its path (.../v1, .../v1/embeddings, .../embed)."),
    ],
    model: Annotated[
        str, typer.Option("--model", help="The saved SentenceTransformer that it serves: a directory or a Hub id.")
    ],
    served_name: Annotated[
        str | None, typer.Option(help="What the server calls the model. Default: the first of its /v1/models.")
    ] = None,
    form: Annotated[
        FormName, typer.Option(help="OpenAI's /v1/embeddings or TEI's /embed; by the URL, or whichever is there.")
    ] = FormName.auto,
    prompt_name: Annotated[
        str | None, typer.Option(help="Which of the model's prompts the server should put before texts.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far two vectors of length 1 may be apart. Default: 1e-4; 5e-3 in float16, 3e-2 in bfloat16.",
            min=0,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="The long text is longer than what the model reads, if that is below this.", min=16)
    ] = 2048,
    api_key: Annotated[
        str | None, typer.Option(envvar="ST_REBA_API_KEY", show_envvar=True, help="That the server asks for.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.", min=0.1)] = 60.0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    dtype: DtypeOption = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """Any server beside the saved model, with the reason if they differ. Exits with 1 then."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no URL: give one that begins with http:// or https://.")
    check_model(model)
