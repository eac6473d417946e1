"""``st-reba serve``, and ``st-reba verify`` of what a server returns."""

from __future__ import annotations

import ipaddress
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import API_KEY_ENV, argument, check_key, check_model, option
from .printing import console, notes, write_json

MIB = 2**20


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        argument("SentenceTransformer for /v1/embeddings: a directory or a Hub id.", "MODEL", callback=check_model),
    ] = None,
    rerank: Annotated[
        str | None, option("CrossEncoder or AttentionReranker for /rerank.", callback=check_model)
    ] = None,
    chat: Annotated[bool, option("Chat with MODEL's language model, too, on the same weights.")] = False,
    lm: Annotated[
        str | None, option("With --chat: the whole language model, if MODEL keeps a part.", callback=check_model)
    ] = None,
    model_name: Annotated[str | None, option("Name of MODEL in requests. Default: the last part of its path.")] = None,
    host: Annotated[str, option("Address to listen on; 0.0.0.0: for other machines, too.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on. 0: any free port.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        option(
            "Key that each request must have, or several separated by commas. Other users of this machine can see the "
            "option, but not the variable.",
            envvar=API_KEY_ENV,
            callback=check_key,
        ),
    ] = None,
    truncate: Annotated[bool, option("Truncate texts too long for the model; --no-truncate refuses them.")] = True,
    batch_tokens: Annotated[int, option("Maximum tokens per batch, padding included.", min=1)] = 8192,
    batch_size: Annotated[int, option("Maximum texts per batch.", min=1)] = 256,
    queue_tokens: Annotated[int, option("Maximum tokens in the queue; further requests get 429.", min=1)] = MIB,
    max_inputs: Annotated[int, option("Maximum texts per request.", min=1)] = 2048,
    max_body: Annotated[int, option("Maximum size of a request in MiB.", min=1)] = 8,
    revision: options.Revision = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    The paths are /v1/embeddings, /rerank, /v1/models, /health and /metrics; with --chat also /v1/chat/completions and
    /v1/completions. On SIGTERM the server answers all requests that it has received, and stops.
    """
    if model is None and rerank is None:
        raise ValueError("There is no model to serve: give MODEL, --rerank, or both.")
    if (chat and model is None) or (lm is not None and not chat):
        raise ValueError("--chat needs MODEL, whose language model it runs, and --lm needs --chat: give both.")
    keys = [] if api_key is None else [key.strip() for key in api_key.split(",")]

    # Printed before imports that take seconds.
    notes.say(f"Loading {' and '.join(filter(None, (model, rerank)))}; the address follows when the server is ready.")

    from st_reba.optional import require

    from .load import load_saved, placement, quiet, usable

    context.with_resource(quiet())
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve", "Serving")

    from st_reba.serve.app import Server, bind, url_of
    from st_reba.serve.app import serve as answer_requests
    from st_reba.serve.models import Embedder, ListReranker, check_kind, load_reranker, share
    from st_reba.serve.requests import Limits

    with bind(host, port) as listener:
        limits = Limits(
            body_bytes=max_body * MIB, inputs=max_inputs, batch_tokens=batch_tokens, batch_texts=batch_size,
            queue_tokens=queue_tokens,
        )  # fmt: skip
        embedder = reranker = talking = None
        if model is not None:
            with usable(model, device):
                check_kind(model, "SentenceTransformer", revision)
                loaded = load_saved(model, revision, dtype=dtype, device=device)
                embedder = Embedder(model_name or _last_part(model), loaded, truncate)
            if chat:
                from st_reba.serve.chat import Chat, load_whole

                with usable(lm or model):
                    talking = Chat(embedder, None if lm is None else load_whole(lm, embedder))
        if rerank is not None:
            with usable(rerank, device):
                where, precision = placement(device, dtype)
                reranker = load_reranker(_last_part(rerank), rerank, where, precision, truncate)
        if embedder is not None and isinstance(reranker, ListReranker):
            # An in-context reranker of the same language model has no weights of its own then.
            share(reranker.model[0], embedder.model[0])
        server, url = Server(embedder, reranker, limits, keys, talking), url_of(listener)
        if not keys and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            warnings.warn(f"{host} is open to other machines, and there is no --api-key.", stacklevel=1)

        def print_address() -> None:
            console.say(f"{', '.join(server.models)} at {url}")
            if embedder is not None:
                client = f'OpenAI(base_url="{url}/v1", api_key="...")'
                console.say(f'{client}.embeddings.create(model="{embedder.name}", input=...)')

        answer_requests(server, listener, started=print_address)
    console.print("Stopped; every request was answered.")


def _last_part(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]


def verify(
    context: typer.Context,
    url: Annotated[str, argument("URL of the server: its root or a path (.../v1, .../v1/embeddings).", "URL")],
    model: Annotated[
        str, option("Saved SentenceTransformer that the server runs: a directory or a Hub id.", callback=check_model)
    ],
    model_name: Annotated[
        str | None, option("Name of the model in requests. Default: the first of the server's /v1/models.")
    ] = None,
    prompt_name: Annotated[str | None, option("Name of the prompt that the server should put before texts.")] = None,
    api_key: Annotated[
        str | None,
        option("Key to send, if the server needs one.", envvar=API_KEY_ENV, callback=check_key),
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
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not a URL: give one that begins with http:// or https://.")

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
    first = endpoint.first_model()
    endpoint.model = model_name or first
    with usable(model, device):
        loaded = load_saved(model, revision, dtype=dtype, device=device)
        result = verified(endpoint, loaded, prompt_name=prompt_name)
    answer = f"Equal: {endpoint.url} returns" if result.equal else f"{endpoint.url} does not return"
    console.say(f"{answer} the vectors of {model}.")
    for cause in result.causes:
        console.say(f"- {cause}")
    console.print(f"Largest distance between vectors: {result.distance:.1e} (length 1). Allowed: {result.tolerance:g}.")
    if as_json:
        write_json("verify", url=endpoint.url, model=model, equal=result.equal, **asdict(result))
    if not result.equal:
        raise typer.Exit(1)
