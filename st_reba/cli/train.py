"""``st-reba train``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoConfig

from ..files import check_file
from .common import app, clear_errors, console, usable


class TrainedMethod(str, Enum):
    bellm = "bellm"
    freeze = "freeze"
    jtcse = "jtcse"


@app.command("train")
def train_command(
    method: Annotated[TrainedMethod, typer.Argument(help="What to train.")],
    config: Annotated[Path, typer.Option(help="A YAML file of settings; see the documentation of each method.")],
    out: Annotated[
        Path, typer.Option(help="Directory of the run. Where one was interrupted, the same command goes on.")
    ],
) -> None:
    """Train a method of the papers on your data: progress bar, checkpoints that resume, a ready model at the end."""
    # Training needs packages that the other commands do not.
    from ..training import DivergedError

    with clear_errors():
        check_file(config, "--config")
        try:
            written = _METHODS[method](config, out)
        except DivergedError as error:
            raise ValueError(str(error)) from None
        except KeyboardInterrupt:
            console.print(f"Stopped. The same command goes on from the last checkpoint in {out}.", soft_wrap=True)
            raise typer.Exit(130) from None
    for directory in written:
        line = f'import st_reba; SentenceTransformer("{directory}")'
        console.print(f"Wrote {directory}. Load it with: {line}", soft_wrap=True)


def _bellm(config: Path, out: Path) -> list[Path]:
    from ..training import BeLLMTraining, read_settings, train_bellm

    settings = read_settings(config, BeLLMTraining)
    _check_models(settings.model)
    train_bellm(settings, out)
    return [out / "model", out / "adapter"]


def _freeze(config: Path, out: Path) -> list[Path]:
    from ..training import FreezeTraining, read_settings, train_freeze

    settings = read_settings(config, FreezeTraining)
    _check_models(settings.model)
    train_freeze(settings, out)
    return [out / "model"]


def _jtcse(config: Path, out: Path) -> list[Path]:
    from ..training import JTCSETraining, read_settings, train_jtcse

    settings = read_settings(config, JTCSETraining)
    _check_models(settings.model, settings.second_model)
    train_jtcse(settings, out)
    return [out / "model"]


def _check_models(*models: str | None) -> None:
    """See that models are there before anything is written. Data may come from the Hub, too: each is asked alone."""
    for model in models:
        if model is not None:
            with usable(model):
                if not Path(model).is_dir():
                    AutoConfig.from_pretrained(model)


#: Each reads its settings, trains, and says which directories it wrote.
_METHODS = {TrainedMethod.bellm: _bellm, TrainedMethod.freeze: _freeze, TrainedMethod.jtcse: _jtcse}
