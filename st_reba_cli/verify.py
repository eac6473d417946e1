"""``st-reba verify``."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import typer

from . import options
from .options import API_KEY_ENV, argument, check_key, check_model, option
from .printing import console, notes, write_json


def verify(
    context: typer.Context,
    url: Annotated[str, argument("URL of the server: its root or a path (.../v1, .../v1/embeddings).", "URL")],
    model: Annotated[
        str,
        option(
            "Saved SentenceTransformer that the server runs: a directory or a Hub id.",
            callback=check_model,
        ),
    ],
    model_name: Annotated[
        str | None, option("Name of the model in requests. Default: the first of the server's /v1/models.")
    ] = None,
    prompt_name: Annotated[
        str | None, option("Name of the model's prompt that the server should put before texts.")
    ] = None,
    api_key: Annotated[
        str | None,
        option("Key to send, if the server needs one.", envvar=API_KEY_ENV, show_envvar=True, callback=check_key),
    ] = None,
    timeout: Annotated[float, option("Seconds to wait for an answer.", min=0.1)] = 60.0,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Check that a server returns the vectors of a saved model.

    The command compares the vectors of twenty texts. If they differ, it prints likely causes, and its exit code is 1.
    """
    _check_answers(url)

    # Printed before imports that take seconds.
    notes.say(f"Sending requests to {url}, with {timeout:g} seconds for each answer (--timeout).")

    from st_reba.hub.push import loading_class
    from st_reba.verify import Endpoint
    from st_reba.verify import verify as verified

    from .load import load_saved, quiet, usable

    context.with_resource(quiet())
    if Path(model).is_dir() and (kind := loading_class(model)) not in (None, "SentenceTransformer"):
        raise ValueError(f"{model} is a {kind}: give a SentenceTransformer, which has one vector per text.")
    # Ask the server first: loading the model takes longer.
    endpoint = Endpoint(url, model_name, api_key, timeout)
    endpoint.model = model_name or endpoint.first_model()
    with usable(model, device):
        loaded = load_saved(model, revision, dtype=dtype, device=device)
        result = verified(endpoint, loaded, prompt_name=prompt_name)
    answer = f"Equal: {endpoint.url} returns" if result.equal else f"{endpoint.url} does not return"
    console.say(f"{answer} the vectors of {model}.")
    for cause in result.causes:
        console.say(f"- {cause}")
    console.print(f"Largest distance between vectors: {result.distance:.1e} (length 1). Allowed: {result.tolerance:g}.")
    if as_json:
        fields = {name: getattr(result, name) for name in ("equal", "causes", "tolerance", "distance")}
        write_json("verify", url=endpoint.url, model=model, **fields)
    if not result.equal:
        raise typer.Exit(1)


def _check_answers(url: str) -> None:
    """Check that a server accepts connections at a URL within a second.

    Raises:
        ValueError: If it is not the URL of a server.
        OSError: If nothing answers.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError(f"{url} is not a URL: give one that begins with http:// or https://.") from None
    proxied = parts.scheme in getproxies() and not proxy_bypass(host)
    if proxied and host not in ("localhost", "127.0.0.1", "::1"):
        # The proxy, not this process, connects to the host.
        return
    try:
        socket.create_connection((host, port), timeout=1).close()
    except (OSError, UnicodeError) as error:
        raise OSError(f"{url} does not answer ({error}): check the URL, and that the server runs.") from None
