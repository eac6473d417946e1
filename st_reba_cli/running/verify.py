"""What ``st-reba verify`` does."""

from __future__ import annotations

import typer
from rich.table import Table
from sentence_transformers.util import get_device_name

from st_reba.encode import Encoder
from st_reba.verify import Endpoint, verify

from ..common import Dtype
from ..printing import console
from ..verify import FormName
from .models import encoder_fastest, usable


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
    # Before the model is loaded: it takes longer.
    endpoint = Endpoint(url, served_name, form.value, api_key, timeout)
    with usable(model, device):
        where = device or get_device_name()
        given, loaded = encoder_fastest(Encoder(model=model, revision=revision), where, dtype)
        own = loaded or given.pinned().load(where)
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
