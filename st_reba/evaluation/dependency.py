"""How much a sentence's tokens share, as the BeLLM paper measures it (section 2, Figures 2 and 5)."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import batch_to_device
from torch import Tensor
from torch.nn.functional import normalize

from ..files import atomic_file
from ..reading.layers import LayerReader
from .drawing import BLUE, ORANGE, layer_axes

logger = logging.getLogger(__name__)

_QUARTILES = {"first_quartile": 25, "median": 50, "third_quartile": 75}


class DependencyEvaluator(BaseEvaluator):
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
    Sentences of fewer than two tokens are left out.

    Args:
        sentences: What is looked at. The paper takes the test set of STS-B.
        pivot: ``"last"`` for autoregressive models, ``"first"`` for the CLS token of a BERT.
        layers: ``"last"`` reads what the first module hands on, of any model whose first module hands on tokens.
            ``"all"`` reads every layer: see :class:`~st_reba.reading.layers.LayerReader` for the models that can be.
        name: Prefix of the metrics.
        batch_size: Sentences at a time.
        on_step: Called with the number of sentences whenever some have been read.

    Raises:
        ValueError: If there are no sentences, or a setting is none of the above.
    """

    def __init__(
        self,
        sentences: Sequence[str],
        *,
        pivot: Literal["last", "first"] = "last",
        layers: Literal["last", "all"] = "last",
        name: str = "",
        batch_size: int = 32,
        on_step: Callable[[int], None] = lambda sentences: None,
    ) -> None:
        super().__init__()
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
        self.name = name
        self.batch_size = batch_size
        self.on_step = on_step
        #: Of the last evaluation: (layers, sentences), one layer unless all were asked for.
        self.correlations = np.empty((0, 0))

    def __call__(
        self, model: BaseModel, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Evaluate a model.

        Args:
            model: See ``layers``.
            output_path: Where to write ``dependency[_<name>][_epoch_<epoch>][_steps_<steps>]_results.csv``.
            epoch: As in ST.
            steps: As in ST.

        Raises:
            ValueError: If the model cannot be read, or no sentence has two tokens.
        """
        correlations = np.concatenate(list(self._batches(model)), axis=1)
        correlations = correlations[:, ~np.isnan(correlations[-1])]
        if not correlations.size:
            raise ValueError(
                f"None of the {len(self.sentences)} sentences has two tokens in what {type(model[0]).__name__} hands "
                "on, so there is nothing to correlate. Give longer sentences, or a module that hands on every token."
            )
        self.correlations = correlations

        summary = self._summary()
        names = [""] if self.layers == "last" else [f"layer_{layer}_" for layer in range(len(summary))]
        metrics = {
            f"{prefix}{key}": value
            for prefix, values in zip(names, summary, strict=True)
            for key, value in values.items()
        }
        self.primary_metric = f"{names[-1]}mean"
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        logger.info("Dependency within %d sentences: %s", correlations.shape[1], metrics)
        if output_path is not None:
            Path(output_path).mkdir(parents=True, exist_ok=True)
            marks = [self.name, f"epoch_{epoch}" if epoch >= 0 else "", f"steps_{steps}" if steps >= 0 else ""]
            stem = "_".join(filter(None, ["dependency", *marks, "results"]))
            self.write_csv(Path(output_path) / f"{stem}.csv")
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

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
            self.on_step(len(texts))

    def _summary(self) -> list[dict[str, float]]:
        """Mean and quartiles over sentences, for each layer.

        Raises:
            RuntimeError: If nothing has been evaluated yet.
        """
        if not self.correlations.size:
            raise RuntimeError("Nothing has been evaluated yet: call the evaluator with a model first.")
        return [
            {
                "mean": float(layer.mean()),
                **{key: float(np.percentile(layer, percent)) for key, percent in _QUARTILES.items()},
            }
            for layer in self.correlations
        ]

    def write_csv(self, path: str | Path) -> None:
        """Write the last evaluation as a table, one line a layer: mean and quartiles over how many sentences.

        Raises:
            RuntimeError: If nothing has been evaluated yet.
        """
        summary = self._summary()
        names = ["last"] if self.layers == "last" else range(len(summary))
        with atomic_file(Path(path), "w") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", "sentences", "mean", *_QUARTILES])
            for name, values in zip(names, summary, strict=True):
                writer.writerow([name, self.correlations.shape[1], *values.values()])

    def draw(self, path: str | Path) -> None:
        """Draw the last evaluation as box plots, one box a layer: quartiles, whiskers (1.5 x their range), mean.

        Args:
            path: Where to write; the ending chooses the format (``.png``, ``.svg``, ``.pdf``).

        Raises:
            ImportError: If matplotlib is missing.
            RuntimeError: If nothing has been evaluated yet.
        """
        count = len(self._summary())
        title = f"{self.pivot} token and the others"
        title = f"{self.name}: {title}" if self.name else title.capitalize()
        title += f"\n{self.correlations.shape[1]} sentences; diamonds: means"
        figure, axes = layer_axes(count, "Spearman correlation", title)
        axes.boxplot(
            list(self.correlations),
            positions=range(count),
            widths=0.5,
            manage_ticks=False,
            patch_artist=True,
            showmeans=True,
            boxprops={"facecolor": "#dce8f5", "edgecolor": BLUE},
            whiskerprops={"color": BLUE},
            capprops={"color": BLUE},
            medianprops={"color": BLUE, "linewidth": 2},
            meanprops={"marker": "D", "markersize": 4, "markerfacecolor": ORANGE, "markeredgecolor": ORANGE},
            flierprops={"marker": ".", "markersize": 3, "markeredgecolor": BLUE, "alpha": 0.5},
        )
        if self.layers == "last":
            axes.set_xticks([0], ["last layer"])
            axes.set_xlabel("")
        figure.savefig(path)


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
