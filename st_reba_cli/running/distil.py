"""What ``st-reba distil`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from st_reba.train import DistilTraining, read_settings, train_distil
from st_reba.train.distil import REPORT, STATIC

from ..distil import DistilLoss
from ..printing import console, notes
from .models import usable
from .train import resumable, tell_models


def run(
    *,
    out: Path,
    recipe: str | None,
    model: str | None,
    texts: str | None,
    student: str | None,
    loss: DistilLoss | None,
    data: str | None,
    held_out: int | None,
    epochs: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    config: Path | None,
) -> None:
    """Distil, and tell what the student reaches."""
    if config is not None:
        settings = read_settings(config, DistilTraining)
    else:
        given: dict[str, Any] = {
            "recipe": recipe, "model": model, "texts": texts, "student": student,
            "loss": None if loss is None else loss.value, "evaluation": data, "held_out": held_out,
        }  # fmt: skip
        arguments = {
            "num_train_epochs": epochs, "per_device_train_batch_size": batch_size, "learning_rate": learning_rate,
        }  # fmt: skip
        given["arguments"] = {name: value for name, value in arguments.items() if value is not None}
        settings = DistilTraining(**{name: value for name, value in given.items() if value is not None})
    _check_student(settings)
    with resumable(out), usable(settings.model):
        train_distil(settings, out)
    for line in told(json.loads((out / REPORT).read_text(encoding="utf-8"))):
        console.print(line, soft_wrap=True)
    tell_models([out / "model"])


def _check_student(settings: DistilTraining) -> None:
    """Refuse a student that cannot be loaded before the teacher reads the texts, which takes the longest."""
    if settings.is_own_model:
        with usable(settings.student):
            SentenceTransformer(settings.student, device="cpu")
    elif Path(settings.student).is_dir():
        kind = "the table of token vectors" if settings.student == STATIC else "the recipe of that key"
        notes.print(
            f"{settings.student} is {kind}. The directory {settings.student}, which is here too, is "
            f"./{settings.student}.",
            soft_wrap=True,
        )


def told(report: dict[str, Any]) -> list[str]:
    """What the student reaches, in sentences."""
    lines = []
    for when in ("at_the_start", "trained"):
        cosines, neighbours = report[when].values()
        begun = "Before training" if when == "at_the_start" else "After it"
        lines.append(
            f"{begun}, on {report['held_out']} texts that were held out: cosines in the teacher's order up to "
            f"{cosines:.3f}, and {100 * neighbours:.0f}% of each text's nearest ten the same."
        )
    if "pairs" in report:
        found = {name: values[0] for name, values in report["pairs"].items()}
        low, high = report["pairs"]["share"][1:]
        lines.append(
            f"On the labelled pairs the teacher has {100 * found['teacher']:.1f} and the student "
            f"{100 * found['student']:.1f}: {100 * found['share']:.1f}% of it [{100 * low:.1f}, {100 * high:.1f}]."
        )
    return lines
