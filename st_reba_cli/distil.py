"""``st-reba distil``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .checks import check_file, check_model, check_recipes, check_source
from .common import command


class DistilLoss(StrEnum):
    mse = "mse"
    cosent = "cosent"


@command("distil")
def distil_command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "--output", help="Directory of the run. Where one was interrupted, the same command goes on."
        ),
    ],
    recipe: Annotated[
        str | None, typer.Option(help="The teacher: a recipe's name or key, such as early-late.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The decoder-only model that the teacher reads: a directory or a Hub id.", show_default=False
        ),
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="Plain texts, one a line or the column text of a table, some thousands. Some are held out, and what "
            "the student reaches is told of these.",
            show_default=False,
        ),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="What is trained: the key of a recipe, read in one pass of the same model with LoRA; static, a table "
            "of token vectors; or any SentenceTransformer, a directory or a Hub id. A directory that is called as a "
            "recipe is ./NAME. Default: classical.",
            show_default=False,
        ),
    ] = None,
    loss: Annotated[
        DistilLoss | None,
        typer.Option(
            help="mse: the teacher's vectors; cosent: the order of its cosines. Default: mse.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Scored pairs that student and teacher are scored on in the end.", show_default=False),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(help="How many of the texts nothing is trained on. Default: 500.", min=3, show_default=False),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the texts. Default: 3; static: 10.", min=1, show_default=False)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Texts a step. Default: 32.", min=2)] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="At its highest. Default: 2e-4 for a recipe, 1e-2 for static, 5e-5 for a SentenceTransformer.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="In place of all other options but --out: a YAML file of settings; see the documentation.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model that costs less to give the vectors of a recipe, on plain texts."""
    needed = {"--recipe": recipe, "--model": model, "--texts": texts}
    if config is not None:
        given = {
            **needed,
            "--student": student,
            "--loss": loss,
            "--data": data,
            "--held-out": held_out,
            "--epochs": epochs,
            "--batch-size": batch_size,
            "--learning-rate": learning_rate,
        }
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"{', '.join(named)}: with --config all of it stands in the file. Write it there, or leave --config "
                "out."
            )
        check_file(config, "--config")
        return
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError(f"{', '.join(missing)} missing: give a recipe, its model and texts; or --config.")
    check_model(str(model))
    check_source(texts)
    check_source(data)
    check_recipes([str(recipe)], str(model))
