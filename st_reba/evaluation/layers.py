"""Layer by layer, as the BeLLM paper looks at a language model: how well each layer's embedding scores (section 3.1,
Figure 4), and how much a sentence's tokens share there (section 2, Figures 2 and 5)."""

from __future__ import annotations

import csv
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import batch_to_device
from torch import Tensor
from torch.nn.functional import normalize

from ..files import atomic_file
from ..reading.layers import LayerReader
from .embedded import Embedded, TensorCache, stand_in
from .evaluator import Evaluator

_QUARTILES = {"first_quartile": 25, "median": 50, "third_quartile": 75}


class LayerEvaluator(Evaluator):
    """An evaluator whose last evaluation is a table, one line a layer.

    In ``output_path`` it writes the table, as ``<file>[_<name>][_epoch_<epoch>][_steps_<steps>]_results.csv``.
    """

    #: The stem of the file.
    file: ClassVar[str]

    @abstractmethod
    def table(self) -> list[list[Any]]:
        """The last evaluation: the names of the columns, then a row for each layer.

        Raises:
            RuntimeError: If nothing has been evaluated yet.
        """

    def write(self, directory: Path, metrics: dict[str, float], epoch: int, steps: int) -> None:
        marks = [f"epoch_{epoch}" if epoch >= 0 else "", f"steps_{steps}" if steps >= 0 else ""]
        directory.mkdir(parents=True, exist_ok=True)
        name = "_".join(filter(None, [self.file, self.name, *marks, "results"]))
        with atomic_file(directory / f"{name}.csv", "w") as file:
            csv.writer(file).writerows(self.table())


class TurningPointEvaluator(LayerEvaluator):
    """Scores the embedding that is read after each layer, with any evaluator of sentence embeddings.

    Layer l's embedding is that of the model without the layers above l (:class:`~st_reba.reading.layers.LayerReader`);
    the turning point is the layer with the best score, the lowest of equals. Each text passes through the model once:
    its embeddings after all L + 1 layers are kept until the evaluation ends, (L + 1) x D numbers a text, in temporary
    files (see :class:`st_reba.evaluation.embedded.Embedded`).

    The metrics are the wrapped evaluator's primary metric after each layer, ``layer_<l>_<metric>``, and
    ``turning_point``, the index of the best. The primary metric is the last layer's: what the model gives as it is.

    The table, ``turning_point[_<name>][_epoch_<epoch>][_steps_<steps>]_results.csv``, has each layer's index, and the
    metric under its name.

    Args:
        evaluator: Scores a model by its ``encode``, such as ``EmbeddingSimilarityEvaluator``. Evaluators that look at
            tokens, or into the model, cannot be wrapped.
        name: Prefix of the metrics; the wrapped evaluator's name if None.

    Raises:
        ValueError: When it is called, if the model cannot be read layer by layer
            (:class:`st_reba.reading.layers.LayerReader`), or the wrapped evaluator has no primary metric, or gives no
            number for any layer.
    """

    file = "turning_point"

    def __init__(self, evaluator: BaseEvaluator, *, name: str | None = None) -> None:
        super().__init__(name=getattr(evaluator, "name", "") if name is None else name)
        self.evaluator = evaluator
        self.greater_is_better = evaluator.greater_is_better
        self.scores: list[float] = []

    def metrics_of(self, model: BaseModel) -> dict[str, float]:
        reader, cache = LayerReader(model), TensorCache()
        names = list(map(str, range(reader.count)))

        def embed(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            return cache.get(
                [list(texts), prompt], lambda: dict(zip(names, reader.embeddings(texts, prompt), strict=True))
            )

        embedded = Embedded(embed)
        models = [stand_in(embedded, name, like=model) for name in names]
        scores = [self._score(self.evaluator(layer)) for layer in models]
        if all(map(math.isnan, scores)):
            raise ValueError(
                f"{type(self.evaluator).__name__} gives no number (NaN) after any layer. Look at its labels: there may "
                "be too few, or all the same."
            )
        self.scores = scores
        metrics: dict[str, float] = {f"layer_{layer}_{self.metric}": score for layer, score in enumerate(scores)}
        self.primary_metric = f"layer_{reader.count - 1}_{self.metric}"
        return {**metrics, "turning_point": self.turning_point}

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

    def table(self) -> list[list[Any]]:
        _ = self.turning_point
        return [["layer", self.metric], *([layer, score] for layer, score in enumerate(self.scores))]


class DependencyEvaluator(LayerEvaluator):
    r"""The Spearman correlation of a sentence's pivot token with its other tokens.

    .. math:: \rho(s) = \frac{1}{n - 1} \sum_{j \neq p} \mathrm{spearman}(v_p, v_j)

    where :math:`v_j` is the state of token j, the correlation runs over its D dimensions, and p is the pivot.

    The paper gives no formula, only: "we choose the last token as the pivot token", for BERT the "CLS" token, and
    "compute their Spearman correlation with the remaining tokens in a sentence", shown as "sentence-level" boxes.
    Followed here: the pivot is the last token, or the first, of those that the model's first module hands on (with
    ``pool_over="all"`` and a prompt, so the last token of the prompt); all other tokens that it hands on count alike;
    the sentence's number is their mean. Which layer the paper reads is not said: by default here the last.

    The metrics are ``mean`` (the primary one), ``first_quartile``, ``median`` and ``third_quartile`` over sentences;
    with ``layers="all"`` one of each a layer, ``layer_<l>_mean`` and so on, and the last layer's mean is the primary.
    Sentences of fewer than two tokens are left out. The table,
    ``dependency[_<name>][_epoch_<epoch>][_steps_<steps>]_results.csv``, has these beside the number of sentences.

    Args:
        sentences: What is looked at. The paper takes the test set of STS-B.
        pivot: ``"last"`` for autoregressive models, ``"first"`` for the CLS token of a BERT.
        layers: ``"last"`` reads what the first module hands on, of any model whose first module hands on tokens.
            ``"all"`` reads every layer: see :class:`~st_reba.reading.layers.LayerReader` for the models that can be.
        name: Prefix of the metrics.
        batch_size: Sentences at a time.

    Raises:
        ValueError: If there are no sentences, or a setting is none of the above; and when it is called, if the model
            cannot be read, or no sentence has two tokens.
    """

    file = "dependency"

    def __init__(
        self,
        sentences: Sequence[str],
        *,
        pivot: Literal["last", "first"] = "last",
        layers: Literal["last", "all"] = "last",
        name: str = "",
        batch_size: int = 32,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size)
        if not sentences:
            raise ValueError("DependencyEvaluator needs at least one sentence.")
        if pivot not in ("last", "first"):
            raise ValueError(f'pivot={pivot!r}: use "last" for autoregressive models, or "first" for a CLS token.')
        if layers not in ("last", "all"):
            raise ValueError(f'layers={layers!r}: use "last" for the last layer, or "all" for one result a layer.')
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give the sentences to read at a time, 1 or more.")
        self.sentences = list(sentences)
        self.pivot = pivot
        self.layers = layers
        #: Of the last evaluation: (layers, sentences), one layer unless all were asked for.
        self.correlations = np.empty((0, 0))

    def metrics_of(self, model: BaseModel) -> dict[str, float]:
        correlations = np.concatenate(list(self._batches(model)), axis=1)
        correlations = correlations[:, ~np.isnan(correlations[-1])]
        if not correlations.size:
            raise ValueError(
                f"None of the {len(self.sentences)} sentences has two tokens in what {type(model[0]).__name__} hands "
                "on, so there is nothing to correlate. Give longer sentences, or a module that hands on every token."
            )
        self.correlations = correlations
        header, *rows = self.table()
        prefixes = ["" if self.layers == "last" else f"layer_{layer}_" for layer, *_ in rows]
        self.primary_metric = f"{prefixes[-1]}mean"
        return {
            f"{prefix}{name}": value
            for prefix, row in zip(prefixes, rows, strict=True)
            for name, value in zip(header[2:], row[2:], strict=True)
        }

    def _batches(self, model: BaseModel) -> Iterator[np.ndarray]:
        """(layers, B) correlations at a time, of sentences of like length."""
        read = LayerReader(model).features if self.layers == "all" else lambda texts: _last_layer(model, texts)
        # Longest first, as in encode: no memory is asked for later that was not there at the start.
        ordered = sorted(self.sentences, key=len, reverse=True)
        for start in range(0, len(ordered), self.batch_size):
            texts = ordered[start : start + self.batch_size]
            layers = [
                sentence_correlations(features["token_embeddings"], features["attention_mask"].bool(), self.pivot)
                for features in read(texts)
            ]
            yield torch.stack(layers).cpu().numpy()

    def table(self) -> list[list[Any]]:
        layers, sentences = self.correlations.shape
        if not layers:
            raise RuntimeError("Nothing has been evaluated yet: call the evaluator with a model first.")
        quartiles = [np.percentile(self.correlations, percent, axis=1) for percent in _QUARTILES.values()]
        statistics = np.stack([self.correlations.mean(axis=1), *quartiles], axis=1).tolist()
        names: Iterable[Any] = ["last"] if self.layers == "last" else range(layers)
        rows = [[name, sentences, *values] for name, values in zip(names, statistics, strict=True)]
        return [["layer", "sentences", "mean", *_QUARTILES], *rows]


def sentence_correlations(states: Tensor, mask: Tensor, pivot: Literal["last", "first"]) -> Tensor:
    """The mean Spearman correlation of each sentence's pivot with its other tokens.

    A state whose dimensions are all equal has no ranks to compare: it correlates with nothing, 0.

    Args:
        states: (B, n, D).
        mask: (B, n), boolean: which tokens there are.
        pivot: Which of them is the pivot.

    Returns:
        (B,), float32; NaN where there are fewer than two tokens.
    """
    ranks = average_ranks(states.float())
    unit = normalize(ranks - ranks.mean(dim=-1, keepdim=True), dim=-1)
    order = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    chosen = (mask * (order if pivot == "last" else order.flip(0))).argmax(dim=1, keepdim=True)
    pivots = unit.gather(1, chosen[..., None].expand(-1, -1, unit.shape[-1]))
    correlations = (unit * pivots).sum(dim=-1)
    others = mask.scatter(1, chosen, False)
    return (correlations * others).sum(dim=1) / others.sum(dim=1)


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 0 along the last dimension; equals share the mean of theirs (bfloat16 states have many)."""
    ordered = values.sort(dim=-1).values
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to - 1).float() / 2


@torch.inference_mode()
def _last_layer(model: BaseModel, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What a model's first module hands on for a batch."""
    model.eval()
    features = model[0](batch_to_device(model.preprocess(list(texts)), model.device))
    if "token_embeddings" not in features:
        raise ValueError(f"The model's first module, {type(model[0]).__name__}, hands on no token embeddings.")
    yield features
