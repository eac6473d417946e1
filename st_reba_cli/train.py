"""``st-reba train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import argument, check_free, file, option
from .printing import console, loading_line


def train(
    context: typer.Context,
    method: Annotated[Literal["bellm", "freeze", "jtcse"], argument("Method to train.", "METHOD")],
    config: Annotated[
        Path,
        file("YAML file with the model, data (triplets, pairs or texts) and settings; docs/train.md has all keys."),
    ],
    out: Annotated[Path, option("Directory of the run. If the run is stopped, the same command resumes it.")],
) -> None:
    """Train a method of the papers on your data.

    A run shows its progress, saves checkpoints and writes a model that is ready to load.
    """
    check_free(out / "model", "--out")

    from transformers import AutoConfig

    from st_reba import train as training
    from st_reba.train.fitting import is_main

    from .load import quiet, usable

    context.with_resource(quiet())
    kinds: dict[str, tuple[Any, Any]] = {
        "bellm": (training.BeLLMTraining, training.train_bellm),
        "freeze": (training.FreezeTraining, training.train_freeze),
        "jtcse": (training.JTCSETraining, training.train_jtcse),
    }
    kind, run = kinds[method]
    settings = training.read_settings(config, kind)
    # Check the models before anything is written, and apart from data, which may come from the Hub, too.
    for model in (settings.model, getattr(settings, "second_model", None)):
        if model is not None:
            with usable(model):
                if not Path(model).is_dir():
                    AutoConfig.from_pretrained(model)
    try:
        run(settings, out)
    except training.DivergedError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:
        console.say(f"Stopped. The same command resumes from the last checkpoint in {out}.")
        raise typer.Exit(130) from None
    if is_main():
        for directory in [out / "model", *([out / "adapter"] if method == "bellm" else [])]:
            console.say(f"Wrote {directory}. Load it with: {loading_line('SentenceTransformer', directory)}")
