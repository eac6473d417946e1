"""After which layer a language model embeds best, as the BeLLM paper asks (section 3.1, Figure 4)."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor

from ..files import atomic_file
from ..reading.layers import LayerReader
from .drawing import BLUE, GREY, ORANGE, layer_axes
from .embedded import Embed, Embedded, TensorCache, stand_in

logger = logging.getLogger(__name__)


class TurningPointEvaluator(BaseEvaluator):
    """Scores the embedding that is read after each layer, with any evaluator of sentence embeddings.

    Layer l's embedding is that of the model without the layers above l (:class:`~st_reba.reading.layers.LayerReader`);
    the turning point is the layer with the best score, the lowest of equals. Each text passes through the model once:
    its embeddings after all L + 1 layers are kept until the evaluation ends, (L + 1) x D numbers a text, in temporary
    files (see :class:`st_reba.evaluation.embedded.Embedded`).

    The metrics are the wrapped evaluator's primary metric after each layer, ``layer_<l>_<metric>``, and
    ``turning_point``, the index of the best. The primary metric is the last layer's: what the model gives as it is.

    Args:
        evaluator: Scores a model by its ``encode``, such as ``EmbeddingSimilarityEvaluator``. Evaluators that look at
            tokens, or into the model, cannot be wrapped.
        name: Prefix of the metrics; the wrapped evaluator's name if None.
        on_step: Called with the number of texts whenever some have been embedded after all layers.
    """

    def __init__(
        self,
        evaluator: BaseEvaluator,
        *,
        name: str | None = None,
        on_step: Callable[[int], None] = lambda texts: None,
    ) -> None:
        super().__init__()
        self.evaluator = evaluator
        self.name: str = getattr(evaluator, "name", "") if name is None else name
        self.on_step = on_step
        self.greater_is_better = evaluator.greater_is_better
        self.metric = ""
        self.scores: list[float] = []

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model.

        Args:
            model: A model that :class:`st_reba.reading.layers.LayerReader` can read.
            output_path: Where to write ``turning_point[_<name>][_epoch_<epoch>][_steps_<steps>]_results.csv``.
            epoch: As in ST.
            steps: As in ST.

        Raises:
            ValueError: If the model cannot be read layer by layer, or the wrapped evaluator has no primary metric, or
                gives no number for any layer.
        """
        reader = LayerReader(model)
        embedded = Embedded(_by_layer(reader, self.on_step))
        models = [stand_in(embedded, str(layer), like=model) for layer in range(reader.count)]
        scores = [self._score(self.evaluator(layer, None, epoch, steps)) for layer in models]
        if all(map(math.isnan, scores)):
            raise ValueError(
                f"{type(self.evaluator).__name__} gives no number (NaN) after any layer. Look at its labels: there may "
                "be too few, or all the same."
            )
        self.scores = scores

        metrics: dict[str, float] = {f"layer_{layer}_{self.metric}": score for layer, score in enumerate(scores)}
        metrics["turning_point"] = self.turning_point
        self.primary_metric = f"layer_{reader.count - 1}_{self.metric}"
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("Turning point: layer %d of %d. %s", self.turning_point, reader.count - 1, metrics)
        if output_path is not None:
            Path(output_path).mkdir(parents=True, exist_ok=True)
            marks = [self.name, f"epoch_{epoch}" if epoch >= 0 else "", f"steps_{steps}" if steps >= 0 else ""]
            stem = "_".join(filter(None, ["turning_point", *marks, "results"]))
            self.write_csv(Path(output_path) / f"{stem}.csv")
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def _score(self, result: float | dict[str, float]) -> float:
        """The wrapped evaluator's primary metric; notes its name, without the evaluator's own."""
        if not isinstance(result, dict):
            self.metric = "score"
            return float(result)
        metric = self.evaluator.primary_metric
        if metric not in result:
            raise ValueError(
                f"{type(self.evaluator).__name__} says that its primary metric is {metric!r} and gives "
                f"{sorted(result)}: wrap an evaluator whose primary_metric is one of its metrics."
            )
        own_name = getattr(self.evaluator, "name", "")
        self.metric = metric.removeprefix(f"{own_name}_") if own_name else metric
        return float(result[metric])

    @property
    def turning_point(self) -> int:
        """The best layer of the last evaluation, the lowest of equals.

        Raises:
            RuntimeError: If there was none.
        """
        if not self.scores:
            raise RuntimeError("Nothing has been evaluated yet: call the evaluator with a model first.")
        best = max if self.greater_is_better else min
        numbers = [layer for layer, score in enumerate(self.scores) if not math.isnan(score)]
        return best(numbers, key=self.scores.__getitem__)

    def write_csv(self, path: str | Path) -> None:
        """Write the last evaluation as a table, one line a layer: its index, and the metric under its name."""
        _ = self.turning_point
        with atomic_file(Path(path), "w") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", self.metric])
            writer.writerows(enumerate(self.scores))

    def draw(self, path: str | Path, *, percent: bool = False) -> None:
        """Draw the last evaluation: the score after each layer, with the best one marked.

        Args:
            path: Where to write; the ending chooses the format (``.png``, ``.svg``, ``.pdf``).
            percent: Whether scores are drawn x 100.

        Raises:
            ImportError: If matplotlib is missing.
            RuntimeError: If nothing has been evaluated yet.
        """
        best = self.turning_point
        metric = self.metric.replace("_", " ") + (" x 100" if percent else "")
        scores = [100 * score for score in self.scores] if percent else self.scores
        shown = f"{scores[best]:.1f}" if percent else f"{scores[best]:.3f}"
        title = f"{self.name}: embeddings after each layer" if self.name else "Embeddings after each layer"
        title += f"\nturning point: layer {best} ({shown})"
        figure, axes = layer_axes(len(scores), metric[:1].upper() + metric[1:], title)
        axes.axvline(best, color=GREY, linestyle=":", linewidth=1)
        axes.plot(scores, color=BLUE, marker="o", markersize=4)
        axes.plot([best], [scores[best]], "o", color=ORANGE, markersize=8)
        figure.savefig(path)


def _by_layer(reader: LayerReader, on_texts: Callable[[int], None]) -> Embed:
    cache = TensorCache()

    def embed(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
        def layers() -> dict[str, Tensor]:
            return {str(layer): vectors for layer, vectors in enumerate(reader.embeddings(texts, prompt))}

        found = cache.get([list(texts), prompt], layers)
        on_texts(len(texts))
        return found

    return embed
