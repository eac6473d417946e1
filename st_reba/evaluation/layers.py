"""Evaluation of each layer, as in the BeLLM paper: scores of its embeddings (section 3.1, Figure 4), and correlations
of a sentence's tokens (section 2, Figures 2 and 5)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import rankdata
from sentence_transformers.base import BaseModel
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..lm.passes import Hook
from ..modules import AttentionPoolingModule, CausalTransformer, EchoModule, InputEmbeddings
from ..settings import check, check_choice, check_int
from ..text.layout import Layout
from .embedded import Embedded, TensorCache, stand_in
from .evaluators import Evaluator

_STATISTICS = ("mean", "first_quartile", "median", "third_quartile")


def reads_one_layer(module: type[nn.Module]) -> bool:
    """Return whether the embeddings of a class of modules depend on the states of one layer alone."""
    reads_more = issubclass(module, (AttentionPoolingModule, InputEmbeddings))
    return issubclass(module, (CausalTransformer, EchoModule)) and not reads_more


class LayerReader:
    r"""Reader of a model's embeddings after each layer of its backbone.

    .. math:: v^{(l)} = \mathrm{norm}(h^{(l)}), \quad l = 0, \dots, L

    where :math:`h^{(l)}` is the residual stream after layer l and norm is the backbone's final norm, or the identity if
    the module has no final norm. This is the embedding of a model without its layers above l (the degradation
    experiment of the BeLLM paper, section 3.1), without running it L times. Layer 0 is the input of the first layer:
    the input embeddings, plus position embeddings in some architectures. Layer L is the embedding of the model. The
    module selects the tokens (copy, ``pool_over``, padding) as always, and the later modules of the pipeline follow.

    The states of all layers are in memory for one batch at a time, L + 1 times (B, N, D).

    Args:
        model: A model whose first module is a ``CausalTransformer`` or an ``EchoModule``. It is set to inference mode,
            as by ``encode``.

    Attributes:
        count: Number of layers with the input embeddings, L + 1.

    Raises:
        ValueError: If the first module is another one, or the backbone's earlier layers cannot be read like its last.
    """

    def __init__(self, model: BaseModel) -> None:
        module: Any = model[0]
        if not reads_one_layer(type(module)):
            raise ValueError(
                f"The model's first module is {type(module).__name__}, whose embedding depends on more than the states "
                "of one layer. Use a model with CausalTransformer or EchoModule."
            )
        self.model = model
        self.count = len(module.lm.layers) + 1
        self._final_norm = module.lm.final_norm if module.final_norm else nn.Identity()

    @torch.inference_mode()
    def features(self, texts: Sequence[str], prompt: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the output of the first module for one batch after each layer.

        Args:
            texts: B strings, at least one.
            prompt: Prompt, as for ``encode``.

        Yields:
            ``token_embeddings`` (B, n, D) and ``attention_mask`` (B, n) for each of L + 1 layers, from layer 0.
        """
        self.model.eval()
        inputs = batch_to_device(self.model.preprocess(list(texts), prompt=prompt), self.model.device)
        # The method selects, moves and sums states: it does the same to all layers at once where they are one tensor.
        module: Any = copy.copy(self.model[0])
        widths: list[int] = []

        def side_by_side(layout: Layout, *hooks: Hook) -> Tensor:
            *below, last = module.run_layers(layout, *hooks)
            layers = [*(self._final_norm(states).to(last.device) for states in below), last]
            widths[:] = [states.shape[-1] for states in layers]
            return torch.cat(layers, dim=-1)

        module.run = side_by_side
        output = module(inputs)
        # The last layer is the module's output itself, equal to that of encode to the bit.
        for states in output["token_embeddings"].split(widths, dim=-1):
            yield {**output, "token_embeddings": states.contiguous()}

    @torch.inference_mode()
    def embeddings(self, texts: Sequence[str], prompt: str | None = None) -> Tensor:
        """Return the embeddings of one batch after each layer, (L + 1, B, D), on the CPU."""
        embeddings = []
        for features in self.features(texts, prompt):
            for module in list(self.model.children())[1:]:
                features = module(features)
            embeddings.append(features["sentence_embedding"].cpu())
        return torch.stack(embeddings)


class TurningPointEvaluator(Evaluator):
    """Score of the embedding after each layer, by any evaluator of sentence embeddings.

    The embedding after layer l is that of the model without the layers above l: see
    :class:`LayerReader`. The turning point is the layer with the best score, the lowest of
    equals. Each text passes through the model once: its embeddings after all L + 1 layers are kept in temporary files
    until the evaluation ends, (L + 1) x D numbers a text.

    The metrics are the wrapped evaluator's primary metric after each layer, ``layer_<l>_<metric>``, and
    ``turning_point``, the index of the best layer. The primary metric is that of the last layer, which is the model's
    own.

    Args:
        evaluator: Evaluator that calls ``encode``, such as ``EmbeddingSimilarityEvaluator``. Those that read tokens or
            modules cannot be wrapped.
        name: Prefix of the metrics. None: the wrapped evaluator's name.

    Attributes:
        scores: Scores of the last evaluation, one for each layer.

    Raises:
        ValueError: When it is called, if the model cannot be read layer by layer, or the wrapped evaluator has no
            primary metric, or gives NaN for every layer.
    """

    file = "turning_point"

    def __init__(self, evaluator: BaseEvaluator, *, name: str | None = None) -> None:
        super().__init__(name=getattr(evaluator, "name", "") if name is None else name)
        self.evaluator, self.greater_is_better = evaluator, evaluator.greater_is_better
        self.scores: list[float] = []

    def metrics_of(self, model: BaseModel) -> dict[str, float]:
        reader, cache = LayerReader(model), TensorCache()
        names = list(map(str, range(reader.count)))

        def embed(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            return cache.get(
                [list(texts), prompt], lambda: dict(zip(names, reader.embeddings(texts, prompt), strict=True))
            )

        embedded = Embedded(embed)
        self.scores = [self._score(self.evaluator(stand_in(embedded, name, like=model))) for name in names]
        proper = [layer for layer, score in enumerate(self.scores) if not math.isnan(score)]
        if not proper:
            problem = f"{type(self.evaluator).__name__} gives no number (NaN) after any layer."
            raise ValueError(f"{problem} Look at its labels: there may be too few, or all the same.")
        metrics = {f"layer_{name}_{self.metric}": score for name, score in zip(names, self.scores, strict=True)}
        self.primary_metric = [*metrics][-1]
        best = max if self.greater_is_better else min
        return {**metrics, "turning_point": best(proper, key=self.scores.__getitem__)}

    def _score(self, result: float | dict[str, float]) -> float:
        """Return the wrapped evaluator's primary metric, and note its name without the evaluator's own."""
        if not isinstance(result, dict):
            self.metric = "score"
            return result
        metric, own_name = self.evaluator.primary_metric, getattr(self.evaluator, "name", "")
        if metric not in result:
            problem = f"{type(self.evaluator).__name__} has the primary metric {metric!r} and returns {sorted(result)}:"
            raise ValueError(f"{problem} wrap an evaluator whose primary_metric is one of its metrics.")
        self.metric = metric.removeprefix(f"{own_name}_") if own_name else metric
        return result[metric]


class DependencyEvaluator(Evaluator):
    r"""Spearman correlation of a sentence's pivot token with its other tokens.

    .. math:: \rho(s) = \frac{1}{n - 1} \sum_{j \neq p} \mathrm{spearman}(v_p, v_j)

    with the states :math:`v_j` of the tokens, over whose D dimensions the correlation runs, and the pivot p.

    The paper has no formula. It says: "we choose the last token as the pivot token", for BERT the "CLS" token, and
    "compute their Spearman correlation with the remaining tokens in a sentence", shown as "sentence-level" boxes. Here
    the pivot is the last or the first of the tokens that the model's first module returns (with ``pool_over="all"`` and
    a prompt, the last token of the prompt), all other tokens count alike, and a sentence's number is their mean. The
    paper does not name the layer; the default is the last.

    The metrics are ``mean``, the primary one, ``first_quartile``, ``median`` and ``third_quartile`` over sentences;
    with ``layers="all"`` one of each for each layer, ``layer_<l>_mean`` and so on, and the primary one is the last
    layer's mean. Sentences of fewer than two tokens are left out.

    Args:
        sentences: Sentences. The paper takes the test set of STS-B.
        pivot: ``"last"`` for autoregressive models, ``"first"`` for the CLS token of a BERT.
        layers: ``"last"`` reads the tokens that the first module of any model returns. ``"all"`` reads every layer:
            see :class:`LayerReader` for the models that allow it.
        name: Prefix of the metrics.
        batch_size: Number of sentences at a time.

    Attributes:
        correlations: Correlations of the last evaluation, (layers, sentences).

    Raises:
        ValueError: If there are no sentences, or a setting is out of range; and when it is called, if the model cannot
            be read, or no sentence has two tokens.
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
        super().__init__(name=name, batch_size=check_int("batch_size", batch_size, 1))
        self.sentences = list(check("sentences", sentences, len(sentences) > 0, "give at least one sentence."))
        self.pivot: Literal["last", "first"] = check_choice("pivot", pivot, "last", "first")
        self.layers: Literal["last", "all"] = check_choice("layers", layers, "last", "all")
        self.correlations = np.empty((0, 0))

    def metrics_of(self, model: BaseModel) -> dict[str, float]:
        rho = np.concatenate(list(self._batches(model)), axis=1)
        self.correlations = rho = rho[:, ~np.isnan(rho[-1])]
        if not rho.size:
            raise ValueError(
                f"None of the {len(self.sentences)} sentences has two tokens in what {type(model[0]).__name__} returns,"
                " so there is nothing to correlate. Give longer sentences, or a module that returns every token."
            )
        values = np.stack([rho.mean(axis=1), *np.percentile(rho, [25, 50, 75], axis=1)], axis=1).tolist()
        prefixes = [""] if self.layers == "last" else [f"layer_{layer}_" for layer in range(len(rho))]
        self.primary_metric = f"{prefixes[-1]}mean"
        names = [f"{prefix}{name}" for prefix in prefixes for name in _STATISTICS]
        return dict(zip(names, chain(*values), strict=True))

    def _batches(self, model: BaseModel) -> Iterator[np.ndarray]:
        """Yield correlations (layers, B) of sentences of similar length."""
        read = LayerReader(model).features if self.layers == "all" else partial(_last_layer, model)
        # Longest first, as in encode: no memory is asked for later that was not there at the start.
        ordered = sorted(self.sentences, key=len, reverse=True)
        for start in range(0, len(ordered), self.batch_size):
            layers = [
                sentence_correlations(features["token_embeddings"], features["attention_mask"].bool(), self.pivot)
                for features in read(ordered[start : start + self.batch_size])
            ]
            yield torch.stack(layers).cpu().numpy()


def sentence_correlations(states: Tensor, mask: Tensor, pivot: Literal["last", "first"]) -> Tensor:
    """Return the mean Spearman correlation of each sentence's pivot with its other tokens.

    A state whose dimensions are all equal has no ranks to compare, and correlates with nothing, 0.

    Args:
        states: (B, n, D).
        mask: (B, n), boolean, True for real tokens.
        pivot: Pivot among these.

    Returns:
        (B,), float32; NaN if there are fewer than two tokens.
    """
    # Equals, of which bfloat16 has many, share the mean of their ranks.
    ranks = torch.from_numpy(rankdata(states.float().cpu().numpy(), axis=-1)).to(mask.device, torch.float32)
    unit = normalize(ranks - ranks.mean(dim=-1, keepdim=True), dim=-1)
    order = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    chosen = (mask * (order if pivot == "last" else order.flip(0))).argmax(dim=1, keepdim=True)
    pivots = unit.gather(1, chosen[..., None].expand(-1, -1, unit.shape[-1]))
    others = mask.scatter(1, chosen, False)
    return ((unit * pivots).sum(dim=-1) * others).sum(dim=1) / others.sum(dim=1)


@torch.inference_mode()
def _last_layer(model: BaseModel, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the features that a model's first module returns for a batch."""
    model.eval()
    features = model[0](batch_to_device(model.preprocess(list(texts)), model.device))
    if "token_embeddings" not in features:
        raise ValueError(f"The model's first module, {type(model[0]).__name__}, returns no token embeddings.")
    yield features
