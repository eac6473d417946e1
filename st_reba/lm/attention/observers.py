"""What looks at attention while a model runs, and changes nothing: each keeps one running result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from .kernels import fold_kernel
from .weights import LayerWeights, fold


class Observer(Protocol):
    """What watches the attention of a forward pass."""

    def wants(self, layer: int) -> bool:
        """Whether this layer's weights are to be shown."""
        ...

    def observe(self, weights: LayerWeights) -> None:
        """Look at one layer. ``weights`` must not outlive the call."""
        ...


@dataclass(eq=False)
class RunningMaximum:
    """The largest weight that any watched layer and head gives, for a rectangle of keys and queries.

    exp is monotone, so the maximum runs over log weights and one exp at the end gives the weights. Only entries with
    query >= key are meaningful: others may hold anything.

    Attributes:
        keys: A slice of key positions, or one position a text, (B,).
        queries: A slice of query positions.
        layers: The layers that count; None for all.
    """

    keys: slice | Tensor
    queries: slice
    layers: Collection[int] | None = None
    _maximum: Tensor | None = field(default=None, init=False, repr=False)

    def wants(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def result(self) -> Tensor:
        """max of log weights, (B, keys, queries), float32 or, in a float64 model, float64."""
        if self._maximum is None:
            raise RuntimeError("no attention layer was seen: the backbone's attention did not run in this context.")
        return self._maximum

    def observe(self, weights: LayerWeights) -> None:
        keys = self.keys
        if isinstance(keys, Tensor):
            weights, keys = weights.at_keys(keys), slice(0, 1)
        maximum = self._maximum
        if torch.is_grad_enabled():
            largest = weights.largest(keys, self.queries)
            # Each layer may lie on a device of its own.
            maximum = largest if maximum is None else torch.maximum(maximum.to(largest.device), largest)
        else:
            shape = (len(weights.query), keys.stop - keys.start, self.queries.stop - self.queries.start)
            if maximum is None:
                maximum = weights.log_sum_exp.new_full(shape, float("-inf"))
            maximum = maximum.to(weights.query.device)
            folding = fold_kernel(weights) or fold
            folding(weights, keys, self.queries, maximum)
        self._maximum = maximum


@dataclass(eq=False)
class MeanWeights:
    """The weights of one query a text, averaged over the heads of one layer.

    Attributes:
        queries: (B,) the query of each text.
        layer: Which layer.
        weights: What was seen.
    """

    queries: Tensor
    layer: int
    weights: Tensor | None = field(default=None, init=False, repr=False)

    def wants(self, layer: int) -> bool:
        return layer == self.layer

    def observe(self, weights: LayerWeights) -> None:
        """Keep (B, keys), of the dtype of ``weights``, on the device of ``queries``.

        Keys behind the query are not masked where the layer needed no mask.
        """
        query = weights.at_queries(self.queries)
        formed = query.log_weights(slice(None), slice(None), slice(0, weights.key.shape[2]), slice(0, 1)).exp()
        self.weights = formed.mean(dim=(1, 3))[..., 0].to(self.queries.device)

    def result(self) -> Tensor:
        if self.weights is None:
            raise RuntimeError(
                "The layer was not seen, because the backbone was not set up to show its attention. Call "
                "st_reba.lm.attention.setup.watched_last_layer(self.model, ...) in the module's constructor."
            )
        return self.weights


@dataclass(eq=False)
class MeanOverQueries:
    """How much attention each head pays to each of the first keys: the mean over some queries of each text.

    Attributes:
        queries: (B, Q), which of the queries count.
        keys: How many keys, K, are looked at.
        layers: The layers that are watched.
        means: By layer, (B, H, K), float32 or, in a float64 model, float64.
    """

    queries: Tensor
    keys: int
    layers: Collection[int]
    means: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def wants(self, layer: int) -> bool:
        return layer in self.layers

    def observe(self, weights: LayerWeights) -> None:
        share = self.queries / self.queries.sum(dim=1, keepdim=True)
        share = share.to(weights.log_sum_exp)
        # One key-value head at a time: (B, 1, K, R, Q) is formed.
        found = [
            torch.einsum(
                "bgkrq,bq->bgrk",
                weights.log_weights(
                    slice(None), slice(group, group + 1), slice(0, self.keys), slice(0, share.shape[1])
                ).exp(),
                share,
            )
            for group in range(weights.key.shape[1])
        ]
        self.means[weights.layer] = torch.cat(found, dim=1).flatten(1, 2)


@dataclass
class Census:
    """Which layers have attention that calls our function, and what their attention is like.

    Attributes:
        attentions: The attention of each layer that ran, by the layer's index.
        explicit: Whether any asked for a softmax that the fused kernels do not know (soft cap, sinks).
        unknown: Names of the arguments they passed that are neither honoured nor harmless.
    """

    attentions: dict[int, nn.Module] = field(default_factory=dict)
    explicit: bool = False
    unknown: set[str] = field(default_factory=set)
