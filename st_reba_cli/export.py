"""``st-reba export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .checks import check_free, check_model, check_source
from .common import DeviceOption, Dtype, DtypeOption, ModelOption, command


@command("export")
def export_command(
    model: ModelOption,
    static: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write a static model to: a whitened, idf-weighted table of the vocabulary's vectors, as "
            "sentence-transformers' StaticEmbedding. It must not exist yet, or be empty.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write a saved model of st_reba's to, given by --model, as a plain sentence-transformers "
            "directory that inference engines serve. It must not exist yet, or be empty.",
            show_default=False,
        ),
    ] = None,
    pieces: Annotated[
        bool, typer.Option(help="--plain: tokenise a template and its text apart, as engines do.")
    ] = False,
    layer: Annotated[
        int | None,
        typer.Option(
            help="--static: after which layer each entry of the vocabulary is read, alone; 0: the input embeddings. "
            "Default: a quarter of the layers.",
            min=0,
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="--static: keep so many values of a vector, by principal components. Default: the language model's.",
            min=1,
            show_default=False,
        ),
    ] = None,
    fit_texts: Annotated[
        str | None,
        typer.Option(
            help="--static: plain texts, one a line or the column text of a table, some hundreds, that weights and "
            "whitening are fitted on. Default: demo texts."
        ),
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Write a model in a form that runs elsewhere, without st_reba."""
    kinds = {"--static": static, "--plain": plain}
    given = {option: out for option, out in kinds.items() if out is not None}
    if len(given) != 1:
        raise ValueError(f"What is exported is one of {', '.join(kinds)}: give one of them, with a directory.")
    if pieces and plain is None:
        raise ValueError("--pieces says how --plain tokenises: give both, or neither.")
    if plain is not None:
        of_static = {"--layer": layer, "--dimensions": dimensions, "--fit-texts": fit_texts}
        of_static["--dtype"] = None if dtype is Dtype.auto else dtype
        if passed_over := [option for option, value in of_static.items() if value is not None]:
            raise ValueError(
                f"{', '.join(passed_over)}: for --static alone, as --plain writes the model as it is. Leave it out."
            )
    for option, out in given.items():
        check_free(out, option)
    check_source(fit_texts)
    check_model(model)
