"""``st-reba verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import options
from .options import argument, check_model, complete_model, option
from .printing import console, notes


def verify(
    context: typer.Context,
    url: Annotated[
        str, argument("The server's URL: its root, or its path (.../v1, .../v1/embeddings, .../embed).", "URL")
    ],
    model: Annotated[
        str,
        option(
            "The saved SentenceTransformer that it serves: a directory or a Hub id.",
            callback=check_model,
            autocompletion=complete_model,
        ),
    ],
    served_name: Annotated[
        str | None, option("The name by which the server knows the model. Default: the first of its /v1/models.")
    ] = None,
    form: Annotated[
        Literal["auto", "openai", "tei", "ollama", "llama.cpp"],
        option(
            "How the server is asked: openai for /v1/embeddings, tei for /embed, auto for whichever is there. ollama "
            "and llama.cpp: for a model that was built with --endpoint."
        ),
    ] = "auto",
    prompt_name: Annotated[
        str | None, option("The name of the model's prompt that the server should put before texts.")
    ] = None,
    tolerance: Annotated[
        float | None,
        option(
            "The largest distance allowed between the two vectors of a text, each scaled to length 1. Default: 1e-4; "
            "5e-3 in float16, 3e-2 in bfloat16.",
            min=0,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        option(
            "Tokens of the longest text that is sent, at most. Whether the server cuts texts is only seen if the "
            "model reads fewer.",
            min=16,
        ),
    ] = 2048,
    api_key: Annotated[
        str | None, option("The key to send, if the server asks for one.", envvar="ST_REBA_API_KEY", show_envvar=True)
    ] = None,
    timeout: Annotated[float, option("Seconds to wait for an answer.", min=0.1)] = 60.0,
    revision: options.Revision = None,
    dtype: options.Dtype = "fastest",
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """See whether a server gives the saved model's vectors.

    If it does not, the command names the reason, and its exit code is 1.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is no URL: give one that begins with http:// or https://.")

    # Before what takes seconds to import.
    notes.say(f"Asking {url}, which has {timeout:g} seconds for each answer (--timeout).")

    from rich.table import Table

    from st_reba import EndpointTransformer
    from st_reba.hub.push import loading_class
    from st_reba.verify import Endpoint
    from st_reba.verify import verify as verified

    from .load import load_saved, quiet, usable
    from .results import Probed, Verified, write_json

    context.with_resource(quiet())
    if Path(model).is_dir() and (kind := loading_class(model)) not in (None, "SentenceTransformer"):
        raise ValueError(
            f"{model} is a {kind}, and verify compares one vector a text, of a SentenceTransformer. Load it with "
            f'{kind}("{model}") after import st_reba, and compare what it gives with what the server answers.'
        )
    # Before the model is loaded: it takes longer.
    endpoint = Endpoint(url, served_name, form, api_key, timeout)
    with usable(model, device):
        own = load_saved(model, revision, dtype=dtype, device=device)
        seen = verified(endpoint, own, prompt_name=prompt_name, tolerance=tolerance, max_tokens=max_tokens)
    verb, what = "give", f"the vectors of {model}"
    if isinstance(own[0], EndpointTransformer):
        verb, what = "serve", f"the model that {model} was made for"
    said = f"Equal: {endpoint.url} {verb}s {what}." if seen.equal else f"{endpoint.url} does not {verb} {what}:"
    console.say(said)
    for cause in seen.causes:
        console.say(f"- {cause}")
    table = Table("text", "tokens", "apart", box=None)
    for row in seen.rows:
        apart = "refused" if row.distance is None else f"{row.distance:.1e}"
        table.add_row(row.probe.name, str(row.probe.tokens), apart)
    console.print(table)
    console.print(f"Allowed are {seen.tolerance:g}, of two vectors of length 1.")
    if as_json:
        rows = [Probed(text=row.probe.name, tokens=row.probe.tokens, distance=row.distance) for row in seen.rows]
        found = Verified(
            url=endpoint.url,
            model=model,
            equal=seen.equal,
            causes=list(seen.causes),
            tolerance=seen.tolerance,
            rows=rows,
        )
        write_json("verify", found)
    if not seen.equal:
        raise typer.Exit(1)
