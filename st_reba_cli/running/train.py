"""What ``st-reba train`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from transformers import AutoConfig

from st_reba.train import (
    BeLLMTraining,
    DivergedError,
    FreezeTraining,
    JTCSETraining,
    read_settings,
    train_bellm,
    train_freeze,
    train_jtcse,
)
from st_reba.train.fitting import is_main

from ..printing import console
from ..train import TrainedMethod
from .models import usable


def run(*, method: TrainedMethod, config: Path, out: Path) -> None:
    """Train, and tell where the models are."""
    with resumable(out):
        written = _METHODS[method](config, out)
    if is_main():
        tell_models(written)


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """A run that may be stopped, and is then gone on with; one that diverges ends in a sentence."""
    try:
        yield
    except DivergedError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on from the last checkpoint in {out}.", soft_wrap=True)
        raise typer.Exit(130) from None


def tell_models(written: Sequence[Path]) -> None:
    """Where models are, and how each is loaded."""
    for directory in written:
        line = f'import st_reba; SentenceTransformer("{directory}")'
        console.print(f"Wrote {directory}. Load it with: {line}", soft_wrap=True)


def _bellm(config: Path, out: Path) -> list[Path]:
    settings = read_settings(config, BeLLMTraining)
    _check_models(settings.model)
    train_bellm(settings, out)
    return [out / "model", out / "adapter"]


def _freeze(config: Path, out: Path) -> list[Path]:
    settings = read_settings(config, FreezeTraining)
    _check_models(settings.model)
    train_freeze(settings, out)
    return [out / "model"]


def _jtcse(config: Path, out: Path) -> list[Path]:
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
