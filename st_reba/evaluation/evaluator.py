"""What the evaluators have in common: settings, the table that grows during training, the note for the model card."""

from __future__ import annotations

import csv
import logging
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator

from ..files import atomic_file

logger = logging.getLogger(__name__)


class Evaluator(BaseEvaluator):
    """An evaluator of sentence-transformers.

    Args:
        name: Prefix of the metrics.
        batch_size: Texts at a time.
    """

    #: The metric that decides, without the prefix; empty until an evaluation tells.
    metric: str = ""

    def __init__(self, *, name: str = "", batch_size: int = 32) -> None:
        super().__init__()
        self.name = name
        self.batch_size = batch_size
        if self.metric:
            self.primary_metric = f"{name}_{self.metric}" if name else self.metric

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """The metrics with their prefix, also logged, and noted for the model card.

        Args:
            model: What is evaluated.
            output_path: Directory of the evaluator's file, where it writes one; made if it is not there.
            epoch: As in ST.
            steps: As in ST.
        """
        metrics = self.metrics_of(model)
        if output_path is not None:
            self.write(Path(output_path), metrics, epoch, steps)
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("%s: %s", type(self).__name__, metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    @abstractmethod
    def metrics_of(self, model: Any) -> dict[str, float]:
        """The metrics, without their prefix."""

    def write(self, directory: Path, metrics: dict[str, float], epoch: int, steps: int) -> None:
        """Write the evaluator's file; here there is none."""


class TabulatedEvaluator(Evaluator):
    """An evaluator that appends its metrics to ``<file>[_<name>]_results.csv`` in ``output_path``.

    Args:
        name: Prefix of the metrics.
        batch_size: Texts at a time.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.
    """

    #: The stem of the file.
    file: ClassVar[str]

    def __init__(self, *, name: str = "", batch_size: int = 32, write_csv: bool = True) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.write_csv = write_csv

    def write(self, directory: Path, metrics: dict[str, float], epoch: int, steps: int) -> None:
        if not self.write_csv:
            return
        path = directory / ("_".join(filter(None, [self.file, self.name, "results"])) + ".csv")
        directory.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes().decode() if path.exists() else ""
        with atomic_file(path, "w") as file:
            file.write(before)
            rows = csv.writer(file)
            rows.writerows([] if before else [["epoch", "steps", *metrics]])
            rows.writerow([epoch, steps, *metrics.values()])
