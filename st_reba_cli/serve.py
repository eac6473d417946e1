"""``st-reba serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from .checks import check_model
from .common import DeviceOption, Dtype, DtypeOption, command

MIB = 2**20


@command("serve")
def serve_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A SentenceTransformer, for embeddings: a directory or a Hub id."),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(
            help="A CrossEncoder, for /rerank: a directory or a Hub id. Without it, MODEL orders texts by similarity."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What requests call MODEL. Default: the last part of it.")] = None,
    rerank_name: Annotated[
        str | None, typer.Option(help="What requests call the CrossEncoder. Default: the last part of it.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; by default this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ST_REBA_API_KEY",
            show_envvar=True,
            help="A key that requests have to bring; several with commas. Others on this machine see an option, and "
            "not the variable.",
        ),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option("--truncate/--no-truncate", help="Cut texts that are too long for the model, or refuse them."),
    ] = True,
    batch_tokens: Annotated[int, typer.Option(help="Of a batch, padding included, at most.", min=1)] = 8192,
    batch_size: Annotated[int, typer.Option(help="Texts of a batch, at most.", min=1)] = 256,
    queue_tokens: Annotated[
        int, typer.Option(help="That wait at most; what comes then is told when to try again.", min=1)
    ] = MIB,
    max_inputs: Annotated[int, typer.Option(help="Texts of a request, at most.", min=1)] = 2048,
    max_body: Annotated[int, typer.Option(help="MiB of a request, at most.", min=1)] = 8,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL on the Hub.")] = None,
    rerank_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the CrossEncoder on the Hub.")
    ] = None,
    dtype: DtypeOption = Dtype.fastest,
    device: DeviceOption = None,
) -> None:
    """A model behind OpenAI's /v1/embeddings, /rerank, /health and /metrics. SIGTERM finishes what it has."""
    if model is None and rerank is None:
        raise ValueError("There is no model to serve: give MODEL, --rerank, or both.")
    for given, called in ((name, "--name"), (rerank_name, "--rerank-name")):
        if given == "":
            raise ValueError(f"{called} is empty: give a name, or leave it out.")
    for given in (model, rerank):
        if given is not None:
            check_model(given)
    if api_key is not None and not all(key.strip() for key in api_key.split(",")):
        raise ValueError("An API key is empty (--api-key, ST_REBA_API_KEY): give a key, or leave it out.")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "An API key (--api-key, ST_REBA_API_KEY) has other characters than printable ASCII, and clients send those "
            "in different ways: give a key of letters, digits and marks."
        )
