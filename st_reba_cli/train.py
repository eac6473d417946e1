"""``st-reba train``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .checks import check_file
from .common import command


class TrainedMethod(StrEnum):
    bellm = "bellm"
    freeze = "freeze"
    jtcse = "jtcse"


@command("train")
def train_command(
    method: Annotated[TrainedMethod, typer.Argument(help="What to train.")],
    config: Annotated[
        Path,
        typer.Option(
            help="A YAML file with lines such as model: org/name, and the data: triplets: nli.tsv (bellm), pairs: "
            "pairs.tsv (freeze), texts: texts.txt (jtcse). docs/train.md has every key."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Directory of the run. Where one was interrupted, the same command goes on.")
    ],
) -> None:
    """Train a method of the papers on your data: progress bar, checkpoints that resume, a ready model at the end."""
    check_file(config, "--config")
