"""What ``st-reba verify`` does."""

from __future__ import annotations

import typer
from rich.table import Table
from transformers.utils import logging as transformers_logging

from st_reba.encoding import Encoder
from st_reba.serving.verify import Endpoint, verify

from ..common import Dtype, console
from ..verify import FormName
from .models import placement, usable


def run(
    *,
    url: str,
    model: str,
    served_name: str | None,
    form: FormName,
    prompt_name: str | None,
    tolerance: float | None,
    max_tokens: int,
    api_key: str | None,
    timeout: float,
    revision: str | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Tell whether a server gives a saved model's vectors, and why not."""
    transformers_logging.disable_progress_bar()
    # Before the model is loaded: it takes longer.
    endpoint = Endpoint(url, served_name, form.value, api_key, timeout)
    with usable(model, device):
        where, chosen = placement(device, dtype)
        own = Encoder(model=model, revision=revision, dtype=chosen.value).pinned().load(where)
        seen = verify(endpoint, own, prompt_name=prompt_name, tolerance=tolerance, max_tokens=max_tokens)
    if seen.equal:
        console.print(f"Equal: {endpoint.url} gives the vectors of {model}.", soft_wrap=True)
    else:
        console.print(f"{endpoint.url} does not give the vectors of {model}:", soft_wrap=True)
        for cause in seen.causes:
            console.print(f"- {cause}", soft_wrap=True)
    table = Table("text", "tokens", "apart", box=None)
    for row in seen.rows:
        apart = "refused" if row.distance is None else f"{row.distance:.1e}"
        table.add_row(row.probe.name, str(row.probe.tokens), apart)
    console.print(table)
    console.print(f"Allowed are {seen.tolerance:g}, of two vectors of length 1.")
    if not seen.equal:
        raise typer.Exit(1)
