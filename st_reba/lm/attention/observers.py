"""What looks at attention while a model runs, and changes nothing: each keeps one running result."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..context import entered
from .fused import fused_fold
from .weights import MapSource, QueryKeySource, SymmetrizedSource, WeightSource

# Rows of keys go in blocks, because queries before the first key of a block are never asked for.
_KEY_BLOCK = 128

# On a CPU, bytes of scratch memory: where heads are taken one by one, the rectangle of one stays in a core's cache;
# where what all heads take fits, as for a short text alone, they are formed at once.
_SCRATCH_BYTES = {"cpu": 2**20}

# The same on any other device, where heads are formed at once, always: enough to fill it.
_SCRATCH_BYTES_AT_ONCE = 2**28


class Observer(Protocol):
    """What watches the attention of a forward pass."""

    def wants(self, layer: int) -> bool:
        """Whether this layer's weights are to be shown."""
        ...

    def observe(self, source: WeightSource) -> None:
        """Look at one layer. ``source`` must not outlive the call."""
        ...


def watching(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Show every attention layer that runs in this block, in this thread, to ``observer``."""
    return entered(observer=observer)


class RunningMaximum:
    """The largest weight that any watched layer and head gives, for a rectangle of keys and queries.

    exp is monotone, so the maximum runs over log weights and one exp at the end gives the weights. Only entries with
    query >= key are meaningful: others may hold anything.

    Args:
        keys: A slice of key positions, or one position a text, (B,).
        queries: A slice of query positions.
        layers: The layers that count; None for all.
    """

    def __init__(self, keys: slice | Tensor, queries: slice, layers: Collection[int] | None = None) -> None:
        self.keys = keys
        self.queries = queries
        self.layers = layers
        self._maximum: Tensor | None = None
        # With one key a text, what each layer gives is small: the maximum over layers can wait till the end.
        self._of_layers: list[Tensor] = []

    def wants(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def result(self) -> Tensor:
        """max of log weights, (B, keys, queries), float32 or, in a float64 model, float64."""
        seen = self._of_layers if self._maximum is None else [self._maximum, *self._of_layers]
        if not seen:
            raise RuntimeError("no attention layer was seen: the backbone's attention did not run in this context.")
        return seen[0] if len(seen) == 1 else torch.stack([layer.to(seen[0].device) for layer in seen]).amax(dim=0)

    def observe(self, source: WeightSource) -> None:
        if isinstance(self.keys, Tensor):
            source, keys = source.at_keys(self.keys.to(source.device)), slice(0, 1)
        else:
            keys = self.keys
        in_order = keys is self.keys
        scratch = _SCRATCH_BYTES.get(source.device.type)
        if torch.is_grad_enabled():
            self._maximum = self._with_gradient(source, keys)
        elif scratch is not None and self._bytes_at_once(source, keys) > scratch:
            self._fold(source, keys, self._so_far(source, keys), scratch)
        elif fused := fused_fold(source, in_order, fold_at_once):
            fused(keys, self.queries, self._so_far(source, keys), in_order)
        elif in_order:
            fold_at_once(source, keys, self.queries, self._so_far(source, keys), in_order)
        else:
            weights = source.of_all_heads(self.queries).log_weights(slice(None), keys, 0)
            self._of_layers.append(weights.amax(dim=(1, 4)))

    def _bytes_at_once(self, source: WeightSource, keys: slice) -> int:
        """What all heads take at once: a copy of their queries, and four passes over their rectangles."""
        of_a_query = source.head_size + 4 * (keys.stop - keys.start)
        return 4 * source.batch * source.heads * (self.queries.stop - self.queries.start) * of_a_query

    def _so_far(self, source: WeightSource, keys: slice) -> Tensor:
        """The maximum over the layers before, where this layer runs."""
        maximum = self._maximum
        if maximum is None:
            shape = (source.batch, keys.stop - keys.start, self.queries.stop - self.queries.start)
            maximum = torch.full(shape, float("-inf"), dtype=source.dtype, device=source.device)
        self._maximum = maximum.to(source.device)
        return self._maximum

    def _with_gradient(self, source: WeightSource, keys: slice) -> Tensor:
        maximum = self._so_far(source, keys)
        for head in range(source.heads):
            maximum = torch.maximum(maximum, source.log_weights(slice(None), head, keys, self.queries))
        return maximum

    def _fold(self, source: WeightSource, keys: slice, maximum: Tensor, scratch_bytes: int) -> None:
        """Take the maximum in place, one head at a time, in pieces that fit the scratch memory."""
        block = min(_KEY_BLOCK, keys.stop - keys.start)
        group = max(1, scratch_bytes // max(1, 4 * block * maximum.shape[2]))
        for texts in _slices(0, source.batch, group):
            for part in _slices(keys.start, keys.stop, _KEY_BLOCK):
                skipped = self._skipped(part)
                queries = slice(self.queries.start + skipped, self.queries.stop)
                target = maximum[texts, part.start - keys.start : part.stop - keys.start, skipped:]
                scratch = torch.empty(target.shape, dtype=source.dtype, device=source.device)
                for head in range(source.heads):
                    source.log_weights(texts, head, part, queries, scratch)
                    torch.maximum(target, scratch, out=target)

    def _skipped(self, keys: slice) -> int:
        """With a key a text there is nothing to skip."""
        return _before(keys, self.queries) if isinstance(self.keys, slice) else 0


def fold_at_once(source: WeightSource, keys: slice, queries: slice, maximum: Tensor, in_order: bool) -> None:
    """Take the maximum of all heads at once, in place: a few operations a block of keys, however many heads there are.

    As :data:`~st_reba.lm.attention.fused.Fold` says.
    """
    heads = source.of_all_heads(queries)
    of_a_key = 4 * source.heads * maximum.shape[2]
    block = min(_KEY_BLOCK, keys.stop - keys.start, max(1, _SCRATCH_BYTES_AT_ONCE // max(1, of_a_key)))
    group = max(1, _SCRATCH_BYTES_AT_ONCE // max(1, of_a_key * block))
    for texts in _slices(0, source.batch, group):
        for part in _slices(keys.start, keys.stop, block):
            skipped = _before(part, queries) if in_order else 0
            target = maximum[texts, part.start - keys.start : part.stop - keys.start, skipped:]
            torch.maximum(target, heads.log_weights(texts, part, skipped).amax(dim=(1, 4)), out=target)


def _before(keys: slice, queries: slice) -> int:
    """How many queries stand before all of these keys, and cannot see them."""
    return max(0, keys.start - queries.start)


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


class InChunks:
    """Shows another observer what each text attends to within its own chunks, as if a chunk were a text.

    Only these blocks on the diagonal are ever formed: (B * count, length, length) instead of (B, N, N). The attention
    itself is that of the whole texts.

    Args:
        observer: Shown B * count texts of ``length`` tokens.
        start: Where the first chunk begins.
        length: Tokens of a chunk.
        count: Chunks of each text.
    """

    def __init__(self, observer: Observer, start: int, length: int, count: int) -> None:
        self.observer = observer
        self.start = start
        self.length = length
        self.count = count

    def wants(self, layer: int) -> bool:
        return self.observer.wants(layer)

    def observe(self, source: WeightSource) -> None:
        # A layer that attends both ways has no look back within a chunk that the rest of the text would not change.
        assert isinstance(source, (QueryKeySource, MapSource))
        self.observer.observe(source.in_chunks(self.start, self.length, self.count))


class MeanWeights:
    """The weights of one query a text, averaged over the heads of one layer.

    Args:
        queries: (B,) the query of each text.
        layer: Which layer.
    """

    def __init__(self, queries: Tensor, layer: int) -> None:
        self.queries = queries
        self.layer = layer
        self.weights: Tensor | None = None

    def wants(self, layer: int) -> bool:
        return layer == self.layer

    def observe(self, source: WeightSource) -> None:
        """Keep (B, keys), of the dtype of ``source``, on the device of ``queries``.

        Keys behind the query are not masked where the layer needed no mask.
        """
        if isinstance(source, SymmetrizedSource):
            source = source.forward
        assert isinstance(source, QueryKeySource)
        query = source.at_queries(self.queries.to(source.device))
        weights = query.of_all_heads(slice(0, 1)).log_weights(slice(None), slice(0, source.key.shape[2]), 0).exp()
        self.weights = weights.mean(dim=(1, 4))[..., 0].to(self.queries.device)

    def result(self) -> Tensor:
        if self.weights is None:
            raise RuntimeError(
                "The layer was not seen, because the backbone was not set up to show its attention. Call "
                "st_reba.modules.checks.watched_last_layer(self.model, ...) in the module's constructor."
            )
        return self.weights


class LayerCensus:
    """An observer that only notes which layers have attention, and what their attention is like.

    Attributes:
        layers: Indices of the layers that ran.
        explicit: Whether any asked for a softmax that the fused kernels do not know (soft cap, sinks).
        unknown: Names of the arguments they passed that are neither honoured nor harmless.
    """

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.explicit = False
        self.unknown: set[str] = set()

    def wants(self, layer: int) -> bool:
        self.layers.append(layer)
        return False

    def observe(self, source: WeightSource) -> None:
        raise AssertionError("a census wants no layer")
