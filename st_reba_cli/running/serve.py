"""What ``st-reba serve`` does."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text
from sentence_transformers.util import get_device_name

from st_reba.encode import Encoder
from st_reba.optional import require

from ..common import Dtype
from ..printing import console, notes
from ..serve import MIB
from .models import encoder_fastest, placement, usable

if TYPE_CHECKING:
    from st_reba.serve.app import Server


def run(
    *,
    model: str | None,
    rerank: str | None,
    name: str | None,
    rerank_name: str | None,
    host: str,
    port: int,
    api_key: str | None,
    truncate: bool,
    batch_tokens: int,
    batch_size: int,
    queue_tokens: int,
    max_inputs: int,
    max_body: int,
    revision: str | None,
    rerank_revision: str | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Load what is to be served, answer requests until a signal, and finish those that are there."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve", "Serving")
    from st_reba.serve.app import Server, bound, serve, url_of
    from st_reba.serve.batches import Limits
    from st_reba.serve.models import Embedder, check_kind, load_reranker

    keys = [] if api_key is None else [key.strip() for key in api_key.split(",")]
    with bound(host, port) as own:
        limits = Limits(
            body_bytes=max_body * MIB,
            inputs=max_inputs,
            batch_tokens=batch_tokens,
            batch_texts=batch_size,
            queue_tokens=queue_tokens,
            truncate=truncate,
        )
        embedder = reranker = None
        if model is not None:
            with usable(model, device):
                check_kind(model, revision, "SentenceTransformer")
                where = device or get_device_name()
                given, loaded = encoder_fastest(Encoder(model=model, revision=revision), where, dtype)
                embedder = Embedder(name or _last_part(model), loaded or given.pinned().load(where), truncate)
        if rerank is not None:
            with usable(rerank, device):
                # The probabilities of a ranking are as good as equal for many texts: it has the model's precision.
                where, chosen = placement(device, Dtype.auto if dtype is Dtype.fastest else dtype)
                reranker = load_reranker(
                    rerank_name or _last_part(rerank), rerank, rerank_revision, where, chosen.value, truncate
                )
        server = Server(embedder, reranker, limits, keys)
        if not keys and not _is_loopback(own.getsockname()[0]):
            notes.print(
                Text.assemble(("Note:", "yellow"), f" {host} is open to other machines, and there is no --api-key."),
                soft_wrap=True,
            )
        serve(server, own, started=lambda: _tell(server, url_of(own)))
    console.print("Stopped; every request was answered.")


def _tell(server: Server, url: str) -> None:
    console.print(f"{', '.join(server.models)} at {url}", soft_wrap=True)
    if server.embedder is not None:
        console.print(f'OpenAI(base_url="{url}/v1").embeddings.create(model="{server.embedder.name}", input=...)')


def _last_part(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
