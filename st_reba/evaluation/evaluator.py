"""What the evaluators have in common: settings, the table that grows during training, the note for the model card."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import ClassVar

from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator

from ..files import atomic_file

logger = logging.getLogger(__name__)


class Evaluator(BaseEvaluator):
    """An evaluator of sentence-transformers.

    Args:
        name: Prefix of the metrics.
        batch_size: Texts at a time.
        write_csv: Whether to append the metrics to a file where an evaluation is given an ``output_path``.
    """

    #: The metric that decides, without the prefix; and the stem of the file, empty if there is none.
    metric: ClassVar[str]
    file: ClassVar[str] = ""

    def __init__(self, *, name: str = "", batch_size: int = 32, write_csv: bool = True) -> None:
        super().__init__()
        self.name = name
        self.batch_size = batch_size
        self.write_csv = write_csv
        self.primary_metric = "_".join(filter(None, [name, self.metric]))

    def noted(
        self, model: BaseModel, metrics: dict[str, float], output_path: str | None, epoch: int, steps: int
    ) -> dict[str, float]:
        """The metrics with their prefix: logged, appended to the file, and noted for the model card."""
        if output_path is not None and self.write_csv and self.file:
            path = Path(output_path) / ("_".join(filter(None, [self.file, self.name, "results"])) + ".csv")
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes().decode() if path.exists() else ""
            with atomic_file(path, "w") as file:
                file.write(before)
                rows = csv.writer(file)
                rows.writerows([] if before else [["epoch", "steps", *metrics]])
                rows.writerow([epoch, steps, *metrics.values()])
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("%s: %s", type(self).__name__, metrics)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics
