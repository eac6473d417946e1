"""``st-reba distil``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import check_model, check_recipes, complete_model, file, option, refuse, source, typed
from .printing import console, notes
from .train import resumable


def distil(
    context: typer.Context,
    out: Annotated[
        Path,
        option("Directory of the run. If the run is stopped, the same command goes on.", "--out", "--output"),
    ],
    recipe: Annotated[str | None, option("The teacher: a recipe's name or key, such as early-late.")] = None,
    model: Annotated[
        str | None,
        option(
            "The decoder-only model that the teacher reads: a directory or a Hub id.",
            callback=check_model,
            autocompletion=complete_model,
        ),
    ] = None,
    texts: Annotated[
        str | None,
        source(
            "Plain texts to train on, some thousands: one a line, or the column text of a table. Some are held out."
        ),
    ] = None,
    student: Annotated[
        str | None,
        option(
            "The model that is trained: the key of a recipe, read in one pass of the same model with LoRA; static, a "
            "table of token vectors; or a SentenceTransformer, a directory or a Hub id. A directory with the name of "
            "a recipe is ./NAME. Default: classical."
        ),
    ] = None,
    data: Annotated[
        str | None, source("Pairs with scores on which student and teacher are measured at the end.")
    ] = None,
    held_out: Annotated[
        int | None, option("How many of the texts are not trained on, but measured on. Default: 500.", min=3)
    ] = None,
    epochs: Annotated[int | None, option("How often all texts are trained on. Default: 3; static: 10.", min=1)] = None,
    batch_size: Annotated[int | None, option("Texts in one step of training. Default: 32.", min=2)] = None,
    learning_rate: Annotated[
        float | None,
        option(
            "The highest learning rate. Default: 2e-4 for a recipe, 1e-2 for static, 5e-5 for a SentenceTransformer."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        file("A YAML file of settings, in place of all other options but --out. docs/distil.md has every key."),
    ] = None,
) -> None:
    """Train a cheaper model to give a recipe's vectors, on plain texts."""
    if config is not None:
        others = [name for name in typed(context) if name not in ("--out", "--config")]
        refuse(context, "with --config all of it stands in the file", *others)
    else:
        needed = {"--recipe": recipe, "--model": model, "--texts": texts}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"{', '.join(missing)} missing: give a recipe, its model and texts; or --config.")
        check_recipes([str(recipe)], str(model))

    from sentence_transformers import SentenceTransformer

    from st_reba.train import DistilTraining, read_settings, train_distil
    from st_reba.train.distil import REPORT, STATIC

    from .load import quiet, usable

    context.with_resource(quiet())
    if config is not None:
        settings = read_settings(config, DistilTraining)
    else:
        trained = {
            "num_train_epochs": epochs, "per_device_train_batch_size": batch_size, "learning_rate": learning_rate,
        }  # fmt: skip
        given: dict[str, Any] = {
            "recipe": recipe, "model": model, "texts": texts, "student": student, "evaluation": data,
            "held_out": held_out, "arguments": {name: value for name, value in trained.items() if value is not None},
        }  # fmt: skip
        settings = DistilTraining(**{name: value for name, value in given.items() if value is not None})
    # A student that cannot be loaded is refused before the teacher reads the texts, which takes the longest.
    if settings.is_own_model:
        with usable(settings.student):
            SentenceTransformer(settings.student, device="cpu")
    elif Path(settings.student).is_dir():
        kind = "the table of token vectors" if settings.student == STATIC else "the recipe of that key"
        notes.say(
            f"{settings.student} is {kind}. The directory {settings.student}, which is here too, is "
            f"./{settings.student}."
        )
    with resumable(out), usable(settings.model):
        train_distil(settings, out)
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    for when, begun in (("at_the_start", "Before training"), ("trained", "After it")):
        cosines, neighbours = report[when].values()
        console.say(
            f"{begun}, on {report['held_out']} texts that were held out: cosines in the teacher's order up to "
            f"{cosines:.3f}, and {100 * neighbours:.0f}% of each text's nearest ten the same."
        )
    if "pairs" in report:
        scores = {name: [100 * value for value in values] for name, values in report["pairs"].items()}
        share, low, high = scores["share"]
        console.say(
            f"On the labelled pairs the teacher has {scores['teacher'][0]:.1f} and the student "
            f"{scores['student'][0]:.1f}: {share:.1f}% of it [{low:.1f}, {high:.1f}]."
        )
    console.say(f'Wrote {out / "model"}. Load it with: import st_reba; SentenceTransformer("{out / "model"}")')
