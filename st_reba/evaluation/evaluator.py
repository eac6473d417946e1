"""Base of the evaluators: names of metrics, a CSV file that grows during training, and the note for the model card."""

from __future__ import annotations

import csv
import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator

from ..files import atomic_file

logger = logging.getLogger(__name__)


class Evaluator(BaseEvaluator):
    """Evaluator of sentence-transformers that appends its metrics to ``<file>[_<name>]_results.csv``.

    Args:
        name: Prefix of the metrics.
        batch_size: Number of texts at a time.
        write_csv: Whether to write the file if an evaluation has an ``output_path``.
    """

    #: Primary metric, without the prefix; empty if it depends on the model.
    metric: str = ""
    #: Beginning of the file's name.
    file: ClassVar[str]

    def __init__(self, *, name: str = "", batch_size: int = 32, write_csv: bool = True) -> None:
        super().__init__()
        self.name, self.batch_size, self.write_csv = name, batch_size, write_csv
        if self.metric:
            self.primary_metric = f"{name}_{self.metric}" if name else self.metric

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics with their prefix; log them, and note them for the model card.

        Args:
            model: Model to evaluate.
            output_path: Directory of the file; it is made if there is none.
            epoch: As for sentence-transformers.
            steps: As for sentence-transformers.
        """
        metrics = self.metrics_of(model)
        if output_path is not None and self.write_csv:
            Path(output_path).mkdir(parents=True, exist_ok=True)
            self.write(Path(output_path), metrics, epoch, steps)
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("%s: %s", type(self).__name__, metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    @abstractmethod
    def metrics_of(self, model: Any) -> dict[str, float]:
        """Return the metrics without their prefix."""

    def write(self, directory: Path, metrics: dict[str, float], epoch: int, steps: int) -> None:
        """Append the metrics to the file."""
        path = directory / ("_".join(filter(None, [self.file, self.name, "results"])) + ".csv")
        before = path.read_bytes().decode() if path.exists() else ""
        header = [] if before else [["epoch", "steps", *metrics]]
        write_rows(path, [*header, [epoch, steps, *metrics.values()]], before)


def write_rows(path: Path, rows: Sequence[Sequence[Any]], before: str = "") -> None:
    """Write a CSV file of rows, behind what it had before."""
    with atomic_file(path, "w") as file:
        file.write(before)
        csv.writer(file).writerows(rows)
