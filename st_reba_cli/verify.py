"""``st-reba verify``."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import typer

from . import options
from .options import KEY_VARIABLE, argument, check_key, check_model, option
from .printing import console, notes, write_json


def verify(
    context: typer.Context,
    url: Annotated[str, argument("The server's URL: its root, or its path (.../v1, .../v1/embeddings).", "URL")],
    model: Annotated[
        str,
        option(
            "The saved SentenceTransformer that it serves: a directory or a Hub id.",
            callback=check_model,
        ),
    ],
    model_name: Annotated[
        str | None, option("The name of the model in requests. Default: the first of the server's /v1/models.")
    ] = None,
    prompt_name: Annotated[
        str | None, option("The name of the model's prompt that the server should put before texts.")
    ] = None,
    api_key: Annotated[
        str | None,
        option(
            "The key to send, if the server asks for one.", envvar=KEY_VARIABLE, show_envvar=True, callback=check_key
        ),
    ] = None,
    timeout: Annotated[float, option("Seconds to wait for an answer.", min=0.1)] = 60.0,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """See whether a server gives the saved model's vectors.

    It is asked for those of twenty texts. If they differ, the command says how, and its exit code is 1.
    """
    _check_answers(url)

    # Before what takes seconds to import.
    notes.say(f"Asking {url}, which has {timeout:g} seconds for each answer (--timeout).")

    from st_reba.hub.push import loading_class
    from st_reba.verify import Endpoint
    from st_reba.verify import verify as verified

    from .load import load_saved, quiet, usable

    context.with_resource(quiet())
    if Path(model).is_dir() and (kind := loading_class(model)) not in (None, "SentenceTransformer"):
        raise ValueError(f"{model} is a {kind}, and verify compares one vector a text, of a SentenceTransformer.")
    # Before the model is loaded: it takes longer.
    endpoint = Endpoint(url, model_name, api_key, timeout)
    endpoint.model = model_name or endpoint.first_model()
    with usable(model, device):
        own = load_saved(model, revision, dtype=dtype, device=device)
        seen = verified(endpoint, own, prompt_name=prompt_name)
    answer = f"Equal: {endpoint.url} gives" if seen.equal else f"{endpoint.url} does not give"
    console.say(f"{answer} the vectors of {model}.")
    for cause in seen.causes:
        console.say(f"- {cause}")
    console.print(f"Greatest distance of two vectors of length 1: {seen.distance:.1e}. Allowed: {seen.tolerance:g}.")
    if as_json:
        found = {name: getattr(seen, name) for name in ("equal", "causes", "tolerance", "distance")}
        write_json("verify", url=endpoint.url, model=model, **found)
    if not seen.equal:
        raise typer.Exit(1)


def _check_answers(url: str) -> None:
    """Refuse a URL at which nothing accepts a connection within a second."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError(f"{url} is no URL: give one that begins with http:// or https://.") from None
    proxied = parts.scheme in getproxies() and not proxy_bypass(host)
    if proxied and host not in ("localhost", "127.0.0.1", "::1"):
        # The proxy connects.
        return
    try:
        socket.create_connection((host, port), timeout=1).close()
    except (OSError, UnicodeError) as error:
        raise OSError(f"{url} does not answer ({error}): check the URL, and that the server runs.") from None
