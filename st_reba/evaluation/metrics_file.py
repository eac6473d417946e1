"""The table that an evaluator grows during training, one line an evaluation, as ST's own evaluators keep it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from ..files import atomic_file


def append_metrics(
    directory: str | Path, task: str, name: str, epoch: int, steps: int, metrics: Mapping[str, float]
) -> Path:
    """Append epoch, steps and metrics to ``<task>[_<name>]_results.csv`` in a directory; both are made if missing.

    Returns:
        The file.
    """
    path = Path(directory) / ("_".join(filter(None, [task, name, "results"])) + ".csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes().decode() if path.exists() else ""
    with atomic_file(path, "w") as file:
        writer = csv.writer(file)
        if before:
            file.write(before)
        else:
            writer.writerow(["epoch", "steps", *metrics])
        writer.writerow([epoch, steps, *metrics.values()])
    return path
